"""Table II: six changes, ours against checkpoints of every kind and against ETC's own plans, at a smaller scale.

All sides move the same state in the same forked processes, by turns: parameters in bf16, fp32 masters and both moments
of a GPT, whose elements say where they belong, so each side's result is checked bit for bit. The baselines are in
``baselines``; none counts what a restart adds (ending and starting processes, imports, building the model), but for
*torchrun restart*, which counts the least of it. The fastest is not sought in two: that one, as it saves and loads like
another, and megatron-core's *resharding*, as it moves weights only.

1. *Fastest baseline*: the least save and the least reshard + load over all of them, on one file system.
2. *Ours*: from when the devices have agreed, over gloo and directly within the host; beside it the whole of
   ``Mover.move``, from planning to commit, into new memory.
3. *Ceiling*: the fastest baseline on /dev/shm over the bare transport of the bytes that our plan moves
   (``baselines/bare.py``). No engine that moves these bytes over this transport can be more times as fast. *With
   copies*: as many bytes as the plan copies within devices are copied flat as well, which any method has to do.

Ours has the placement that moves the fewest bytes, which is what the paper's sketch aims at. Where TP groups and whole
nodes matter more there are rows against ETC's coalesced plan, which aims at that too.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

from _changes import TABLE_2
from _processes import Rank, Spans, run_ranks
from baselines import resharding, restart
from baselines.bare import bare_sides
from baselines.checkpoint import TorchCheckpoint
from baselines.common import Baseline, Digests, Meter, Place, checked, digests, enter, gate_of, median_ms
from baselines.etc import ETC, published
from baselines.megatron import EasyCkpt, Megatron
from baselines.megatron_dist import MegatronDist
from baselines.ours import Pool, moving, transports, whole

from shardshift.demo.model import ModelShape
from shardshift.models import Catalogue, Model
from shardshift.plan import Plan
from shardshift.plan.methods import Change, solve
from shardshift.report.bench import Row
from shardshift.values import ParallelConfig, Topology

GiB: Final = 2**30
SHM: Final = "/dev/shm"
DISK: Final = "disk"
SLOW: Final = "Megatron"
"""How the names of Megatron's two ways begin, over files and by ``dist_checkpointing``."""
OTHERS: Final = ("joint", ETC, "whole")
"""How the names of plans begin that are not the one that moves the least, and of ``Mover.move`` as a whole."""
HEADS: Final = 16
LEAST: Final = {"same host": 10.0, "gloo": 5.0}
"""How many times as fast as the fastest baseline on /dev/shm we want to be, by transport."""
CEILING: Final = 0.8
"""The part of the ceiling that is to be reached."""
PAPER: Final = dict(
    zip((f"{prev} → {curr}" for prev, curr, _ in TABLE_2), (2.90, 5.77, 6.36, 2.33, 2.47, 2.83), strict=True)
)
"""How many times as fast as the fastest of its baselines the paper's method is, on 128 GPUs."""
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
        once: the first so many changes for which is measured what takes long and is much alike for all: checkpoints on
            disk, and a restart, of which most is imports.
        few_runs: of those that no goal hangs on: both of Megatron's ways and what is on disk, the slowest, which are
            not run once untimed before; plans other than ours, and all of ``Mover.move``.
        where: folders for checkpoints, by what they are called. On disk there is one baseline.
    """

    changes: tuple[tuple[str, str, int], ...] = TABLE_2
    hidden: int = 384
    vocab: int = 8192
    runs: int = 3
    once: int = 1
    few_runs: int = 1
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

    def add(self, name: str, phases: Mapping[str, float], nbytes: Mapping[str, int]) -> None:
        """A baseline that was measured apart: milliseconds by phase, and bytes of those that have some."""
        self.phases[name] = dict(phases)
        self.phase_bytes[name] = {phase: nbytes.get(phase, 0) for phase in phases}

    def words(self, name: str) -> str:
        """A baseline and its phases."""
        parts = []
        for phase, phase_ms in self.phases[name].items():
            nbytes = self.phase_bytes[name][phase]
            parts.append(f"{phase} {phase_ms:.0f}" + (f" ({nbytes / GiB:.2f} GiB)" if nbytes else ""))
        return f"{name}: {' + '.join(parts)}"

    def fastest(self, where: str) -> tuple[float, str]:
        """The least save and the least of what follows, on one file system; and in words."""
        here = [name for name in self.phases if name.endswith(where) or name == "EasyCkpt"]
        here = [name for name in here if not name.startswith(restart.NAME)]
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
    for number, (prev, curr, layers) in enumerate(scale.changes):
        model = Model.from_dimensions(
            layers=layers, hidden=scale.hidden, heads=HEADS, vocab=scale.vocab, positions=scale.hidden
        )
        asked = Asked.of(model, prev, curr, Topology.preset("cluster-a"))
        state_bytes, most = max(state_bytes, asked.ours.state_bytes), max(most, asked.world)
        times, said = measured(asked, scale, say, slowest=number < scale.once)
        for line in said:
            say(f"left out: {asked.case} on the same-host path, since {line}")
        rows += case_rows(asked, times, say)
        rows += weights_rows(asked, times, layers, scale, say)
    described = (
        f"GPT of hidden {scale.hidden} in place of 3072 (1/{(3072 // scale.hidden) ** 2} of a layer), the paper's "
        f"layers and configurations, {state_bytes / GiB:.2f} GiB of state, up to {most} processes of one thread; "
        f"medians of {scale.runs} runs, sides by turns; on disk, of Megatron's ways, of other plans and of all of "
        f"Mover.move {scale.few_runs}, a restart 1; ours from the agreement on"
    )
    return described, sorted(rows, key=lambda row: row.goal is None)


def measured(
    asked: Asked, scale: Scale, say: Callable[[str], None], *, slowest: bool = False
) -> tuple[Times, list[str]]:
    """Measure all sides of a change that move the whole state; and why the same-host path was left out, if it was."""
    with ExitStack() as stack:
        folders: dict[str, Path] = {}
        for name, parent in scale.where:
            if slowest or name == SHM:
                folders[name] = Path(tempfile.mkdtemp(prefix="shardshift-table2-", dir=parent))
                stack.callback(shutil.rmtree, folders[name], ignore_errors=True)
        if slowest:
            folders[restart.NAME] = folders[SHM] / "restart"
            folders[restart.NAME].mkdir()
        gate, expected = gate_of(asked.world), digests(asked.ours.curr.layout)

        def body(rank: Rank) -> Found:
            return _sides(rank, asked, folders, gate, expected, scale)

        found = run_ranks(asked.world, body, timeout_s=600)
        times = Times.from_ranks(found)
        saved = f"torch checkpoint, {SHM}"
        if not slowest:
            return times, sorted({line for one in found for line in one.said})
        try:
            parts = restart.restarted(asked.ours, asked.configs[1], folders[restart.NAME])
            phases = {"save": times.phases[saved]["save"], **parts}
            times.add(f"{restart.NAME}, {SHM}", phases, times.phase_bytes[saved])
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # the other figures count all the same
            say(f"left out: {asked.case}, {restart.NAME}: {error}")
    return times, sorted({line for one in found for line in one.said})


def weights_rows(asked: Asked, times: Times, layers: int, scale: Scale, say: Callable[[str], None]) -> Iterator[Row]:
    """megatron-core's resharding, which moves the weights and no more."""
    path = times.paths[0]
    own_ms = times.of[f"ours, {path}"]
    if why := resharding.obstacle(asked.configs):
        yield Row.of(f"{asked.case}: ours, {path}; {resharding.NAME}, cannot: {why}", own_ms, "ms")
        return
    shape = ModelShape(
        layers=layers,
        hidden=scale.hidden,
        heads=HEADS,
        sequence_length=scale.hidden,
        vocab_size=scale.vocab,
        tied=False,
    )
    try:
        found = resharding.resharded(asked.configs, shape, scale.runs)
    except (RuntimeError, TimeoutError) as error:  # as above
        say(f"left out: {asked.case}, {resharding.NAME}: {error}")
        return
    words = f"{resharding.NAME} ({found.moved_bytes / GiB:.2f} GiB)"
    yield _row(f"{asked.case}: ours, {path}", own_ms, words, found.milliseconds)


def _sides(
    rank: Rank, asked: Asked, folders: Mapping[str, Path], gate: Barrier, expected: Digests, scale: Scale
) -> Found:
    enter(rank, asked.world)
    place = Place.of(rank, asked.configs, asked.ours, expected, asked.devices_per_node)
    shm = TorchCheckpoint(place, folders[SHM] / "torch", SHM, sync=False)
    baselines: list[Baseline] = [
        EasyCkpt(place),
        Megatron(place, folders[SHM] / "megatron", SHM),
        shm,
        MegatronDist(place, folders[SHM] / "megatron-dist", SHM),
    ]
    if DISK in folders:
        baselines.append(TorchCheckpoint(place, folders[DISK] / "torch", DISK, sync=True))
    over, said = transports(place)
    pool = Pool.of(place.targets)
    sides = {name: side for baseline in baselines for name, side in checked(place, baseline).items()}
    sides |= moving(place, "ours", (asked.ours,), over, pool)
    sides |= bare_sides(place, asked.ours, near="same host" in over)
    first = dict([max(over.items(), key=lambda one: one[0])])  # "same host", if it is there
    sides |= moving(place, "joint", (asked.joint,), first, pool)
    for form, plans in asked.etc.items():
        sides |= moving(place, f"{ETC}: {form}", plans, first, pool)
    sides |= whole(place, asked.ours, first)
    meter = Meter(gate)
    slow = {name: side for name, side in sides.items() if f", {DISK}: " in name or name.startswith(SLOW)}
    others = {name: side for name, side in sides.items() if name.startswith(OTHERS)}
    meter.measure({name: side for name, side in sides.items() if name not in slow | others}, scale.runs)
    meter.measure(others, scale.few_runs)
    meter.measure(slow, scale.few_runs, warm_up=False)
    if restart.NAME in folders:
        shm.keep(restart.checkpoint_of(folders[restart.NAME]))
    return Found(meter.spans, {baseline.name: baseline.moved_bytes for baseline in baselines}, said)


def case_rows(asked: Asked, times: Times, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one change."""
    case, plan, of = asked.case, asked.ours, times.of
    main = of[f"ours, {times.paths[0]}"]
    for name in times.phases:
        alone = "" if "load" in times.phases[name] else ", its save alone"
        yield _row(f"{case}: ours, {times.paths[0]}{alone}", main, times.words(name), times.whole_ms(name))
    fastest_ms, words = times.fastest(SHM)
    moved = f"{plan.moved_bytes / GiB:.2f} GiB over the bare transport"
    for path in times.paths:
        own_ms = of[f"ours, {path}"]
        yield _row(f"{case}: ours, {path}", own_ms, f"fastest on {SHM}: {words}", fastest_ms, 1 / LEAST[path])
        floors = {"ceiling": (of[f"bare {path}"], f"floor: {moved}")}
        if plan.copied_bytes > COPYING * plan.moved_bytes:
            copied = f"floor with copies: the same and {plan.copied_bytes / GiB:.2f} GiB of flat copies"
            floors["ceiling with copies"] = of[f"bare {path} and copies"], copied
        told = []
        times_as_fast = f"{case}: times as fast as the fastest on {SHM}, {path}"
        for ceiling, (floor_ms, floor) in floors.items():
            most = fastest_ms / floor_ms
            under = f", under the goal of {LEAST[path]:g}" if most < LEAST[path] else ""
            told.append(f"{ceiling} {most:.1f} x{under}, {floor_ms / own_ms:.2f} of it")
            yield _row(f"{case}: ours, {path}", own_ms, floor, floor_ms, 1 / CEILING)
            yield Row.of(times_as_fast, fastest_ms / own_ms, "x", baseline=f"{ceiling}{under}", theirs=most)
        if (paper := PAPER.get(case)) is not None:
            yield Row.of(times_as_fast, fastest_ms / own_ms, "x", baseline="the paper, 128 GPUs", theirs=paper)
        say(
            f"{case}, {path}: {fastest_ms / own_ms:.1f} x the fastest baseline on {SHM}; {'; '.join(told)}; "
            f"{plan.moved_bytes / GiB:.2f} GiB move, {plan.copied_bytes / GiB:.2f} are copied"
        )
        if (whole_ms := of.get(f"whole, {path}")) is not None:
            yield _row(f"{case}: all of Mover.move, {path}", whole_ms, f"fastest on {SHM}", fastest_ms)
    path = times.paths[0]
    for form in ("migrate", "migrate, then defragment"):
        yield _row(f"{case}: ours, {path}", main, f"{ETC}: {form}", of[f"{ETC}: {form}, {path}"])
    joint_ms, etc_ms = of[f"joint, {path}"], of[f"{ETC}: coalesced, {path}"]
    yield _row(f"{case}: ours on whole nodes, {path}", joint_ms, f"{ETC}: coalesced", etc_ms)


def _row(case: str, own_ms: float, baseline: str, theirs_ms: float, most_ratio: float | None = None) -> Row:
    return Row.of(case, own_ms, "ms", baseline=baseline, theirs=theirs_ms, most_ratio=most_ratio)
