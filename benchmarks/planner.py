"""Planning: its speed and size up to 131,072 devices, how near plans are to the bound, placement against the paper's.

The paper is arXiv 2607.04749. Its clusters are the presets ``cluster-a`` and ``cluster-b``; a job is given the whole
nodes that its larger layout needs. Its models are the presets; where a figure gives layers and hidden size alone, there
are 32 heads. The large cases are run in a process of their own, whose peak memory is what the kernel says of it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from _changes import FIG_8, FIG_9, FIG_11, PUBLISHED, TABLE_2
from scipy.optimize import linear_sum_assignment

from shardshift.models import Catalogue, Model, preset
from shardshift.plan import Plan, lacking_bytes, make
from shardshift.plan.methods import Change, Method, direct, solve
from shardshift.plan.paper import group_matrix
from shardshift.plan.summary import STAGING_BYTES, Summary, bound_of, prediction_of, summarise
from shardshift.report.bench import Row
from shardshift.schedule import compile_program
from shardshift.values import Layout, ParallelConfig, PlacedLayout, Topology

Say = Callable[[str], None]
GiB = 2**30

# make_plan's steps, in the words of the table.
STEPS = {
    "account": "cells of both layouts",
    "savings": "pairing",
    "least_bytes": "pairing",
    "place": "placement",
    "wants": "sources",
    "choose_sources": "sources",
    "prove": "proof",
}


HUGE = (("PP16TP16DP512", "PP12TP16DP640", 96), ("PP64TP16DP128", "PP48TP16DP160", 192))


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is planned; the defaults are the benchmark's.

    Attributes:
        speed: configurations that are planned step by step, of so many layers; of the first there are all parts.
        runs: of each of those, of which the median counts.
        huge: planned in a process each, with layers.
        growth: DP sizes of one change.
        zero1: the same with the distributed optimizer: layers, most seconds, most bytes over the least.
        most: of each list of the paper's changes and of published models; None for all.
    """

    speed: tuple[tuple[str, str, int], ...] = (("PP16TP8DP8", "PP12TP8DP10", 96), ("PP16TP8DP16", "PP12TP8DP20", 96))
    runs: int = 5
    huge: tuple[tuple[str, str, int], ...] = HUGE
    growth: tuple[int, ...] = (8, 32, 128, 512)
    zero1: tuple[tuple[str, str, int, float | None, float], ...] = (
        ("PP16TP8DP8", "PP12TP8DP10", 96, None, 1.0),
        ("PP16TP8DP16", "PP12TP8DP20", 96, None, 1.0),
        *((*one, 10, 1.01) for one in HUGE),
    )
    most: int | None = None


TINY = Scale(
    speed=(("PP4TP2DP2", "PP2TP2DP4", 8),),
    runs=1,
    huge=(("PP4TP2DP8", "PP2TP2DP16", 8),),
    growth=(1,),
    zero1=(("PP4TP2DP2", "PP2TP2DP4", 8, None, 1.0),),
    most=1,
)


def run(say: Say, scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All of it, in a minute or two."""
    scale = scale or Scale()
    rows: list[Row] = []
    for part in (speed, paper_speed, huge, growth, zero1, scenarios, scale_out, placements):
        say(f"{part.__name__} ...")
        rows += part(scale)
    sizes = [ParallelConfig.parse(one).world_size for one, *_ in (*scale.speed, *scale.huge)]
    words = f"{min(sizes):,} to {max(sizes):,} devices, 8 a node; speeds: medians of {scale.runs} runs in one process"
    return f"{words}; times of moves are predicted, against the lower bound of their placement", rows


def speed(scale: Scale) -> Iterator[Row]:
    """The whole, its parts, and what an assignment over ranks would take."""
    prev, curr, layers = scale.speed[0]
    runs = [timed(prev, curr, layers) for _ in range(scale.runs)]
    case = f"{prev} → {curr}, {ParallelConfig.parse(prev).world_size:,} devices"
    total = statistics.median(sum(one.values()) for one in runs)
    yield Row.of(f"{case}: roles, pairing, placement, sources, proof", total * 1e3, "ms", most=50)
    for part in runs[0]:
        yield Row.of(f"{case}: {part}", statistics.median(one[part] for one in runs) * 1e3, "ms")
    for before, after, layers in scale.speed:
        ours = statistics.median(timed(before, after, layers)["pairing"] for _ in range(scale.runs))
        yield Row.of(
            f"{before} → {after}: pairing",
            ours * 1e3,
            "ms",
            baseline="SciPy's assignment over ranks",
            theirs=assignment_s(before, after, layers) * 1e3,
        )


def paper_speed(scale: Scale) -> Iterator[Row]:
    """The paper's cost matrices, PP x TP from 8 to 64."""
    seconds = []
    for prev, curr in FIG_11[: scale.most]:
        start = time.perf_counter()
        group_matrix(config(prev), config(curr), 48)
        seconds.append(time.perf_counter() - start)
    mean_ms = statistics.mean(seconds) * 1e3
    yield Row.of("cost matrix as the paper's, mean of Fig. 11's changes", mean_ms, "ms", baseline="paper", theirs=7.54)


def huge(scale: Scale) -> Iterator[Row]:
    """As many devices as the largest clusters have."""
    for prev, curr, layers in scale.huge:
        found = apart(prev, curr, layers)
        case = f"{prev} → {curr}, {layers} layers, {ParallelConfig.parse(prev).world_size:,} devices"
        yield Row.of(f"{case}: plan", found["plan_s"], "s", most=1)
        yield Row.of(f"{case}: peak memory of the process", found["peak_bytes"] / GiB, "GiB", most=1)
        yield Row.of(f"{case}: digest", found["digest_s"] * 1e3, "ms")
        yield Row.of(f"{case}: one device's program", found["program_s"] * 1e3, "ms", most=50)
        yield bound_row(case, found)


def growth(scale: Scale) -> Iterator[Row]:
    """The same roles, ever more replicas."""
    for dp in scale.growth:
        prev, curr = f"PP16TP8DP{dp}", f"PP12TP8DP{dp * 5 // 4}"
        ours = statistics.median(sum(timed(prev, curr, 96).values()) for _ in range(3))
        yield Row.of(f"{prev} → {curr}, {16 * 8 * dp:,} devices, 224 roles: plan", ours * 1e3, "ms")


def zero1(scale: Scale) -> Iterator[Row]:
    """The distributed optimizer: every rank is a role of its own."""
    for prev, curr, layers, most_s, goal in scale.zero1:
        found = apart(prev, curr, layers, zero1=True)
        case = f"{prev} → {curr}, ZeRO-1"
        yield Row.of(f"{case}: plan", found["plan_s"], "s", most=most_s)
        yield Row.of(f"{case}: peak memory of the process", found["peak_bytes"] / GiB, "GiB")
        yield Row.of(f"{case}: one device's program", found["program_s"] * 1e3, "ms")
        yield Row.of(
            f"{case}: moved",
            found["moved_bytes"] / GiB,
            "GiB",
            baseline="proven least",
            theirs=found["least_moved_bytes"] / GiB,
            most_ratio=goal,
        )
        yield bound_row(case, found)


def scenarios(scale: Scale) -> Iterator[Row]:
    """The paper's changes and those of the published models: predicted time over the bound."""
    a, b = Topology.preset("cluster-a"), Topology.preset("cluster-b")
    gpt = preset("gpt3-32b")
    for prev, curr, layers in TABLE_2[: scale.most]:
        yield near_bound(f"Table II: {prev} → {curr}", replace(gpt, layers=layers), prev, curr, a)
    for name in ("gpt3-2.7b", "gpt3-6.7b"):
        for prev, curr in FIG_8[: scale.most]:
            yield near_bound(f"Fig. 8: {prev} → {curr}, {name}", preset(name), prev, curr, b)
    for prev, curr, layers, hidden in FIG_9[: scale.most]:
        model = sized(layers, hidden)
        yield near_bound(f"Fig. 9: {prev} → {curr}, {layers} layers of {hidden}", model, prev, curr, a)
    for prev, curr, where in (("PP16TP1", "PP8TP1", a), ("PP4TP2", "PP4TP4", b)):
        yield near_bound(f"Fig. 10: {prev} → {curr}, gpt3-64b", preset("gpt3-64b"), prev, curr, where)
    for prev, curr in FIG_11[: scale.most]:
        yield near_bound(f"Fig. 11: {prev} → {curr}", gpt, prev, curr, a)
    for name, prev, curr in PUBLISHED[: scale.most]:
        yield near_bound(f"{name}: {prev} → {curr}", preset(name), prev, curr, b)
        yield near_bound(f"{name}: {prev} → {curr}, ZeRO-1", preset(name), prev, curr, b, zero1=True)


def scale_out(scale: Scale) -> Iterator[Row]:
    """DP 1 to k costs little more than DP 1 to 2."""
    where = Topology.preset("cluster-b")
    model = preset("gpt3-6.7b")
    one = figures(model, "PP4TP2DP1", "PP4TP2DP2", where).lower_bound.seconds
    for replicas in (2, 4, 8, 16, 32, 64)[: scale.most]:
        ours = figures(model, "PP4TP2DP1", f"PP4TP2DP{replicas}", where).predicted_s
        yield Row.of(
            f"DP 1 → {replicas} of PP4TP2, gpt3-6.7b: predicted",
            ours * 1e3,
            "ms",
            baseline="bound of DP 1 → 2",
            theirs=one * 1e3,
            most_ratio=1.3,
        )


def placements(scale: Scale) -> Iterator[Row]:
    """Pairing and placement at once, against Algorithm 2 after the sketch."""
    a, b = Topology.preset("cluster-a"), Topology.preset("cluster-b")
    cases = [
        ("Fig. 7a: PP8 → PP4", sized(24, 2048), "PP8", "PP4", a),
        ("Fig. 7b: PP4TP2 → PP6TP4", sized(12, 2048), "PP4TP2", "PP6TP4", a),
        *((f"Fig. 9: {x} → {y}, {n} layers of {h}", sized(n, h), x, y, a) for x, y, n, h in FIG_9),
        ("Fig. 10: PP16TP1 → PP8TP1", preset("gpt3-64b"), "PP16TP1", "PP8TP1", a),
        ("Fig. 10: PP4TP2 → PP4TP4", preset("gpt3-64b"), "PP4TP2", "PP4TP4", b),
    ]
    for case, model, prev, curr, where in cases[: scale.most]:
        joint = figures(model, prev, curr, where)
        phases = figures(model, prev, curr, where, method=Method.PHASES)
        coalesced, nodes = coalesced_figures(model, prev, curr, where)
        for baseline, theirs in (("two phases", phases.moved_bytes), ("coalesced", coalesced.moved_bytes)):
            ours = joint.moved_bytes / GiB
            yield Row.of(f"{case}: moved", ours, "GiB", baseline=baseline, theirs=theirs / GiB, most_ratio=1)
        time_ms, theirs_ms = joint.predicted_s * 1e3, coalesced.predicted_s * 1e3
        yield Row.of(f"{case}: predicted", time_ms, "ms", baseline="coalesced", theirs=theirs_ms, most_ratio=1)
        ours, used = nodes - joint.free_nodes, nodes - coalesced.free_nodes
        yield Row.of(f"{case}: nodes in use", ours, "nodes", baseline="coalesced", theirs=used, most_ratio=1)


def near_bound(case: str, model: Model, prev: str, curr: str, where: Topology, *, zero1: bool = False) -> Row:
    """One change: predicted time over the bound."""
    found = figures(model, prev, curr, where, zero1=zero1)
    return Row.of(
        f"{case}: predicted",
        found.predicted_s * 1e3,
        "ms",
        baseline="bound",
        theirs=found.lower_bound.seconds * 1e3,
        most_ratio=1.25,
    )


def bound_row(case: str, found: dict[str, float]) -> Row:
    """The same for what ran apart."""
    ours, theirs = found["predicted_s"] * 1e3, found["lower_bound_s"] * 1e3
    return Row.of(f"{case}: predicted", ours, "ms", baseline="bound", theirs=theirs, most_ratio=1.25)


def figures(
    model: Model, prev: str, curr: str, where: Topology, *, method: Method = Method.EXACT, zero1: bool = False
) -> Summary:
    """Plan a change on as many whole nodes as its larger layout needs."""
    change = asked(model, prev, curr, where)
    plans = solve(change, *layouts(model, prev, curr, zero1=zero1), method)
    return summarise(change, method, plans, plan_s=0)


def coalesced_figures(model: Model, prev: str, curr: str, where: Topology) -> tuple[Summary, int]:
    """The placement of the two phases reached at once; and the nodes that there are."""
    change = asked(model, prev, curr, where)
    before, after = layouts(model, prev, curr)
    *_, last = solve(change, before, after, Method.PHASES)
    plan = direct(change, PlacedLayout(before, change.prev_devices), after, last.curr.devices)
    return summarise(change, Method.PHASES, (plan,), plan_s=0), change.topology.nodes


def asked(model: Model, prev: str, curr: str, where: Topology) -> Change:
    """The change on whole nodes, from device 0 on."""
    before, after = config(prev), config(curr)
    topology = where.with_nodes(-(-max(before.world_size, after.world_size) // where.devices_per_node))
    every = tuple(range(topology.devices))
    return Change(before, after, model.layers, every[: before.world_size], every, topology)


def layouts(model: Model, prev: str, curr: str, *, zero1: bool = False) -> tuple[Layout, Layout]:
    """Both layouts, of one catalogue."""
    catalogue = catalogue_of(model)
    return catalogue.layout(config(prev), zero1=zero1), catalogue.layout(config(curr), zero1=zero1)


@cache
def catalogue_of(model: Model) -> Catalogue:
    """A model's tensors; no part of planning a change."""
    return Catalogue.of(model)


def config(text: str) -> ParallelConfig:
    """A configuration."""
    return ParallelConfig.parse(text)


def sized(layers: int, hidden: int) -> Model:
    """A model of GPT's kind."""
    return Model.from_dimensions(layers=layers, hidden=hidden, heads=32)


def gpt3_175b(layers: int) -> Model:
    """The large cases: layers of 12288."""
    return Model.from_dimensions(layers=layers, hidden=12288, heads=96)


def timed(prev: str, curr: str, layers: int) -> dict[str, float]:
    """Seconds by part of planning a change on nodes of 8."""
    model = gpt3_175b(layers)
    catalogue_of(model)
    change = asked(model, prev, curr, Topology(1, 8))
    parts = {"roles of both layouts": 0.0} | dict.fromkeys(STEPS.values(), 0.0)

    def clocked(part: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = step(*args, **named)
            parts[part] += time.perf_counter() - start
            return result

        return call

    start = time.perf_counter()
    both = layouts(model, prev, curr)
    parts["roles of both layouts"] = time.perf_counter() - start
    with ExitStack() as stack:
        for name, part in STEPS.items():
            stack.enter_context(patch.object(make, name, clocked(part, getattr(make, name))))
        start = time.perf_counter()
        solve(change, *both)
        whole = time.perf_counter() - start
    parts["the rest"] = max(0.0, whole + parts["roles of both layouts"] - sum(parts.values()))
    return parts


def assignment_s(prev: str, curr: str, layers: int) -> float:
    """Seconds for pairing by an assignment between all ranks and all devices."""
    before, after = layouts(gpt3_175b(layers), prev, curr)
    lacking = lacking_bytes(before, after)
    start = time.perf_counter()
    cost = lacking[np.ix_(np.array(after.role_of_rank), np.array(before.role_of_rank))]
    linear_sum_assignment(cost)
    return time.perf_counter() - start


def apart(prev: str, curr: str, layers: int, *, zero1: bool = False) -> dict[str, float]:
    """Plan a change in a process of its own."""
    arguments = [prev, curr, str(layers), *(["--zero1"] if zero1 else [])]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(prev: str, curr: str, layers: str, *flags: str) -> None:
    """What ``apart`` runs: figures as JSON."""
    model = gpt3_175b(int(layers))
    catalogue_of(model)
    change = asked(model, prev, curr, Topology(1, 8))
    start = time.perf_counter()
    (plan,) = solve(change, *layouts(model, prev, curr, zero1="--zero1" in flags))
    plan_s = time.perf_counter() - start
    start = time.perf_counter()
    _ = plan.digest  # which ranks compare before any of them compiles its program
    digest_s = time.perf_counter() - start
    program_s = program_time_s(plan)
    peak_bytes = peak_memory_bytes()  # before the bound, which is no part of a plan
    found = {
        "plan_s": plan_s,
        "digest_s": digest_s,
        "program_s": program_s,
        "peak_bytes": peak_bytes,
        "moved_bytes": plan.moved_bytes,
        "least_moved_bytes": plan.least_moved_bytes,
        "lower_bound_s": bound_of(plan, change.topology).seconds,
        "predicted_s": prediction_of(plan, change.topology).seconds,
    }
    print(json.dumps(found))


def program_time_s(plan: Plan) -> float:
    """The slowest of three runs for the device in the middle, the first one cold."""
    device, seconds = plan.devices[len(plan.devices) // 2], []
    for _ in range(3):
        start = time.perf_counter()
        compile_program(plan, device, STAGING_BYTES)
        seconds.append(time.perf_counter() - start)
    return max(seconds)


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    # Not ru_maxrss, which counts what the parent had before exec.
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
