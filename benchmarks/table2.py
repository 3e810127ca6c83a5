"""Table II: six changes, ours against checkpoints of every kind and against ETC's own plans, at a smaller scale.

All sides move the same state in the same forked processes, by turns: parameters in bf16, fp32 masters and both moments
of a GPT, whose elements say where they belong, so each side's result is checked bit for bit. The baselines are in
``baselines``; none counts what a restart adds (ending and starting processes, imports, building the model).

1. *Fastest baseline*: the least save and the least reshard + load over all of them, on one file system.
2. *Ours*: from when the devices have agreed, over gloo and directly within the host; beside it the whole of
   ``Mover.move``, from planning to commit, into new memory.
3. *Ceiling*: the fastest baseline on /dev/shm over the bare transport of the bytes that our plan moves
   (``baselines/bare.py``). No engine that moves these bytes over this transport can be more times as fast.

Ours has the placement that moves the fewest bytes, which is what the paper's sketch aims at. Where TP groups and whole
nodes matter more there are rows against ETC's coalesced plan, which aims at that too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

from _processes import Rank, Spans, run_ranks
from baselines.bare import bare_sides
from baselines.checkpoint import TorchCheckpoint
from baselines.common import Baseline, Digests, Meter, Place, checked, digests, enter, gate_of, median_ms
from baselines.etc import ETC, published
from baselines.megatron import EasyCkpt, Megatron
from baselines.megatron_dist import MegatronDist
from baselines.ours import Pool, moving, transports, whole
from planner import TABLE_2

from shardshift.models import Catalogue, Model
from shardshift.plan import Plan
from shardshift.plan.methods import Change, solve
from shardshift.report.bench import Row
from shardshift.values import ParallelConfig, Topology

GiB: Final = 2**30
SHM: Final = "/dev/shm"
DISK: Final = "disk"
LEAST: Final = {"same host": 10.0, "gloo": 5.0}
"""How many times as fast as the fastest baseline on /dev/shm we want to be, by transport."""
CEILING: Final = 0.8
"""The part of the ceiling that is to be reached."""
COPYING: Final = 0.1
"""From this part of the moved bytes on, local copies have a floor of their own beside the bare transport."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        changes: old and new configuration, and the model's layers.
        hidden: hidden size; the paper's is 3072.
        vocab: rows of the embedding.
        runs: of each side, of which the median counts.
        disk_runs: of those that save to disk, which no goal hangs on.
        where: folders for checkpoints, by what they are called.
    """

    changes: tuple[tuple[str, str, int], ...] = TABLE_2
    hidden: int = 384
    vocab: int = 8192
    runs: int = 3
    disk_runs: int = 1
    where: tuple[tuple[str, str], ...] = ((SHM, "/dev/shm"), (DISK, tempfile.gettempdir()))


@dataclass(frozen=True, slots=True)
class Asked:
    """One change, planned.

    Attributes:
        case: its name.
        configs: old and new.
        ours: the fewest bytes.
        joint: TP groups together and whole nodes free first, then the fewest bytes.
        etc: ETC's plans by form.
        devices_per_node: of the cluster.
    """

    case: str
    configs: tuple[ParallelConfig, ParallelConfig]
    ours: Plan
    joint: Plan
    etc: Mapping[str, tuple[Plan, ...]]
    devices_per_node: int

    @classmethod
    def of(cls, model: Model, prev: str, curr: str, where: Topology) -> Asked:
        """Plan a change on as many whole nodes as its larger layout needs."""
        before, after = ParallelConfig.parse(prev), ParallelConfig.parse(curr)
        topology = where.with_nodes(-(-max(before.world_size, after.world_size) // where.devices_per_node))
        every = tuple(range(max(before.world_size, after.world_size)))
        change = Change(before, after, model.layers, every[: before.world_size], every, topology)
        catalogue = Catalogue.of(model)
        old, new = catalogue.layout(before), catalogue.layout(after)
        (ours,) = solve(replace(change, node_worth_bytes=0), old, new)
        (joint,) = solve(change, old, new)
        case = f"{prev} → {curr}"
        return cls(case, (before, after), ours, joint, published(change, old, new), where.devices_per_node)

    @property
    def world(self) -> int:
        """Processes."""
        return max(config.world_size for config in self.configs)


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured.

    Attributes:
        spans: of all sides.
        moved_bytes: by baseline and phase what this rank wrote, read or sent.
        said: why the same-host path could not be taken.
    """

    spans: Spans
    moved_bytes: dict[str, dict[str, int]]
    said: list[str]


@dataclass(frozen=True, slots=True)
class Times:
    """What all ranks measured, in milliseconds.

    Attributes:
        of: by side.
        phases: by baseline and phase, in order.
        phase_bytes: likewise, over all ranks.
        paths: transports that were measured.
    """

    of: dict[str, float]
    phases: dict[str, dict[str, float]]
    phase_bytes: dict[str, dict[str, int]]
    paths: tuple[str, ...]

    @classmethod
    def from_ranks(cls, found: Sequence[Found]) -> Times:
        """The medians."""
        spans = [one.spans for one in found]
        of = {side: median_ms(spans, side) for side in spans[0]}
        phases: dict[str, dict[str, float]] = {}
        total: dict[str, dict[str, int]] = {}
        for name, by_phase in found[0].moved_bytes.items():
            phases[name] = {phase: of[f"{name}: {phase}"] for phase in by_phase}
            total[name] = {phase: sum(one.moved_bytes[name][phase] for one in found) for phase in by_phase}
        paths = tuple(path for path in ("same host", "gloo") if f"ours, {path}" in of)
        return cls(of, phases, total, paths)

    def whole_ms(self, name: str) -> float:
        """All phases of a baseline."""
        return sum(self.phases[name].values())

    def words(self, name: str) -> str:
        """A baseline and its phases."""
        parts = [
            f"{phase} {self.phases[name][phase]:.0f} ({self.phase_bytes[name][phase] / GiB:.2f} GiB)"
            for phase in self.phases[name]
        ]
        return f"{name}: {' + '.join(parts)}"

    def fastest(self, where: str) -> tuple[float, str]:
        """The least save and the least of what follows, on one file system; and in words."""
        here = [name for name in self.phases if name.endswith(where) or name == "EasyCkpt"]
        save = min(here, key=lambda name: self.phases[name]["save"])
        after = {name: self.whole_ms(name) - self.phases[name]["save"] for name in here if len(self.phases[name]) > 1}
        load = min(after, key=after.__getitem__)
        save_ms = self.phases[save]["save"]
        return save_ms + after[load], f"save of {save} ({save_ms:.0f}) + load of {load} ({after[load]:.0f})"


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows, those with goals first; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    state_bytes = most = 0
    for prev, curr, layers in scale.changes:
        model = Model.from_dimensions(
            layers=layers, hidden=scale.hidden, heads=16, vocab=scale.vocab, positions=scale.hidden
        )
        asked = Asked.of(model, prev, curr, Topology.preset("cluster-a"))
        state_bytes, most = max(state_bytes, asked.ours.state_bytes), max(most, asked.world)
        times, said = measured(asked, scale)
        for line in said:
            say(f"left out: {asked.case} on the same-host path, since {line}")
        rows += case_rows(asked, times, say)
    described = (
        f"GPT of hidden {scale.hidden} in place of 3072 (1/{(3072 // scale.hidden) ** 2} of a layer), the paper's "
        f"layers and configurations, {state_bytes / GiB:.2f} GiB of state, up to {most} processes of one thread; "
        f"medians of {scale.runs} runs, sides by turns, {scale.disk_runs} on disk; ours from the agreement on"
    )
    return described, sorted(rows, key=lambda row: row.goal is None)


def measured(asked: Asked, scale: Scale) -> tuple[Times, list[str]]:
    """Measure all sides of a change; and why the same-host path was left out, if it was."""
    with ExitStack() as stack:
        folders: dict[str, Path] = {}
        for name, parent in scale.where:
            folders[name] = Path(tempfile.mkdtemp(prefix="shardshift-table2-", dir=parent))
            stack.callback(shutil.rmtree, folders[name], ignore_errors=True)
        gate, expected = gate_of(asked.world), digests(asked.ours.curr.layout)

        def body(rank: Rank) -> Found:
            return _sides(rank, asked, folders, gate, expected, scale)

        found = run_ranks(asked.world, body, timeout_s=600)
    return Times.from_ranks(found), sorted({line for one in found for line in one.said})


def _sides(
    rank: Rank, asked: Asked, folders: Mapping[str, Path], gate: Barrier, expected: Digests, scale: Scale
) -> Found:
    enter(rank, asked.world)
    place = Place.of(rank, asked.configs, asked.ours, expected, asked.devices_per_node)
    baselines: list[Baseline] = [EasyCkpt(place)]
    for where, folder in folders.items():
        baselines += [
            Megatron(place, folder / "megatron", where),
            TorchCheckpoint(place, folder / "torch", where, sync=where == DISK),
            MegatronDist(place, folder / "megatron-dist", where),
        ]
    over, said = transports(place)
    pool = Pool.of(place.targets)
    sides = {name: side for baseline in baselines for name, side in checked(place, baseline).items()}
    sides |= moving(place, "ours", (asked.ours,), over, pool)
    sides |= bare_sides(place, asked.ours, near="same host" in over)
    sides |= moving(place, "joint", (asked.joint,), over, pool)
    for form, plans in asked.etc.items():
        sides |= moving(place, f"{ETC}: {form}", plans, over, pool)
    sides |= whole(place, asked.ours, over)
    meter = Meter(gate)
    disk = {name: side for name, side in sides.items() if f", {DISK}: " in name}
    meter.measure({name: side for name, side in sides.items() if name not in disk}, scale.runs)
    meter.measure(disk, scale.disk_runs)
    return Found(meter.spans, {baseline.name: baseline.moved_bytes for baseline in baselines}, said)


def case_rows(asked: Asked, times: Times, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one change."""
    case, plan, of = asked.case, asked.ours, times.of
    main = of[f"ours, {times.paths[0]}"]
    for name in times.phases:
        alone = "" if "load" in times.phases[name] else ", its save alone"
        yield _row(f"{case}: ours, {times.paths[0]}{alone}", main, times.words(name), times.whole_ms(name))
    fastest_ms, words = times.fastest(SHM)
    for path in times.paths:
        own_ms, bare_ms = of[f"ours, {path}"], of[f"bare {path}"]
        ceiling = fastest_ms / bare_ms
        under = f", under the goal of {LEAST[path]:g}" if ceiling < LEAST[path] else ""
        say(
            f"{case}, {path}: {fastest_ms / own_ms:.1f} x the fastest baseline on {SHM}; ceiling {ceiling:.1f} x"
            f"{under}; {bare_ms / own_ms:.2f} of it; {plan.moved_bytes / GiB:.2f} GiB move, "
            f"{plan.copied_bytes / GiB:.2f} are copied"
        )
        yield _row(f"{case}: ours, {path}", own_ms, f"fastest on {SHM}: {words}", fastest_ms, 1 / LEAST[path])
        floor = f"floor: {plan.moved_bytes / GiB:.2f} GiB over the bare transport"
        yield _row(f"{case}: ours, {path}", own_ms, floor, bare_ms, 1 / CEILING)
        if plan.copied_bytes > COPYING * plan.moved_bytes:
            floor = f"the same and {plan.copied_bytes / GiB:.2f} GiB of flat copies"
            yield _row(f"{case}: ours, {path}", own_ms, floor, of[f"bare {path} and copies"])
        times_as_fast = f"{case}: times as fast as the fastest on {SHM}, {path}"
        yield Row.of(times_as_fast, fastest_ms / own_ms, "x", baseline=f"ceiling{under}", theirs=ceiling)
        if any(name.endswith(DISK) for name in times.phases):
            disk_ms, on_disk = times.fastest(DISK)
            yield _row(f"{case}: ours, {path}", own_ms, f"fastest on {DISK}: {on_disk}", disk_ms)
        whole_ms = of[f"whole, {path}"]
        yield _row(f"{case}: all of Mover.move, {path}", whole_ms, f"fastest on {SHM}", fastest_ms)
        for form in ("migrate", "migrate, then defragment"):
            yield _row(f"{case}: ours, {path}", own_ms, f"{ETC}: {form}", of[f"{ETC}: {form}, {path}"])
        joint_ms, etc_ms = of[f"joint, {path}"], of[f"{ETC}: coalesced, {path}"]
        yield _row(f"{case}: ours on whole nodes, {path}", joint_ms, f"{ETC}: coalesced", etc_ms)


def _row(case: str, own_ms: float, baseline: str, theirs_ms: float, most_ratio: float | None = None) -> Row:
    return Row.of(case, own_ms, "ms", baseline=baseline, theirs=theirs_ms, most_ratio=most_ratio)
