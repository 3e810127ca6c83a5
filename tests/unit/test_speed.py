"""Slow links and devices: of placements that move the same, the one that spares them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import equal_layers, even_grid

from shardshift.plan import Plan, make_plan
from shardshift.plan.allocator import cross_node_tp_groups, free_nodes
from shardshift.values import ParallelConfig, PlacedLayout, Rates, Topology

MODEL = equal_layers(12)


def planned(prev: str, curr: str, topology: Topology, node_worth_bytes: int | None = None) -> Plan:
    before, after = ParallelConfig.parse(prev), ParallelConfig.parse(curr)
    return make_plan(
        PlacedLayout(even_grid(MODEL, prev), tuple(range(before.world_size))),
        even_grid(MODEL, curr),
        devices=range(topology.devices),
        topology=topology,
        group_size=after.tp,
        node_worth_bytes=node_worth_bytes,
    )


def slowest_s(plan: Plan, rates: list[float]) -> float:
    """Seconds for which the busiest link takes in what the two devices of its node lack."""
    need = np.bincount(plan.moves.target, plan.cells.nbytes[plan.moves.cell], 2 * len(rates))
    return float((need.reshape(-1, 2).sum(axis=1) / np.array(rates)).max())


def test_a_new_replica_goes_where_the_link_is_fast() -> None:
    slow = Topology(4, 2, link_exceptions=((1, Rates.both(1e6)), (2, Rates.both(1e9))))
    plan = planned("tp2dp1", "tp2dp2", slow)
    assert plan.curr.devices == (0, 1, 6, 7)
    assert planned("tp2dp1", "tp2dp3", slow).curr.devices == (0, 1, 6, 7, 4, 5)


def test_within_a_node_the_fast_devices_are_taken() -> None:
    slow = Topology(1, 4, device_exceptions=((1, Rates.both(1e6)),))
    assert set(planned("pp1", "pp1dp3", slow).curr.devices) == {0, 2, 3}


@pytest.mark.parametrize("node_worth_bytes", [0, None])
def test_what_a_device_holds_comes_before_its_speed(node_worth_bytes: int | None) -> None:
    slow = Topology(3, 1, device_exceptions=((0, Rates.both(1.0)),))
    assert planned("pp1", "pp1", slow, node_worth_bytes).curr.devices == (0,)


CONFIGS = st.builds(
    lambda pp, tp, dp: f"pp{pp}tp{tp}dp{dp}", st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(1, 2)
)


@settings(max_examples=60)
@given(CONFIGS, CONFIGS, st.lists(st.sampled_from([1e3, 1e6, 1e9]), min_size=12, max_size=12), st.booleans())
def test_bytes_nodes_and_groups_are_those_of_equal_rates_and_no_link_is_worse_off(
    prev: str, curr: str, rates: list[float], nodes: bool
) -> None:
    even = Topology(6, 2)
    uneven = Topology(6, 2, link_exceptions=tuple((i, Rates.both(rate)) for i, rate in enumerate(rates[:6])))
    worth = None if nodes else 0
    one, other = planned(prev, curr, even, worth), planned(prev, curr, uneven, worth)
    config = ParallelConfig.parse(curr)
    assert one.moved_bytes == other.moved_bytes
    if nodes:
        measures = [
            (free_nodes(plan.curr.devices, even, range(12)), cross_node_tp_groups(config, plan.curr.devices, even))
            for plan in (one, other)
        ]
        assert measures[0] == measures[1]
        assert slowest_s(other, rates[:6]) <= slowest_s(one, rates[:6])
