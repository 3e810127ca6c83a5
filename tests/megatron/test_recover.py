"""A Megatron job outlives lost ranks, wherever they are lost: what is left is a change of layout, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron.losing import ANY, Fault, Outcome, Run, play, survivors
from tests.megatron.training import training

from shardshift import ParallelConfig, StateLost
from shardshift.demo import oracle

STEPS = 6


def calm_of(run: Run, lossy: Outcome) -> Run:
    """The same training with the changes that the losses led to, and no loss."""
    made = {generation: jobs[0][2:] for generation, jobs in lossy.jobs.items()}
    changes = tuple(made.get(number) or run.changes[number - 1] for number in range(1, max(made) + 1))
    return Run(run.recipe, run.start, run.devices, changes=changes)


def read(folder: Path) -> list[dict[str, Any]]:
    ranks = oracle.read_ranks(folder)
    return [rank | torch.load(folder / f"more{rank['rank']}.pt", weights_only=True) for rank in ranks]


def assert_goes_on_like_a_change(run: Run, folder: Path) -> Outcome:
    """The run, and the calm one; state by the oracle, all that goes along, and losses are the same bit for bit."""
    lossy = play(run, folder / "lossy")
    assert lossy.errors == {}
    assert lossy.ends == survivors(run)
    calm = play(calm_of(run, lossy), folder / "calm")
    assert (calm.errors, calm.ends) == ({}, {*range(run.devices)})
    for generation in [*lossy.jobs, None]:
        name = "end" if generation is None else f"after{generation}"
        found, expected = (read(folder / which / name) for which in ("lossy", "calm"))
        states = [oracle.assemble(records) for records in (found, expected)]
        assert oracle.differences(*states) == [], name
        if generation in calm.jobs and (folder / "calm" / f"before{generation}").exists():
            before = oracle.assemble(read(folder / "calm" / f"before{generation}"))
            assert oracle.differences(before, states[0]) == [], name
        for mine, theirs in zip(found, expected, strict=True):
            for key in mine.keys() - {"tensors", "streams"}:
                assert mine[key] == theirs[key], f"{key} of rank {mine['rank']}, {name}"
    assert {at: lossy.losses.get(at) for at in calm.losses} == calm.losses
    return lossy


def where_it_went_on(outcome: Outcome) -> list[tuple[tuple[int, ...], int, str]]:
    """Of each recovery who was lost, at which iteration and as what; all that took part tell the same."""
    longest = max(outcome.recovered.values(), key=len)
    for told in outcome.recovered.values():
        assert [one for one in longest if one in told] == told
    return longest


def test_replicas_are_lost_one_by_one_before_the_step_and_after_and_rank_0_among_them(tmp_path: Path) -> None:
    faults = Fault(2, "forward", 1), Fault(0, "gate", 2), Fault(3, "passed", 4)
    run = Run(training(STEPS, global_batch_size=12, dropout=0.1), "dp4", 4, faults)
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert told == [((2,), 1, "pp1tp1dp3"), ((0,), 2, "pp1tp1dp2"), ((3,), 5, "pp1tp1dp1")]


def test_ranks_are_lost_in_the_middle_of_an_optimizer_step(tmp_path: Path) -> None:
    """The first while others wait for it there: these go back, and who was done with the step does, too."""
    faults = Fault(3, "passed", 1), Fault(0, "uncopied", 2), Fault(2, "copied", 4)
    run = Run(training(STEPS, global_batch_size=6, dropout=0.1, precision="bf16"), "pp2tp1dp2", 4, faults)
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert told == [((3,), 1, "pp1tp1dp3"), ((0,), 3, "pp1tp1dp2"), ((2,), 5, "pp1tp1dp1")]


def test_ranks_are_lost_in_changes_of_layout(tmp_path: Path) -> None:
    """As the new job is built: all have the new state; in the move and before the commit: all have the old one."""
    faults = Fault(0, "build", 1), Fault(3, "move", 3), Fault(2, "commit", 5)
    changes = (1, "pp2tp1dp2"), (-1, "dp1"), (3, "pp1tp2dp2"), (5, "pp1tp2dp1")
    run = Run(training(STEPS + 1, global_batch_size=6, dropout=0.1), "pp1tp2dp2", 5, faults, changes)
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert told == [((0,), 1, "pp2tp1dp2"), ((3,), 3, "pp1tp1dp3"), ((2,), 5, "pp1tp1dp2")]


def test_experts_live_on_in_the_replicas_that_have_them(tmp_path: Path) -> None:
    recipe = training(STEPS, experts=4, biases=False, expert_bias=True)
    told = where_it_went_on(assert_goes_on_like_a_change(Run(recipe, "dp4ep2", 4, (Fault(0, "normed", 1),)), tmp_path))
    assert told == [((0,), 2, "pp1tp1dp2ep2")]


@pytest.mark.alone
def test_a_rank_that_stops_is_given_up(tmp_path: Path) -> None:
    fault = Fault(1, "forward", 2, signal.SIGSTOP)
    run = Run(training(4, dropout=0.1), "pp2tp1dp2", 4, (fault,), timeout_s=5.0)
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert told == [((1,), 2, "pp2tp1dp1")]


ONE_HOLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO-1": ("dp2", {"distributed": True, "precision": "bf16", "overlap": True, "bucket_size": 600}),
    "experts": ("dp2ep2", {"experts": 4, "biases": False}),
}


@pytest.mark.parametrize("job", ONE_HOLDER)
def test_state_with_one_holder_is_lost_with_it_and_named_on_all_survivors(job: str, tmp_path: Path) -> None:
    start, settings = ONE_HOLDER[job]
    devices = 3  # one stands by
    outcome = play(Run(training(4, **settings), start, devices, (Fault(1, "forward", 2),)), tmp_path)
    lost = outcome.errors[0]
    assert isinstance(lost, StateLost)
    if job == "ZeRO-1":
        assert {name.partition(":")[0] for name in lost.names} == {"fp32_master", "exp_avg", "exp_avg_sq"}
    else:
        assert {name.partition(".local_experts.")[2].partition(".")[0] for name in lost.names} == {"2", "3"}


ZERO_1: dict[str, Any] = {"distributed": True, "global_batch_size": 12, "dropout": 0.1}


def test_with_copies_the_distributed_optimizer_outlives_losses_in_its_step(tmp_path: Path) -> None:
    """Its gradient norm and its gather are over data parallel ranks: survivors wait there, with half of a step."""
    faults = Fault(2, "copied", 1), Fault(0, "passed", 2), Fault(3, "forward", 3)
    run = Run(training(STEPS, **ZERO_1), "dp4", 4, faults, settings={"shard_copies": 1})
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert told == [((2,), 1, "pp1tp1dp3"), ((0,), 2, "pp1tp1dp2"), ((3,), 3, "pp1tp1dp1")]


def test_with_copies_it_outlives_losses_in_the_gather_of_the_next_forward_and_in_a_change(tmp_path: Path) -> None:
    faults = Fault(1, "gathered", 1), Fault(0, "build", 3), Fault(2, "gate", 4)
    recipe = training(STEPS, **ZERO_1 | {"global_batch_size": 6}, precision="bf16", overlap=True, bucket_size=600)
    changes = (-1, "dp1"), (3, "pp1tp1dp2")
    run = Run(recipe, "pp2tp1dp2", 4, faults, changes, settings={"shard_copies": 1})
    told = where_it_went_on(assert_goes_on_like_a_change(run, tmp_path))
    assert [who for who, _, _ in told] == [(1,), (0,), (2,)]
    assert told[0][1] in (0, 1)


def by_two(devices: Sequence[int]) -> ParallelConfig:
    return ParallelConfig(dp=2)


def test_losses_leak_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    """Device 0 sees each partner go, another place of the step each time; who stood by takes the place."""
    losses = 8
    places = ("forward", "gate", "passed", "committed")
    faults = tuple(Fault(ANY, places[generation % 4], generation) for generation in range(losses))
    recipe = training(losses + 3, precision="bf16", overlap=True, bucket_size=600)
    run = Run(recipe, "dp2", losses + 2, faults, settings={"layouts": by_two}, counts=True)
    outcome = play(run, tmp_path)
    assert outcome.errors == {}
    assert len(outcome.recovered[0]) == losses
    last_of = {generation: numbers for generation, *numbers in outcome.counts[0]}
    assert [*last_of] == [*range(1, losses + 1)]
    threads, descriptors = zip(*last_of.values(), strict=True)
    assert min(threads[-3:]) <= min(threads[:4]), last_of  # one that has just ended may still be listed
    assert min(descriptors[-3:]) <= min(descriptors[:4]), last_of
