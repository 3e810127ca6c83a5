"""The README's examples are programs, and run here; the live one with the demo's functions in place of the user's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardshift.elastic import LocalJob

ROOT = Path(__file__).parents[2]


def examples() -> list[str]:
    """The one that plans, the one that trains, and the one that moves tensors."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    return list(map(str, blocks))


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


def test_the_planning_example_of_the_readme_prints_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples()[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    command = ["plan", "pp4tp2", "pp6tp4", "--nodes", "6", "--devices-per-node", "4", "--json"]
    argv = [sys.executable, "-c", "from shardshift.cli import main; main()", *command]
    record = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout)
    expected = f"{record['moved_bytes'] / 2**30:.1f} GiB, {record['predicted_s']:.3f} s, plan {record['digest']}\n"
    assert printed == expected


def test_the_example_of_the_readme_trains_through_its_changes_of_layout() -> None:
    layouts: dict[int, set[str]] = {}
    losses: dict[int, float] = {}
    job = LocalJob(8, run_example, (examples()[1],), timeout_s=30, preload=["shardshift.demo.worker"])
    with job:
        for _, (iteration, layout, loss) in job.messages():
            layouts.setdefault(iteration, set()).add(layout)
            if loss is not None:
                losses[iteration] = loss
    expected = ["pp2tp2dp1", "pp2tp2dp1", "pp4tp2dp1", "pp4tp2dp1", "pp2tp4dp1", "pp2tp4dp1"]
    assert layouts == {iteration: {layout} for iteration, layout in enumerate(expected)}
    assert losses[5] < losses[0]


def run_script(send: Any, code: str) -> None:
    import builtins

    import torch.distributed as dist

    exec(compile(code, "reshard.py", "exec"), {"print": lambda *words: send(words)} | {"__builtins__": builtins})
    dist.destroy_process_group()


def test_the_example_of_the_readme_moves_tensors_and_joins_ranks() -> None:
    with LocalJob(4, run_script, (examples()[2],), timeout_s=30) as job:
        told = dict(job.messages())
    assert told == {rank: (rank, (2, 6), float(rank // 2)) for rank in range(4)}
