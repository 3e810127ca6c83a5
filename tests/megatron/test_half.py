"""16-bit parameters with fp32 masters, loss scales, and an optimizer that is not Adam."""

from pathlib import Path

import pytest
from tests.megatron.harness import Scenario, check, walk

SCENARIOS = {
    "bf16, tied, no moments at first": walk("pp2tp2dp1", "pp1tp2dp2", "pp2tp1dp2", first=0, precision="bf16"),
    "bf16, padded vocabulary, buckets, frozen parameters": walk(
        "pp1tp1dp2",
        "pp2tp4dp1",
        precision="bf16",
        vocab_size=50,
        tied=False,
        overlap=True,
        bucket_size=500,
        frozen=("layernorm",),
    ),
    "bf16, 16-bit gradients, dropout": walk(
        "pp1tp2dp1", "pp2tp1dp2", "pp1tp4dp1", precision="bf16", fp32_gradients=False, dropout=0.1
    ),
    "fp16 with a scale that falls and grows": walk(
        "pp2tp1dp2", "pp1tp2dp1", precision="fp16", loss_scale=2.0**20, first=3, every=3
    ),
    "momentum": walk("pp2tp1dp2", "pp1tp2dp2", "pp1tp4dp1", optimizer="sgd", learning_rate=0.3),
    "momentum of masters": walk("pp2tp1dp2", "pp1tp2dp1", optimizer="sgd", learning_rate=0.3, precision="bf16"),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_masters_and_scales_arrive_with_their_parameters(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)
