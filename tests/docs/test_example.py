"""The README's example is a program: it runs here with the demo's functions in the place of the user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardshift.elastic import LocalJob

ROOT = Path(__file__).parents[2]


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def run_example(send: Any, code: str) -> None:
    """What the user of the README has already, then the README."""
    import torch

    from shardshift.demo import model
    from shardshift.demo.text import Corpus

    torch.set_num_threads(1)
    shape = model.ModelShape(layers=4, hidden=32, sequence_length=32)
    recipe = model.Recipe(shape, steps=6)
    names: dict[str, Any] = {
        "model_chunks": lambda layout: model.build_model(shape, layout),
        "ddp_optimizer_scheduler": lambda chunks, layout: model.wrap(recipe, chunks),
        "micro_batches": Corpus(bytes(range(256)) * 64, shape.sequence_length, 1).micro_batches,
        "load_or_init": lambda job: model.set_initial_weights(job, recipe.seed),
        "forward_backward": lambda job: send((job.iteration, str(job.config), model.train_step(job))),
        "optimizer_step": model.optimizer_step,
        "iterations": recipe.steps,
    }
    exec(compile(code, "README.md", "exec"), names)


def test_the_example_of_the_readme_trains_through_its_changes_of_layout() -> None:
    layouts: dict[int, set[str]] = {}
    losses: dict[int, float] = {}
    job = LocalJob(8, run_example, (example(),), timeout_s=30, preload=["shardshift.demo.worker"])
    with job:
        for _, (iteration, layout, loss) in job.messages():
            layouts.setdefault(iteration, set()).add(layout)
            if loss is not None:
                losses[iteration] = loss
    expected = ["pp2tp2dp1", "pp2tp2dp1", "pp4tp2dp1", "pp4tp2dp1", "pp2tp4dp1", "pp2tp4dp1"]
    assert layouts == {iteration: {layout} for iteration, layout in enumerate(expected)}
    assert losses[5] < losses[0]
