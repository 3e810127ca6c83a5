"""What every baseline is given on one rank, what it gives back, and how its phases are timed.

``Rank.measure`` is not used: it lets ranks that wait look every half millisecond, and while one process reshards for
thirty others their looking would take a good part of two cores. Here ranks sleep in a barrier of the kernel.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch
import torch.distributed as dist
from _processes import TIMEOUT_S, Action, Rank, Side, Spans, median_s
from _state import Locals, coded, dtype_of, warm

from shardshift.engine import names_of
from shardshift.engine.checksum import checksum
from shardshift.plan import Plan
from shardshift.values import Layout, ParallelConfig, PlacedLayout, Region, Shard

GATE_S: Final = 2 * TIMEOUT_S
"""The longest that a phase may take."""

Digests: TypeAlias = dict[Shard, int]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One rank's part in a change, as all baselines see it. Device r runs rank r of the old layout.

    Attributes:
        rank: this process, whose index is its device.
        configs: the old and the new configuration.
        plan: our plan; baselines take its placement of the new ranks and nothing else.
        sources: this device's old state, coded.
        targets: memory for its new state that has been written to.
        expected: per shard of the new layout, wherever it is, the digest of what must be in it.
        devices_per_node: consecutive devices that share a node.
    """

    rank: Rank
    configs: tuple[ParallelConfig, ParallelConfig]
    plan: Plan
    sources: Locals
    targets: Locals
    expected: Digests
    devices_per_node: int

    @classmethod
    def of(
        cls,
        rank: Rank,
        configs: tuple[ParallelConfig, ParallelConfig],
        plan: Plan,
        expected: Digests,
        devices_per_node: int,
    ) -> Place:
        """Make the state."""
        sources = {shard: coded(shard, warm(shard)) for shard in plan.prev.shards_on(rank.index)}
        targets = {shard: warm(shard) for shard in plan.curr.shards_on(rank.index)}
        return cls(rank, configs, plan, sources, targets, expected, devices_per_node)

    @property
    def device(self) -> int:
        """This process's device."""
        return self.rank.index

    @property
    def world(self) -> int:
        """Devices of either layout."""
        return len(self.plan.devices)

    def saves(self) -> dict[str, Shard]:
        """What a checkpoint takes from this device, by name: of replicas the lowest device saves."""
        first = lowest(self.plan.prev.layout.role_of_rank)
        rank = self.plan.prev.rank_of(self.device)
        return names_of(self.plan.prev.shards_on(self.device)) if rank is not None and rank in first else {}

    def clear(self) -> None:
        """Write zeros over the targets, so that nothing of an earlier run is left in them."""
        for target in self.targets.values():
            target.zero_()

    def check(self, what: str, found: Mapping[Shard, torch.Tensor], layout: PlacedLayout | None = None) -> None:
        """Hold new state to the codes of its elements.

        Args:
            what: has made it.
            found: by shard.
            layout: the new one, if it is not the plan's.

        Raises:
            AssertionError: naming the first shard that is missing or wrong.
        """
        for shard in (layout or self.plan.curr).shards_on(self.device):
            assert checksum(found[shard]) == self.expected[shard], f"{what}: device {self.device}: {shard} is wrong"


class Baseline(Protocol):
    """A way to change the layout. Made on every rank alike; its phases are collective.

    Attributes:
        name: for tables.
        moved_bytes: per phase what this rank wrote, read or sent in its last run.
    """

    name: str
    moved_bytes: dict[str, int]

    def phases(self) -> Mapping[str, Side]:
        """``save``, ``reshard`` and ``load``, or those of them that there are, in this order.

        The last one leaves the new state in the place's targets, unless there is no ``load``.
        """
        ...

    def clean(self) -> None:
        """After a load was checked: give back what has been saved, so that baselines take up memory one at a time."""
        ...


@dataclass(slots=True)
class Meter:
    """Times phases and checks what was loaded.

    Attributes:
        gate: at which all ranks meet.
        spans: per side the (start, end) of each run on this rank.
    """

    gate: Barrier
    spans: Spans = field(default_factory=dict)

    def measure(self, sides: Mapping[str, Side], runs: int, *, warm_up: bool = True) -> None:
        """Run each side ``runs`` times, by turns, all ranks together; with ``warm_up`` once more at first, untimed."""
        for name in sides:
            self.spans[name] = []
        for run in range(not warm_up, runs + 1):
            for name, prepare in sides.items():
                action = prepare()
                self.gate.wait(GATE_S)
                start_s = time.perf_counter()
                kept = action()
                end_s = time.perf_counter()
                self.gate.wait(GATE_S)
                del action, kept
                if run:
                    self.spans[name].append((start_s, end_s))


def checked(place: Place, baseline: Baseline) -> dict[str, Side]:
    """A baseline's phases as sides ``NAME: PHASE``; loads begin on zeros, and are checked when all is over."""

    def loading(side: Side) -> Side:
        def prepare() -> Action:
            place.clear()
            return side()

        return prepare

    def checking() -> Action:
        place.check(baseline.name, place.targets)
        baseline.clean()
        return lambda: None

    phases = dict(baseline.phases())
    sides = {f"{baseline.name}: {name}": loading(side) if name == "load" else side for name, side in phases.items()}
    return sides | ({f"{baseline.name}: check": checking} if "load" in phases else {})


def digests(layout: Layout) -> Digests:
    """What must be in each shard of a layout: digests of coded tensors, for all ranks to share once they are forked."""
    shards = {shard for rank in lowest(layout.role_of_rank) for shard in layout.shards(rank)}
    return {shard: checksum(coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard)))) for shard in shards}


def empty_folder(folder: Path) -> None:
    """Remove the files in a folder and its folders, which stay."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def gate_of(parties: int) -> Barrier:
    """A barrier for forked ranks, to be made before they are."""
    return mp.get_context("fork").Barrier(parties)


def lowest(roles: Sequence[int]) -> dict[int, int]:
    """The lowest rank of each role, and the role."""
    found: dict[int, int] = {}
    for rank, role in enumerate(roles):
        found.setdefault(role, rank)
    return {rank: role for role, rank in found.items()}


def enter(rank: Rank, world: int) -> None:
    """Make the devices torch's default group, over gloo; and say nothing about folders that are written to again."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.index, world_size=world, timeout=timeout)


def median_ms(spans: Sequence[Spans], side: str) -> float:
    """Milliseconds that a side takes; see ``median_s``."""
    return 1e3 * median_s(spans, side)


def part(tensor: torch.Tensor, region: Region, within: Region) -> torch.Tensor:
    """The view of a region in a tensor that holds ``within``, which contains it."""
    for dim, (offset, count, base) in enumerate(zip(region.offsets, region.shape, within.offsets, strict=True)):
        tensor = tensor.narrow(dim, offset - base, count)
    return tensor


def file_of(folder: Path, role: int) -> Path:
    """The file of a role."""
    return folder / f"mp_rank_{role:02d}.pt"
