"""What a Megatron job tells of its steps, and what the same steps are when they begin at a checkpoint.

1. A corpus notes which samples are drawn from it; each rank tells of each finished step its loss, rates and samples.
2. A ledger keeps what all ranks told. Of an iteration the step of the last generation counts that took it: one that
   was lost with a rank is taken again after the loss. It holds samples and rates of that course to plain arithmetic.
3. Fresh processes start from what the oracle (``demo.oracle``) makes of the files of a moment, and tell their steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.megatron.harness import start_alone
from tests.megatron.training import Training, corpus_of, make_adapter, optimizer_step, schedule, train_step

from shardshift import ParallelConfig
from shardshift.adapters.megatron import Adapter
from shardshift.demo import oracle
from shardshift.demo.text import Corpus

Send = Callable[[Any], None]


class Noting(Corpus):
    """Notes which samples are drawn.

    Attributes:
        drawn: their numbers, in order, since it was last cleared.
    """

    def __init__(self, recipe: Training) -> None:
        plain = corpus_of(recipe)
        self.__dict__.update(plain.__dict__)
        self.drawn: list[int] = []

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As a corpus does, and note it."""
        self.drawn.append(index)
        return super().sample(index)


def noting_adapter(recipe: Training) -> tuple[Adapter, Noting]:
    """The adapter of a training job, and its corpus, which tells what is drawn from it."""
    corpus = Noting(recipe)
    return make_adapter(recipe, corpus), corpus


@dataclass(frozen=True, slots=True)
class Step:
    """A step as one rank has finished it.

    Attributes:
        generation: changes of layout before it.
        iteration: steps finished, this one among them.
        at: the rank's (pp, tp, dp).
        loss: of the global batch, on the last pipeline stage.
        rates: learning rate and weight decay of each param group after it.
        samples: numbers of those that this rank drew for it.
    """

    generation: int
    iteration: int
    at: tuple[int, int, int]
    loss: float | None
    rates: tuple[tuple[float, float], ...]
    samples: tuple[int, ...]


def tell_step(job: Any, loss: float | None, corpus: Noting) -> Step:
    """What this rank has done in the step that is just over."""
    at = job.layout.coordinate
    rates = tuple((float(group["lr"]), float(group["weight_decay"])) for group in job.optimizer.param_groups)
    return Step(job.generation, job.iteration, (at.pp, at.tp, at.dp), loss, rates, tuple(corpus.drawn))


class Ledger:
    """What all ranks told of their steps.

    Attributes:
        steps: by (generation, iteration), the ranks' by coordinate.
    """

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], dict[tuple[int, int, int], Step]] = {}

    def note(self, step: Step) -> None:
        """Take note of a step."""
        self.steps.setdefault((step.generation, step.iteration), {})[step.at] = step

    def course(self) -> dict[int, int]:
        """By iteration the generation whose step counts: the last one that has taken it."""
        return {iteration: generation for generation, iteration in sorted(self.steps)}

    def check_samples(self, batch: int) -> None:
        """Each global batch was drawn whole and once, by ranks of one data parallel coordinate alike."""
        course = self.course()
        assert [*sorted(course)] == [*range(1, max(course) + 1)]
        for iteration, generation in course.items():
            drawn: dict[int, tuple[int, ...]] = {}
            for (_, _, dp), step in self.steps[generation, iteration].items():
                assert drawn.setdefault(dp, step.samples) == step.samples, f"iteration {iteration}, replica {dp}"
            found = sorted(sample for samples in drawn.values() for sample in samples)
            assert found == [*range((iteration - 1) * batch, iteration * batch)], f"iteration {iteration}: {found}"

    def check_rates(self, recipe: Training) -> None:
        """Learning rates and decays are those of Megatron's scheduler that nothing ever happened to."""
        course = self.course()
        expected = rates_of(recipe, max(course))
        for iteration, generation in course.items():
            for step in self.steps[generation, iteration].values():
                assert {*step.rates} <= expected[iteration], (iteration, step.rates, expected[iteration])


def rates_of(recipe: Training, steps: int) -> dict[int, set[tuple[float, float]]]:
    """By iteration the learning rates and decays after it, by Megatron's scheduler on param groups of its own."""
    groups: list[dict[str, float]] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    scheduler = schedule(recipe, SimpleNamespace(param_groups=groups))
    found: dict[int, set[tuple[float, float]]] = {}
    for iteration in range(1, steps + 1):
        scheduler.step(increment=recipe.global_batch_size)
        found[iteration] = {(float(group["lr"]), float(group["weight_decay"])) for group in groups}
    return found


def read(place: Path) -> list[dict[str, Any]]:
    """What all ranks wrote; nothing if one was killed before it had written."""
    try:
        records = oracle.read_ranks(place)
    except (RuntimeError, EOFError):
        return []
    return records if records and len(records) == ParallelConfig.parse(records[0]["config"]).world_size else []


@dataclass(frozen=True, slots=True)
class Segment:
    """What was trained in one layout.

    Attributes:
        generation: its number.
        layout: the layout.
        until: steps finished at its end.
        checkpoint: of the moment before it.
    """

    generation: int
    layout: str
    until: int
    checkpoint: Path


def train_afresh(send: Send, recipe: Training, segments: tuple[Segment, ...]) -> None:
    """One process that starts from each checkpoint in turn, and trains to the segment's end."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for segment in segments:
        adapter, corpus = noting_adapter(recipe)
        size = ParallelConfig.parse(segment.layout).world_size
        if int(os.environ["RANK"]) >= size:
            continue
        records = oracle.read_ranks(segment.checkpoint, weights_only=False)
        job = start_alone(adapter, segment.layout, f"{segment.generation}", records[0]["consumed_samples"])
        assert job is not None
        oracle.load_rank(job, records, oracle.assemble(records), change=segment.generation)
        while job.iteration < segment.until:
            corpus.drawn.clear()
            loss = train_step(job)
            optimizer_step(job)
            adapter.advance(job)
            send(replace(tell_step(job, loss, corpus), generation=segment.generation))
        dist.barrier()
        adapter.retire(job)
