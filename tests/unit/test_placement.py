"""Placement, held against an integer program over every rank and device, and against the paper's allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import lil_array
from tests.unit.strategies import element_costs, equal_layers, even_grid, even_split, grid_layout

from shardshift.plan import Plan, make_plan
from shardshift.plan.allocator import cross_node_tp_groups, defragment, free_nodes, migrate_then_defragment
from shardshift.values import Infeasible, Layout, ParallelConfig, PlacedLayout, Topology

Price = tuple[int, int, int]
"""TP groups on more nodes than need be, nodes in use, bytes."""


@dataclass(frozen=True)
class Change:
    """From one configuration to another, on nodes."""

    before: ParallelConfig
    after: ParallelConfig
    layers: int
    prev: PlacedLayout
    curr: Layout
    devices: tuple[int, ...]
    topology: Topology

    def plan(self, *, worth: int | None = None, placement: Sequence[int] | None = None) -> Plan:
        return make_plan(
            self.prev, self.curr, devices=self.devices, topology=self.topology,
            group_size=self.after.tp, node_worth_bytes=worth, placement=placement,
        )  # fmt: skip

    def price(self, plan: Plan) -> Price:
        """Counted by hand."""
        placed, topology = plan.curr.devices, self.topology
        crossing = cross_node_tp_groups(self.after, placed, topology)
        return crossing, len({topology.node_of(device) for device in placed}), plan.moved_bytes

    @property
    def slots(self) -> int:
        """How many TP groups fit whole on single nodes, or on whole nodes."""
        room = Counter(self.topology.node_of(device) for device in self.devices)
        size, tp = self.topology.devices_per_node, self.after.tp
        if tp <= size:
            return sum(count // tp for count in room.values())
        return sum(count == size for count in room.values()) * size // tp


@st.composite
def changes(
    draw: st.DrawFn, *, most: int = 12, nodes: tuple[int, int] = (2, 4), fills: bool = False, scattered: bool = True
) -> Change:
    """Random configurations on random devices; with ``fills`` a TP group fills a node or is one device."""
    count, size = draw(
        st.sampled_from([(n, d) for n in range(nodes[0], nodes[1] + 1) for d in (2, 3, 4) if n * d <= most])
    )
    configs = st.sampled_from(
        [
            ParallelConfig(pp=pp, tp=tp, dp=dp)
            for pp in (1, 2, 3, 4, 6)
            for tp in ({1, size} if fills else {1, 2, 3, 4})
            for dp in (1, 2, 3, 4)
            if pp * tp * dp <= count * size
        ]
    )
    before, after = draw(configs), draw(configs)
    layers = draw(st.sampled_from([6, 8]))
    model = equal_layers(layers, width=12)
    prev, curr = (grid_layout(model, one, even_split(layers, one.pp)) for one in (before, after))
    order = draw(st.permutations(range(count * size))) if scattered else range(count * size)
    devices = draw(st.permutations(range(count * size)))[: draw(st.integers(after.world_size, count * size))]
    usable = tuple(devices) if scattered else tuple(range(count * size))
    return Change(
        before,
        after,
        layers,
        PlacedLayout(prev, tuple(order[: before.world_size])),
        curr,
        usable,
        Topology(count, size),
    )


class Oracle:
    """The best placement by an integer program: which rank on which device, which group and whose ranks on which node.

    Minimised one after the other: TP groups on more nodes than need be, nodes in use, bytes.
    """

    def __init__(self, change: Change) -> None:
        costs = element_costs(change.prev, change.curr, change.devices)
        tp, per_node = change.after.tp, change.topology.devices_per_node
        ranks, devices = costs.shape
        node_of = [change.topology.node_of(device) for device in change.devices]
        nodes = sorted(set(node_of))
        groups = ranks // tp
        at = np.arange(ranks * devices).reshape(ranks, devices)
        spot = at.size + np.arange(groups * len(nodes)).reshape(groups, len(nodes))
        opened = at.size + spot.size + np.arange(len(nodes))
        spans = at.size + spot.size + opened.size + np.arange(groups)
        self._count = at.size + spot.size + opened.size + spans.size
        self._rows: list[tuple[dict[int, float], float, float]] = []
        for rank in range(ranks):
            self._add(dict.fromkeys(at[rank].tolist(), 1), 1, 1)
            for index, node in enumerate(nodes):
                here = [int(at[rank, column]) for column in range(devices) if node_of[column] == node]
                self._add({**dict.fromkeys(here, 1), int(spot[rank // tp, index]): -1}, -np.inf, 0)
        for column in range(devices):
            self._add(dict.fromkeys(at[:, column].tolist(), 1), 0, 1)
        for group in range(groups):
            self._add(
                {**dict.fromkeys(spot[group].tolist(), 1), int(spans[group]): -len(nodes)}, -np.inf, -(-tp // per_node)
            )
            for index in range(len(nodes)):
                self._add({int(spot[group, index]): 1, int(opened[index]): -1}, -np.inf, 0)
        self.price: Price = (
            self._least(dict.fromkeys(spans.tolist(), 1)),
            self._least(dict.fromkeys(opened.tolist(), 1)),
            self._least(dict(zip(at.reshape(-1).tolist(), costs.reshape(-1).tolist(), strict=True))),
        )

    def _add(self, row: dict[int, float], low: float, high: float) -> None:
        self._rows.append((row, low, high))

    def _least(self, objective: dict[int, float]) -> int:
        """The least of an objective, which from now on holds."""
        matrix = lil_array((len(self._rows), self._count))
        for index, (row, _, _) in enumerate(self._rows):
            for column, factor in row.items():
                matrix[index, column] = factor
        cost: NDArray[np.float64] = np.zeros(self._count)
        cost[list(objective)] = list(objective.values())
        low, high = (np.array([row[side] for row in self._rows]) for side in (1, 2))
        answer = milp(
            cost,
            integrality=np.ones(self._count, np.int64),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(matrix.tocsr(), low, high)],
            options={"mip_rel_gap": 0.0},
        )
        assert answer.x is not None
        least = round(float(cost @ np.round(answer.x)))
        self._rows.append((objective, -np.inf, least))
        return least


@settings(max_examples=20)
@given(changes(most=9, nodes=(2, 3), fills=True))
def test_no_placement_is_better_where_a_tp_group_fills_a_node_or_is_one_device(change: Change) -> None:
    assume(change.slots >= change.curr.world_size // change.after.tp)
    assert change.price(change.plan()) == Oracle(change).price


@settings(max_examples=20)
@given(changes(most=9, nodes=(2, 3)))
def test_no_placement_is_below_the_integer_program(change: Change) -> None:
    assert change.price(change.plan()) >= Oracle(change).price


@settings(max_examples=100)
@given(changes(most=20, nodes=(2, 5)))
def test_tp_groups_are_whole_wherever_there_is_room_for_all_of_them(change: Change) -> None:
    plan = change.plan()
    placed = plan.curr.devices
    assert set(placed) <= set(change.devices)
    assert len(set(placed)) == len(placed)
    groups = change.curr.world_size // change.after.tp
    if change.slots >= groups:
        assert cross_node_tp_groups(change.after, placed, change.topology) == 0
    elif change.after.tp <= change.topology.devices_per_node:
        assert cross_node_tp_groups(change.after, placed, change.topology) == groups - change.slots


@settings(max_examples=100)
@given(changes(most=20, nodes=(2, 5), fills=True))
def test_as_many_nodes_are_free_as_can_be(change: Change) -> None:
    groups = change.curr.world_size // change.after.tp
    assume(change.slots >= groups)
    room = Counter(change.topology.node_of(device) for device in change.devices)
    held = sorted((count // change.after.tp for count in room.values()), reverse=True)
    fewest = next(count for count in range(1, len(held) + 1) if sum(held[:count]) >= groups)
    assert free_nodes(change.plan().curr.devices, change.topology, change.devices) == len(room) - fewest


@settings(max_examples=120)
@given(changes(most=20, nodes=(2, 5)))
def test_nothing_is_worse_than_pairing_then_defragmentation_then_coalescing(change: Change) -> None:
    ours = change.price(change.plan())
    free = make_plan(change.prev, change.curr, devices=change.devices).curr.devices
    for slots in (set(change.devices), set(change.devices) & set(change.prev.devices)):
        placed = defragment(change.after, free, slots, change.topology)
        assert ours <= change.price(change.plan(placement=placed))
    assert ours <= change.price(change.plan(placement=free))


@settings(max_examples=80)
@given(changes(most=20, nodes=(2, 5), scattered=False))
def test_nothing_is_worse_than_the_papers_allocator_where_tp_and_nodes_divide(change: Change) -> None:
    # Its sketch pairs replicas apart: no candidate of ours. With TP3 on nodes of 2 it was better, once in 2,500 cases.
    tp, size = change.after.tp, change.topology.devices_per_node
    assume(not tp % size or not size % tp)
    try:
        placed = migrate_then_defragment(
            change.before, change.after, change.layers, change.prev.devices, change.devices, change.topology
        )[1]
    except Infeasible:
        return
    assert change.price(change.plan()) <= change.price(change.plan(placement=placed))


@settings(max_examples=80)
@given(changes(most=20, nodes=(2, 5)))
def test_a_layout_that_stays_stays_where_it_is(change: Change) -> None:
    again = make_plan(
        change.prev, change.prev.layout, devices=change.prev.devices, topology=change.topology,
        group_size=change.before.tp,
    )  # fmt: skip
    crossing, stayed = (
        cross_node_tp_groups(change.before, placed.devices, change.topology) for placed in (again.curr, change.prev)
    )
    assert crossing <= stayed
    assert again.moved_bytes == 0 or crossing < stayed


@settings(max_examples=60)
@given(changes(most=20, nodes=(2, 5)))
def test_bytes_alone_count_where_nodes_are_worth_nothing(change: Change) -> None:
    plan = change.plan(worth=0)  # TP groups among what does not count
    costs = element_costs(change.prev, change.curr, change.devices)
    assert plan.moved_bytes == plan.least_moved_bytes == costs[linear_sum_assignment(costs)].sum()


@settings(max_examples=60)
@given(changes(most=20, nodes=(2, 5), fills=True))
def test_the_more_a_node_is_worth_the_more_are_free_and_the_more_moves(change: Change) -> None:
    assume(change.slots >= change.curr.world_size // change.after.tp)
    worths = [1, 12, 30, 100, 1000, 10**6, None]
    prices = [change.price(change.plan(worth=worth)) for worth in worths]
    assert [opened for _, opened, _ in prices] == sorted((opened for _, opened, _ in prices), reverse=True)
    assert [moved for _, _, moved in prices] == sorted(moved for _, _, moved in prices)
    # And each is the best of them at its own price.
    for worth, (_, opened, moved) in zip(worths[:-1], prices, strict=False):
        assert worth is not None
        assert moved + worth * opened == min(other + worth * nodes for _, nodes, other in prices)
    assert prices[-1] == prices[-2], "a million bytes are more than these jobs have"


@settings(max_examples=40)
@given(changes(most=20, nodes=(2, 5)))
def test_the_order_in_which_devices_are_named_does_not_matter(change: Change) -> None:
    again = make_plan(
        change.prev, change.curr, devices=sorted(change.devices), topology=change.topology, group_size=change.after.tp
    )
    assert again.digest == change.plan().digest


@settings(max_examples=40)
@given(changes(most=12))
def test_ranges_that_ranks_have_of_their_own_are_no_other_problem(change: Change) -> None:
    """Classes of shared roles with ranges beside them: as valid, and no worse than the pairing defragmented."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardshift.plan.pairing.MOST_CLASSES", 0)
        ours = change.plan()
        free = make_plan(change.prev, change.curr, devices=change.devices).curr.devices
        placed = defragment(change.after, free, change.devices, change.topology)
    assert change.price(ours) <= change.price(change.plan(placement=placed))


def test_a_tp_group_wider_than_a_node_is_split_so_that_each_node_keeps_its_slices() -> None:
    # Two nodes held a TP2 group each; of TP4, either keeps a half of its slices if it takes every second rank.
    model = equal_layers(4, width=12)
    prev = PlacedLayout(even_grid(model, "pp1tp2dp2"), (0, 1, 2, 3))
    plan = make_plan(prev, even_grid(model, "pp1tp4"), devices=range(4), topology=Topology(2, 2), group_size=4)
    assert plan.moved_bytes == 0
    assert sorted(plan.curr.devices.index(device) for device in (0, 1)) in ([0, 2], [0, 3], [1, 2], [1, 3])


def test_one_node_is_no_topology() -> None:
    model = equal_layers(4)
    prev = PlacedLayout(even_grid(model, "pp2tp2"), (3, 1, 2, 0))
    plan = make_plan(prev, prev.layout, devices=range(4), topology=Topology(1, 4), group_size=2)
    assert plan.curr.devices == (3, 1, 2, 0)


def test_ranks_that_are_no_groups_are_refused_even_without_a_topology() -> None:
    layout = even_grid(equal_layers(4), "pp3")
    with pytest.raises(Infeasible, match="3 ranks are not groups of 2"):
        make_plan(PlacedLayout(layout, (0, 1, 2)), layout, devices=range(3), group_size=2)
