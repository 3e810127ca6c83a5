"""Changes of layout of real megatron-core jobs are exact, whatever the model is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron import models
from tests.megatron.harness import Scenario, check_change, run, small

from shardshift.adapters.megatron import Job
from shardshift.demo import oracle


def number_the_layers(job: Job) -> None:
    """Biases of layer i hold i."""
    for _, parameter, name in oracle.named_logical(job.model):
        if name.startswith("decoder.layers.") and name.endswith("linear_fc1.bias"):
            parameter.data.fill_(float(name.split(".")[2]))


def mark_groups(job: Job) -> None:
    """Groups with and without weight decay differ in eps and betas too."""
    for part in job.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            decays = group["wd_mult"] > 0
            group["eps"], group["betas"] = (1e-6, (0.8, 0.95)) if decays else (1e-7, (0.85, 0.9))


def end_at_a_higher_rate(job: Job) -> None:
    """The schedule is no longer the one that wrap makes."""
    job.scheduler.min_lr = 5e-4


SCENARIOS = {
    "tied embeddings": Scenario(small(6), "pp1tp2dp2", {2: "pp2tp2dp2", 4: "pp4tp1dp2"}),
    "frozen parameters": Scenario(
        small(6, tied=False), "pp2tp2dp1", {2: "pp4tp1dp1", 4: "pp1tp2dp2"}, adapter=models.frozen_embedding_and_norms
    ),
    "param groups in another order": Scenario(
        small(6),
        "pp2tp2dp1",
        {2: "pp4tp1dp1", 4: "pp1tp1dp2"},
        adapter=models.groups_in_another_order,
        prepare=mark_groups,
    ),
    "stages without layers": Scenario(
        small(6, layers=2, layer_split=((0, 1, 1, 0),)), "pp4tp1dp1", {2: "pp1tp2dp2", 4: "pp4tp1dp1"}
    ),
    "tensor ranks that hold nothing but padding": Scenario(
        small(6, layers=2, vocab_size=5), "pp1tp1dp1", {2: "pp1tp4dp1", 4: "pp2tp2dp1"}
    ),
    "a schedule that was changed while training": Scenario(
        small(4, layers=2), "pp1tp2dp1", {2: "pp2tp1dp1"}, before=end_at_a_higher_rate, prepare=end_at_a_higher_rate
    ),
    "new memory that is full of NaN": Scenario(
        small(6, vocab_size=64), "pp1tp1dp1", {2: "pp2tp2dp1", 4: "pp4tp1dp1"}, adapter=models.memory_full_of_nan
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_state_bytes_storage_and_losses_are_those_of_a_fresh_start(scenario: Scenario, tmp_path: Path) -> None:
    outcome = run(scenario, tmp_path)
    for change in scenario.changes:
        check_change(outcome, change)


def test_uneven_stages_keep_every_layer(tmp_path: Path) -> None:
    scenario = Scenario(
        small(7, layers=10, hidden=8, heads=2, batch=4),
        "pp1tp1dp1",
        {1: "pp3tp1dp1", 3: "pp3tp2dp1", 5: "pp1tp1dp1"},
        adapter=models.split_by_tensor_ranks,
        prepare=number_the_layers,
    )
    outcome = run(scenario, tmp_path)
    for change in scenario.changes:
        check_change(outcome, change)
    for change, split in {1: (4, 3, 3), 3: (2, 5, 3), 5: (10,)}.items():
        held = [layers_held(record) for record in outcome.after[change].values() if record["coordinate"][1] == 0]
        assert sorted(held) == [list(range(sum(split[:i]), sum(split[: i + 1]))) for i in range(len(split))]
        whole = oracle.assemble(list(outcome.after[change].values()))
        for layer in range(10):
            bias = whole["param", f"decoder.layers.{layer}.mlp.linear_fc1.bias"]
            assert torch.allclose(bias, torch.full_like(bias, layer), atol=0.1)


def layers_held(record: dict[str, Any]) -> list[int]:
    return sorted({int(name.split(".")[2]) for name, *_ in record["tensors"] if name.startswith("decoder.layers.")})


@pytest.mark.parametrize(("tied", "wide"), [(True, "pp2tp4dp1"), (False, "pp1tp4dp1")], ids=["tied", "untied"])
def test_vocabulary_keeps_its_rows_whatever_its_padding(tied: bool, wide: str, tmp_path: Path) -> None:
    scenario = Scenario(small(5, layers=2, tied=tied), "pp1tp1dp1", {2: "pp1tp2dp1", 3: wide, 4: "pp1tp1dp1"})
    outcome = run(scenario, tmp_path)
    names = ["embedding.word_embeddings.weight"] + ["output_layer.weight"] * (not tied)
    for change, (rows_before, rows_after) in {2: (52, 56), 3: (56, 64), 4: (64, 52)}.items():
        check_change(outcome, change)
        before, after = (oracle.assemble(list(records[change].values())) for records in (outcome.before, outcome.after))
        for key in [(kind, name) for kind in oracle.KINDS for name in names]:
            common = min(rows_before, rows_after)
            assert (before[key].shape, after[key].shape) == ((rows_before, 16), (rows_after, 16))
            assert oracle.same_bits(before[key][:common], after[key][:common])
            assert (before[key][:50] != 0).any()
            if key[1] == names[-1]:  # an embedding alone trains only the rows that it has seen
                assert (before[key] != 0).any(dim=1).all(), "padding counts in the loss, so Megatron trains it"
            assert (after[key][common:] == 0).all()


@pytest.mark.parametrize(
    ("recipe", "start", "to"),
    [
        (small(3, layers=2, batch=12), "pp1tp1dp4", "pp1tp1dp6"),
        (small(3, layers=2, vocab_size=64), "pp1tp2dp1", "pp1tp1dp1"),
        (small(3, layers=2, vocab_size=64), "pp1tp1dp1", "pp1tp2dp1"),
        (small(3, layers=2, hidden=12, heads=6, vocab_size=72), "pp1tp3dp1", "pp1tp2dp1"),
    ],
    ids=["DP 4 to 6", "TP 2 to 1", "TP 1 to 2", "TP 3 to 2"],
)
def test_the_next_loss_is_that_of_the_job_left_alone(recipe: Any, start: str, to: str, tmp_path: Path) -> None:
    outcome = run(Scenario(recipe, start, {2: to}), tmp_path, unmigrated=True)
    check_change(outcome, 2)
    assert outcome.losses[3] == pytest.approx(outcome.unmigrated[3], abs=1e-6)
    assert outcome.unmigrated[3] != outcome.unmigrated[2]
