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
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ...engine import Mover
from ...engine.events import Sink
from ...engine.line import Kind as Transport
from ...values import Infeasible, Mesh, Mismatch, PeerLost, Topology
from .job import Job

_PREFIX: Final = "shardshift/migrate"


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
) -> Mover:
    """A mover between all ranks of a change. Called by all of them; arguments as for ``migrate``.

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
    store = dist.PrefixStore(_PREFIX, group.get_group_store())
    if job is not None and rank == min(job.mesh.ranks):
        ranks: Sequence[int] = sorted({*job.mesh.ranks, *to.ranks})
        number = store.add("changes", 1)
        for other in ranks:
            if other != rank:
                box = f"box/{other}/{store.add(f'sent/{other}', 1)}"
                store.set(box, json.dumps({"number": number, "ranks": ranks}))
    else:
        number, ranks = _invited(store, rank, timeout_s)
        if job is not None and not {*job.mesh.ranks, *to.ranks} == {*ranks}:
            raise Mismatch(
                f"rank {rank} changes {job.mesh} to {to}, and is invited to a change between ranks {ranks}; nothing "
                "was moved. What to do: give the same mesh on all ranks"
            )
    return Mover(
        dist.PrefixStore(str(number), store),
        rank,
        ranks,
        topology=topology,
        transport=transport,
        staging_bytes=staging_bytes,
        timeout_s=timeout_s,
        memory=memory,
        sink=sink,
    )


def _invited(store: dist.Store, rank: int, timeout_s: float) -> tuple[int, list[int]]:
    """The next invitation in this rank's box."""
    box = f"box/{rank}/{store.add(f'taken/{rank}', 0) + 1}"
    try:
        store.wait([box], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise PeerLost(
            (),
            "plan",
            f"rank {rank} was not invited to a change within {timeout_s:.0f} s; nothing was moved. What to do: call "
            "this on all ranks of the old job, too",
        ) from error
    # A change that this rank missed, and whose others have given up on it, lies here still: the newest one counts.
    newest = store.add(f"sent/{rank}", 0)
    record = json.loads(store.get(f"box/{rank}/{newest}"))
    taken = store.add(f"taken/{rank}", 0)
    store.add(f"taken/{rank}", newest - taken)
    return record["number"], record["ranks"]
