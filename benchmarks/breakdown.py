"""Where the time of a change goes (the paper's Fig. 11): planning, groups, agreement, moving, commit; PP x TP 8 to 64.

1. *Planning*, for all five of the paper's changes, in one process: the paper's cost matrix, and our whole plan by
   parts (layouts, cells, pairing, placement, sources, proof), and the program of one device.
2. *The whole change*, for those of at most as many devices as this machine bears: ``Mover.move`` by forked processes
   over gloo on real state, by the phases that it tells of, each on the device that takes longest.
3. *Groups*: what megatron-core needs to make its process groups in the new configuration
   (``initialize_model_parallel``), and our own line between the devices. The paper calls the first the framework's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from _changes import FIG_11
from _moves import Ways, shrunk
from _peer import enter
from _processes import TIMEOUT_S, Rank, run_ranks
from _state import check, held
from planner import config, timed

from shardshift.adapters.megatron import world
from shardshift.engine import Event, Mover, names_of
from shardshift.engine.events import PhaseEnded
from shardshift.plan import make_plan
from shardshift.plan.paper import group_matrix
from shardshift.plan.summary import STAGING_BYTES
from shardshift.report.bench import Row
from shardshift.schedule import compile_program
from shardshift.values import ParallelConfig, Topology

MiB: Final = 2**20
PAPER_MATRIX_MS: Final = 7.54
PHASES: Final = ("plan", "agree", "move", "commit")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        changes: configurations before and after.
        layers: of the model.
        hidden: of the paper's model.
        shrink: what hidden size, vocabulary and positions are divided by, where state moves.
        most: devices of a change that is carried out.
        runs: of which the median counts.
    """

    changes: tuple[tuple[str, str], ...] = FIG_11
    layers: int = 48
    hidden: int = 3072
    shrink: int = 16
    most: int = 32
    runs: int = 3


TINY: Final = Scale(changes=(("PP2TP1", "PP2TP2"),), layers=4, hidden=1024, shrink=16, most=4, runs=1)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    matrices_ms: list[float] = []
    for prev, curr in scale.changes:
        say(f"{prev} → {curr}: planning")
        matrices_ms.append(_matrix_ms(scale, prev, curr))
        rows += planning_rows(scale, prev, curr)
        if max(config(prev).world_size, config(curr).world_size) <= scale.most:
            say(f"{prev} → {curr}: whole")
            rows += whole_rows(scale, prev, curr)
    mean = statistics.mean(matrices_ms)
    rows.append(
        Row.of("the paper's cost matrix, mean of all", mean, "ms", baseline="the paper", theirs=PAPER_MATRIX_MS)
    )
    described = (
        f"planning: {scale.layers} layers; whole changes: hidden {scale.hidden // scale.shrink}, "
        f"1/{scale.shrink**2} of the bytes of {scale.hidden}, one forked process a device, up to {scale.most}, over "
        f"gloo; medians of {scale.runs}"
    )
    return described, rows


def planning_rows(scale: Scale, prev: str, curr: str) -> Iterator[Row]:
    """Parts of planning, without moving anything."""
    runs = [timed(prev, curr, scale.layers) for _ in range(scale.runs)]
    case = f"{prev} → {curr}, planning"
    yield Row.of(f"{case}: all", statistics.median(sum(one.values()) for one in runs) * 1e3, "ms")
    for part in runs[0]:
        yield Row.of(f"{case}: {part}", statistics.median(one[part] for one in runs) * 1e3, "ms")
    ways = Ways.of(shrunk(scale.layers, scale.hidden, scale.shrink), prev, curr, Topology(1, 8))
    began_s = time.perf_counter()
    compile_program(ways.joint, ways.joint.devices[-1], STAGING_BYTES)
    yield Row.of(f"{case}: one device's program", (time.perf_counter() - began_s) * 1e3, "ms")


def whole_rows(scale: Scale, prev: str, curr: str) -> Iterator[Row]:
    """One change from the plan to the commit, by phases; and the groups."""
    plan = Ways.of(shrunk(scale.layers, scale.hidden, scale.shrink), prev, curr, Topology(1, 8)).joint
    devices = max(plan.devices) + 1
    back = make_plan(plan.curr, plan.prev.layout, devices=range(devices), placement=plan.prev.devices)

    def body(rank: Rank) -> tuple[float, list[dict[str, float]], float]:
        found: list[dict[str, float]] = []
        phases: dict[str, float] = {}

        def sink(event: Event) -> None:
            if isinstance(event, PhaseEnded):
                phases[event.phase] = phases.get(event.phase, 0.0) + event.ended_s - event.began_s

        rank.barrier()
        began_s = time.perf_counter()
        with Mover(rank.store("line"), rank.index, range(devices), transport="gloo", sink=sink) as mover:
            line_s = time.perf_counter() - began_s
            sources = held(plan, rank.index) if rank.index in plan.devices else {}
            state = {name: sources[shard] for name, shard in names_of(plan.prev.shards_on(rank.index)).items()}
            sources.clear()
            for run in range(scale.runs):
                rank.barrier()
                phases.clear()
                began_s = time.perf_counter()
                state = mover.move(plan.prev, plan.curr, state, policy="keep", compare_copies=False)
                found.append(
                    {phase: phases.get(phase, 0.0) for phase in PHASES} | {"all": time.perf_counter() - began_s}
                )
                if not run:
                    names = names_of(plan.curr.shards_on(rank.index))
                    check(plan, rank.index, {shard: state[name] for name, shard in names.items()})
                rank.barrier()
                state = mover.move(back.prev, back.curr, state, policy="keep", compare_copies=False)
        return line_s, found, _groups_s(rank, config(curr))

    ranks = run_ranks(devices, body)
    case = f"{prev} → {curr}, {plan.moved_bytes / MiB:.0f} MiB moved by {devices} processes"
    for part in ("all", *PHASES):
        slowest = (max(found[run][part] for _, found, _ in ranks) for run in range(scale.runs))
        yield Row.of(f"{case}: {part}", statistics.median(slowest) * 1e3, "ms")
    yield Row.of(f"{case}: line between the devices", max(line_s for line_s, _, _ in ranks) * 1e3, "ms")
    groups_ms = max(groups_s for *_, groups_s in ranks) * 1e3
    yield Row.of(f"{case}: megatron-core's groups", groups_ms, "ms", baseline="the paper, 32 GPUs", theirs=1500)


def _groups_s(rank: Rank, curr: ParallelConfig) -> float:
    """Seconds to make megatron-core's groups, on the ranks of the configuration."""
    rank.barrier()
    began_s = time.perf_counter()
    if rank.index < curr.world_size:
        enter(Rank(rank.index, curr.world_size, rank.host, rank.met))
        world.forget()
        world.initialize(curr, TIMEOUT_S, gloo=False)
    return time.perf_counter() - began_s


def _matrix_ms(scale: Scale, prev: str, curr: str) -> float:
    began_s = time.perf_counter()
    group_matrix(config(prev), config(curr), scale.layers)
    return (time.perf_counter() - began_s) * 1e3
