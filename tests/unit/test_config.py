"""Parallel configurations: parsing, and the order of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardshift.values import Coordinate, Infeasible, ParallelConfig

CONFIGS = st.builds(ParallelConfig, pp=st.integers(1, 6), tp=st.integers(1, 6), dp=st.integers(1, 6))


@given(CONFIGS)
def test_text_and_configuration_are_inverse(config: ParallelConfig) -> None:
    assert ParallelConfig.parse(str(config)) == config


@given(CONFIGS)
def test_tensor_parallel_varies_fastest_and_pipeline_parallel_slowest(config: ParallelConfig) -> None:
    order = itertools.product(range(config.pp), range(config.dp), range(config.tp))
    for rank, (pp, dp, tp) in enumerate(order):
        assert config.coordinate(rank) == Coordinate(pp=pp, tp=tp, dp=dp)
        assert config.rank(pp, tp, dp) == rank
    assert config.world_size == rank + 1


@pytest.mark.parametrize("text", ["pp4tp2", "PP4-TP2", "tp=2, pp=4", "pp4_tp2_dp1"])
def test_any_usual_spelling_is_read(text: str) -> None:
    assert ParallelConfig.parse(text) == ParallelConfig(pp=4, tp=2, dp=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "not a parallel"), ("4", "not a parallel"), ("pp4pp2", "twice"), ("zz2", "unknown axis"), ("pp0", "size 0")],
)
def test_anything_else_is_refused_with_advice(text: str, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason) as caught:
        ParallelConfig.parse(text)
    assert "what to do" in str(caught.value)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 8"):
        ParallelConfig(pp=2, tp=2, dp=2).coordinate(8)
