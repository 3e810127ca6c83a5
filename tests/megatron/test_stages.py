"""Stages of several chunks, of uneven size or without layers; and axes that cut activations, not weights."""

from pathlib import Path

import pytest
from tests.megatron.harness import Outcome, Scenario, check, walk

SCENARIOS = {
    "to interleaved stages and back": walk("pp4", "pp2vpp2", "pp2tp2vpp2", "pp1tp2", layers=4),
    "interleaved, replicas, bf16, overlaps": walk(
        "pp1tp2dp2",
        "pp2dp2vpp2",
        "pp4",
        layers=4,
        precision="bf16",
        overlap=True,
        bucket_size=500,
    ),
    "embedding and loss have stages of their own": walk(
        "pp4", "pp2vpp2", "pp1tp2", stages=(((4, 1), "E|t|t|L"), ((2, 2), "E|tt||L"))
    ),
    "uneven first and last stages": walk("pp3", "pp1tp2", "pp3tp2", layers=5, first_stage=1, last_stage=2),
    "embedding and loss count as layers": walk("pp3", "pp1tp2", layers=4, tied=False, count_ends=True),
    "sequence parallel": walk("tp1dp2", "tp2", "pp2tp2", "tp4", sequence_parallel=True, rms_norm=True),
    "context parallel": walk("dp2cp2", "pp2cp2", "tp2dp1cp2", "dp4", learned_positions=True, precision="bf16"),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_every_layer_arrives(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)


def layers_held(outcome: Outcome, change: int) -> dict[int, list[int]]:
    """Per pipeline stage the layers that are there."""
    found: dict[int, set[int]] = {}
    for record in outcome.after[change].values():
        names = [name for name, *_ in record["tensors"] if name.startswith("decoder.layers.")]
        found.setdefault(record["coordinate"][0], set()).update(int(name.split(".")[2]) for name in names)
    return {stage: sorted(layers) for stage, layers in found.items()}


def test_chunk_c_of_stage_s_is_virtual_stage_c_times_pp_plus_s(tmp_path: Path) -> None:
    outcome = check(walk("pp4", "pp2vpp2", layers=8, hidden=8, heads=2, first=1, every=1), tmp_path)
    assert layers_held(outcome, 1) == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    copies = [
        record["coordinate"][0]
        for record in outcome.after[1].values()
        for name, *_ in record["tensors"]
        if name == "embedding.word_embeddings.weight"
    ]
    assert sorted(copies) == [0, 1], "the tied embedding is on the first and the last chunk, and nowhere else"
