"""Memory over time on rank 0 through PP → 2 PP (the paper's Fig. 12), in parts of the steady state before.

1. *Engine*: a model's parameters, masters and moments under PP8 are moved to PP16 by 16 processes, with either
   policy: ``keep`` (old tensors stay whole until the commit) and ``release`` (they are given back epoch by epoch).
   *Tensors* are bytes of storages that live; *resident* is what the kernel counts for the process, less what it had
   without state.
2. *Megatron job*: the demo's training with a larger model, PP2 → PP4 by 4 processes, with gradients, activations,
   process groups and whatever else there is; resident, less what the process had before the job was built. The steady
   state is the median over the steps before the change.

The paper's curve (6.7B, PP8 → PP16 on GPUs): 1.00 at first, 1.07 when communication is done, 1.11 with buffers, 1.25
at its peak, 0.59 when the old tensors are freed, 0.82 with the new model and optimizer, 0.67 in the steady state
after.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from _jobs import profile_job
from _memory import Tally, Watch, resident_bytes, trim
from _moves import Ways, shrunk
from _processes import Rank, run_ranks
from _state import check, coded, copies, dtype_of

from shardshift.demo.model import ModelShape
from shardshift.engine import Mover, names_of, staging
from shardshift.engine.pages import Pages, empty
from shardshift.plan import Plan
from shardshift.report.bench import Curve, Row
from shardshift.values import Topology

MiB: Final = 2**20
PAPER_PEAK, PAPER_AFTER = 1.25, 0.67
MOST_PEAK: Final = 1.05

Seen = list[tuple[float, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        layers: of the model that the engine moves.
        hidden: of the paper's model.
        shrink: what hidden size, vocabulary and positions are divided by.
        prev: the engine's configuration before.
        curr: the one after.
        policies: of the engine.
        staging_bytes: the most that a device stages.
        job: the Megatron job's model, its configurations and its steps in each; None: leave it out.
    """

    layers: int = 32
    hidden: int = 4096
    shrink: int = 8
    prev: str = "PP8TP1"
    curr: str = "PP16TP1"
    policies: tuple[Any, ...] = ("keep", "release")
    staging_bytes: int = 8 * MiB
    job: tuple[ModelShape, str, str, int] | None = (ModelShape(layers=8, hidden=768, heads=8), "pp2", "pp4", 6)


TINY: Final = Scale(layers=4, hidden=2048, shrink=16, prev="PP2TP1", curr="PP4TP1", job=None)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row], Sequence[Curve]]:
    """All rows and the curves; see ``cli.bench.Run``."""
    scale = scale or Scale()
    ways = Ways.of(shrunk(scale.layers, scale.hidden, scale.shrink), scale.prev, scale.curr, Topology(1, 64))
    plan = ways.joint
    rows: list[Row] = []
    curves: list[Curve] = []
    held_bytes = 0
    for policy in scale.policies:
        say(f"{scale.prev} → {scale.curr}, {policy}: {plan.state_bytes / MiB:.0f} MiB of state")
        body = partial(_measure, plan=plan, policy=policy, staging_bytes=scale.staging_bytes)
        seen, held_bytes = run_ranks(len(plan.devices), body)[0]
        for figure, words in (("tensors", "tensors"), ("resident", "resident")):
            parts = [(at_s, found[figure] / held_bytes) for at_s, found in seen]
            rows += figure_rows(f"{scale.prev} → {scale.curr}, engine, {policy}, {words}", parts)
            curves.append(curve(f"engine, {scale.prev} → {scale.curr}", f"{policy}, {words}", parts))
    if scale.job is not None:
        shape, prev, curr, steps = scale.job
        say(f"Megatron job, {prev} → {curr}")
        seen, changed_s, trimmed_bytes = profile_job(shape, prev, curr, steps)
        steady = statistics.median(found["resident"] for at_s, found in seen if changed_s / 2 < at_s < changed_s)
        parts = [(at_s, found["resident"] / steady) for at_s, found in seen]
        around = [(at_s, part) for at_s, part in parts if at_s > changed_s / 2]
        before = max(part for at_s, part in around if at_s < changed_s)
        case = f"{prev} → {curr}, Megatron job, resident"
        rows += figure_rows(case, around)
        trimmed = Row.of(f"{case}: after, what is free given back", trimmed_bytes / steady, "of the steady state")
        rows += [trimmed, Row.of(f"{case}: peak of the steps before", before, "of the steady state")]
        curves.append(curve(f"Megatron job, {prev} → {curr}", "resident", parts))
    described = (
        f"engine: GPT of {scale.layers} layers, hidden {scale.hidden // scale.shrink} (1/{scale.shrink**2} of the "
        f"bytes of the paper's 6.7B), {held_bytes / MiB:.0f} MiB of state on rank 0, staging "
        f"{scale.staging_bytes // MiB} MiB; read every 2 ms; parts of the steady state before"
    )
    return described, rows, curves


def figure_rows(case: str, parts: Sequence[tuple[float, float]]) -> list[Row]:
    """The peak and the end of one curve."""
    unit, peak, after = "of the steady state", max(part for _, part in parts), parts[-1][1]
    return [
        Row.of(f"{case}: peak", peak, unit, baseline="the paper", theirs=PAPER_PEAK, most_ratio=MOST_PEAK / PAPER_PEAK),
        Row.of(f"{case}: after", after, unit, baseline="the paper", theirs=PAPER_AFTER),
    ]


def curve(panel: str, name: str, parts: Sequence[tuple[float, float]]) -> Curve:
    """A curve, thinned to what a picture shows: of each stretch its largest figure."""
    stride = max(1, len(parts) // 300)
    kept = [max(parts[at : at + stride], key=lambda point: point[1]) for at in range(0, len(parts), stride)]
    points = ((at_s * 1e3, part) for at_s, part in kept)
    return Curve.of(f"memory of rank 0: {panel}", name, "ms", "of the steady state before", points)


def _measure(rank: Rank, plan: Plan, policy: Any, staging_bytes: int) -> tuple[Seen, int]:
    """On rank 0 what was seen, resident memory less what there was without state; and the old state's bytes."""
    device = rank.index
    tally = Tally()
    with Mover(
        rank.store("profile"), device, range(rank.count), transport="gloo", staging_bytes=staging_bytes
    ) as mover:
        small = copies(2, 4096, 1, rank.count)  # its move brings in whatever code and buffers a first move needs
        mover.move(small.prev, small.curr, _state(small, device, tally), policy=policy, compare_copies=False)
        gc.collect()
        trim()
        empty_bytes = resident_bytes()
        state = _state(plan, device, tally)
        held_bytes = sum(tensor.nbytes for tensor in state.values())
        figures = {"tensors": lambda: tally.nbytes, "resident": lambda: resident_bytes() - empty_bytes}
        rank.barrier()
        watch = Watch(figures)
        with (
            patch.object(Pages, "empty", tally.counting(Pages.empty)),
            patch.object(staging, "empty", tally.counting(empty)),
            watch,
        ):
            watch.read()
            found = mover.move(plan.prev, plan.curr, state, policy=policy, compare_copies=False)
            state.clear()  # under ``keep`` the old tensors are the caller's to drop
            gc.collect()
            trim()
    check(plan, device, {shard: found[name] for name, shard in names_of(plan.curr.shards_on(device)).items()})
    return (watch.seen if device == 0 else []), held_bytes


def _state(plan: Plan, device: int, tally: Tally) -> dict[str, torch.Tensor]:
    names = names_of(plan.prev.shards_on(device))
    return {
        name: tally.add(coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard))))
        for name, shard in names.items()
    }
