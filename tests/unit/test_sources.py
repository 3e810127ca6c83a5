"""Sources: everything a device lacks, once, from a living holder; what is held stays or is copied."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.strategies import Move, inside, mask, moves

from shardshift.plan import Copy, Refer, Transfer, source
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard, StateLost, Tensor, Topology

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)


def rows(start: int, count: int) -> Shard:
    return Shard(WEIGHT, Region((start, 0), (count, 2)))


def placed(*per_device: tuple[Shard, ...]) -> PlacedLayout:
    """One role and one device for each argument."""
    ranks = tuple(range(len(per_device)))
    return PlacedLayout(Layout(per_device, ranks), ranks)


@settings(max_examples=100)
@given(moves())
def test_every_element_of_every_target_is_written_exactly_once(move: Move) -> None:
    curr = PlacedLayout(move.curr, move.devices[: move.curr.world_size])
    found = source(move.prev, curr)
    written: dict[tuple[int, Shard], list[Region]] = {
        (device, shard): [] for device in curr.devices for shard in curr.shards_on(device)
    }
    for refer in found.refers:
        assert refer.shard in move.prev.shards_on(refer.device)
        written[refer.device, refer.shard].append(refer.shard.region)
    for copy in found.copies:
        written[copy.device, copy.target].append(copy.piece.region)
    for transfer in found.transfers:
        written[transfer.target_device, transfer.target].append(transfer.piece.region)
    for (_, shard), regions in written.items():
        counts = mask(shard.tensor.shape, *(region for region in regions if region.numel))
        assert (counts == mask(shard.tensor.shape, shard.region)).all()


@settings(max_examples=60)
@given(moves())
def test_nothing_that_a_device_holds_is_sent_to_it(move: Move) -> None:
    curr = PlacedLayout(move.curr, move.devices[: move.curr.world_size])
    for transfer in source(move.prev, curr).transfers:
        for shard in move.prev.shards_on(transfer.target_device):
            assert shard.tensor != transfer.piece.tensor or shard.region.intersect(transfer.piece.region) is None


def test_the_very_same_shard_is_referred_to_and_another_shape_is_copied() -> None:
    found = source(placed((rows(0, 4),), (rows(4, 4),)), placed((rows(0, 4),), (rows(4, 3),)))
    assert found.refers == (Refer(0, rows(0, 4)),)
    assert found.copies == (Copy(1, rows(4, 3), rows(4, 4), rows(4, 3)),)
    assert found.transfers == ()


def test_what_is_held_in_part_is_copied_in_part() -> None:
    found = source(placed((rows(0, 4),), (rows(4, 4),)), placed((rows(0, 6),)))
    assert found.copies == (Copy(0, rows(0, 4), rows(0, 4), rows(0, 6)),)
    assert found.transfers == (Transfer(1, 0, rows(4, 2), rows(4, 4), rows(0, 6)),)


def test_overlapping_holders_give_each_element_once() -> None:
    # Device 0 holds all, device 1 the rows 2 to 5: what both hold may come from either, but only once.
    found = source(placed((rows(0, 8),), (rows(2, 4),), ()), placed((), (), (rows(0, 8),)))
    counts = mask(WEIGHT.shape, *(transfer.piece.region for transfer in found.transfers))
    assert (counts == 1).all()


def test_the_same_node_is_asked_first() -> None:
    prev = placed((rows(0, 8),), (), (rows(0, 8),), ())
    curr = placed((), (rows(0, 8),), (), (rows(0, 8),))
    transfers = source(prev, curr, topology=Topology(nodes=2, devices_per_node=2)).transfers
    assert [(t.source_device, t.target_device) for t in transfers] == [(0, 1), (2, 3)]


def test_replicas_share_the_sending() -> None:
    whole = (rows(0, 8),)
    prev = PlacedLayout(Layout((whole,), (0,) * 3), (0, 1, 2))
    curr = PlacedLayout(Layout((whole,), (0,) * 9), tuple(range(9)))
    sent = Counter(transfer.source_device for transfer in source(prev, curr).transfers)
    assert sent == {0: 2, 1: 2, 2: 2}


def test_the_lost_send_nothing_while_a_replica_lives() -> None:
    whole = (rows(0, 8),)
    prev = PlacedLayout(Layout((whole,), (0, 0)), (0, 1))
    curr = PlacedLayout(Layout((whole,), (0,)), (2,))
    assert [t.source_device for t in source(prev, curr, lost=[0]).transfers] == [1]


def test_everything_that_is_lost_is_named() -> None:
    bias = Tensor(Kind.PARAM, "b", (4,), "bfloat16", 2)
    bias_shard = Shard(bias, Region((0,), (4,)))
    prev = placed((rows(0, 3), bias_shard), (rows(3, 5),))
    curr = PlacedLayout(Layout(((rows(0, 8), bias_shard),), (0, 0)), (1, 2))
    with pytest.raises(StateLost) as caught:
        source(prev, curr, lost=[0])
    assert caught.value.names == ("param:w", "param:b")
    assert "param:w [0:3, 0:2]; param:b [0:4]" in str(caught.value)
    assert "devices [0] are lost" in str(caught.value)


@settings(max_examples=60)
@given(moves(losses=True))
def test_state_is_lost_exactly_when_an_element_has_no_living_holder(move: Move) -> None:
    curr = PlacedLayout(move.curr, move.devices[: move.curr.world_size])
    held = {tensor: np.zeros(tensor.shape, dtype=bool) for tensor in move.curr.tensors}
    for device in set(move.prev.devices) - set(move.lost):
        for shard in move.prev.shards_on(device):
            held[shard.tensor][inside(shard.region)] = True
    gone = {str(tensor) for tensor, marks in held.items() if not marks.all()}
    if gone:
        with pytest.raises(StateLost) as caught:
            source(move.prev, curr, lost=move.lost)
        assert set(caught.value.names) == gone
    else:
        found = source(move.prev, curr, lost=move.lost)
        assert not {transfer.source_device for transfer in found.transfers} & set(move.lost)


def test_empty_shards_move_nothing() -> None:
    found = source(placed((rows(0, 8),), (rows(8, 0),)), placed((rows(0, 0),), (rows(0, 8),)))
    assert [t.target for t in found.transfers] == [rows(0, 8)]
    assert found.copies == ()
