"""Parallel configurations: parsing, and the order of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardshift.values import Coordinate, Infeasible, ParallelConfig
from shardshift.values.config import ExpertCoordinate


@st.composite
def configs(draw: st.DrawFn) -> ParallelConfig:
    pp, tp, dp, vpp, cp = (draw(st.integers(1, most)) for most in (4, 6, 4, 3, 3))
    divisors = [n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % n == 0]
    product = draw(st.sampled_from(divisors))
    etp = draw(st.sampled_from([n for n in divisors if product % n == 0]))
    return ParallelConfig(pp, tp, dp, vpp=vpp, cp=cp, ep=product // etp, etp=etp)


@given(configs())
def test_text_and_configuration_are_inverse(config: ParallelConfig) -> None:
    assert ParallelConfig.parse(str(config)) == config


@given(configs())
def test_tensor_parallel_varies_fastest_and_pipeline_parallel_slowest(config: ParallelConfig) -> None:
    order = itertools.product(range(config.pp), range(config.dp), range(config.cp), range(config.tp))
    rank = -1
    for rank, (pp, dp, cp, tp) in enumerate(order):
        assert config.coordinate(rank) == Coordinate(pp=pp, tp=tp, dp=dp, cp=cp)
        assert config.rank(pp, tp, dp, cp) == rank
    assert config.world_size == rank + 1


@given(configs())
def test_experts_lie_over_the_ranks_of_each_stage_tensor_parallel_first(config: ParallelConfig) -> None:
    axes = (config.pp, config.expert_dp, config.ep, config.expert_tp)
    for rank, (pp, edp, ep, etp) in enumerate(itertools.product(*map(range, axes))):
        assert config.expert_coordinate(rank) == ExpertCoordinate(pp=pp, ep=ep, etp=etp, edp=edp)
        assert config.coordinate(rank).pp == pp


def megatron_groups(config: ParallelConfig, *, expert: bool, token: str) -> list[list[int]]:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(
        tp=config.expert_tp if expert else config.tp,
        ep=config.ep if expert else 1,
        dp=config.expert_dp if expert else config.dp,
        pp=config.pp,
        cp=1 if expert else config.cp,
        order="tp-cp-ep-dp-pp",
    )
    groups: list[list[int]] = generator.get_ranks(token)
    return groups


@pytest.mark.parametrize("text", ["pp2tp4dp3cp2ep4etp3", "pp3tp2dp4ep8etp1", "tp4cp3", "pp2dp6ep3"])
def test_ranks_lie_as_in_megatron(text: str) -> None:
    config = ParallelConfig.parse(text)
    dense = [config.coordinate(rank) for rank in range(config.world_size)]
    experts = [config.expert_coordinate(rank) for rank in range(config.world_size)]
    for token, varying in [("tp", {"tp"}), ("cp", {"cp"}), ("dp", {"dp"}), ("pp", {"pp"}), ("dp-cp", {"dp", "cp"})]:
        for group in megatron_groups(config, expert=False, token=token):
            assert len({replace(dense[rank], **dict.fromkeys(varying, 0)) for rank in group}) == 1
            assert len({dense[rank] for rank in group}) == len(group)
    for token, axis in [("tp", "etp"), ("ep", "ep"), ("dp", "edp"), ("pp", "pp")]:
        for group in megatron_groups(config, expert=True, token=token):
            assert len({replace(experts[rank], **{axis: 0}) for rank in group}) == 1
            assert [getattr(experts[rank], axis) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize("text", ["pp4tp2", "PP4-TP2", "tp=2, pp=4", "pp4_tp2_dp1", "pp4tp2ep1etp2", " pp 4 - tp 2 "])
def test_any_usual_spelling_is_read(text: str) -> None:
    assert ParallelConfig.parse(text) == ParallelConfig(pp=4, tp=2, dp=1)


def test_axes_are_read_in_any_order_and_written_in_one() -> None:
    config = ParallelConfig.parse("pp2tp2dp2vpp2ep4etp1cp2")
    assert config == ParallelConfig(2, 2, 2, vpp=2, cp=2, ep=4, etp=1)
    assert str(config) == "pp2tp2dp2vpp2cp2ep4etp1"
    assert str(ParallelConfig(pp=4, tp=2)) == "pp4tp2dp1"


def test_a_coordinate_names_context_parallelism_only_where_there_is_some() -> None:
    assert str(Coordinate(1, 2, 3)) == "pp1 tp2 dp3"
    assert str(Coordinate(1, 2, 3, 4)) == "pp1 tp2 dp3 cp4"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a parallel"),
        ("4", "not a parallel"),
        ("pp4pp2", "twice"),
        ("zz2", "unknown axis"),
        ("pp0", "size 0"),
        ("etp0", "size 0"),
        ("tp2dp3ep4", r"ep 4 x etp 2 = 8 does not divide the tp x cp x dp = 6"),
        ("pp-2", "not a parallel"),  # not pp2, and not a size of -2
        ("tp4, pp - 2", "not a parallel"),
        ("pp1 2", "not a parallel"),  # not pp12
        ("pp\N{FULLWIDTH DIGIT TWO}", "not a parallel"),
        ("pp" + "9" * 5000, "'pp' has a size of 5000 digits"),
        ("tp4etp3", r"ep 1 x etp 3 = 3 does not divide"),
    ],
)
def test_anything_else_is_refused_with_advice(text: str, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason) as caught:
        ParallelConfig.parse(text)
    assert "what to do" in str(caught.value)


@pytest.mark.parametrize("size", ["pp4tp2", "4", 2.0, True, [4]])
def test_a_size_that_is_no_whole_number_is_refused_and_text_is_sent_to_parse(size: Any) -> None:
    with pytest.raises(Infeasible, match=r"axis pp has size .*, expected a whole number.*ParallelConfig\.parse"):
        ParallelConfig(size)


def test_a_rank_outside_is_refused() -> None:
    config = ParallelConfig(pp=2, tp=2, dp=2)
    with pytest.raises(ValueError, match="rank 8"):
        config.coordinate(8)
    with pytest.raises(ValueError, match="rank -1"):
        config.expert_coordinate(-1)
