"""``dry_run``: what a change would come to. Nothing is moved, no process group is made, the job trains on.

The new job is built in an imagined world (``imagined``), once for each stage if the new mesh has an axis called pp,
else once. Where its other ranks stand follows from the names of the meshes that its tensors lie on; if that cannot be
told (a mesh that ``build`` has flattened), it is built at every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from ...engine.events import nowhere
from ...plan import Plan, make_plan
from ...plan.summary import STAGING_BYTES
from ...schedule import Schedule, peak_of
from ...values import Mesh, PlacedLayout, Topology
from ..imagined import imagined_world, undisturbed_generators
from .building import Build
from .described import Standing, Text, layout_of
from .gathered import Old, Told, check_modules
from .job import Job
from .live import meshes_of
from .meeting import meet
from .meshes import meshes_apart, torch_mesh
from .new import New
from .report import DryRun
from .ties import one_name_each, renamed

_STAGES: Final = "pp"


def dry_run(
    job: Job | None,
    build: Build,
    to: Mesh,
    *,
    cast: bool = False,
    topology: Topology | None = None,
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 60.0,
) -> DryRun | None:
    """Say what ``migrate`` would do. Called by all ranks of the job; a rank without one gets None at once.

    Args:
        job: this rank's job.
        build: see ``migrate``; it is called with meshes of an imagined world, on the meta device or not.
        to: the new mesh.
        cast: see ``migrate``.
        topology: see ``migrate``.
        staging_bytes: see ``migrate``.
        timeout_s: the longest to wait for the other ranks of the job.

    Raises:
        Infeasible, Mismatch, Unaccounted, StateLost: as ``migrate`` would.
        PeerLost: if a rank of the job does not come.
    """
    if job is None:
        return None
    with meet(
        job,
        job.mesh,
        topology=topology,
        transport="gloo",
        staging_bytes=staging_bytes,
        timeout_s=timeout_s,
        memory="cpu",
        sink=nowhere,
    ) as mover:
        old: Old | None = None

        def first() -> Mapping[str, Any]:
            nonlocal old
            old = Old.of(job)
            return old.record(job)

        told = mover.exchange(first)
        assert old is not None  # an error of one's own has been raised
        bodies = old.bodies(job.rank, told)
        before = Told.of(told, mover.exchange(lambda: bodies))
    kind = job.device_mesh.device_type if job.device_mesh is not None else "cpu"
    texts, ranks, lacking = _imagined(build, to, kind, job, before)
    check_modules(lacking)
    names = one_name_each(before.texts.values(), texts)
    before = before.under(names)
    after = layout_of([before.moving(renamed(text, names), cast=cast)[0] for text in texts], ranks)
    plan = make_plan(
        PlacedLayout(before.layout, before.mesh.ranks),
        after,
        devices=sorted(to.ranks),
        topology=topology,
        placement=to.ranks,
    )
    return DryRun(
        before.mesh,
        to,
        plan.state_bytes,
        plan.moved_bytes,
        plan.least_moved_bytes,
        plan.referred_bytes,
        _traffic(plan),
        _peaks(plan, staging_bytes),
        old.audit,
        plan.digest,
    )


def _imagined(
    build: Build, to: Mesh, device_type: str, job: Job, before: Told
) -> tuple[list[Text], list[tuple[int, Standing]], list[list[str]]]:
    """The texts of the new ranks, each once; per position its text and standing; and which modules they lack."""
    texts: dict[str, int] = {}
    found: list[Text] = []
    first_of: dict[int, tuple[int, tuple[tuple[str, ...], ...] | None]] = {}
    ranks: list[tuple[int, Standing]] = []
    lacking: list[list[str]] = []
    for rank in to.ranks:
        stage = to.coordinate(rank).get(_STAGES, 0)
        known = first_of.get(stage)
        if known is not None and known[1] is not None:
            ranks.append((known[0], _standing(to, rank, known[1])))
            continue
        with undisturbed_generators(), imagined_world(rank, 1 + max(to.ranks)), meshes_apart():
            device_mesh = torch_mesh(to, device_type)
            assert device_mesh is not None  # the rank is in the mesh
            new = New(build, device_mesh, to, job)
            new.prepare(job, before)
            axes = _axes(meshes_of(new.held.tensors), to)
        lacking.append(before.companions.unknown_modules(new.models))
        index = texts.setdefault(new.text.digest, len(texts))
        if index == len(found):
            found.append(new.text)
        first_of[stage] = (index, axes)
        ranks.append((index, new.standing))
    return found, ranks, lacking


def _axes(meshes: list[DeviceMesh], to: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """Per mesh the axes that it has of the whole one; None if it has others."""
    named = [mesh.mesh_dim_names for mesh in meshes]
    found = tuple(names for names in named if names is not None)
    plain = len(found) == len(named) and all(
        name in to.names and to.size(name) == size
        for mesh, names in zip(meshes, found, strict=True)
        for name, size in zip(names, mesh.shape, strict=True)
    )
    return found if plain else None


def _standing(to: Mesh, rank: int, axes: tuple[tuple[str, ...], ...]) -> Standing:
    at = to.coordinate(rank)
    return tuple((tuple(to.size(name) for name in names), tuple(at[name] for name in names)) for names in axes)


def _traffic(plan: Plan) -> dict[int, tuple[int, int]]:
    """Per rank what it sends and receives."""
    sizes = plan.cells.nbytes[plan.moves.cell]
    sent, received = Counter[int](), Counter[int]()
    for total, ranks in ((sent, plan.moves.source), (received, plan.moves.target)):
        for rank in np.unique(ranks).tolist():
            total[rank] = int(sizes[ranks == rank].sum())
    return {rank: (sent[rank], received[rank]) for rank in sorted({*plan.prev.devices, *plan.curr.devices})}


def _peaks(plan: Plan, staging_bytes: int) -> dict[int, int]:
    schedule = Schedule.of(plan, staging_bytes)
    return {
        rank: peak_of(schedule.program(rank), plan.prev.shards_on(rank)).live_bytes
        for rank in sorted({*plan.prev.devices, *plan.curr.devices})
    }
