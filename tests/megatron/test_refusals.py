"""What cannot be carried is refused by name before anything moves, and the job trains on as if nobody had asked."""

from collections.abc import Callable
from typing import Any

import megatron.core.num_microbatches_calculator as calculator
import pytest
import torch
from tests.megatron import models
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, Send, initialise, nothing, open_session, run_processes, small
from tests.megatron.training import training

from shardshift import Infeasible, Mismatch, ParallelConfig, Script, ShardshiftError, Unaccounted
from shardshift.adapters.megatron import Adapter, Job
from shardshift.adapters.megatron.job import RankLayout
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
        2: ("pp3", "pp3tp1"),
        3: ("pp2tp2dp2", "needs 8 devices, there are 4"),
        4: ("dp3", "global batch of 8 ... dp 3"),
    }
    changes = {iteration: config for iteration, (config, _) in refused.items()}
    scenario = Scenario(small(6, batch=8), "tp2", changes)
    check_refused(scenario, {iteration: (Infeasible, text) for iteration, (_, text) in refused.items()}, 4)


def test_an_axis_that_is_not_known() -> None:
    with pytest.raises(Infeasible, match=r"unknown axis 'zz' .* known axes: pp, tp, dp"):
        Script({1: "pp2zz2"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0, expected the number of samples"),
        ({"global_batch_size": -8}, "global_batch_size is -8"),
        ({"global_batch_size": 8.0}, r"global_batch_size is 8\.0"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"micro_batch_size": -2}, "micro_batch_size is -2"),
        ({"micro_batch_size": "2"}, "micro_batch_size is '2'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"extra_state": "frist"}, "unknown extra_state 'frist'"),
    ],
)
def test_an_adapter_is_refused_where_its_numbers_are_none(given: dict[str, Any], text: str) -> None:
    sizes: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2}
    with pytest.raises(Infeasible, match=f"^{text}.*what to do"):
        Adapter(lambda layout: [], lambda chunks, layout: (chunks, None, None), **sizes | given)


MOE = training(1, global_batch_size=8, experts=4, ffn=6, rms_norm=True, biases=False)


@pytest.mark.parametrize(
    ("recipe", "config", "text"),
    [
        (training(1), "pp1tp2dp1vpp2", "interleaved over stages"),
        (training(1), "pp1tp1dp2ep2", "no experts"),
        (training(1, heads=12, hidden=24, query_groups=4), "tp3", "4 query groups are not divisible by tp 3"),
        (MOE, "pp1tp1dp8ep8", "4 experts are not divisible by ep 8"),
        (MOE, "pp1tp1dp8ep2etp4", "6 rows of each part of an expert's linear_fc1 are not divisible by etp 4"),
        (training(1, layers=4), "pp2tp1dp1vpp3", "pp2tp1dp1vpp3"),
    ],
    ids=["chunks of one stage", "experts of a dense model", "query groups", "experts", "rows of experts", "chunks"],
)
def test_axes_that_the_model_cannot_take(recipe: Recipe, config: str, text: str) -> None:
    with pytest.raises(Infeasible, match=f"{text}.*what to do"):
        Scenario(recipe, config, {}).make().check(ParallelConfig.parse(config))


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


def count_another_batch(job: Job) -> None:
    calculator.init_num_microbatches_calculator(job.layout.rank, None, 16, 1, job.config.dp)


SMALL = small(3, layers=1)
STATE: dict[str, tuple[Scenario, Refusal]] = {
    name: (Scenario(SMALL, "tp1", {1: "tp2"}, adapter=adapter, before=before), refusal)
    for name, adapter, before, refusal in [
        ("a buffer registered while training", make_adapter, add_a_buffer, (Unaccounted, "decoder.expert_bias")),
        ("extra state of a module", models.extra_state, nothing, (Unaccounted, "Counting")),
        ("a parameter added while training", make_adapter, add_a_parameter, (Mismatch, "decoder.scale")),
        (
            "a parameter frozen while training",
            make_adapter,
            freeze_a_parameter,
            (
                Mismatch,
                "nothing was moved: the live model of rank 0 ... is not the one that build_model ... "
                "final_layernorm.weight ... requires_grad ... What to do",
            ),
        ),
        ("a parameter outside the model", make_adapter, train_another_parameter, (Unaccounted, "(3, 5)")),
        ("a group's setting that is no value", make_adapter, keep_a_function_in_a_group, (Unaccounted, "param group")),
        ("a partition that is not declared", models.undeclared_partition, nothing, (Mismatch, "linear_fc1.weight")),
        (
            "a fused matrix cut across its parts",
            models.ffn_of_three,
            nothing,
            (Infeasible, "linear_fc1 ... 3 ... tp 2"),
        ),
        ("vocabulary's size not told", models.no_vocab_size, nothing, (Mismatch, "52 ... 56 ... vocab_size")),
        ("vocabulary's size too large", models.vocab_size_60, nothing, (Mismatch, "60 ... 52")),
        ("a batch counted otherwise", make_adapter, count_another_batch, (Mismatch, "16 ... 4")),
    ]
}


@pytest.mark.parametrize(("scenario", "refusal"), STATE.values(), ids=STATE.keys())
def test_state_that_no_rule_covers(scenario: Scenario, refusal: Refusal) -> None:
    check_refused(scenario, {1: refusal}, 2)


def test_a_matrix_that_megatron_makes_on_a_stage_and_never_reads() -> None:
    """With a tied embedding and multi-token prediction the last of several stages has an output layer of its own."""
    adapter = Scenario(training(1, mtp=1), "pp2", {}).make()
    one, two = ParallelConfig(), ParallelConfig.parse("pp2")
    adapter.check(two)
    with pytest.raises(Mismatch, match=r"output_layer\.weight is in the model of this rank, but not in the same model"):
        adapter.change(one, two, kinds=())


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (models.experts, "layers.0.mlp.linear_fc1.weight is an expert parameter"),
        (models.adagrad, "optimizer Adagrad inside FP32Optimizer"),
    ],
    ids=["experts that are no modules of their own", "an optimizer of its own"],
)
def test_a_job_that_cannot_be_carried_does_not_start(adapter: Callable[[Recipe, Corpus], Adapter], text: str) -> None:
    with pytest.raises(Unaccounted, match=text):
        Scenario(SMALL, "tp1", {}, adapter=adapter).make().check(ParallelConfig())


def failing(where: str, error: Exception | None, gives: Callable[[list[Any]], Any] = list, pp: int = 2) -> Adapter:
    """An adapter of a small job one of whose functions raises, or gives something else, for so many stages."""
    recipe = training(1)
    corpus = jobs.corpus_of(recipe)

    def build(recipe: jobs.Training, layout: RankLayout) -> Any:
        if where == "build_model" and layout.config.pp == pp and error is not None:
            raise error
        chunks = jobs.build_model(recipe, layout)
        return gives(chunks) if layout.config.pp == pp else chunks

    def wrap(recipe: jobs.Training, chunks: Any, layout: RankLayout) -> Any:
        if where == "wrap" and layout.config.pp == pp and error is not None:
            raise error
        return jobs.wrap(recipe, chunks, layout)

    return jobs.make_adapter(recipe, corpus, build, wrap)


@pytest.mark.parametrize("where", ["build_model", "wrap"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NameError("name 'hiden' is not defined"), "NameError: name 'hiden' is not defined"),
        (TypeError("unexpected keyword 'hiden'"), "TypeError: unexpected keyword 'hiden'"),
        (AttributeError("no attribute 'ttp'"), "AttributeError: no attribute 'ttp'"),
        (KeyError("ttp"), "KeyError: 'ttp'"),
        (ModuleNotFoundError("No module named 'apex'"), "ModuleNotFoundError: No module named 'apex'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_in_the_jobs_own_functions_is_no_refusal_of_a_layout(where: str, error: Exception, text: str) -> None:
    said = f"{where} failed for pp2tp1dp1 \\(stage 0, on the meta device\\) with {text}, at {__file__}, line [0-9]+;"
    with pytest.raises(Mismatch, match=f"{said} nothing was moved. What to do: mend {where}, or") as raised:
        failing(where, error).check(ParallelConfig(pp=2))
    assert raised.value.__cause__ is error


def test_what_megatron_refuses_is_told_with_its_kind() -> None:
    with pytest.raises(Infeasible, match=r"pp2tp1dp1 \(stage 0, .*\): ValueError: 3 layers; .* divides the model"):
        failing("build_model", ValueError("3 layers")).check(ParallelConfig(pp=2))
    with pytest.raises(Infeasible, match="AssertionError without a text; what to do: choose"):
        failing("wrap", AssertionError()).check(ParallelConfig(pp=2))


def test_a_job_that_can_only_be_built_cut_hears_that_it_is_also_built_whole() -> None:
    """As with sequence parallelism that is switched on whatever the layout: Megatron's own words."""
    refusal = ValueError("Cannot use sequence parallelism without tensor parallelism")
    with pytest.raises(Infeasible) as raised:
        failing("build_model", refusal, pp=1).check(ParallelConfig(tp=2))
    for words in (str(refusal), "also built whole, all axes 1", "sequence_parallel = layout.config.tp > 1"):
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("gives", "what"),
    [
        (lambda chunks: None, "returned NoneType"),
        (lambda chunks: chunks[0], "returned GPTModel"),
        (lambda chunks: [], "returned list"),
        (lambda chunks: [chunks, None], "returned list of NoneType, list"),
    ],
)
def test_a_build_model_that_gives_no_list_of_chunks_is_told_so(gives: Callable[[list[Any]], Any], what: str) -> None:
    with pytest.raises(Mismatch, match=f"must return a list of this rank's model chunks.* it {what}$"):
        failing("build_model", None, gives).check(ParallelConfig(pp=2))
