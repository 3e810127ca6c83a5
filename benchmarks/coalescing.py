"""Coalescing (the paper's Fig. 9): migrate and then defragment, coalesced, and joint placement; bytes and times.

The seven scenarios are the paper's, with its layers and its configurations; hidden size, vocabulary and positions are
divided. Each of them is planned for nodes of 4 devices (Cluster-A), and every plan is carried out by the engine on
the same real state in the same processes, one a device, by turns. *two moves* is the paper's sketch and then its
Algorithm 2, each timed by itself and added up, without the agreement between the two that a job would need.

The largest volume is what the device receives that receives most: the paper says that coalescing does not change it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from _changes import FIG_9
from _moves import Ways, largest_received_bytes, shrunk, time_plans

from shardshift.report.bench import Row
from shardshift.values import Topology

MiB: Final = 2**20
PAPER_RATIO: Final = 2.43
"""By which coalesced is faster than two moves, on average over the scenarios, in the paper."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        cases: (before, after, layers, hidden size of the paper's model).
        shrink: what hidden size, vocabulary and positions are divided by.
        runs: of each plan, of which the median counts.
    """

    cases: tuple[tuple[str, str, int, int], ...] = FIG_9
    shrink: int = 16
    runs: int = 3


TINY: Final = Scale(cases=(("PP4TP1", "PP2TP1", 4, 1024),), shrink=16, runs=1)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    ratios: dict[str, list[float]] = {"coalesced": [], "joint": []}
    state_bytes: list[int] = []
    for prev, curr, layers, hidden in scale.cases:
        case = f"{prev} → {curr}, {layers} layers of {hidden}"
        ways = Ways.of(shrunk(layers, hidden, scale.shrink), prev, curr, Topology.preset("cluster-a"))
        say(f"{case}: {ways.joint.state_bytes / MiB:.0f} MiB of state, {len(ways.change.devices)} processes")
        state_bytes.append(ways.joint.state_bytes)
        seconds = time_plans(ways.named, scale.runs)
        rows += case_rows(case, ways, seconds)
        two_s = seconds["migrate"] + seconds.get("defragment", 0.0)
        for name, found in ratios.items():
            found.append(seconds[name] / two_s)
    for name, found in ratios.items():
        what = f"mean over the scenarios: time, {name} over two moves"
        theirs = 1 / PAPER_RATIO
        rows.append(Row.of(what, statistics.mean(found), "x", baseline="the paper's coalesced", theirs=theirs))
    described = (
        f"hidden size, vocabulary and positions 1/{scale.shrink} of the paper's, all layers: 1/{scale.shrink**2} of "
        f"its bytes, {min(state_bytes) / MiB:.0f} to {max(state_bytes) / MiB:.0f} MiB of state; planned for nodes of "
        f"4; one process a device, up to 32, over gloo on one host; medians of {scale.runs} runs, plans by turns"
    )
    return described, rows


def case_rows(case: str, ways: Ways, seconds: dict[str, float]) -> list[Row]:
    """Bytes, times and the largest volume of one scenario."""
    two_bytes = sum(plan.moved_bytes for plan in ways.phases)
    two_s = seconds["migrate"] + seconds.get("defragment", 0.0)
    rows = [
        Row.of(
            f"{case}: moved, {name}",
            plan.moved_bytes / MiB,
            "MiB",
            baseline="two moves",
            theirs=two_bytes / MiB,
            most_ratio=1,
        )
        for name, plan in (("coalesced", ways.coalesced), ("joint", ways.joint))
    ]
    rows += [
        Row.of(
            f"{case}: time, {name}", seconds[name] * 1e3, "ms", baseline="two moves", theirs=two_s * 1e3, most_ratio=1
        )
        for name in ("coalesced", "joint")
    ]
    migrate_ms = seconds["migrate"] * 1e3
    rows.append(
        Row.of(
            f"{case}: time, joint placement",
            seconds["joint"] * 1e3,
            "ms",
            baseline="migration alone",
            theirs=migrate_ms,
        )
    )
    largest = largest_received_bytes(ways.phases[0]) / MiB
    for name, plan in (("coalesced", ways.coalesced), ("joint", ways.joint)):
        ours = largest_received_bytes(plan) / MiB
        rows.append(
            Row.of(f"{case}: most that a device receives, {name}", ours, "MiB", baseline="migration", theirs=largest)
        )
    return rows
