"""The paper's Algorithm 2, held against its figures, and against node counts made by hand."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.plan.allocator import (
    Remap,
    apply,
    cross_node_tp_groups,
    defragment,
    defragment_efficiency,
    defragment_occupancy,
    free_nodes,
    migrate_then_defragment,
)
from shardshift.plan.paper import lacking_layers
from shardshift.values import Infeasible, Mismatch, ParallelConfig, Topology

parse = ParallelConfig.parse


def change(prev: str, curr: str, layers: int, per_node: int) -> tuple[tuple[int, ...], tuple[int, ...], Topology]:
    """A change on whole nodes, prev on the first devices: placements after migration, after defragmentation."""
    before, after = parse(prev), parse(curr)
    devices = range(max(before.world_size, after.world_size))
    topology = Topology.of(len(devices), per_node)
    placements = migrate_then_defragment(before, after, layers, devices[: before.world_size], devices, topology)
    return *placements, topology


def busy_by_node(placement: tuple[int, ...], topology: Topology) -> list[int]:
    """Devices with a rank, per node."""
    count = Counter(device // topology.devices_per_node for device in placement)
    return [count[node] for node in range(topology.nodes)]


def crossing(config: ParallelConfig, placement: tuple[int, ...], per_node: int) -> int:
    """TP groups on two nodes or more, by the coordinates of the ranks."""
    nodes: dict[tuple[int, int], set[int]] = {}
    for rank, device in enumerate(placement):
        at = config.coordinate(rank)
        nodes.setdefault((at.pp, at.dp), set()).add(device // per_node)
    return sum(len(where) > 1 for where in nodes.values())


# Figures


def test_fig_7a_a_node_is_free_after_defragmentation() -> None:
    migrated, defragmented, topology = change("pp8", "pp4", 24, 4)
    assert migrated == (0, 2, 4, 6)
    assert busy_by_node(migrated, topology) == [2, 2]
    assert defragment_occupancy(migrated, range(8), topology) == (Remap(6, 1), Remap(4, 3))
    assert defragmented == (0, 2, 3, 1)
    assert [free_nodes(placed, topology, range(8)) for placed in (migrated, defragmented)] == [0, 1]


def test_fig_7b_no_tp_group_crosses_nodes_after_defragmentation() -> None:
    migrated, defragmented, topology = change("pp4tp2", "pp6tp4", 12, 4)
    config = parse("pp6tp4")
    # The figure's nodes 0 and 1: stages 0 and 2, and 3 and 5, with two of their four TP ranks each.
    assert [
        sorted(config.coordinate(migrated.index(device)).pp for device in node) for node in (range(4), range(4, 8))
    ] == [
        [0, 0, 2, 2],
        [3, 3, 5, 5],
    ]
    assert cross_node_tp_groups(config, migrated, topology) == crossing(config, migrated, 4) == 6
    assert defragmented == tuple(range(24))
    assert cross_node_tp_groups(config, defragmented, topology) == 0


def test_fig_10_two_of_four_nodes_are_free_after_defragmentation() -> None:
    migrated, defragmented, topology = change("pp16tp1", "pp8tp1", 64, 4)
    assert busy_by_node(migrated, topology) == [2, 2, 2, 2]
    assert busy_by_node(defragmented, topology) == [4, 4, 0, 0]
    assert free_nodes(defragmented, topology, range(16)) == 2


@pytest.mark.parametrize(
    ("prev", "curr", "layers", "totals", "largest"),
    [
        ("pp8", "pp4", 24, (12, 12, 18), (3, 6)),
        ("pp16tp1", "pp8tp1", 64, (32, 32, 48), (4, 8)),
        ("pp8tp2", "pp8tp4", 64, (32, 60, 62), (2, 2)),
        ("pp4tp2", "pp6tp4", 48, (32, 44, 46), (2, 2)),
    ],
)
def test_coalescing_moves_less_than_migrating_and_then_defragmenting(
    prev: str, curr: str, layers: int, totals: tuple[int, int, int], largest: tuple[int, int]
) -> None:
    """Layers of the model's width: migration, defragmentation, both coalesced; most to one device, first and last."""
    migrated, defragmented, _ = change(prev, curr, layers, 4)
    before, after = parse(prev), parse(curr)
    devices = range(before.world_size)
    first = lacking_layers(before, after, layers, devices, migrated)
    second = lacking_layers(after, after, layers, migrated, defragmented)
    both = lacking_layers(before, after, layers, devices, defragmented)
    assert tuple(int(sum(phase)) for phase in (first, second, both)) == totals
    assert (int(max(first)), int(max(both))) == largest
    assert totals[2] <= totals[0] + totals[1]


# Occupancy


def test_idle_slots_in_order_take_busy_ones_in_reverse_until_they_meet() -> None:
    topology = Topology(3, 4)
    operators = defragment_occupancy((9, 1, 6, 3), range(12), topology)
    assert operators == (Remap(9, 0), Remap(6, 2))
    assert [str(operator) for operator in operators] == ["<9->0>", "<6->2>"]
    assert apply((9, 1, 6, 3), operators) == (0, 1, 2, 3)
    assert defragment_occupancy((0, 1, 2, 3), range(12), topology) == ()


def test_the_fullest_nodes_are_filled_first_where_nodes_are_not_whole() -> None:
    """By ascending device the two ranks of node 1 would end on nodes 0 and 1."""
    topology = Topology(2, 4)
    assert defragment_occupancy((4, 5), [3, 4, 5], topology) == ()
    assert defragment_occupancy((3, 6), [3, 4, 5, 6], topology) == (Remap(3, 4), Remap(6, 5))


# Efficiency


def test_ranks_swap_in_one_step() -> None:
    operators = defragment_efficiency(parse("pp2"), (1, 0), range(2), Topology(1, 2))
    assert operators == (Remap(1, 0), Remap(0, 1))
    assert apply((1, 0), operators) == (0, 1)


def test_only_nodes_in_use_are_slots() -> None:
    placed = (10, 5, 4, 11)
    assert apply(placed, defragment_efficiency(parse("pp2tp2"), placed, range(12), Topology(3, 4))) == (4, 5, 6, 7)


def test_a_tp_group_skips_the_rest_of_a_node_that_it_does_not_fit() -> None:
    config, topology, slots = parse("pp2tp2"), Topology(2, 4), [1, 2, 3, 4, 5]
    placed = (1, 4, 2, 3)
    assert apply(placed, defragment_efficiency(config, placed, slots, topology)) == (1, 2, 4, 5)


def test_a_tp_group_wider_than_a_node_counts_only_if_it_spans_more_nodes_than_it_must() -> None:
    config, topology = parse("pp2tp4"), Topology(4, 2)
    assert cross_node_tp_groups(config, range(8), topology) == 0
    assert cross_node_tp_groups(config, (0, 2, 4, 6, 1, 3, 5, 7), topology) == 2


# Operators


def test_operators_that_do_not_fit_the_placement_are_refused() -> None:
    with pytest.raises(Mismatch, match="from device 7 where no rank is"):
        apply((0, 1), [Remap(7, 2)])
    with pytest.raises(Mismatch, match="from device 0 twice"):
        apply((0, 1), [Remap(0, 2), Remap(0, 3)])
    with pytest.raises(Mismatch, match=r"each of devices \[1\]"):
        apply((0, 1), [Remap(0, 1)])


def test_devices_outside_the_topology_are_refused() -> None:
    with pytest.raises(Infeasible, match=r"devices \[4\] are outside"):
        migrate_then_defragment(parse("pp2"), parse("pp2"), 2, [0, 4], [0, 1, 4], Topology(2, 2))


# Random changes


@st.composite
def placements(draw: st.DrawFn) -> tuple[ParallelConfig, tuple[int, ...], list[int], Topology]:
    """A configuration anywhere on scattered slots of some nodes."""
    sizes = st.integers(1, 4)
    config = ParallelConfig(draw(sizes), draw(sizes), draw(st.integers(1, 2)))
    per_node = draw(st.integers(1, 6))
    topology = Topology(-(-config.world_size // per_node) + draw(st.integers(0, 3)), per_node)
    order = draw(st.randoms(use_true_random=False)).sample(range(topology.devices), topology.devices)
    slots = order[: draw(st.integers(config.world_size, topology.devices))]
    return config, tuple(slots[: config.world_size]), slots, topology


def free(placed: tuple[int, ...], slots: list[int], topology: Topology) -> int:
    """Nodes of the slots without a rank."""
    return len({d // topology.devices_per_node for d in slots} - {d // topology.devices_per_node for d in placed})


@given(placements())
@settings(max_examples=150)
def test_no_function_breaks_a_placement_or_takes_a_free_node(
    case: tuple[ParallelConfig, tuple[int, ...], list[int], Topology],
) -> None:
    config, placed, slots, topology = case
    packed = apply(placed, defragment_occupancy(placed, slots, topology))
    ordered = apply(placed, defragment_efficiency(config, placed, slots, topology))
    both = defragment(config, placed, slots, topology)
    for after in (packed, ordered, both):
        assert len(after) == len(set(after)) == config.world_size
        assert set(after) <= set(slots)
        assert free(after, slots, topology) >= free(placed, slots, topology)
    assert free(both, slots, topology) == free_nodes(both, topology, slots)


@given(placements())
@settings(max_examples=100)
def test_occupancy_leaves_the_most_nodes_free(
    case: tuple[ParallelConfig, tuple[int, ...], list[int], Topology],
) -> None:
    _, placed, slots, topology = case
    packed = apply(placed, defragment_occupancy(placed, slots, topology))
    sizes = sorted(Counter(device // topology.devices_per_node for device in slots).values(), reverse=True)
    fewest = next(count for count in range(len(sizes) + 1) if sum(sizes[:count]) >= len(placed))
    assert free(packed, slots, topology) == len(sizes) - fewest


@given(placements())
@settings(max_examples=150)
def test_efficiency_leaves_no_group_across_whole_nodes_unless_there_is_no_room(
    case: tuple[ParallelConfig, tuple[int, ...], list[int], Topology],
) -> None:
    config, placed, _, topology = case
    per_node = topology.devices_per_node
    whole = range(topology.devices)
    after = apply(placed, defragment_efficiency(config, placed, whole, topology))
    if config.tp <= per_node:
        nodes = len({device // per_node for device in placed})
        without_room = config.pp * config.dp - nodes * (per_node // config.tp)
        assert crossing(config, after, per_node) == max(0, without_room)
        if per_node % config.tp == 0:
            assert crossing(config, after, per_node) == 0
    elif config.tp % per_node == 0:
        assert cross_node_tp_groups(config, after, topology) == 0


@given(st.data(), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_a_change_in_two_phases_is_valid_and_frees_no_fewer_nodes(data: st.DataObject, random: Random) -> None:
    sizes = st.integers(1, 4)
    prev, curr = (ParallelConfig(data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 2))) for _ in range(2))
    layers, per_node = data.draw(st.integers(max(prev.pp, curr.pp), 9)), data.draw(st.integers(1, 5))
    topology = Topology(-(-max(prev.world_size, curr.world_size) // per_node) + data.draw(st.integers(0, 2)), per_node)
    prev_devices, devices = (
        random.sample(range(topology.devices), topology.devices)[: data.draw(st.integers(least, most))]
        for least, most in ((prev.world_size, prev.world_size), (curr.world_size, topology.devices))
    )
    migrated, defragmented = migrate_then_defragment(prev, curr, layers, prev_devices, devices, topology)
    assert len(set(defragmented)) == len(defragmented) == curr.world_size
    assert set(defragmented) <= set(devices)
    assert free_nodes(defragmented, topology, devices) >= free_nodes(migrated, topology, devices)
