"""What goes on by coordinate: random streams, and the samples that each replica reads."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tests.megatron.harness import Scenario, Send, initialise, open_session, run_processes, small
from tests.megatron.training import make_adapter as training_adapter
from tests.megatron.training import training

from shardshift import Infeasible
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo.model import Recipe, make_adapter, train_step
from shardshift.demo.text import Corpus
from shardshift.elastic import transition

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


Streams = dict[str, torch.Tensor]


def seed_by_rank(job: Job) -> None:
    """Streams of one's own for each tensor and expert rank: seeds 10, 11, 12, ...; shared ones by pp."""
    at, expert = job.layout.coordinate, job.config.expert_coordinate(job.layout.rank)
    seed = 10 + at.tp + job.config.tp * at.pp
    expert_seed = 10 + expert.etp + job.config.expert_tp * (expert.ep + job.config.ep * expert.pp)
    random.seed(10 + at.pp)
    np.random.seed(10 + at.pp)
    torch.manual_seed(10 + at.pp)
    seeds = {"data-parallel-rng": 10 + at.pp, "model-parallel-rng": seed, "expert-parallel-rng": expert_seed}
    get_cuda_rng_tracker().set_states({k: torch.Generator().manual_seed(v).get_state() for k, v in seeds.items()})


def seed_each_rank(job: Job) -> None:
    """All streams of each rank are its own, as with Megatron's ``data_parallel_random_init``."""
    seed = 10 + job.layout.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_cuda_rng_tracker().set_states({k: torch.Generator().manual_seed(seed).get_state() for k in TRACKED})


def draw_around_a_permutation(send: Send, scenario: Scenario, order: tuple[int, ...]) -> None:
    """Draw thrice; come back to the same layout on other devices, if so asked; and draw for the fourth time."""
    torch.set_num_threads(1)
    plan_of: Any = transition.make_plan  # type: ignore[attr-defined]

    def permuted(*args: Any, **options: Any) -> Any:
        if options["placement"] is None and args[1].world_size == len(order):
            options["placement"] = order
        return plan_of(*args, **options)

    transition.make_plan = permuted  # type: ignore[attr-defined]
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < 3:
            if elastic.resize_due(job):
                job = elastic.resize(job) or elastic.start()
                continue
            drawn_now = [draw() for _ in range((3, 0, 1)[job.iteration])]
            if job.iteration == 2:
                at = job.layout.coordinate
                send(((at.pp, at.tp, at.dp), drawn_now[0]))
            with elastic.commit_step(job):
                pass


def fourth_draws(
    start: str, between: str, order: tuple[int, ...], seeds: Callable[[Job], None]
) -> tuple[dict[Any, Any], dict[int, Any]]:
    """The fourth draw of each coordinate, and which coordinate was on which device."""
    changes = {1: between, 2: start} if order else {}
    experts = {"experts": 8, "ffn": 8, "biases": False, "swiglu": True}
    if "ep" in start:
        recipe = training(3, **experts)
        adapter: Any = training_adapter
        scenario = Scenario(recipe, start, changes, adapter, prepare=seeds)
    else:
        scenario = Scenario(small(3, layers=2, vocab_size=64), start, changes, prepare=seeds)
    found = run_processes(scenario.devices, draw_around_a_permutation, scenario, order)
    return {at: numbers for _, (at, numbers) in found}, {device: at for device, (at, _) in found}


@pytest.mark.parametrize(
    ("start", "between", "order", "seeds"),
    [
        ("tp2", "tp2dp2", (3, 0), seed_by_rank),
        ("pp2tp2", "pp2tp2dp2", (6, 3, 4, 1), seed_by_rank),
        ("dp4ep4", "pp2dp4ep4", (2, 3, 0, 1), seed_by_rank),
        ("dp4ep4", "pp2dp4ep4", (5, 0, 3, 6), seed_each_rank),
    ],
)
def test_ranks_that_run_on_other_devices_take_their_streams_along(
    start: str, between: str, order: tuple[int, ...], seeds: Callable[[Job], None]
) -> None:
    moved, now = fourth_draws(start, between, order, seeds)
    alone, then = fourth_draws(start, between, (), seeds)
    assert [now[device] for device in order] == [then[device] for device in range(len(order))]
    assert moved == alone
    own = "expert-parallel-rng" if "ep" in start else "model-parallel-rng"
    assert len({numbers[own] for numbers in moved.values()}) == len(order)
    if seeds is seed_each_rank:
        assert len({numbers["python"] for numbers in moved.values()}) == len(order)


def tell_streams(send: Send, scenario: Scenario) -> None:
    """Tell the state of the tracked streams in each iteration, before anything is drawn, and then draw."""
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job):
                states = get_cuda_rng_tracker().get_states()
                send(("before", job.iteration, job.layout.coordinate, {k: v.clone() for k, v in states.items()}))
                job = elastic.resize(job) or elastic.start()
                continue
            states = get_cuda_rng_tracker().get_states()
            send(("in", job.iteration, job.layout.coordinate, {k: v.clone() for k, v in states.items()}))
            draw()
            with elastic.commit_step(job):
                pass


def derived(origin: torch.Tensor, stream: str, change: int, home: str) -> torch.Tensor:
    """The documented derivation, written down once more."""
    text = b"shardshift rng\0" + origin.numpy().tobytes() + f"\0tracker:{stream}\0change {change}\0{home}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(seed).get_state()


def test_tensor_ranks_that_come_and_go_have_derived_streams_and_the_first_goes_on() -> None:
    scenario = Scenario(small(5), "tp1dp2", {1: "tp2dp2", 2: "tp1dp2", 3: "tp2dp1", 4: "tp1dp1"})
    before: dict[int, Streams] = {}
    found: dict[int, dict[tuple[int, int], Streams]] = {}
    for _, (when, iteration, at, states) in run_processes(4, tell_streams, scenario):
        if when == "before" and (at.tp, at.dp) == (0, 0):
            before[iteration] = states
        if when == "in":
            found.setdefault(iteration, {})[at.tp, at.dp] = states
    alone = {
        iteration: states
        for _, (_, iteration, at, states) in run_processes(1, tell_streams, Scenario(small(5), "tp1", {}))
    }
    for iteration, by_rank in found.items():
        for (tp, dp), states in by_rank.items():
            for stream in TRACKED:
                state = states[stream]
                assert torch.equal(state, by_rank[tp, 0][stream]), "replicas are alike"
                if tp == 0 or stream in SHARED:
                    assert torch.equal(state, alone[iteration][stream])
                else:
                    home = f"pp0 ep0 etp{tp}" if stream == "expert-parallel-rng" else f"pp0 tp{tp}"
                    assert torch.equal(state, derived(before[iteration][stream], stream, iteration, home))
                    assert not torch.equal(state, by_rank[0, dp][stream])
    for stream in ("model-parallel-rng", "expert-parallel-rng"):
        assert not torch.equal(found[1][1, 0][stream], found[3][1, 0][stream]), "each change has its own"
    from_the_seed = {
        at.tp: states
        for _, (_, iteration, at, states) in run_processes(2, tell_streams, Scenario(small(1), "tp2dp1", {}))
    }
    for iteration in (1, 3):
        assert not torch.equal(found[iteration][1, 0]["model-parallel-rng"], from_the_seed[1]["model-parallel-rng"])


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
