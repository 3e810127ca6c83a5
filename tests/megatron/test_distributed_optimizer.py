"""The distributed optimizer (ZeRO-1): masters and moments are flat pieces that ignore where parameters begin and end.

They go from piece to piece with no gather over replicas: moved bytes are the least that any pairing of ranks needs,
counted element by element, and padding is never among them.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.megatron.harness import Scenario, check, walk

BUCKETS: dict[str, Any] = {"distributed": True, "overlap": True, "bucket_size": 500}
"""Several buckets; gradients are reduced under the backward, parameters gathered under the next forward."""
EXPERTS: dict[str, Any] = {"experts": 4, "biases": False, "swiglu": True, "ffn": 8}

SCENARIOS = {
    "fp32, replicas alone": walk("dp4", "dp3", "dp1", "dp6", global_batch_size=12, distributed=True),
    "bf16, one bucket, every axis, frozen parameters": walk(
        "pp1tp2dp4",
        "pp2tp2dp1",
        "pp1tp1dp8",
        precision="bf16",
        distributed=True,
        tied=False,
        swiglu=True,
        frozen=("embedding", "layernorm"),
    ),
    "bf16, buckets and overlaps, padded vocabulary": walk(
        "pp1tp2dp4", "pp2tp1dp4", "pp2tp2dp2", precision="bf16", vocab_size=50, **BUCKETS
    ),
    "more ranks than a bucket has data for, and no moments at first": walk(
        "dp8",
        "dp2",
        "dp8",
        first=0,
        layers=1,
        hidden=8,
        heads=2,
        precision="bf16",
        **BUCKETS | {"bucket_size": 1},
    ),
    "interleaved stages": walk("pp2dp2vpp2", "pp1tp2dp2", "pp2tp2dp2vpp2", layers=4, **BUCKETS),
    "on one side only": walk(
        "pp2tp1dp2", "pp1tp1dp4", "pp1tp2dp2", precision="bf16", overlap=True, distributed=("pp1tp1dp4",)
    ),
    "fp16 with a scale that falls and grows": walk(
        "dp4", "tp2dp2", precision="fp16", loss_scale=2.0**20, distributed=True, first=3, every=3
    ),
    "experts have buffers of their own": walk(
        "pp1dp4ep2", "pp2dp2ep2", "pp1dp8ep4", "pp1dp2", precision="bf16", **EXPERTS, **BUCKETS
    ),
    "pieces over context ranks too": walk("dp2cp2", "dp4", "tp2dp1cp2", precision="bf16", **BUCKETS),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_pieces_go_to_pieces(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)
