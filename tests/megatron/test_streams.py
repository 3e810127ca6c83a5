"""What goes on by coordinate: random streams, and the samples that each replica reads."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tests.megatron.harness import Scenario, Send, initialise, open_session, run_processes, small

from shardshift import Infeasible
from shardshift.adapters.megatron import Adapter
from shardshift.demo.model import Recipe, make_adapter, train_step
from shardshift.demo.text import Corpus

SHARED = ("python", "numpy", "torch", "data-parallel-rng")
TRACKED = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")


def draw() -> dict[str, float]:
    """One number from every stream."""
    drawn = {"python": random.random(), "numpy": float(np.random.rand()), "torch": float(torch.rand(()))}
    for stream in TRACKED:
        with get_cuda_rng_tracker().fork(stream):
            drawn[stream] = float(torch.rand(()))
    return drawn


def draw_through_changes(send: Send, scenario: Scenario) -> None:
    """Tell what each coordinate draws, three times in each iteration."""
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            at = job.layout.coordinate
            if elastic.resize_due(job):
                job = elastic.resize(job) or elastic.start()
                continue
            for _ in range(3):
                send((job.iteration, (at.pp, at.tp, at.dp), draw()))
            with elastic.commit_step(job):
                pass


def drawn(scenario: Scenario) -> dict[int, dict[tuple[int, int, int], list[dict[str, float]]]]:
    """Per iteration and (pp, tp, dp) the three draws of each stream."""
    found: dict[int, dict[tuple[int, int, int], list[dict[str, float]]]] = {}
    for _, message in run_processes(scenario.devices, draw_through_changes, scenario):
        iteration, at, numbers = message
        found.setdefault(iteration, {}).setdefault(at, []).append(numbers)
    return found


def test_a_coordinate_that_stays_goes_on_with_its_streams() -> None:
    changed = drawn(Scenario(small(3), "pp2tp2dp1", {1: "pp2tp1dp2", 2: "pp2tp1dp1"}))
    left_alone = drawn(Scenario(small(3), "pp2tp2dp1", {}))
    for iteration, coordinates in changed.items():
        for (pp, tp, _), numbers in coordinates.items():
            assert numbers == left_alone[iteration][pp, tp, 0]


def test_a_new_coordinate_starts_a_stream_of_its_own() -> None:
    changed = drawn(Scenario(small(2), "pp1tp1dp1", {1: "pp2tp2dp2"}))[1]
    from_the_seed = drawn(Scenario(small(2), "pp2tp2dp2", {}))
    for (pp, tp, dp), numbers in changed.items():
        assert numbers == changed[pp, tp, 1 - dp], "replicas draw alike"
        for stream in (*SHARED, *TRACKED):
            own = [number[stream] for number in numbers]
            other_tp = [number[stream] for number in changed[pp, 1 - tp, dp]]
            other_pp = [number[stream] for number in changed[1 - pp, tp, dp]]
            assert (own == other_tp) == (stream in SHARED)
            assert own != other_pp
            if pp or (tp and stream not in SHARED):
                for iteration in range(2):
                    assert own != [number[stream] for number in from_the_seed[iteration][pp, tp, dp]]


class Reading(Corpus):
    """Remembers which samples were read."""

    read: list[int]

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        Reading.read.append(index)
        return super().sample(index)


def reading_adapter(recipe: Recipe, corpus: Corpus) -> Adapter:
    Reading.read = []
    corpus.__class__ = Reading
    return make_adapter(recipe, corpus)


def read_through_changes(send: Send, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        refused = False
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job) and not refused:
                before = job.iteration
                try:
                    job = elastic.resize(job) or elastic.start()
                except Infeasible as error:
                    send(("refused", before, str(error)))
                    refused = True
                continue
            Reading.read.clear()
            train_step(job)
            at = job.layout.coordinate
            send(("read", job.iteration, (at.pp, at.tp, at.dp), list(Reading.read)))
            with elastic.commit_step(job):
                pass


def test_each_sample_is_read_once_and_in_order_whatever_the_replicas() -> None:
    scenario = Scenario(
        small(5, layers=1, batch=8), "dp4", {1: "dp2", 2: "dp8", 3: "tp2dp2", 4: "dp3"}, adapter=reading_adapter
    )
    read: dict[int, dict[tuple[int, int, int], list[int]]] = {}
    refused: list[Any] = []
    for _, message in run_processes(8, read_through_changes, scenario):
        match message:
            case ("read", int(iteration), at, samples):
                read.setdefault(iteration, {})[at] = samples
            case refusal:
                refused.append(refusal)
    for iteration, dp in enumerate([4, 2, 8, 2, 2]):
        by_replica = [read[iteration][0, 0, replica] for replica in range(dp)]
        in_order = [sample for microbatch in zip(*by_replica, strict=True) for sample in microbatch]
        assert in_order == list(range(8 * iteration, 8 * iteration + 8))
        for (_, _, replica), samples in read[iteration].items():
            assert samples == by_replica[replica], "tensor ranks read alike"
    assert len(refused) == 4
    assert {(what, iteration) for what, iteration, _ in refused} == {("refused", 4)}
    assert "global batch of 8" in refused[0][2]
    assert "dp 3" in refused[0][2]
