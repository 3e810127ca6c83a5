"""Changes of layout of real megatron-core jobs are exact, whatever the model is made of."""

from pathlib import Path

import pytest

from tests.megatron.harness import Scenario, check_change, run, small

SCENARIOS = {
    "tied embeddings": Scenario(small(6), "pp1tp2dp2", {2: "pp2tp2dp2", 4: "pp4tp1dp2"}),
    "untied embeddings": Scenario(small(6, tied=False), "pp2tp1dp2", {2: "pp1tp2dp2", 4: "pp2tp4dp1"}),
    "SwiGLU's fused gate and up, cut by tensor ranks": Scenario(
        small(6, layers=2, swiglu=True, tied=False), "pp2tp1dp1", {2: "pp1tp4dp2", 4: "pp1tp2dp1"}
    ),
    "grouped query attention": Scenario(
        small(6, layers=2, query_groups=2, swiglu=True), "pp1tp2dp1", {2: "pp2tp1dp2", 4: "pp2tp2dp2"}
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_state_bytes_storage_and_losses_are_those_of_a_fresh_start(scenario: Scenario, tmp_path: Path) -> None:
    outcome = run(scenario, tmp_path)
    for change in scenario.changes:
        check_change(outcome, change)
