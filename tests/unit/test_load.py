"""Loads against the papers that the formulas come from, and against layouts of the same models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardshift.models import Catalogue, Model, preset
from shardshift.models.load import load_of, step_flops
from shardshift.models.step import Step
from shardshift.values import Infeasible, ParallelConfig


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Model:
    return Model.from_dimensions(layers=layers, hidden=hidden, heads=heads, vocab=vocab)


# Korthikanti et al. 2022, table 3; the vocabulary of 51200 is Narayanan et al.'s.
GPT3 = Step(gpt(96, 12288, 96), sequence=2048, global_batch=1536, micro_batch=1)
MT_NLG = Step(gpt(105, 20480, 128), sequence=2048, global_batch=280, micro_batch=1)
GPT_22B = Step(gpt(48, 6144, 64), sequence=2048, global_batch=4, micro_batch=4)


def at(config: str) -> ParallelConfig:
    return ParallelConfig.parse(config)


def layer_bytes(step: Step, config: str) -> float:
    """Activations that one layer adds on the last stage, which has one micro-batch in flight."""
    deeper = replace(step, model=replace(step.model, layers=step.model.layers + at(config).pp))
    loads = [load_of(each, at(config)).stages[-1].activation_bytes for each in (deeper, step)]
    return loads[0] - loads[1]


@pytest.mark.parametrize("step", [GPT3, MT_NLG, GPT_22B])
def test_operations_are_those_of_megatrons_formula(step: Step) -> None:
    model, b, s, v = step.model, step.global_batch, step.sequence, 51200
    layers, h = model.layers, model.hidden
    forward_and_backward = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    recomputed = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert step_flops(step) == pytest.approx(forward_and_backward, rel=1e-12)
    assert step_flops(replace(step, recompute="full")) == pytest.approx(recomputed, rel=1e-12)


def test_gpt3_takes_the_operations_and_the_days_that_were_published() -> None:
    """3.14e23 operations for 300 B tokens (Brown et al. 2020, table D.1, which leaves out attention's scores).

    34 days on 1,024 A100 at 140e12 with everything computed again (Narayanan et al. 2021, section 5.1).
    """
    steps = 300e9 / (GPT3.global_batch * GPT3.sequence)
    without_scores = step_flops(GPT3) - 72 * 1536 * 2048 * 96 * 12288 * 2048 / 6
    assert without_scores * steps == pytest.approx(3.14e23, rel=5e-3)
    days = step_flops(replace(GPT3, recompute="full")) * steps / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1)


def test_operations_are_shared_out_among_all_ranks() -> None:
    load = load_of(GPT3, at("pp8tp8dp4"))
    total = sum(stage.flops for stage in load.stages) * 8 * 4 * load.micro_batches
    assert load.micro_batches == 384
    assert total == pytest.approx(step_flops(GPT3))


@pytest.mark.parametrize("step", [GPT3, MT_NLG, GPT_22B])
def test_activations_of_a_layer_are_those_of_the_papers_table(step: Step) -> None:
    """Korthikanti et al. 2022, table 2, with t = 8."""
    b, s, h, a, t = step.micro_batch, step.sequence, step.model.hidden, step.model.heads, 8
    scores = 5 * a * s / h
    sequence_parallel = replace(step, sequence_parallel=True)
    selective = replace(sequence_parallel, recompute="selective")
    found = {
        s * b * h * (34 + scores): layer_bytes(step, "tp1"),
        s * b * h * (10 + 24 / t + scores / t): layer_bytes(step, "tp8"),
        s * b * h / t * (34 + scores): layer_bytes(sequence_parallel, "tp8"),
        s * b * h / t * 34: layer_bytes(selective, "tp8"),
        2 * s * b * h: layer_bytes(replace(step, recompute="full"), "tp1"),
        34 * s * b * h: layer_bytes(replace(step, scores=False), "tp1"),
    }
    assert list(found.values()) == pytest.approx(list(found))


def test_selective_recomputing_saves_what_was_published() -> None:
    """70 % of GPT-3's and 65 % of MT-NLG's activations (section 5); with sequence parallelism 5 x less (abstract)."""
    for step, saved in ((GPT3, 0.70), (MT_NLG, 0.65)):
        selective = replace(step, recompute="selective")
        assert 1 - layer_bytes(selective, "pp1") / layer_bytes(step, "pp1") == pytest.approx(saved, abs=5e-3)
        both = replace(selective, sequence_parallel=True)
        assert layer_bytes(step, "tp8") / layer_bytes(both, "tp8") == pytest.approx(5, abs=0.5)


def test_the_first_stage_holds_all_layers_once_and_the_others_less() -> None:
    """Section 4.2.3: with 1F1B the first stage has p micro-batches of L / p layers in flight.

    Interleaved (1 + (p - 1) / pm) times that; besides masks of the embedding's dropout, s b h p / t. The last one's
    norm, head and fp32 logits are 4 s b h / t (1 + v / h).
    """
    step = replace(GPT3, sequence_parallel=True)
    s, h, a, t, p, m = 2048, 12288, 96, 8, 8, 3
    layer = s * h / t * (34 + 5 * a * s / h)
    stages = load_of(step, at("pp8tp8")).stages
    assert stages[0].activation_bytes == pytest.approx(96 * layer + s * h * p / t)
    assert stages[1].activation_bytes == pytest.approx(7 * 12 * layer)
    assert stages[-1].activation_bytes == pytest.approx(12 * layer + 4 * s * h / t * (1 + 51200 / h))
    interleaved = load_of(step, at("pp8tp8vpp3")).stages[0].activation_bytes
    rounds = 1 + (p - 1) / (p * m)
    assert interleaved == pytest.approx(96 * layer * rounds + s * h * p * rounds / t)
    few = load_of(replace(step, global_batch=2), at("pp8tp8")).stages[0].activation_bytes
    assert few == pytest.approx(2 * 12 * layer + 2 * s * h / t)


def test_traffic_is_that_of_the_papers_formulas() -> None:
    """Narayanan et al. 2021, section 3.2: b s h elements between stages, 8 b s h (t - 1) / t a layer, each micro-batch.

    A ring sends 2 (d - 1) / d of the gradients.
    """
    stage = load_of(GPT3, at("pp8tp8dp4")).stages[3]
    bsh = 2048 * 12288
    assert stage.tp.sent_bytes == 12 * 8 * bsh * 7 / 8 * 2
    assert stage.pp.sent_bytes == 2 * bsh * 2  # an activation forward, a gradient back
    assert stage.dp.sent_bytes == pytest.approx(2 * 3 / 4 * stage.state.gradient_bytes)
    zero1 = load_of(replace(GPT3, zero1=True), at("pp8tp8dp4")).stages[3]
    assert zero1.dp.sent_bytes == pytest.approx(3 / 4 * (stage.state.gradient_bytes + stage.state.param_bytes))
    assert zero1.state.optimizer_bytes == pytest.approx(stage.state.optimizer_bytes / 4, rel=1e-6)
    alone = load_of(GPT3, at("pp1")).stages[0]
    assert [each.sent_bytes for each in (alone.tp, alone.cp, alone.ep, alone.pp, alone.dp, alone.ends)] == [0] * 6


@pytest.mark.parametrize(
    ("name", "config", "zero1"),
    [
        ("llama3-8b", "pp2tp2dp2", False),
        ("llama3-70b", "pp4tp8dp2", True),
        ("gpt3-2.7b", "pp4tp2dp2", False),
        ("mixtral-8x7b", "pp2tp2dp4ep4etp1", True),
        ("deepseek-v3", "pp1tp2dp4ep8etp1", True),
    ],
)
def test_state_by_the_description_is_that_of_the_models_layout(name: str, config: str, zero1: bool) -> None:
    """Parameters in bf16, and masters and two moments: what ``Catalogue`` lays out, but for padding of ranges."""
    model, parsed = preset(name), at(config)
    load = load_of(Step(model, sequence=64, global_batch=64, micro_batch=1, zero1=zero1), parsed)
    found = [stage.state.param_bytes + stage.state.optimizer_bytes for stage in load.stages]
    laid_out = Catalogue.of(model).layout(parsed, zero1=zero1).rank_bytes.reshape(parsed.pp, -1).max(axis=1)
    np.testing.assert_allclose(found, laid_out, rtol=1e-4)


def test_a_batch_that_dp_does_not_divide_is_refused() -> None:
    with pytest.raises(Infeasible, match=r"global batch of 1536.*what to do"):
        load_of(GPT3, at("dp5"))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(Infeasible, match="96 layers"):
        load_of(GPT3, at("pp99"))
