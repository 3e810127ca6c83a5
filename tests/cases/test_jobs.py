"""Real megatron-core jobs of other makes and numbers: what arrives, and the loss after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.megatron.harness import Scenario, check_change, run, small
from tests.megatron.models import Build, Chunks, adapter_of

from shardshift.adapters.megatron import Adapter, RankLayout
from shardshift.demo import model as demo
from shardshift.demo import oracle
from shardshift.demo.model import ModelShape, Recipe
from shardshift.demo.text import Corpus


def built_with(config: dict[str, Any], gpt: dict[str, Any] | None = None) -> Build:
    """The demo's model with other settings of the configuration and of the GPTModel."""

    def make_config(**settings: Any) -> TransformerConfig:
        return TransformerConfig(**(settings | config))

    def make_gpt(*args: Any, **settings: Any) -> Any:
        return GPTModel(*args, **(settings | (gpt or {})))

    def build(shape: ModelShape, layout: RankLayout) -> Chunks:
        with patch.object(demo, "TransformerConfig", make_config), patch.object(demo, "GPTModel", make_gpt):
            return demo.build_model(shape, layout)

    return build


def learned_positions(recipe: Recipe, corpus: Corpus) -> Adapter:
    return adapter_of(recipe, corpus, build=built_with({}, {"position_embedding_type": "learned_absolute"}))


def fused_bias(recipe: Recipe, corpus: Corpus) -> Adapter:
    """SwiGLU whose fused matrix has a bias, which is fused too."""
    return adapter_of(recipe, corpus, build=built_with({"add_bias_linear": True}))


def norms_of_queries(recipe: Recipe, corpus: Corpus) -> Adapter:
    return adapter_of(recipe, corpus, build=built_with({"qk_layernorm": True, "kv_channels": 6}))


PLAIN: dict[str, Any] = {"layers": 2, "batch": 2, "vocab_size": 64}
SCENARIOS = {
    "learned positions": Scenario(
        small(4, **PLAIN), "tp2", {1: "pp2", 3: "pp2tp2"}, adapter=learned_positions
    ),
    "a bias as fused as its matrix": Scenario(
        small(4, **PLAIN, swiglu=True), "tp1", {1: "tp2", 3: "tp4"}, adapter=fused_bias
    ),
    "norms of queries, heads of a width of their own": Scenario(
        small(4, **PLAIN, query_groups=2), "tp2", {1: "pp2", 3: "pp2tp2"}, adapter=norms_of_queries
    ),
    "three replicas of thirds": Scenario(
        small(5, layers=3, batch=6, hidden=24, heads=6, vocab_size=72, swiglu=True, tied=False),
        "pp3tp2",
        {1: "dp3tp2", 2: "tp3dp2", 4: "pp3"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_state_and_losses_are_those_of_a_job_that_never_changed(scenario: Scenario, tmp_path: Path) -> None:
    """The vocabulary's padding is the same in all layouts, so the losses are comparable."""
    outcome = run(scenario, tmp_path, unmigrated=True)
    for change in scenario.changes:
        check_change(outcome, change)
    assert outcome.losses == pytest.approx(outcome.unmigrated, abs=3e-6)
    assert len(set(outcome.unmigrated.values())) == scenario.recipe.steps


@pytest.mark.parametrize(
    ("size", "divisor", "tied", "ways"),
    [(50, 4, True, {1: (4, 64), 2: (6, 72), 4: (2, 56)}), (13, 1, False, {1: (4, 16), 2: (2, 14), 4: (3, 15)})],
    ids=["50 by 4", "a prime by 1"],
)
def test_rows_of_the_vocabulary_stay_and_new_padding_is_zero(
    size: int, divisor: int, tied: bool, ways: dict[int, tuple[int, int]], tmp_path: Path
) -> None:
    recipe = small(5, layers=1, hidden=24, heads=12, batch=1, vocab_size=size, vocab_divisor=divisor, tied=tied)
    scenario = Scenario(recipe, "tp3", {change: f"tp{tp}" for change, (tp, _) in ways.items()})
    outcome = run(scenario, tmp_path)
    for change, (_, rows) in ways.items():
        check_change(outcome, change)
        before, after = (oracle.assemble(list(records[change].values())) for records in (outcome.before, outcome.after))
        for key in before.keys() & {(kind, f"{name}.weight") for kind in oracle.KINDS for name in VOCABULARY}:
            assert after[key].shape[0] == rows
            assert oracle.same_bits(before[key][:size], after[key][:size])
            assert (before[key][:size] != 0).any()
            assert (after[key][before[key].shape[0] :] == 0).all()


VOCABULARY = ("embedding.word_embeddings", "output_layer")
