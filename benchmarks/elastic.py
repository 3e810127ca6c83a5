"""The pause of a change of layout and of a loss, against a restart from a checkpoint; what surviving costs each step.

All on the demo's Megatron training. A *pause* is from the end of the last step before to the beginning of the first
one after, each on the last rank. Its phases are those of the rank that stays and takes longest; what is not in them is
*resume*. By how much the first step takes longer than the median of those that follow (new connections, code that runs
for the first time) is told apart. What is measured:

1. the demo's changes, several times over; the first one of all is a growth, for which fresh processes are started while
   training goes on: they import, build their meta model and stand by. Medians over the times;
2. the same changes of a training whose step takes half a second or more, by a larger batch;
3. a loss: one rank ends by SIGKILL at the beginning of a step, with a replica of all that it holds. From the kill;
4. the same change by a restart: a megatron-core checkpoint is saved, the processes end, torchrun starts new ones in the
   new layout, which load it;
5. what each step pays to survive: the gate, and the undo copy. Steps with and without, by turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Final

from _live import SIDES, Course, Seen, watch, weigh, with_batch
from _restart import Restart, restarts

from shardshift.demo.model import ModelShape, Recipe
from shardshift.demo.run import CONFIGS, DEVICES_PER_NODE
from shardshift.demo.text import default_source
from shardshift.demo.worker import Task
from shardshift.elastic import ResizeReport, start_fork_server
from shardshift.report.bench import Row
from shardshift.values import ParallelConfig

Say = Callable[[str], None]

_ASKED_S: Final = 0.150
"""By how much a pause may exceed the move."""
_LONG_STEP_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        configs: the layouts, in a ring.
        rounds: times round the ring.
        steps: of each layout.
        founders: processes of the first layout; the others join.
        devices: processes in all.
        per_node: processes that stand for a node.
        slow: how many layouts the training with the long step goes through; 0 leaves it out.
        lossy: the layout that loses a rank.
        losses: how often.
        restarted: the layouts of the restarts; none leaves them out.
        weighed: the layout in which steps are weighed.
        turns: of each way to step.
        timeout_s: the longest that a collective may take.
    """

    configs: tuple[str, ...] = CONFIGS
    rounds: int = 3
    steps: int = 6
    founders: int = 4
    devices: int = 2 * DEVICES_PER_NODE
    per_node: int = DEVICES_PER_NODE
    slow: int = 2
    lossy: str = "pp2tp2dp2"
    losses: int = 3
    restarted: tuple[str, ...] = CONFIGS[:2]
    weighed: str = "dp2"
    turns: int = 30
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Pause:
    """One change.

    Attributes:
        case: from what to what.
        pause_s: seconds without training.
        step_s: seconds of a step, before and after: the shorter one.
        phases_s: of the pause, ``resume`` among them.
        first_s: by how much the first step after it takes longer.
        ahead_s: for which the change was prepared beforehand, between two steps.
        cpu_s: processor seconds of a rank that stays, in the pause: their mean; 0 where they were not told.
    """

    case: str
    pause_s: float
    step_s: float
    phases_s: Mapping[str, float]
    first_s: float
    ahead_s: float
    cpu_s: float = 0.0


@dataclass(slots=True)
class Found:
    """All pauses of one kind."""

    of_case: dict[str, list[Pause]] = field(default_factory=dict)

    def add(self, pause: Pause) -> None:
        """One more."""
        self.of_case.setdefault(pause.case, []).append(pause)

    def middle(self, case: str) -> Pause:
        """The one whose pause is the median."""
        pauses = sorted(self.of_case[case], key=lambda pause: pause.pause_s)
        return pauses[len(pauses) // 2]


def run(say: Say, scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    start_fork_server(["shardshift.demo.worker"])
    task = Task(Recipe(ModelShape()), default_source(), scale.per_node, scale.timeout_s)
    rows: list[Row] = []
    ring = scale.configs * scale.rounds + scale.configs[:1]
    seen = watch(Course(task, ring, scale.steps, scale.founders, scale.devices - scale.founders))
    quick = pauses(seen)
    say(f"{len(ring) - 1} changes, the first one with {scale.devices - scale.founders} joiners: done")
    for case in quick.of_case:
        rows += change_rows(quick.middle(case))
    rows += joining_rows(seen, scale.founders)
    rows += slow_rows(task, quick, scale, say)
    rows += loss_rows(task, scale, say)
    rows += restart_rows(task, quick, scale, say)
    rows += cost_rows(task, scale)
    described = (
        f"megatron-core GPT of the demo: {task.recipe.shape.layers} layers, hidden {task.recipe.shape.hidden}; "
        f"{scale.devices} processes; medians of {scale.rounds} changes of each kind, {scale.losses} losses, "
        f"{scale.turns} steps of each way to step, by turns"
    )
    return described, rows


def pauses(seen: Seen) -> Found:
    """The pauses of a job without losses."""
    found = Found()
    for generation in sorted(seen.changes):
        report = seen.changes[generation][0][1]
        ended_s = _ends(seen, generation - 1)[-1]
        growth = ", joiners" if generation == 1 and seen.joining else ""
        case = f"{report.prev} → {report.curr}{growth}"
        found.add(_pause(seen, generation, case, ended_s, min(_step_s(seen, generation - at) for at in (0, 1))))
    return found


def _pause(seen: Seen, generation: int, case: str, began_s: float, step_s: float) -> Pause:
    begins_s = max(start for start, _ in _of(seen, generation)[0])
    pause_s = begins_s - began_s
    first_s = _ends(seen, generation)[0] - begins_s - _step_s(seen, generation)
    report, _ = _longest(seen, generation)
    phases_s = dict(report.phases_s)
    phases_s["resume"] = pause_s - sum(phases_s.values())
    told = seen.cpu_s.get(generation)
    return Pause(case, pause_s, step_s, phases_s, first_s, report.ahead_s, fmean(told) if told else 0.0)


def _longest(seen: Seen, generation: int) -> tuple[ResizeReport, float]:
    """The report, and the seconds, of the rank that stays and takes longest: one that joins or leaves waits more."""
    told = seen.changes[generation]
    stays = [(report, spent_s) for _, report, spent_s in told if "quiesce" in report.phases_s or report.lost]
    return max(stays, key=lambda one: one[0].pause_s)


def _of(seen: Seen, generation: int) -> list[list[tuple[float, float]]]:
    """The steps of a generation, in order, each with the (start, end) of all ranks."""
    return [spans for (of, _), spans in sorted(seen.steps.items()) if of == generation]


def _ends(seen: Seen, generation: int) -> list[float]:
    return [max(end for _, end in spans) for spans in _of(seen, generation)]


def _step_s(seen: Seen, generation: int) -> float:
    """Seconds of a step: the median of all but the first one."""
    ends = _ends(seen, generation)
    return median(after - before for before, after in pairwise(ends))


def change_rows(pause: Pause) -> Iterator[Row]:
    """A pause against the move, and its phases."""
    case = pause.case
    asked_s = pause.phases_s["move"] + _ASKED_S
    yield Row.of(
        f"{case}: pause",
        pause.pause_s * 1e3,
        "ms",
        baseline=f"move + {_ASKED_S * 1e3:g} ms",
        theirs=asked_s * 1e3,
        most_ratio=1,
    )
    yield from phase_rows(case, pause)
    yield Row.of(f"{case}: processor time of a rank, mean", pause.cpu_s * 1e3, "ms")
    yield Row.of(f"{case}: prepared beforehand, between two steps", pause.ahead_s * 1e3, "ms")


def phase_rows(case: str, pause: Pause) -> Iterator[Row]:
    """What a pause consists of, and what comes after it."""
    for phase, seconds in pause.phases_s.items():
        yield Row.of(f"{case}: {phase}", seconds * 1e3, "ms")
    yield Row.of(f"{case}: the first step takes longer by", pause.first_s * 1e3, "ms")


def joining_rows(seen: Seen, founders: int) -> Iterator[Row]:
    """What joiners take to start, and what the others notice of it."""
    if not seen.joining:
        return
    started_s, ready_s = min(at for at, _ in seen.joining.values()), max(at for _, at in seen.joining.values())
    yield Row.of(f"{len(seen.joining)} joiners: from start to standing by", ready_s - started_s, "s")
    ends = _ends(seen, 0)
    spans = list(pairwise(ends))
    meanwhile = [after - before for before, after in spans if started_s <= before and after <= ready_s]
    others = [after - before for before, after in spans if after <= started_s]
    if meanwhile and others:
        yield Row.of(
            f"a step of the {founders} others meanwhile, on the same cores",
            median(meanwhile) * 1e3,
            "ms",
            baseline="a step before",
            theirs=median(others) * 1e3,
        )


def slow_rows(task: Task, quick: Found, scale: Scale, say: Say) -> Iterator[Row]:
    """Pauses of a training whose step takes long, in steps."""
    if not scale.slow:
        return
    shortest_s = min(pause.step_s for pauses in quick.of_case.values() for pause in pauses)
    batch = task.recipe.global_batch_size * ceil(2 * _LONG_STEP_S / shortest_s)  # part of a step does not grow with it
    seen = watch(Course(with_batch(task, batch), scale.configs[: scale.slow], scale.steps, scale.devices))
    say(f"the same with {batch} samples a step: done")
    for case, found in pauses(seen).of_case.items():
        for pause in found:
            long_enough = pause.step_s >= _LONG_STEP_S
            yield Row.of(
                f"{case}, {batch} samples a step: pause",
                pause.pause_s * 1e3,
                "ms",
                baseline="a step",
                theirs=pause.step_s * 1e3,
                most_ratio=2 if long_enough else None,
            )
            yield from phase_rows(f"{case}, {batch} samples a step", pause)


def loss_rows(task: Task, scale: Scale, say: Say) -> Iterator[Row]:
    """From a kill to the first step after it."""
    found = Found()
    curr = ""
    for _ in range(scale.losses):
        seen = watch(Course(task, (scale.lossy,), scale.steps, _size(scale.lossy), victim=_size(scale.lossy) - 1))
        report, spent_s = _longest(seen, 1)
        curr = str(report.curr)
        whole = _pause(seen, 1, f"a rank of {scale.lossy} is killed → {curr}", seen.struck_s, _step_s(seen, 0))
        noticed_s = max(seen.noticed_s) - seen.struck_s
        # Plan is the first phase, and in it all survivors meet: before it each severs its world and begins an era.
        era_s = spent_s - sum(report.phases_s.values())
        phases_s = {"notice": noticed_s, "sever, next era": era_s, **report.phases_s}
        phases_s["resume"] = whole.pause_s - sum(phases_s.values())
        found.add(replace(whole, phases_s=phases_s))
    say(f"{scale.losses} losses in {scale.lossy}: done")
    for case in found.of_case:
        pause = found.middle(case)
        yield Row.of(f"{case}: from the kill to the next step", pause.pause_s * 1e3, "ms")
        yield from phase_rows(case, pause)


def restart_rows(task: Task, quick: Found, scale: Scale, say: Say) -> Iterator[Row]:
    """The same changes by a restart from a checkpoint."""
    if not scale.restarted:
        return
    with tempfile.TemporaryDirectory(prefix="shardshift-bench-") as folder:
        batch = task.recipe.global_batch_size
        made = restarts(scale.restarted, task.data, batch, scale.steps, Path(folder), 4 * scale.timeout_s)
    for (prev, curr), restart in zip(pairwise(scale.restarted), made, strict=True):
        say(f"{prev} → {curr} by a restart: {', '.join(f'{k} {v:.2f} s' for k, v in restart.parts_s.items())}")
        wanted = f"{_full(prev)} → {_full(curr)}"
        # That without joiners, if it was made both ways: a restart loads its processes while nothing trains.
        case = max((case for case in quick.of_case if case.split(",")[0] == wanted), key=lambda case: case == wanted)
        yield from compared(f"{prev} → {curr}", quick.middle(case), restart)


def compared(case: str, pause: Pause, restart: Restart) -> Iterator[Row]:
    """A change against a restart, the whole and what does the same in both."""
    ours, theirs = pause.phases_s, restart.parts_s
    yield Row.of(
        f"{case}, against a restart: pause",
        pause.pause_s * 1e3,
        "ms",
        baseline="torchrun and checkpoint",
        theirs=restart.pause_s * 1e3,
        most_ratio=0.1,
    )
    for what, own, names in (
        ("the state goes over", ours["move"], ("save", "load")),
        ("groups, model, optimizer", ours["rebuild"], ("build",)),
        ("processes end", 0.0, ("processes end",)),
        ("torchrun starts processes", 0.0, ("torchrun",)),
        ("they import", 0.0, ("imports",)),
    ):
        other = sum(theirs[name] for name in names)
        yield Row.of(
            f"{case}, against a restart: {what}", own * 1e3, "ms", baseline=" and ".join(names), theirs=other * 1e3
        )
    case = f"{case}, against a restart: the first step takes longer by"
    yield Row.of(case, pause.first_s * 1e3, "ms", baseline="restart", theirs=restart.first_s * 1e3)


def cost_rows(task: Task, scale: Scale) -> Iterator[Row]:
    """What each step pays to survive."""
    found = weigh(task, scale.weighed, scale.turns)
    bare_s, gate_s, both_s = (median(found[side]) for side in SIDES)
    case, ms = f"a step of {scale.weighed}", 1e3
    yield Row.of(f"{case} with the gate", gate_s * ms, "ms", baseline="without", theirs=bare_s * ms)
    yield Row.of(f"{case} with gate and undo copy", both_s * ms, "ms", baseline="without", theirs=bare_s * ms)
    for what, more_s in (("the gate", gate_s - bare_s), ("the undo copy", both_s - gate_s)):
        yield Row.of(f"{case}: {what}", more_s * ms, "ms")
        yield Row.of(f"{case}: {what}, of a step without", more_s / bare_s * 100, "%")
    mib = max(found["bytes"]) / (1 << 20)
    yield Row.of(f"the undo copy of {mib:.1f} MiB a rank, by itself", median(found["copy"]) * ms, "ms")


def _size(config: str) -> int:
    return ParallelConfig.parse(config).world_size


def _full(config: str) -> str:
    return str(ParallelConfig.parse(config))
