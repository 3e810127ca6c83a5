"""The three ways to plan one change, held against one another and against the paper's placements."""

from __future__ import annotations

import pytest
from tests.unit.strategies import equal_layers, even_grid

from shardshift.models import Catalogue, Model
from shardshift.plan.allocator import migrate_then_defragment
from shardshift.plan.methods import Change, Method, direct, solve
from shardshift.plan.paper import paper_placement
from shardshift.plan.plan import Plan
from shardshift.values import Infeasible, ParallelConfig, PlacedLayout, Topology

MODEL = Model.from_dimensions(layers=12, hidden=48, heads=12, vocab=96, positions=8)
CHANGES = [("pp4tp2", "pp6tp4", 4), ("pp6", "pp3", 3), ("pp2tp2dp3", "pp2tp4dp1", 4), ("pp3tp2dp2", "pp2tp2dp3", 4)]


def change(prev: str, curr: str, per_node: int, layers: int = 12) -> Change:
    before, after = ParallelConfig.parse(prev), ParallelConfig.parse(curr)
    every = max(before.world_size, after.world_size)
    topology = Topology(-(-every // per_node), per_node)
    devices = tuple(range(topology.devices))
    return Change(before, after, layers, devices[: before.world_size], devices, topology)


def solved(asked: Change, method: Method, model: Model = MODEL) -> tuple[Plan, ...]:
    catalogue = Catalogue.of(model)
    return solve(asked, catalogue.layout(asked.prev), catalogue.layout(asked.curr), method)


@pytest.mark.parametrize(("prev", "curr", "per_node"), CHANGES)
def test_the_paper_s_method_runs_each_rank_where_its_sketch_puts_it(prev: str, curr: str, per_node: int) -> None:
    asked = change(prev, curr, per_node)
    (plan,) = solved(asked, Method.PAPER)
    assert plan.curr.devices == paper_placement(asked.prev, asked.curr, 12, asked.prev_devices, asked.devices)


@pytest.mark.parametrize(("prev", "curr", "per_node"), CHANGES)
def test_two_phases_go_through_the_sketch_to_the_defragmented_placement(prev: str, curr: str, per_node: int) -> None:
    asked = change(prev, curr, per_node)
    first, second = migrate_then_defragment(
        asked.prev, asked.curr, 12, asked.prev_devices, asked.devices, asked.topology
    )
    plans = solved(asked, Method.PHASES)
    assert len(plans) == (1 if first == second else 2)
    assert plans[0].curr.devices == first
    assert plans[-1].curr.devices == second
    assert plans[-1].prev.layout == (plans[0].prev if len(plans) == 1 else plans[0].curr).layout


@pytest.mark.parametrize(("prev", "curr", "per_node"), CHANGES)
def test_no_method_moves_less_than_the_least_and_the_joint_one_no_more_than_coalescing(
    prev: str, curr: str, per_node: int
) -> None:
    asked = change(prev, curr, per_node)
    (exact,) = solved(asked, Method.EXACT)
    phases = solved(asked, Method.PHASES)
    whole = direct(asked, phases[0].prev, phases[-1].curr.layout, phases[-1].curr.devices)
    assert exact.least_moved_bytes <= exact.moved_bytes <= whole.moved_bytes <= sum(one.moved_bytes for one in phases)
    assert solved(asked, Method.PAPER)[0].moved_bytes >= exact.least_moved_bytes


def test_isolated_replicas_move_27_layers_where_9_are_enough() -> None:
    """PP4 TP2 DP3 to PP4 TP8 DP1, 36 equal layers; the paper's own figure counts nothing across DP groups.

    Its placement lets two devices keep what they hold of another replica all the same, as bytes know no replicas.
    """
    asked = change("pp4tp2dp3", "pp4tp8dp1", 32, layers=36)
    model = equal_layers(36, width=8)
    prev, curr = even_grid(model, "pp4tp2dp3"), even_grid(model, "pp4tp8dp1")
    layer_bytes = curr.state_bytes // 36
    (exact,) = solve(asked, prev, curr)
    assert exact.moved_bytes == 9 * layer_bytes
    (paper,) = solve(asked, prev, curr, Method.PAPER)
    assert paper.moved_bytes >= exact.moved_bytes


def test_the_paper_s_methods_refuse_axes_that_it_does_not_know() -> None:
    asked = change("pp2tp2", "pp2tp2cp2", 4)
    assert solved(asked, Method.EXACT)
    for method in (Method.PAPER, Method.PHASES):
        with pytest.raises(Infeasible, match="cp"):
            solved(asked, method)


def test_a_change_refuses_devices_that_are_not_there_or_are_named_twice() -> None:
    two, four = ParallelConfig(pp=2), ParallelConfig(pp=4)
    topology = Topology(1, 4)
    with pytest.raises(Infeasible, match="4, 5 are outside"):
        Change(two, four, 4, (0, 1), (0, 1, 4, 5), topology)
    with pytest.raises(Infeasible, match="1 of them distinct"):
        Change(two, four, 4, (1, 1), (0, 1, 2, 3), topology)
    with pytest.raises(Infeasible, match="devices 3 are lost"):
        Change(two, four, 4, (0, 1), (0, 1, 2), topology, lost=(3,))


def test_a_plan_to_a_given_placement_is_that_placement() -> None:
    asked = change("pp2", "pp4", 4)
    catalogue = Catalogue.of(MODEL)
    prev = PlacedLayout(catalogue.layout(asked.prev), asked.prev_devices)
    assert direct(asked, prev, catalogue.layout(asked.curr), (3, 1, 0, 2)).curr.devices == (3, 1, 0, 2)
