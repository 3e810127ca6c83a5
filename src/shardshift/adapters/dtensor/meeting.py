"""How the ranks of a change find one another: those of the old job know both meshes, a joiner only the new one.

1. The lowest rank of the old job numbers the change and leaves every other rank of either mesh an invitation in its
   box in the store: who takes part, and the number. Boxes count: a rank takes invitations in order, each once, so
   what an earlier change has left behind is not read again.
2. All open a line to one another (``engine.Mover``) under that number.
3. A joiner that comes first waits for its invitation, within the time limit.

The devices of the mover are the global ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ...engine import Mover
from ...engine.events import Sink
from ...engine.line import Kind as Transport
from ...values import Infeasible, Mesh, PeerLost, Topology
from .job import Job

_PREFIX: Final = "shardshift/migrate"


@contextmanager
def meet(
    job: Job | None,
    to: Mesh,
    *,
    topology: Topology | None,
    transport: Transport,
    staging_bytes: int,
    timeout_s: float,
    memory: str,
    sink: Sink,
) -> Iterator[Mover]:
    """A mover between all ranks of a change, for a while. Called by all of them; arguments as for ``migrate``.

    Raises:
        Infeasible: if this rank has no part in the change.
        PeerLost: if not all come in time.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if beyond := [each for each in to.ranks if each >= world_size]:
        raise Infeasible(
            f"the new mesh names rank {beyond[0]}, the world has {world_size} ranks; nothing was moved. What to do: "
            "start more processes, or choose ranks below that"
        )
    if job is None and to.position(rank) is None:
        raise Infeasible(
            f"rank {rank} has no job and is not in the new mesh ({to}), so it has no part in this change; nothing was "
            "moved. What to do: call this on the ranks of the old and of the new mesh only"
        )
    group = dist.group.WORLD
    assert group is not None  # it is initialised
    apart = {*range(world_size)} - {*to.ranks, *(job.mesh.ranks if job is not None else to.ranks)}
    if group.bound_device_id is not None and job is not None and apart:
        raise Infeasible(
            "the default process group is bound to a device (init_process_group(device_id=...)), so every rank has "
            f"to come when groups are made, and {sorted(apart)} take no part in this change; nothing was moved. What "
            "to do: initialise without device_id, or let the old and the new mesh have all ranks between them"
        )
    store = dist.PrefixStore(_PREFIX, group.get_group_store())
    leads = job is not None and rank == min(job.mesh.ranks)
    if job is not None and leads:
        ranks: Sequence[int] = sorted({*job.mesh.ranks, *to.ranks})
        number = store.add("changes", 1)
        for other in ranks:
            if other != rank:
                box = f"box/{other}/{store.add(f'sent/{other}', 1)}"
                store.set(box, json.dumps({"number": number, "ranks": ranks}))
    else:
        number, ranks = _invited(store, rank, timeout_s)
    try:
        with Mover(
            dist.PrefixStore(str(number), store),
            rank,
            ranks,
            topology=topology,
            transport=transport,
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            memory=memory,
            sink=sink,
        ) as mover:
            yield mover
    finally:
        if leads:
            store.set(f"over/{number}", b"")  # type: ignore[arg-type]  # the stub says str


def _invited(store: dist.Store, rank: int, timeout_s: float) -> tuple[int, list[int]]:
    """The next invitation in this rank's box to a change that is not over."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        box = f"box/{rank}/{store.add(f'taken/{rank}', 0) + 1}"
        try:
            store.wait([box], timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
        except dist.DistStoreError as error:
            raise PeerLost(
                (),
                "plan",
                f"rank {rank} was not invited to a change within {timeout_s:.0f} s; nothing was moved. What to do: "
                "call this on all ranks of the old job, too",
            ) from error
        record = json.loads(store.get(box))
        store.add(f"taken/{rank}", 1)
        if not store.check([f"over/{record['number']}"]):
            return record["number"], record["ranks"]
