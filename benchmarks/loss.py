"""Loss over 100 iterations with a change of layout at 20 (the paper's Fig. 13), against no change and a checkpoint.

The demo's megatron-core GPT trains four times from the same weights on the same data:

1. *live*: PP4 until iteration 20, then PP8 by shardshift, while the job runs;
2. *checkpoint*: fresh processes start in PP8 from the state that was saved at iteration 20;
3. *fixed*: PP4 throughout;
4. *the other layout*: PP8 throughout, which says how far two layouts drift apart by themselves.

The live run must be the checkpoint's bit for bit, for both add up in the same order. The fixed run adds up in
another, so the last digit of fp32 may differ, and training makes of that more and more, whatever the layout: so a
spike is what the live curve rises above the fixed one soon after the change, and over the whole run the drift is
compared with run 4's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _jobs import TIMEOUT_S, WORKER, train_live

from shardshift.demo.model import ModelShape, Recipe
from shardshift.demo.text import default_source
from shardshift.demo.worker import Task, train_fixed, train_from_saved
from shardshift.elastic import LocalJob
from shardshift.report.bench import Curve, Row
from shardshift.values import ParallelConfig

SHAPE: Final = ModelShape()
MOST_SPIKE: Final = 1e-5
SOON: Final = 20
"""Iterations after the change in which a spike would be seen."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        shape: the model.
        prev: the layout at first.
        curr: the one after the change.
        at: the iteration of the change.
        steps: iterations in all.
    """

    shape: ModelShape = SHAPE
    prev: str = "pp4"
    curr: str = "pp8"
    at: int = 20
    steps: int = 100


TINY: Final = Scale(ModelShape(layers=2, hidden=32, heads=2, sequence_length=16), "pp1", "pp2", 2, 4)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row], Sequence[Curve]]:
    """All rows and the curves; see ``cli.bench.Run``."""
    scale = scale or Scale()
    ranks = [ParallelConfig.parse(config).world_size for config in (scale.prev, scale.curr)]
    task = Task(Recipe(scale.shape, steps=scale.steps), default_source(), max(ranks), TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="shardshift-loss-") as name:
        folder = Path(name)
        say(f"live: {scale.prev} → {scale.curr} at {scale.at}")
        live, _ = _train(max(ranks), train_live, task, scale.prev, scale.at, scale.curr, folder)
        say(f"checkpoint: {scale.curr} from {scale.at} on")
        saved, told = _train(ranks[1], train_from_saved, task, scale.curr, scale.at, scale.steps, folder)
        say(f"fixed: {scale.prev}")
        fixed, _ = _train(ranks[0], train_fixed, task, scale.prev)
        say(f"the other layout: {scale.curr}")
        other, _ = _train(ranks[1], train_fixed, task, scale.curr)
    exact = all(same for what, *_, same in told if what == "compared") and any(what == "compared" for what, *_ in told)
    after = [step for step in live if step > scale.at]
    apart, drift = (max(abs(losses[step] - fixed[step]) for step in fixed) for losses in (live, other))
    spike = max(live[step] - fixed[step] for step in after[:SOON])
    unit = "nats per byte"
    rows = [
        Row.of("states that are not bit-exact after the change", float(not exact), "states", most=0),
        Row.of("iterations after the change whose loss is not the checkpoint's, bit for bit",
               sum(live[step] != saved.get(step) for step in after), "iterations", most=0),
        Row.of(f"spike: most that the loss rises above the fixed layout's, {SOON} iterations after the change",
               max(spike, 0.0), unit, most=MOST_SPIKE),
        Row.of("largest difference of any iteration's loss from the fixed layout's", apart, unit,
               baseline="the other layout", theirs=drift),
        Row.of("loss at the end, live", live[scale.steps], unit, baseline="fixed", theirs=fixed[scale.steps]),
    ]  # fmt: skip
    curves = [
        Curve.of(f"{scale.prev} → {scale.curr} at iteration {scale.at}", what, "iteration", f"loss, {unit}",
                 sorted(losses.items()))
        for what, losses in (
            ("fixed", fixed), ("the other layout", other), ("through a checkpoint", saved), ("live", live)
        )
    ]  # fmt: skip
    described = (
        f"megatron-core GPT of {scale.shape.layers} layers, hidden {scale.shape.hidden}, {scale.steps} iterations, "
        f"change {scale.prev} → {scale.curr} at {scale.at}; {max(ranks)} processes"
    )
    return described, rows, curves


def _train(processes: int, worker: Callable[..., None], *args: Any) -> tuple[dict[int, float], list[Any]]:
    """Losses by iteration, and whatever else the processes told."""
    losses: dict[int, float] = {}
    told: list[Any] = []
    with LocalJob(processes, worker, args, timeout_s=TIMEOUT_S, preload=[WORKER]) as job:
        for _, message in job.messages():
            match message:
                case ("loss", int(step), float(loss)):
                    losses[step] = loss
                case _:
                    told.append(message)
    return losses, told
