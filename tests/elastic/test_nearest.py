from __future__ import annotations

import pytest

from shardshift.elastic.nearest import nearest
from shardshift.elastic.present import Present
from shardshift.values import Infeasible, Mismatch, ParallelConfig, Topology


class Model:
    """Four layers, six heads, a batch of eight."""

    def check(self, config: ParallelConfig) -> None:
        if 4 % config.pp or 6 % config.tp or 8 % config.dp:
            raise Infeasible(f"{config} does not divide")


@pytest.mark.parametrize(
    ("present", "devices", "expected"),
    [
        ("pp2tp2dp2", 4, "pp2tp2dp1"),
        ("pp2tp2dp2", 16, "pp2tp2dp4"),
        ("pp2tp2dp2", 7, "pp2tp3dp1"),  # six are the most that anything uses, with TP 2 it would be four
        ("pp2tp3dp1", 3, "pp1tp3dp1"),
        ("dp4", 3, "pp1tp3dp1"),
        ("dp4cp2", 4, "dp2cp2"),
        ("dp4", 1, "dp1"),
    ],
)
def test_the_most_devices_then_the_present_axes(present: str, devices: int, expected: str) -> None:
    config = ParallelConfig.parse(present)
    held = Present(config, tuple(range(config.world_size)), Topology.of(32, 8))
    assert nearest(Model())(range(devices), held) == ParallelConfig.parse(expected)


def test_devices_that_nothing_fits_are_refused_with_a_reason() -> None:
    held = Present(ParallelConfig(cp=4), (0, 1, 2, 3), Topology.of(4, 4))
    with pytest.raises(Infeasible, match="no configuration fits 3 devices"):
        nearest(Model())(range(3), held)


def test_a_layout_for_which_the_jobs_own_functions_fail_is_passed_over() -> None:
    class Failing(Model):
        def check(self, config: ParallelConfig) -> None:
            super().check(config)
            if config.pp == 2:
                raise Mismatch(f"build_model failed for {config}")

    held = Present(ParallelConfig(pp=2, tp=2), (0, 1, 2, 3), Topology.of(4, 4))
    assert nearest(Failing())(range(4), held) == ParallelConfig(tp=2, dp=2)
