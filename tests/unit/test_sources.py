"""Sources: every cell that a device lacks, once, from one that has it by then; nodes are entered once."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, equal_layers, even_grid, inside, moves

from shardshift.plan import Cells, Moves, make_plan, sources
from shardshift.plan.sources import choose_sources, wants
from shardshift.values import Kind, Layout, PlacedLayout, Rates, Region, Shard, StateLost, Tensor, Topology

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)

Arrival = tuple[int, int, int]
"""Source, target, hop."""


def rows(start: int, count: int) -> Shard:
    return Shard(WEIGHT, Region((start, 0), (count, 2)))


def placed(*per_device: tuple[Shard, ...]) -> PlacedLayout:
    """One role and one device for each argument."""
    ranks = tuple(range(len(per_device)))
    return PlacedLayout(Layout(per_device, ranks), ranks)


def replicas(holders: list[int], wanting: list[int]) -> tuple[PlacedLayout, PlacedLayout]:
    """Some devices hold the whole weight, and some shall."""
    whole = (rows(0, 8),)
    return tuple(PlacedLayout(Layout((whole,), (0,) * len(on)), tuple(on)) for on in (holders, wanting))  # type: ignore[return-value]


def chosen(
    prev: PlacedLayout, curr: PlacedLayout, topology: Topology | None = None, lost: tuple[int, ...] = ()
) -> tuple[Cells, Moves]:
    cells = Cells(prev.layout, curr.layout)
    return cells, choose_sources(cells, wants(cells, prev, curr, lost), topology=topology, lost=lost)


def arrivals(found: Moves) -> list[Arrival]:
    """Of a plan with one cell."""
    return list(zip(found.source.tolist(), found.target.tolist(), found.hop.tolist(), strict=True))


def holding(placed: PlacedLayout, cells: Cells, cell: int, device: int) -> bool:
    """Whether a device holds all of a cell, by its shards; cells are never held in part."""
    found = {
        region.intersect(shard.region) == region
        for tensor, regions in cells.regions([cell]).items()
        for region in regions
        for shard in placed.shards_on(device)
        if shard.tensor == tensor and region.intersect(shard.region)
    }
    assert found != {True, False}
    return bool(found)


@st.composite
def settled(draw: st.DrawFn) -> tuple[Move, PlacedLayout, Topology]:
    """A move whose new ranks have devices, in any order, on nodes of one to four devices."""
    move = draw(moves(losses=True))
    curr = PlacedLayout(move.curr, move.devices[: move.curr.world_size])
    size = draw(st.integers(1, 4))
    return move, curr, Topology(-(-(max(*move.prev.devices, *move.devices) + 1) // size), size)


def unrelieved(
    prev: PlacedLayout, curr: PlacedLayout, topology: Topology, lost: tuple[int, ...]
) -> tuple[Cells, Moves]:
    """Sources as they are before weight is taken off the busiest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "relieve", lambda *_: None)
        return chosen(prev, curr, topology, lost)


def by_cell(found: Moves) -> dict[int, list[Arrival]]:
    grouped: dict[int, list[Arrival]] = defaultdict(list)
    for cell, source, target, hop in zip(*(column.tolist() for column in found.columns), strict=True):
        grouped[cell].append((source, target, hop))
    return grouped


def busiest_s(cells: Cells, found: Moves, topology: Topology) -> float:
    """What the busiest device or link takes to send."""
    size_bytes = cells.nbytes[found.cell].astype(float)
    nodes = topology.nodes_of(found.source)
    crossing = nodes != topology.nodes_of(found.target)
    devices_s = np.bincount(found.source, size_bytes, topology.devices) / topology.device_out_bytes_per_s()
    links_s = np.bincount(nodes[crossing], size_bytes[crossing], topology.nodes) / topology.node_out_bytes_per_s()
    return float(max(devices_s.max(), links_s.max()))


@settings(max_examples=80)
@given(settled())
def test_every_lacking_device_gets_each_cell_once_from_one_that_has_it_by_then(
    given_move: tuple[Move, PlacedLayout, Topology],
) -> None:
    move, curr, topology = given_move
    living = [device for device in move.prev.devices if device not in move.lost]
    try:
        cells, found = chosen(move.prev, curr, topology, move.lost)
    except StateLost:
        return
    arriving = by_cell(found)
    for cell in range(len(cells)):
        holders = {device for device in living if holding(move.prev, cells, cell, device)}
        lacking = {device for device in curr.devices if holding(curr, cells, cell, device)} - holders
        assert Counter(target for _, target, _ in arriving[cell]) == Counter(lacking)
        hop_of = {target: hop for _, target, hop in arriving[cell]}
        for source, _, hop in arriving[cell]:
            assert source in holders if hop == 1 else hop_of[source] == hop - 1
        # A node without a holder takes the cell over its link once, however many of its devices lack it.
        homes = {topology.node_of(device) for device in holders}
        entered = Counter(
            topology.node_of(target)
            for source, target, _ in arriving[cell]
            if topology.node_of(source) != topology.node_of(target)
        )
        assert {node: count for node, count in entered.items() if node not in homes} == dict.fromkeys(
            {topology.node_of(device) for device in lacking} - homes, 1
        )
    assert not set(found.source.tolist()) & set(move.lost)
    assert found.cell.tolist() == sorted(found.cell.tolist())


@settings(max_examples=80)
@given(settled())
def test_a_node_that_has_a_cell_serves_itself_and_nobody_sends_a_cell_twice(
    given_move: tuple[Move, PlacedLayout, Topology],
) -> None:
    move, curr, topology = given_move
    living = [device for device in move.prev.devices if device not in move.lost]
    try:
        cells, found = unrelieved(move.prev, curr, topology, move.lost)
    except StateLost:
        return
    for cell, arriving in by_cell(found).items():
        homes = {topology.node_of(device) for device in living if holding(move.prev, cells, cell, device)}
        for source, target, _ in arriving:
            assert topology.node_of(target) not in homes or topology.node_of(source) == topology.node_of(target)
        # Once to its own node and once to another; a forwarder once in all.
        sent = Counter((source, topology.node_of(source) == topology.node_of(target)) for source, target, _ in arriving)
        assert max(sent.values()) == 1
        assert max(Counter(source for source, _, hop in arriving if hop > 1).values(), default=0) <= 1


@settings(max_examples=80)
@given(settled())
def test_taking_weight_off_the_busiest_never_makes_any_busier(
    given_move: tuple[Move, PlacedLayout, Topology],
) -> None:
    move, curr, topology = given_move
    try:
        cells, found = chosen(move.prev, curr, topology, move.lost)
        _, before = unrelieved(move.prev, curr, topology, move.lost)
    except StateLost:
        return
    assert len(found) == len(before)
    assert busiest_s(cells, found, topology) <= busiest_s(cells, before, topology)


@settings(max_examples=60)
@given(settled())
def test_state_is_lost_exactly_when_an_element_has_no_living_holder(
    given_move: tuple[Move, PlacedLayout, Topology],
) -> None:
    move, curr, topology = given_move
    held = {tensor: np.zeros(tensor.shape, dtype=bool) for tensor in move.curr.tensors}
    for device in set(move.prev.devices) - set(move.lost):
        for shard in move.prev.shards_on(device):
            held[shard.tensor][inside(shard.region)] = True
    gone = {str(tensor) for tensor, marks in held.items() if not marks.all()}
    if gone:
        with pytest.raises(StateLost) as caught:
            chosen(move.prev, curr, topology, move.lost)
        assert set(caught.value.names) == gone
    else:
        chosen(move.prev, curr, topology, move.lost)


def test_the_same_node_is_asked_first() -> None:
    prev, curr = replicas([0, 2], [1, 3])
    assert arrivals(chosen(prev, curr, Topology(nodes=2, devices_per_node=2))[1]) == [(0, 1, 1), (2, 3, 1)]


def test_one_holder_heads_a_chain_through_all_receivers() -> None:
    prev, curr = replicas([0], [0, 1, 2, 3, 4])
    assert arrivals(chosen(prev, curr)[1]) == [(0, 1, 1), (1, 2, 2), (2, 3, 3), (3, 4, 4)]


def test_a_chain_runs_through_each_node_before_it_goes_on() -> None:
    prev, curr = replicas([0], [1, 2, 3, 4, 5, 6, 7, 8])
    topology = Topology(nodes=3, devices_per_node=3)
    found = arrivals(chosen(prev, curr, topology)[1])
    crossings = [(topology.node_of(source), topology.node_of(target)) for source, target, _ in found]
    assert Counter(pair for pair in crossings if pair[0] != pair[1]) == {(0, 1): 1, (1, 2): 1}
    assert len(found) == 8


def test_replicas_share_the_sending() -> None:
    prev, curr = replicas([0, 1, 2], list(range(9)))
    found = arrivals(chosen(prev, curr)[1])
    assert Counter(source for source, _, hop in found if hop == 1) == {0: 1, 1: 1, 2: 1}
    assert Counter(hop for _, _, hop in found) == {1: 3, 2: 3}


def test_a_holder_that_is_busy_elsewhere_does_not_head_a_chain() -> None:
    # Devices 0 and 1 hold a; 0 alone holds b, which 2 lacks; so a comes from 1.
    a, b = (Shard(Tensor(Kind.PARAM, name, (8,), "uint8", 1), Region((0,), (8,))) for name in "ab")
    prev = PlacedLayout(Layout(((a, b), (a,)), (0, 1)), (0, 1))
    curr = PlacedLayout(Layout(((a, b),), (0,)), (2,))
    _, found = chosen(prev, curr)
    assert Counter(found.source.tolist()) == {0: 1, 1: 1}


@pytest.mark.parametrize(("before", "after"), [("pp4dp2", "pp4dp8"), ("pp2dp1", "pp2dp16"), ("pp2tp2dp3", "pp2tp2dp7")])
def test_at_a_scale_out_no_device_sends_more_than_one_receives(before: str, after: str) -> None:
    model = equal_layers(8)
    prev, curr = even_grid(model, before), even_grid(model, after)
    plan = make_plan(PlacedLayout(prev, tuple(range(prev.world_size))), curr, devices=range(curr.world_size))
    sent, received = (
        np.bincount(devices, plan.cells.nbytes[plan.moves.cell]) for devices in (plan.moves.source, plan.moves.target)
    )
    assert sent.max() == received.max() == plan.curr.layout.shards(0)[0].tensor.nbytes * 8 // (len(curr.roles))


def test_the_lost_send_nothing_while_a_replica_lives() -> None:
    prev, curr = replicas([0, 1], [2])
    assert arrivals(chosen(prev, curr, lost=(0,))[1]) == [(1, 2, 1)]


def test_a_device_that_lost_its_memory_gets_everything_anew() -> None:
    prev, curr = replicas([0, 1], [0])
    assert arrivals(chosen(prev, curr, lost=(0,))[1]) == [(1, 0, 1)]


def test_everything_that_is_lost_is_named() -> None:
    bias = Tensor(Kind.PARAM, "b", (4,), "bfloat16", 2)
    bias_shard = Shard(bias, Region((0,), (4,)))
    prev = placed((rows(0, 3), bias_shard), (rows(3, 5),))
    curr = PlacedLayout(Layout(((rows(0, 8), bias_shard),), (0, 0)), (1, 2))
    with pytest.raises(StateLost) as caught:
        chosen(prev, curr, lost=(0,))
    assert set(caught.value.names) == {"param:w", "param:b"}
    assert "param:w [0:3, 0:2]" in str(caught.value)
    assert "param:b [0:4]" in str(caught.value)
    assert "devices [0] are lost" in str(caught.value)


def test_overlapping_holders_give_each_element_once() -> None:
    # Device 0 holds all, device 1 the rows 2 to 5: what both hold may come from either, but only once.
    prev, curr = placed((rows(0, 8),), (rows(2, 4),), ()), placed((), (), (rows(0, 8),))
    cells, found = chosen(prev, curr)
    counts = np.zeros(WEIGHT.shape, np.int64)
    for region in cells.regions(found.cell.tolist())[WEIGHT]:
        counts[inside(region)] += 1
    assert (counts == 1).all()


def test_empty_shards_move_nothing() -> None:
    prev, curr = placed((rows(0, 8),), (rows(8, 0),)), placed((rows(0, 0),), (rows(0, 8),))
    assert arrivals(chosen(prev, curr)[1]) == [(0, 1, 1)]


def test_moves_are_taken_by_row() -> None:
    prev, curr = replicas([0], [1, 2, 3])
    _, found = chosen(prev, curr)
    assert arrivals(found.take(np.array([2, 0]))) == [arrivals(found)[2], arrivals(found)[0]]
    assert arrivals(found.take(found.hop > 1)) == arrivals(found)[1:]
    assert len(found.take(found.hop > 9)) == 0


@pytest.mark.parametrize("factor", [2, 10, 100])
@pytest.mark.parametrize("what", ["device", "link"])
def test_nobody_waits_for_a_slow_sender_when_another_has_the_cell(factor: int, what: str) -> None:
    """Eight replicas from one, of which one sends slowly: as fast as if it did not."""
    slow = ((4, Rates(25e9, 25e9 / factor)),)
    topology = (
        Topology(1, 8, device_exceptions=slow)
        if what == "device"
        else Topology(8, 1, link_rates=Rates.both(25e9), link_exceptions=slow)
    )
    prev, curr = replicas([0], list(range(8)))
    cells, found = chosen(prev, curr, topology)
    even = Topology(topology.nodes, topology.devices_per_node, link_rates=topology.link_rates)
    assert busiest_s(cells, found, topology) == busiest_s(*chosen(prev, curr, even), even)
    assert 4 not in found.source
