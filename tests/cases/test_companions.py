"""Steps and settings of real optimizers: those of another convention, those that disagree, those changed on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.megatron import models
from tests.megatron.harness import Scenario, Send, initialise, open_session, run_processes, small
from tests.megatron.test_refusals import train_refused

from shardshift import Mismatch, ShardshiftError
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo import model as demo
from shardshift.demo import oracle
from shardshift.demo.model import Recipe, train_step
from shardshift.demo.text import Corpus


class FusedAdam(torch.optim.Optimizer):
    """Adam that counts its steps in its groups, as Apex's does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - second)
                mean, square = (
                    state[kind] / (1 - beta ** group["step"])
                    for kind, beta in (("exp_avg", first), ("exp_avg_sq", second))
                )
                parameter.addcdiv_(mean, square.sqrt() + group["eps"], value=-float(group["lr"]))


def steps_in_groups(recipe: Recipe, corpus: Corpus) -> Adapter:
    def wrap(recipe: Recipe, chunks: models.Chunks) -> Any:
        wrapped, optimizer, scheduler = demo.wrap(recipe, chunks)
        for part in optimizer.chained_optimizers:
            part.optimizer = FusedAdam(part.optimizer.param_groups)
        return wrapped, optimizer, scheduler

    return models.adapter_of(recipe, corpus, wrap=wrap)


def rates_of_tensors(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Learning rates are tensors, which no schedule sets."""

    def wrap(recipe: Recipe, chunks: models.Chunks) -> Any:
        wrapped, optimizer, _ = demo.wrap(recipe, chunks)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-3)
        return wrapped, optimizer, models.NoSchedule()

    return models.adapter_of(recipe, corpus, wrap=wrap)


def plain_sgd(recipe: Recipe, corpus: Corpus) -> Adapter:
    settings = {"optimizer": "sgd", "sgd_momentum": 0.0}
    return models.adapter_of(recipe, corpus, wrap=models._with_optimizer(settings))


def halve_the_rates(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def train_twice(send: Send, scenario: Scenario) -> None:
    """Train with the change and without it; tell losses, and the groups' rates and steps at the end."""
    torch.set_num_threads(1)
    for name, played in (("changed", scenario), ("alone", replace(scenario, changes={}))):
        with open_session(played, name) as elastic:
            job = elastic.start(lambda job: initialise(scenario, job))
            while job and job.iteration < scenario.recipe.steps:
                if job.iteration == 2 and (name == "alone" or elastic.resize_due(job)):
                    scenario.before(job)
                if elastic.resize_due(job):
                    job = elastic.resize(job) or elastic.start()
                    continue
                loss = train_step(job)
                with elastic.commit_step(job):
                    job.optimizer.step()
                    job.scheduler.step(job.position.global_batch_size)
                if loss is not None and job.layout.coordinate.tp == 0:
                    send((name, "loss", job.iteration, loss))
            if job:
                send((name, "groups", [(float(g["lr"]), g.get("step")) for g in job.optimizer.param_groups]))


@pytest.mark.parametrize(
    ("adapter", "start", "to"),
    [(steps_in_groups, "pp2", "tp2"), (rates_of_tensors, "tp1", "pp2"), (plain_sgd, "tp2", "pp2")],
)
def test_updates_equal_those_of_a_job_left_alone_wherever_the_optimizer_keeps_its_step(
    adapter: Callable[[Recipe, Corpus], Adapter], start: str, to: str
) -> None:
    scenario = Scenario(
        small(4, layers=2, batch=1, vocab_size=64), start, {2: to}, adapter=adapter, before=halve_the_rates
    )
    losses: dict[str, dict[int, float]] = {"changed": {}, "alone": {}}
    groups: dict[str, set[str]] = {"changed": set(), "alone": set()}
    for _, message in run_processes(2, train_twice, scenario):
        match message:
            case (str(name), "loss", int(iteration), float(loss)):
                losses[name][iteration] = loss
            case (str(name), "groups", settings):
                groups[name].add(repr(settings))
    assert losses["changed"].keys() == losses["alone"].keys() == {1, 2, 3, 4}
    assert losses["changed"] == pytest.approx(losses["alone"], abs=2e-6)
    assert groups["changed"] == groups["alone"]
    assert len(groups["alone"]) == 1


def count_by(axis: str, job: Job) -> None:
    for part in job.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"].fill_(5.0 + getattr(job.layout.coordinate, axis))


def count_by_tensor_rank(job: Job) -> None:
    count_by("tp", job)


def count_by_stage(job: Job) -> None:
    count_by("pp", job)


@pytest.mark.parametrize(("start", "count"), [("tp2", count_by_tensor_rank), ("pp2", count_by_stage)])
def test_copies_of_one_parameter_at_different_steps_are_refused_on_all(
    start: str, count: Callable[[Job], None]
) -> None:
    """Of two stages the tied embedding alone has two copies."""
    scenario = Scenario(small(2, layers=2, batch=2), start, {1: "tp1"}, before=count)
    refused = [message for _, message in run_processes(2, train_refused, scenario) if message[0] == "refused"]
    assert len(refused) == 2
    for _, iteration, wire, untouched in refused:
        error = ShardshiftError.from_wire(wire)
        assert isinstance(error, Mismatch)
        assert "embedding.word_embeddings.weight: one copy is at optimizer step 5.0, another at 6.0" in str(error)
        assert (iteration, untouched) == (1, True)


def hold_other_norms(job: Job) -> None:
    """Tensor ranks, or replicas, hold different bits of what is one norm."""
    at = job.layout.coordinate
    for _, parameter, name in oracle.named_logical(job.model):
        if name == "decoder.final_layernorm.weight":
            parameter.data.fill_(1.0 + 2 * at.tp + at.dp)


@pytest.mark.parametrize(("start", "to"), [("tp2", "tp1"), ("dp2", "tp2")])
def test_copies_of_one_parameter_that_differ_are_refused(start: str, to: str) -> None:
    scenario = Scenario(small(2, layers=2, batch=2, vocab_size=64), start, {1: to}, before=hold_other_norms)
    refused = [message for _, message in run_processes(2, train_refused, scenario) if message[0] == "refused"]
    assert len(refused) == 2
    for _, iteration, wire, untouched in refused:
        error = ShardshiftError.from_wire(wire)
        assert isinstance(error, Mismatch)
        assert "decoder.final_layernorm.weight[0:16]: devices 0 and 1 hold different bits" in str(error)
        assert (iteration, untouched) == (1, True)
