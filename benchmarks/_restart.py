"""The same change by a restart: a checkpoint is saved, the processes end, torchrun starts new ones, which load it.

This file is the training script too. torchrun runs it in each process; it imports what the training needs, builds the
job of its layout, loads a checkpoint if there is one, trains some steps, saves a checkpoint if one is wanted, and
writes when it came to each of these places, by ``time.perf_counter``, which all processes of a machine share on Linux.

The checkpoint is megatron-core's ``dist_checkpointing``, as in the demo: any layout loads it. Its helper process is
started before training, and is not counted.
"""

# ruff: noqa: E402

from __future__ import annotations

import time

_BEGAN_S = time.perf_counter()  # before anything else is imported

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Leg:
    """One run of torchrun.

    Attributes:
        config: its layout.
        data: text file or folder.
        batch: samples of a step.
        steps: that it trains.
        load: folder of the checkpoint that it begins with; empty: none.
        iteration: finished steps in that.
        save: folder for the checkpoint that it ends with; empty: none.
        times: folder for what each process writes.
    """

    config: str
    data: str
    batch: int
    steps: int
    load: str
    iteration: int
    save: str
    times: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A change by a restart, part by part.

    Attributes:
        parts_s: seconds by part, in order.
        first_s: by how much the first step took longer than later ones.
    """

    parts_s: dict[str, float]
    first_s: float

    @property
    def pause_s(self) -> float:
        """From the end of the last step before to the beginning of the first one after."""
        return sum(self.parts_s.values())


def restarts(
    configs: tuple[str, ...], data: Path, batch: int, steps: int, folder: Path, limit_s: float
) -> list[Restart]:
    """Go from layout to layout by restarts.

    Args:
        configs: the layouts.
        data: text file or folder.
        batch: samples of a step.
        steps: in each layout.
        folder: for checkpoints and times.
        limit_s: the longest that one run of torchrun may take.

    Raises:
        RuntimeError: with what it printed, if a run failed.
    """
    legs: list[tuple[float, float, list[dict[str, Any]]]] = []
    for number, config in enumerate(configs):
        leg = Leg(
            config,
            str(data),
            batch,
            steps,
            str(folder / f"checkpoint{number - 1}") if number else "",
            number * steps,
            str(folder / f"checkpoint{number}") if number + 1 < len(configs) else "",
            str(folder / f"times{number}"),
        )
        legs.append(_torchrun(leg, limit_s))
    return [_restart(old, new) for old, new in pairwise(legs)]


def _torchrun(leg: Leg, limit_s: float) -> tuple[float, float, list[dict[str, Any]]]:
    """When a run was started, when it had ended, and what its processes wrote."""
    from shardshift.values import ParallelConfig

    processes = ParallelConfig.parse(leg.config).world_size
    Path(leg.times).mkdir()
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, json.dumps(asdict(leg))]
    started_s = time.perf_counter()
    with subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            printed, _ = run.communicate(timeout=limit_s)
        except BaseException:
            run.terminate()  # torchrun ends its processes
            raise
    ended_s = time.perf_counter()
    if run.returncode:
        raise RuntimeError(f"torchrun in layout {leg.config} ended with {run.returncode}:\n{printed[-4000:]}")
    told = [json.loads(path.read_text()) for path in sorted(Path(leg.times).iterdir())]
    return started_s, ended_s, told


def _restart(old: tuple[float, float, list[dict[str, Any]]], new: tuple[float, float, list[dict[str, Any]]]) -> Restart:
    """The parts, each from the last process's end of the one before to the last process's end of it."""

    def last(leg: tuple[float, float, list[dict[str, Any]]], what: str) -> float:
        return max(float(told[what]) for told in leg[2])

    helpers_s = max(float(told["helpers_s"]) for told in new[2])
    ends = [max(told["steps"][index] for told in new[2]) for index in range(len(new[2][0]["steps"]))]
    later_s = [end - start for start, end in pairwise(ends)]
    return Restart(
        {
            "save": last(old, "saved") - max(told["steps"][-1] for told in old[2]),
            "processes end": old[1] - last(old, "saved"),
            "torchrun": last(new, "began") - new[0],
            "imports": last(new, "imported") - last(new, "began"),
            "build": last(new, "built") - last(new, "imported") - helpers_s,
            "load": last(new, "loaded") - last(new, "built"),
        },
        ends[0] - last(new, "loaded") - median(later_s),
    )


def main(leg: Leg) -> None:
    """One process of a run."""
    from shardshift.demo import checkpoint
    from shardshift.demo.model import Recipe, optimizer_step, set_initial_weights, train_step
    from shardshift.demo.worker import Task, _quiet, _start

    _quiet()
    times: dict[str, Any] = {"began": _BEGAN_S, "imported": time.perf_counter(), "steps": [], "helpers_s": 0.0}
    if leg.save:
        times["helpers_s"] = checkpoint.start_helpers()
    task = Task(Recipe(global_batch_size=leg.batch), Path(leg.data), 8, 60.0)
    adapter = task.adapter()
    job, _ = _start(task, adapter, leg.config, leg.iteration * leg.batch)
    times["built"] = time.perf_counter()
    if leg.load:
        checkpoint.load(job, Path(leg.load))
    else:
        set_initial_weights(job, task.recipe.seed)
    times["loaded"] = time.perf_counter()
    for _ in range(leg.steps):
        train_step(job)
        optimizer_step(job)
        adapter.advance(job)
        times["steps"].append(time.perf_counter())
    if leg.save:
        checkpoint.save(job, Path(leg.save))
    times["saved"] = time.perf_counter()
    (Path(leg.times) / os.environ["RANK"]).write_text(json.dumps(times))
    adapter.retire(job)


if __name__ == "__main__":
    main(Leg(**json.loads(sys.argv[1])))
