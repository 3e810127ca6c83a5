"""What a layer is made of: positions, norms, biases, attention, prediction of more than one token."""

from pathlib import Path

import pytest
from tests.megatron.harness import Scenario, check, walk

SCENARIOS = {
    "learned positions, LayerNorm, no biases": walk(
        "pp2tp1dp2", "pp1tp2dp1", "pp2tp2dp1", learned_positions=True, tied=False, biases=False
    ),
    "RMSNorm, norms of queries and keys, biases beside SwiGLU": walk(
        "tp2dp2", "pp2tp2", "pp2dp2", rms_norm=True, qk_norm=True, swiglu=True, biases=True
    ),
    "more tensor ranks than query groups": walk("tp1dp2", "tp4dp1", "tp2dp2", query_groups=1, precision="bf16"),
    "latent attention": walk("tp2dp2", "pp2tp1", "tp4dp1", latent=True, qk_norm=True, precision="bf16"),
    "latent attention without a cut of queries": walk("pp2", "tp2", latent=True, config=(("q_lora_rank", None),)),
    "prediction of two tokens more, untied": walk("pp2", "tp2", "pp2tp2", mtp=2, tied=False),
    "prediction beside a tied embedding, on one stage": walk("tp2", "dp2", mtp=1),
    "latent attention, experts and prediction at once": walk(
        "dp2ep2", "pp2dp2ep2", latent=True, experts=4, biases=False, ffn=8, mtp=1, tied=False, precision="bf16"
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_every_part_of_a_layer_arrives(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)
