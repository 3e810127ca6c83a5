"""What real optimizers keep beside elements: groups, steps, rates; state that is not there yet, or of another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.test_companions import steps_in_groups
from tests.megatron import training as jobs
from tests.megatron.harness import check, small, walk
from tests.megatron.models import NoSchedule
from tests.megatron.test_cases_numbers import TINY, Tour, check_numbers, number, seen
from tests.megatron.training import training

from shardshift import Mismatch, ParallelConfig, Unaccounted
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo import held
from shardshift.demo.text import Corpus


def wrapped_with(change: Callable[[Any, Any], Any], recipe: Any, corpus: Corpus) -> Adapter:
    """The adapter of ``training``, with the optimizer changed after it is made; ``change`` may give a scheduler."""

    def wrap(chunks: Any, layout: Any) -> Any:
        model, optimizer, scheduler = jobs.wrap(recipe, chunks, layout)
        return model, optimizer, change(optimizer, layout) or scheduler

    return Adapter(
        build_model=lambda layout: jobs.build_model(recipe, layout),
        wrap=wrap,
        data=lambda layout, position: jobs.micro_batches(corpus, layout, position),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size,
    )


def norms_learn_twice_as_fast(recipe: Any, corpus: Corpus) -> Adapter:
    """Groups without decay have twice the rate; on odd stages, and where there is one, groups are in reverse order."""

    def change(optimizer: Any, layout: Any) -> None:
        for part in (part for part in held.parts(optimizer) if part.optimizer is not None):
            for group in part.optimizer.param_groups:
                if group["wd_mult"] == 0:
                    group["max_lr"], group["min_lr"] = 2 * recipe.learning_rate, 0.2 * recipe.learning_rate
            if layout.coordinate.pp % 2 or layout.config.pp == 1:
                part.optimizer.param_groups.reverse()

    return wrapped_with(change, recipe, corpus)


def test_norms_keep_their_rate_and_no_decay_whatever_the_order_of_groups_on_a_stage(tmp_path: Path) -> None:
    """One stage has the embedding alone, one no parameters: their groups are empty."""
    stages = (((4, 1), "E|t||tL"),)
    scenario = replace(
        walk("pp2", "pp1", "pp4", "pp2tp2", tied=False, stages=stages, **TINY | {"layers": 2}),
        adapter=norms_learn_twice_as_fast,
    )
    outcome = check(scenario, tmp_path)
    for records in outcome.after.values():
        for record in records.values():
            rates = {name: (values["wd_mult"], values["lr"]) for name, values in record["settings"].items()}
            slow, fast = ({lr for mult, lr in rates.values() if mult == wanted} for wanted in (1.0, 0.0))
            assert len(slow) <= 1
            assert len(fast) <= 1
            if slow and fast:
                assert fast.pop() == pytest.approx(2 * slow.pop())
            assert all(mult == 0 for name, (mult, _) in rates.items() if "norm" in name)


def many_steps_but_none_where_the_group_is_empty(job: Job) -> None:
    if job.generation:
        return
    for group in job.optimizer.param_groups:
        group.pop("step", None)
        if group["params"]:
            group["step"] = 2640


def other_steps_on_the_second_stage(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["step"] = 2640 + job.layout.coordinate.pp


def other_rates_on_the_second_stage(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = 0.1 * (1 + job.layout.coordinate.pp)


def groups_of(job: Job) -> list[tuple[Any, bool]]:
    return [(group.get("step"), bool(group["params"])) for group in job.optimizer.param_groups]


STEPS = replace(small(1, layers=2, vocab_size=64), shape=small(1, layers=2, vocab_size=64, tied=False).shape)
SPLIT = replace(STEPS, shape=replace(STEPS.shape, layer_split=((0, 1, 1, 0),)))


def test_every_group_knows_the_step_also_where_it_was_empty(tmp_path: Path) -> None:
    """Steps lie in groups, as Apex keeps them; the first of four stages has an embedding and no norm."""
    before = many_steps_but_none_where_the_group_is_empty
    found = seen(Tour(SPLIT, ("pp4", "pp1", "pp4", "dp4", "pp2"), steps_in_groups, before, groups_of), tmp_path)  # type: ignore[arg-type]
    assert found.refused == {}
    assert {len(told) for told in found.told.values()} == {1, 4, 2}
    said = [groups for told in found.told.values() for groups in told.values()]
    assert {step for groups in said for step, _ in groups} == {2640}
    assert any(not full for groups in said for _, full in groups), "some groups are empty"


@pytest.mark.parametrize(
    ("recipe", "adapter", "before", "text"),
    [
        (STEPS, steps_in_groups, other_steps_on_the_second_stage, "2641"),
        (training(1, **TINY | {"layers": 2, "tied": False}), None, other_rates_on_the_second_stage, "differ in ['lr']"),
    ],
    ids=["steps", "rates"],
)
def test_stages_whose_groups_differ_are_refused_where_they_meet_before_anything_moves(
    recipe: Any, adapter: Any, before: Any, text: str, tmp_path: Path
) -> None:
    found = seen(Tour(recipe, ("pp2", "pp1"), adapter or rates_without_a_schedule, before), tmp_path)
    assert len(found.refused[1]) == 2
    for error in found.refused[1]:
        assert isinstance(error, Mismatch)
        assert text in str(error)
    assert not found.touched


def rates_without_a_schedule(recipe: Any, corpus: Corpus) -> Adapter:
    return wrapped_with(lambda optimizer, layout: NoSchedule(), recipe, corpus)


def halve_the_rate_once(job: Job) -> None:
    for index, group in enumerate(job.optimizer.param_groups):
        if not job.generation:
            group["lr"] = torch.tensor(0.5) if index else 0.5


def rates(job: Job) -> list[tuple[bool, Any]]:
    return [(isinstance(group["lr"], torch.Tensor), float(group["lr"])) for group in job.optimizer.param_groups]


@pytest.mark.parametrize("settings", [{}, {"distributed": True, "precision": "bf16"}], ids=["whole", "ZeRO-1"])
def test_replicas_that_join_have_the_rate_of_now(settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = training(1, **TINY, **settings)
    configs = ("dp1", "dp2", "tp2dp2", "dp4")
    found = seen(Tour(recipe, configs, rates_without_a_schedule, halve_the_rate_once, rates), tmp_path)
    assert found.refused == {}
    for told in found.told.values():
        for said in told.values():
            assert sorted(said) == [(False, 0.5), (True, 0.5)]


def stale_where_there_are_two_replicas(recipe: Any, corpus: Corpus) -> Adapter:
    """The new optimizer comes with state of its own: as after a load, or a step that warms it up."""

    def change(optimizer: Any, layout: Any) -> None:
        for part in held.parts(optimizer) if layout.config.dp == 2 else ():
            for group in part.optimizer.param_groups:
                for key in group["params"]:
                    moments = {kind: torch.full_like(key, 7.0) for kind in ("exp_avg", "exp_avg_sq")}
                    part.optimizer.state[key] = {"step": torch.tensor(9.0), **moments}

    return wrapped_with(change, recipe, corpus)


def states(job: Job) -> tuple[int, set[float]]:
    found = [state for part in held.parts(job.optimizer) for state in part.optimizer.state.values()]
    return sum(bool(state) for state in found), {float(state["step"]) for state in found if state}


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"distributed": True}, {"distributed": True, "precision": "bf16"}],
    ids=["fp32", "bf16", "ZeRO-1 of fp32", "ZeRO-1 of bf16"],
)
def test_moments_are_made_and_filled_and_stale_ones_are_cleared(settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = training(1, **TINY, **settings)
    make = stale_where_there_are_two_replicas
    untrained = seen(Tour(recipe, ("dp1", "dp2", "tp2dp2", "dp4"), make, tell=states, train=False), tmp_path / "0")
    assert untrained.refused == {}
    assert [said for told in untrained.told.values() for said in told.values()] == [(0, set())] * 10
    trained = seen(Tour(recipe, ("dp1", "dp2", "dp4", "tp2dp2"), make, number, states), tmp_path / "1")
    assert trained.refused == {}
    for generation, told in trained.told.items():
        assert {step for _, steps in told.values() for step in steps} == {1.0}
        assert all(count for count, _ in told.values())
        check_numbers(trained.records[generation], 16)


def quantised(job: Job) -> None:
    """Moments as bytes with a scale of each block of four."""
    for part in held.parts(job.optimizer):
        for state in part.optimizer.state.values():
            blocks = -(-state["exp_avg"].numel() // 4)
            state["exp_avg"] = state["exp_avg"].to(torch.int8)
            state["exp_avg_scale"] = torch.ones(blocks)


def bytes_alone(job: Job) -> None:
    for part in held.parts(job.optimizer):
        for state in part.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(torch.int8)


def half_as_long(job: Job) -> None:
    """What a rank would keep of a tensor of which it has one of two shards."""
    for part in held.parts(job.optimizer):
        for state in part.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"][: len(state["exp_avg"]) // 2]


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "ZeRO-1"])
@pytest.mark.parametrize(
    ("before", "kind", "text"),
    [(quantised, Unaccounted, "exp_avg_scale"), (bytes_alone, Mismatch, "int8"), (half_as_long, Mismatch, "exp_avg")],
)
def test_state_of_another_form_than_its_parameter_is_refused(
    distributed: bool, before: Any, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    found = seen(Tour(training(1, distributed=distributed, **TINY), ("dp2", "dp1"), before=before), tmp_path)
    assert len(found.refused[1]) == ParallelConfig.parse("dp2").world_size
    for error in found.refused[1]:
        assert type(error) is kind, error
        assert text in str(error)
    assert not found.touched
