"""``migrate``: a job of torch's own parallelism goes from one mesh to another.

A module cannot be re-meshed in place, so the old job is consumed and ``build`` makes a new one.

1. **Meet** (``meeting``): all ranks of both meshes.
2. **Tell** (``gathered``): each old rank brings its modules to rest, accounts for every tensor, and says how its
   tensors are cut (``described``) and what else it carries (``companions``).
3. **Make** (``building``): torch's mesh and groups for the new ranks, ``build`` on them, and how that cuts the same
   tensors. Extras and param groups of the new job take the old ones' state, where it can still be refused.
4. **Move** (``engine.Mover``): plan and proof, agreement, bytes, commit. All or none.
5. **Install** (``installing``): what has arrived becomes the new job's; the old one's objects raise from then on.

Until 4 commits, whatever fails is one error on all ranks, and the old job trains on as if nothing had been.
"""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from ...engine.events import Sink, nowhere
from ...engine.line import Kind as Transport
from ...engine.readiness import Verify
from ...engine.reconcile import Differing
from ...plan.summary import STAGING_BYTES
from ...values import Infeasible, Mesh, Topology
from .building import Build
from .change import Change
from .job import Job
from .meeting import meet

Order: TypeAlias = Literal["given", "least"]


def migrate(
    job: Job | None,
    build: Build,
    to: Mesh,
    *,
    order: Order = "given",
    cast: bool = False,
    verify: Verify = False,
    compare_copies: bool = True,
    differing: Differing = "error",
    device_type: str | None = None,
    topology: Topology | None = None,
    transport: Transport = "auto",
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 60.0,
    sink: Sink = nowhere,
) -> Job | None:
    """Move a job to another mesh. Called between two steps by all ranks of the old and of the new mesh, alike.

    Args:
        job: this rank's job; None on a rank that joins.
        build: from torch's ``DeviceMesh`` of the new ranks the new (model, optimizer), (model, optimizer, extras) or
            ``Job``. The model is best made on the meta device; what it holds is overwritten. Called on new ranks only.
        to: the new mesh, of global ranks.
        order: ``"given"``: each rank stands in the new mesh where ``to`` says; ``"least"``: the same ranks stand where
            the fewest bytes have to move. ``job.mesh`` says where.
        cast: whether parameters and buffers may change their dtype to what ``build`` made; each that does is in the
            report. Without it such a change is refused.
        verify: ``"digest"``: hold each piece to a digest of what was sent.
        compare_copies: refuse copies that differ (plain buffers of FSDP2 ranks may), which reads every byte that
            several ranks hold, also where one holds all of a tensor and others parts. Otherwise a rank whose part stays
            keeps its own, and others get any.
        differing: what becomes of copies that differ instead: ``"first"``: all get the lowest rank's; ``"mean"``. By
            the element: where ranks' parts overlap, each stretch is settled among the ranks that hold it.
        device_type: of torch's mesh; None for where the job's parameters are.
        topology: which ranks share a node, and rates; None for one node.
        transport: see ``shardshift.transport.connect``.
        staging_bytes: the most that a rank stages at any time.
        timeout_s: the longest that a round or an agreement may take; ``build`` on the slowest rank, too.
            That all are there at first may take a minute.
        sink: takes the events of the move.

    Returns:
        The new job, live on the new mesh; None on a rank that is not in it.

    Raises:
        Infeasible: if the new mesh, or an extra on it, cannot be.
        Mismatch: if old and new job do not fit each other: shapes, dtypes, optimizers, copies.
        Unaccounted: naming state that follows no rule.
        StateLost: naming what no old rank holds.
        PeerLost: if a rank is gone.

        In all these cases the old job is as it was, but for one: a ``Mismatch`` that says that the change is committed.
        Then code of the user's (``after_move``, extra state, extras) has failed on a rank; the new job is not whole.
    """
    if order not in ("given", "least"):
        raise Infeasible(f"unknown order {order!r}; what to do: use 'given' or 'least'")
    if not isinstance(to, Mesh):
        raise Infeasible(
            f"the mesh to go to is a {type(to).__name__}, expected an ss.Mesh; what to do: write it like "
            "ss.Mesh({'dp': 2, 'tp': 2}): the size of each axis, outermost first, and ranks= if not 0, 1, 2, ..."
        )
    clock = _Clock()
    kind = device_type or _device_type(job)
    memory = kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"
    # What is made under inference mode could never train.
    with (
        torch.inference_mode(False),
        meet(
            job,
            to,
            topology=topology,
            transport="nccl" if transport == "auto" and kind == "cuda" else transport,
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            memory=memory,
            sink=sink,
        ) as mover,
    ):
        clock.lap("meet")
        change = Change(
            job,
            build,
            to,
            mover,
            cast=cast,
            device_type=kind,
            timeout_s=timeout_s,
            options={"order": order, "differing": differing, "compare_copies": compare_copies},
        )
        change.tell()
        clock.lap("tell")
        change.make()
        if order == "least":
            change.place()
        clock.lap("make")
        targets = mover.move(
            change.prev,
            change.curr,
            change.state,
            verify=verify,
            compare_copies=compare_copies,
            differing=differing,
            among=change.curr.devices,
        )
        clock.lap("move")
        found = change.finish(targets)
        clock.lap("install")
        if found is not None:
            found.report = change.report(clock.seconds)
        return found


def _device_type(job: Job | None) -> str:
    """Where the old job's parameters are; a rank that joins goes by the default group's backend."""
    if job is not None and not job.is_consumed:
        for parameter in (each for model in job.models for each in model.parameters()):
            if parameter.device.type != "meta":
                return parameter.device.type
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


class _Clock:
    """Seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self.seconds[name], self._last_s = now_s - self._last_s, now_s
