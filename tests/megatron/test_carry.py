"""State that is not tensors by region, through changes of a real job: held against the same job left alone."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import megatron.core.num_microbatches_calculator as calculator
import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, Send, initialise, open_session, run_processes
from tests.megatron.training import training

from shardshift import Mismatch, ParallelConfig, Unaccounted
from shardshift.adapters.megatron import Adapter, Job
from shardshift.adapters.megatron.job import unwrapped
from shardshift.demo.text import Corpus


class Recorder(torch.nn.Module):
    """Has extra state of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Decay(torch.nn.Module):
    """A parameter, and what follows from it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        self.after_move()

    def after_move(self) -> None:
        self.cached = -torch.exp(self.A_log.detach())


def with_parts(chunk: Any) -> Any:
    inside: Any = unwrapped([chunk])[0]
    for layer in inside.decoder.layers:
        layer.add_module("recorder", Recorder())
        layer.add_module("decay", Decay(next(layer.parameters()).dtype))
    return chunk


def rich_adapter(recipe: Any, corpus: Corpus) -> Adapter:
    return Adapter(
        build_model=lambda layout: [with_parts(chunk) for chunk in jobs.build_model(recipe, layout)],
        wrap=lambda chunks, layout: jobs.wrap(recipe, chunks, layout),
        data=lambda layout, position: jobs.micro_batches(corpus, layout, position),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size,
        after_move=lambda job: job.counters.update(hooked=job.generation),
    )


STATES: Sequence[Any] = (b"", torch.arange(4, dtype=torch.uint8), io.BytesIO(b"\x80\x04scales"), None)
RAMP = [4, 4, 8]


def layers_of(job: Job) -> dict[int, Any]:
    chunks: list[Any] = list(unwrapped(job.model))
    return {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}


def plain(state: Any) -> Any:
    return ("stream", state.getvalue()) if isinstance(state, io.BytesIO) else state


def tell(job: Job) -> dict[str, Any]:
    """What has to be the same on every rank, whatever the layout."""
    parts = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    scales = {str(sorted(part.grad_scaler.state_dict().items())) for part in parts}
    assert len(scales) == 1
    groups = {
        (group["wd_mult"], float(group["lr"]), float(group["weight_decay"])) for group in job.optimizer.param_groups
    }
    sizes = calculator.get_current_global_batch_size(), calculator.get_num_microbatches() * job.config.dp
    counters = {name: value for name, value in job.counters.items() if name != "hooked"}
    position = job.position.consumed_samples, job.position.global_batch_size
    return {"scale": scales.pop(), "groups": groups, "sizes": sizes, "counters": counters, "position": position}


def train_and_tell(send: Send, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    calculator.unset_num_microbatches_calculator()
    with open_session(scenario) as elastic:
        config = ParallelConfig.parse(scenario.start)
        if int(os.environ["RANK"]) < config.world_size:  # who joins later has no calculator
            calculator.init_num_microbatches_calculator(1, RAMP, scenario.recipe.global_batch_size, 1, config.dp)
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job):
                job = elastic.resize(job) or elastic.start()
                if job:
                    send(("arrived", job.generation, job.counters["hooked"]))
                continue
            for number, layer in layers_of(job).items():
                if job.iteration == 0:
                    layer.recorder.state = STATES[number]
                    torch.nn.init.constant_(layer.decay.A_log, float(number))
                    layer.decay.after_move()
                else:
                    now = (plain(layer.recorder.state), torch.equal(layer.decay.cached, layer.decay.A_log.exp().neg()))
                    send(("layer", job.iteration, number, now))
            send(("tell", job.iteration, job.layout.rank, tell(job)))
            jobs.train_step(job)
            job.counters["consumed_valid_samples"] = 3 * job.iteration
            job.counters["floating_point_operations"] = 2**70 + job.iteration
            with elastic.commit_step(job):
                jobs.optimizer_step(job)
            for layer in layers_of(job).values():
                layer.decay.after_move()


def told(start: str, changes: dict[int, str], **settings: Any) -> tuple[dict[int, Any], dict[Any, Any], list[Any]]:
    recipe = training(5, layers=4, precision="fp16", loss_scale=2.0**40, global_batch_size=8, **settings)
    scenario = Scenario(recipe, start, changes, rich_adapter)
    whole: dict[int, list[Any]] = {}
    layers: dict[Any, Any] = {}
    arrived = []
    for _, message in run_processes(scenario.devices, train_and_tell, scenario):
        match message:
            case ("tell", int(iteration), _, now):
                whole.setdefault(iteration, []).append(now)
            case ("layer", int(iteration), int(number), now):
                layers.setdefault((iteration, number), []).append(now)
            case other:
                arrived.append(other)
    for each in whole.values():
        assert all(one == each[0] for one in each), "all ranks hold it alike"
    return {iteration: each[0] for iteration, each in whole.items()}, layers, arrived


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "ZeRO-1"])
def test_scale_groups_batches_counts_extra_state_and_caches_go_on_as_if_nothing_had_been(distributed: bool) -> None:
    changes = {1: "pp2tp1dp2", 3: "pp1tp2dp1"}
    moved, layers, arrived = told("pp1tp1dp2", changes, distributed=distributed)
    alone, _, _ = told("pp1tp1dp1", {}, distributed=distributed)
    assert moved == alone
    assert len({now["scale"] for now in alone.values()}) > 2, "the scale has moved meanwhile"
    assert [now["position"] for now in alone.values()] == [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8)]
    assert sorted(set(arrived)) == [("arrived", 1, 1), ("arrived", 2, 2)]
    for (_, number), each in layers.items():
        for state, fresh in each:
            assert fresh, "the cache is that of the parameter"
            assert type(state) is type(plain(STATES[number]))
            assert torch.equal(state, STATES[number]) if number == 1 else state == plain(STATES[number])


def refused_change(send: Send, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job):
                scenario.before(job)
                try:
                    job = elastic.resize(job) or elastic.start()
                except (Mismatch, Unaccounted) as error:
                    send((type(error), str(error)))
                    return
                continue
            jobs.train_step(job)
            with elastic.commit_step(job):
                jobs.optimizer_step(job)


def rate_of_one_replica(job: Job) -> None:
    if job.layout.coordinate.dp == 1:
        for group in job.optimizer.param_groups:
            group["lr"] = 0.5


def a_count_of_one_rank(job: Job) -> None:
    job.counters["skipped_samples"] = job.layout.rank


def a_count_that_is_no_number(job: Job) -> None:
    job.counters["note"] = "x"  # type: ignore[assignment]


def extra_state_by_tensor_rank(job: Job) -> None:
    for layer in layers_of(job).values():
        layer.recorder.state = bytes([job.layout.coordinate.tp])


def scales_that_disagree(job: Job) -> None:
    if job.layout.coordinate.tp == 1:
        parts = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
        parts[0].grad_scaler._growth_tracker += 1


@pytest.mark.parametrize(
    ("before", "kind", "text"),
    [
        (rate_of_one_replica, Mismatch, "lr of param group 0"),
        (a_count_of_one_rank, Mismatch, "counter skipped_samples"),
        (a_count_that_is_no_number, Unaccounted, "counter note is a str"),
        (extra_state_by_tensor_rank, Mismatch, "extra state of decoder.layers.0.recorder differs over tp"),
        (scales_that_disagree, Mismatch, "two grad scalers of dense parameters"),
    ],
)
def test_what_ranks_hold_otherwise_than_they_should_is_refused_by_name_on_all(
    before: Any, kind: type[Exception], text: str
) -> None:
    recipe = training(3, precision="fp16")
    scenario = Scenario(recipe, "pp1tp2dp2", {1: "pp1tp1dp2"}, rich_adapter, before=before)
    found = [message for _, message in run_processes(scenario.devices, refused_change, scenario)]
    assert len(found) == 4
    assert all(error is kind and text in message for error, message in found), found
