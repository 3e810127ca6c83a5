"""What cannot be carried is refused by name before anything moves, and the job trains on as if nobody had asked."""

from collections.abc import Callable
from typing import Any

import megatron.core.num_microbatches_calculator as calculator
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.megatron import models
from tests.megatron.harness import Scenario, Send, initialise, nothing, open_session, run_processes, small, start_alone

from shardshift import Infeasible, Mismatch, ParallelConfig, Script, ShardshiftError, Unaccounted
from shardshift.adapters.megatron import Adapter, Job
from shardshift.adapters.megatron.build import refuse_unknown
from shardshift.demo import oracle
from shardshift.demo.model import Recipe, make_adapter, optimizer_step, train_step
from shardshift.demo.text import Corpus

Refusal = tuple[type[ShardshiftError], str]


def train_refused(send: Send, scenario: Scenario) -> None:
    """Train, ask for each change once, and tell what was raised and every loss and bit of state around it."""
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        refused: set[int] = set()
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job) and job.iteration not in refused:
                refused.add(job.iteration)
                scenario.before(job)
                before = tensors(job)
                try:
                    elastic.resize(job)
                except ShardshiftError as error:
                    untouched = all(oracle.same_bits(a, b) for a, b in zip(before, tensors(job), strict=True))
                    send(("refused", job.iteration, error.to_wire(), untouched))
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            if loss is not None:
                send(("loss", job.iteration, loss))


def tensors(job: Job) -> list[torch.Tensor]:
    parts = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    states = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
    parameters = [parameter.detach() for chunk in job.model for parameter in chunk.parameters()]
    return [t.clone() for t in (*parameters, *states) if isinstance(t, torch.Tensor)]


def check_refused(scenario: Scenario, expected: dict[int, Refusal], devices: int) -> None:
    """Every rank that trains hears the same refusal, nothing is touched, and training goes on to its end."""
    refusals: dict[int, list[str]] = {}
    losses = set()
    for _, message in run_processes(devices, train_refused, scenario):
        match message:
            case ("loss", int(iteration), float()):
                losses.add(iteration)
            case ("refused", int(iteration), str(wire), bool(untouched)):
                assert untouched
                refusals.setdefault(iteration, []).append(wire)
    assert losses == set(range(1, scenario.recipe.steps + 1))
    assert refusals.keys() == expected.keys()
    for iteration, (kind, text) in expected.items():
        errors = [ShardshiftError.from_wire(wire) for wire in refusals[iteration]]
        assert len(errors) == ParallelConfig.parse(scenario.start).world_size
        assert {(type(error), str(error)) for error in errors} == {(kind, str(errors[0]))}
        for words in text.split(" ... "):
            assert words in str(errors[0])
        assert "what to do" in str(errors[0]).lower()


def test_layouts_that_the_model_the_batch_or_the_devices_cannot_take() -> None:
    refused = {
        1: ("tp3", "4 attention heads ... tp 3"),
        2: ("tp4", "2 query groups ... tp 4"),
        3: ("pp3", "pp3tp1"),
        4: ("pp2tp2dp2", "needs 8 devices, there are 4"),
        5: ("dp3", "global batch of 8 ... dp 3"),
    }
    changes = {iteration: config for iteration, (config, _) in refused.items()}
    scenario = Scenario(small(7, query_groups=2), "tp2", changes)
    check_refused(scenario, {iteration: (Infeasible, text) for iteration, (_, text) in refused.items()}, 4)


def test_an_axis_that_is_not_known() -> None:
    with pytest.raises(Infeasible, match=r"unknown axis 'zz' .* known axes: pp, tp, dp"):
        Script({1: "pp2zz2"})


@pytest.mark.parametrize("others", ["vpp2", "cp2", "ep2", "etp1", "vpp2cp2"])
def test_an_axis_that_the_adapter_does_not_carry(others: str) -> None:
    def untouched(*_: object) -> Any:
        raise AssertionError("the model is built before the axes are looked at")

    adapter = Adapter(untouched, untouched, global_batch_size=1, micro_batch_size=8)
    with pytest.raises(Infeasible, match=f"pp, tp and dp alone, not {others}; what to do"):
        adapter.check(ParallelConfig.parse(f"pp2tp2dp2{others}"))


def add_a_buffer(job: Job) -> None:
    chunk: Any = job.model[0]
    chunk.module.decoder.register_buffer("expert_bias", torch.ones(3))


def add_a_parameter(job: Job) -> None:
    chunk: Any = job.model[0]
    chunk.module.decoder.scale = torch.nn.Parameter(torch.ones(3))


def freeze_a_parameter(job: Job) -> None:
    chunk: Any = job.model[0]
    chunk.module.decoder.final_layernorm.weight.requires_grad = False


def train_another_parameter(job: Job) -> None:
    base = job.optimizer.chained_optimizers[0].optimizer
    base.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3, 5)))


def keep_a_function_in_a_group(job: Job) -> None:
    job.optimizer.chained_optimizers[0].optimizer.param_groups[0]["schedule"] = torch.optim.Adam


def ramp_up_the_batch(job: Job) -> None:
    calculator.init_num_microbatches_calculator(job.layout.rank, [4, 4, 8], 8, 1, job.config.dp)


def count_another_batch(job: Job) -> None:
    calculator.init_num_microbatches_calculator(job.layout.rank, None, 16, 1, job.config.dp)


SMALL = small(3, layers=1)
STATE: dict[str, tuple[Scenario, Refusal]] = {
    name: (Scenario(SMALL, "tp1", {1: "tp2"}, adapter=adapter, before=before), refusal)
    for name, adapter, before, refusal in [
        ("distributed optimizer", models.distributed_optimizer, nothing, (Unaccounted, "DistributedOptimizer")),
        ("bf16 with fp32 masters", models.bf16, nothing, (Unaccounted, "Float16OptimizerWithFloat16Params")),
        ("momentum of SGD", models.sgd_with_momentum, nothing, (Unaccounted, "SGD ... momentum_buffer")),
        ("amsgrad", models.amsgrad, nothing, (Unaccounted, "AdamW ... max_exp_avg_sq")),
        ("an optimizer of its own", models.adagrad, nothing, (Unaccounted, "Adagrad")),
        ("a buffer registered while training", make_adapter, add_a_buffer, (Unaccounted, "decoder.expert_bias")),
        ("extra state of a module", models.extra_state, nothing, (Unaccounted, "Counting")),
        ("a parameter added while training", make_adapter, add_a_parameter, (Mismatch, "decoder.scale")),
        (
            "a parameter frozen while training",
            make_adapter,
            freeze_a_parameter,
            (Mismatch, "final_layernorm.weight ... requires_grad"),
        ),
        ("a parameter outside the model", make_adapter, train_another_parameter, (Unaccounted, "(3, 5)")),
        ("a group's setting that is no value", make_adapter, keep_a_function_in_a_group, (Unaccounted, "groups")),
        ("a partition that is not declared", models.undeclared_partition, nothing, (Mismatch, "linear_fc1.weight")),
        (
            "a fused matrix cut across its parts",
            models.ffn_of_three,
            nothing,
            (Infeasible, "linear_fc1 ... 3 ... tp 2"),
        ),
        ("vocabulary's size not told", models.no_vocab_size, nothing, (Mismatch, "52 ... 56 ... vocab_size")),
        ("vocabulary's size too large", models.vocab_size_60, nothing, (Mismatch, "60 ... 52")),
        ("a batch that grows", make_adapter, ramp_up_the_batch, (Unaccounted, "RampupBatchsize")),
        ("a batch counted otherwise", make_adapter, count_another_batch, (Mismatch, "16 ... 8")),
    ]
}


@pytest.mark.parametrize(("scenario", "refusal"), STATE.values(), ids=STATE.keys())
def test_state_that_no_rule_covers(scenario: Scenario, refusal: Refusal) -> None:
    check_refused(scenario, {1: refusal}, 2)


def start_only(send: Send, scenario: Scenario) -> None:
    """Start, and tell the error that came instead."""
    try:
        start_alone(scenario.make(), scenario.start, "start")
    except ShardshiftError as error:
        send(error.to_wire())


@pytest.mark.parametrize(
    ("adapter", "name"),
    [(models.buffer, "expert_bias (buffer)"), (models.experts, "(expert parameter)")],
    ids=["buffer", "experts"],
)
def test_a_model_that_cannot_be_carried_does_not_start(adapter: Callable[[Recipe, Corpus], Adapter], name: str) -> None:
    refused_at_start(adapter, name)


def test_features_whose_state_no_rule_covers_do_not_start() -> None:
    settings = {
        "num_moe_experts": 4,
        "mtp_num_layers": 1,
        "multi_latent_attention": True,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    for setting, value in settings.items():
        chunk = FakeChunk(setting, value)
        with pytest.raises(Unaccounted, match=f"{setting}={value}"):
            refuse_unknown([chunk])


class FakeChunk(torch.nn.Module):
    """A model chunk of which only the configuration matters."""

    def __init__(self, setting: str, value: object) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
        setattr(self.config, setting, value)


def refused_at_start(adapter: Callable[[Recipe, Corpus], Adapter], name: str) -> None:
    sent = run_processes(1, start_only, Scenario(SMALL, "tp1", {}, adapter=adapter))
    error = ShardshiftError.from_wire(sent[0][1])
    assert isinstance(error, Unaccounted)
    assert name in str(error)
