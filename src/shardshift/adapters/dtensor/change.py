"""One rank's part in one change of ``migrate``. Each step ends in a record that all hear, or one error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ...engine import Mover, names_of
from ...values import Mesh, Mismatch, PlacedLayout
from .. import generators, hooks
from ..imagined import undisturbed_generators
from ..once import Records, speaks, spoken
from . import meshes
from .building import Build
from .described import Text
from .gathered import Old, Told, as_standing, check_modules, check_target, layout_by_position
from .job import Job
from .live import optimizers_in
from .new import New
from .report import Report
from .retire import retire
from .ties import one_name_each, renamed

INVALID: Final = (
    "modules and optimizers of the old job (they raise)",
    "its tensors where they are held elsewhere, views of them, hooks on them",
    "captured graphs and compiled functions of its modules",
)


class Change:
    """One rank's part.

    Args:
        job: the old job; None on a rank that joins.
        build: see ``migrate``.
        to: the new mesh.
        mover: between all ranks of the change.
        cast: see ``migrate``.
        device_type: of torch's mesh.
        timeout_s: the longest to wait for a process group.
        options: what else all have to have alike, by name.

    Attributes:
        prev: who holds what; known once ``make`` is over.
        curr: who shall hold what; likewise.
        state: this rank's tensors by name; likewise.
    """

    prev: PlacedLayout
    curr: PlacedLayout
    state: dict[str, torch.Tensor]

    def __init__(
        self,
        job: Job | None,
        build: Build,
        to: Mesh,
        mover: Mover,
        *,
        cast: bool,
        device_type: str,
        timeout_s: float,
        options: Mapping[str, Any],
    ) -> None:
        self._job, self._build, self._to, self._mover = job, build, to, mover
        self._cast, self._device_type, self._timeout_s = cast, device_type, timeout_s
        self._options = dict(options) | {"cast": cast, "device_type": device_type}
        self._old: Old | None = None
        self._new: New | None = None
        self._later: list[Callable[[], None]] = []
        self._kept = False
        self._casts: dict[str, tuple[str, str]] = {}

    def tell(self) -> None:
        """Say what the old job is like, and hear it of all."""

        def say() -> Mapping[str, Any]:
            record = {"to": [self._to.axes, self._to.ranks], "options": self._options, **self._counted()}
            if self._job is None:
                return record
            self._old = Old.of(self._job)
            return record | self._old.record(self._job)

        self._records = self._mover.exchange(say)
        check_target(self._records, self._to)
        self._align(self._records)

    def _counted(self) -> dict[str, Any]:
        return {"groups": meshes.group_count(), "has_mesh": meshes.has_mesh(self._to, self._device_type)}

    def _align(self, counted: Records) -> None:
        meshes.align_groups(max(record["groups"] for record in counted.values()))
        self._kept = all(record["has_mesh"] for record in counted.values())

    def make(self) -> None:
        """Make the new mesh and job, let it take what it can before anything moves, and work out both layouts."""

        def first() -> Mapping[str, Any]:
            record: dict[str, Any] = {} if self._old is None else self._old.bodies(self._mover.device, self._records)
            device_mesh = meshes.torch_mesh(self._to, self._device_type, kept=self._kept, timeout_s=self._timeout_s)
            with undisturbed_generators():
                self._new = None if device_mesh is None else New(self._build, device_mesh, self._to, self._job)
            return record if self._new is None else record | self._new.record

        made = self._mover.exchange(first)
        self._told = Told.of(self._records, made)

        def second() -> Mapping[str, Any]:
            new = self._new
            if new is None:
                return {}
            with undisturbed_generators():  # a loader may seed when it takes a state
                self._later = new.prepare(self._job, self._told)
            record: dict[str, Any] = {"lacks": self._told.companions.unknown_modules(new.models)}
            return record | ({"new_body": new.text.body} if speaks(self._mover.device, made, "new") else {})

        bodies = self._mover.exchange(second)
        texts = spoken(made, bodies, "new", Text.of_body)
        check_modules([record["lacks"] for record in bodies.values() if "lacks" in record])
        names = one_name_each(self._told.texts.values(), texts.values())
        self._told = self._told.under(names)
        moving: dict[str, Text] = {}
        for digest, text in texts.items():
            moving[digest], casts = self._told.moving(renamed(text, names), cast=self._cast)
            self._casts |= casts
        standings = {rank: (made[rank]["new"], as_standing(made[rank]["new_standing"])) for rank in self._to.ranks}
        after = layout_by_position(moving, self._to, standings)
        self.prev = PlacedLayout(self._told.layout, self._told.mesh.ranks)
        self.curr = PlacedLayout(after, self._to.ranks)
        self.state = {}
        if self._old is not None:
            shards = names_of(self._told.layout.shards(_position(self._told.mesh, self._mover.device)))
            views = self._old.views_under(names)
            self.state = {name: views[shard] for name, shard in shards.items()}
        if self._new is not None:
            self._new.moving = moving[self._new.text.digest]

    def place(self) -> None:
        """Let the ranks of the new mesh stand where the fewest bytes have to move, and make the new job there."""
        group_size = self._to.size("tp") if self._to.names[-1] == "tp" else 1
        placed = self._mover.place(self.prev, self.curr.layout, among=self._to.ranks, group_size=group_size)
        if placed.devices == self._to.ranks:
            return
        self._to, self._new = Mesh(dict(self._to.axes), placed.devices), None
        self._align(self._mover.exchange(self._counted))
        self.make()

    def finish(self, targets: Mapping[str, torch.Tensor]) -> Job | None:
        """After the commit: the new job takes its tensors, the old one is consumed, and all hear that all have.

        Raises:
            ShardshiftError: on all ranks alike, if one could not: the change is committed, its job is not whole.
        """

        def install() -> Mapping[str, Any]:
            try:
                if self._new is not None:
                    self._installed(self._new, targets)
                for turn in self._later:
                    turn()
            except Exception as error:
                raise Mismatch(
                    f"rank {self._mover.device}: the change to {self._to} is committed, but the new job could not be "
                    f"made whole: {type(error).__name__}: {error}. What to do: mend what the text names (after_move, "
                    "extra state, extras and hooks are the user's code), and start from the last checkpoint"
                ) from error
            finally:
                self._consume()
            return {}

        self._mover.exchange(install)
        return None if self._new is None else self._new.job

    def _installed(self, new: New, targets: Mapping[str, torch.Tensor]) -> None:
        names = names_of(self.curr.layout.shards(_position(self._to, self._mover.device)))
        new.take({shard: targets[name] for name, shard in names.items()}, self._told)
        hooks.run(new.models)
        generators.install(self._told.companions.streams(self._to, self._mover.device, self._told.generation))
        new.job.generation = self._told.generation + 1

    def _consume(self) -> None:
        """Make the old job's objects raise."""
        old, self._old = self._job, None
        self.state = {}
        if old is None:
            return
        models, optimizers, container = old.models, optimizers_in(old.optimizer), old.optimizer
        old.consume()
        if isinstance(container, torch.optim.Optimizer) and container not in optimizers:
            optimizers = (*optimizers, container)
        retire(models, optimizers)

    def report(self, seconds: Mapping[str, float]) -> Report:
        """What it came to."""
        plan, layout = self._mover.plan, self.curr.layout
        return Report(
            self._told.mesh,
            self._to,
            layout.state_bytes,
            plan.moved_bytes if plan else 0,
            plan.least_moved_bytes if plan else 0,
            plan.referred_bytes if plan else int(layout.rank_bytes.sum()),
            self._casts,
            seconds,
            INVALID,
        )


def _position(mesh: Mesh, rank: int) -> int:
    position = mesh.position(rank)
    assert position is not None  # whoever has a job is in its mesh
    return position
