"""Plans written out: every element of every new shard comes from one place, seen on numbered elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from tests.unit.strategies import Array, Move, identities, inside, moves, state_of

from shardshift.plan import Copy, Plan, Refer, Transfer, make_plan
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard, StateLost, Tensor

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)


def rows(start: int, count: int, first: int = 0, width: int = 2) -> Shard:
    return Shard(WEIGHT, Region((start, first), (count, width)))


def placed(*per_device: tuple[Shard, ...]) -> PlacedLayout:
    """One role and one device for each argument."""
    ranks = tuple(range(len(per_device)))
    return PlacedLayout(Layout(per_device, ranks), ranks)


def planned(prev: PlacedLayout, curr: PlacedLayout) -> Plan:
    """The plan from one to the other."""
    return make_plan(prev, curr.layout, devices=curr.devices, placement=curr.devices)


class Walk:
    """What each device holds of a plan's new shards; NaN where nothing has been written."""

    def __init__(self, plan: Plan, values: dict[Tensor, Array]) -> None:
        self.held = state_of(plan.prev, values, plan.lost)
        self.got: dict[int, dict[Shard, NDArray[Any]]] = {
            device: {shard: np.full(shard.region.shape, np.nan) for shard in plan.curr.shards_on(device)}
            for device in plan.curr.devices
        }

    def put(self, device: int, piece: Shard, source: tuple[Shard, NDArray[Any]], target: Shard) -> None:
        """Write a piece into a new shard, where nothing is yet, out of what has been written."""
        shard, array = source
        values = array[inside(piece.region.relative_to(shard.region))]
        into = self.got[device][target][inside(piece.region.relative_to(target.region))]
        assert not np.isnan(values).any(), "what is sent has been written"
        assert np.isnan(into).all(), "nothing is written twice"
        into[...] = values


@settings(max_examples=150)
@given(moves(losses=True))
def test_every_element_is_written_once_and_is_the_right_one(move: Move) -> None:
    try:
        plan = make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost)
    except StateLost:
        return
    values = identities(move.prev.layout)
    walk = Walk(plan, values)
    for refer in plan.refers:
        assert refer.shard in walk.held[refer.device]
        walk.got[refer.device][refer.shard] = walk.held[refer.device][refer.shard].copy()
    for copy in plan.copies:
        walk.put(copy.device, copy.piece, (copy.source, walk.held[copy.device][copy.source]), copy.target)
    for move_ in sorted(plan.transfers, key=lambda transfer: transfer.hop):
        state = walk.held if move_.hop == 1 else walk.got
        source = move_.source, state[move_.source_device][move_.source]
        walk.put(move_.target_device, move_.piece, source, move_.target)
    for shards in walk.got.values():
        for shard, found in shards.items():
            assert (found == values[shard.tensor][inside(shard.region)]).all()


@settings(max_examples=100)
@given(moves(losses=True))
def test_sums_are_those_of_what_is_written_out(move: Move) -> None:
    try:
        plan = make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost)
    except StateLost:
        return
    assert plan.referred_bytes == sum(refer.shard.nbytes for refer in plan.refers)
    assert plan.copied_bytes == sum(copy.piece.nbytes for copy in plan.copies)
    assert plan.moved_bytes == sum(transfer.piece.nbytes for transfer in plan.transfers)
    held_bytes = sum(shard.nbytes for rank in range(move.curr.world_size) for shard in move.curr.shards(rank))
    assert plan.referred_bytes + plan.copied_bytes + plan.moved_bytes == held_bytes
    assert plan.instructions == {
        "refer": len(plan.refers),
        "copy": len(plan.copies),
        "send": sum(transfer.hop == 1 for transfer in plan.transfers),
        "recv": len(plan.transfers),
        "forward": sum(transfer.hop > 1 for transfer in plan.transfers),
    }
    # What one device does is what the whole says of it.
    for device in plan.devices:
        assert list(plan.refers_of(device)) == [refer for refer in plan.refers if refer.device == device]
        assert list(plan.copies_of(device)) == [copy for copy in plan.copies if copy.device == device]
        ends = [t for t in plan.transfers if device in (t.source_device, t.target_device)]
        assert list(plan.transfers_of(device)) == ends


@settings(max_examples=60)
@given(moves())
def test_facts_of_a_device_are_in_order_of_need(move: Move) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    need = {tensor: place for place, tensor in enumerate(move.curr.tensors)}
    for device in plan.curr.devices:
        refers = [need[refer.shard.tensor] for refer in plan.refers_of(device)]
        copies = [need[copy.target.tensor] for copy in plan.copies_of(device)]
        assert refers == sorted(refers)
        assert copies == sorted(copies)
        kept = {refer.shard for refer in plan.refers_of(device)}
        assert kept == set(plan.prev.shards_on(device)) & set(plan.curr.shards_on(device))


def test_the_very_same_shard_is_referred_to_and_another_shape_is_copied() -> None:
    found = planned(placed((rows(0, 4),), (rows(4, 4),)), placed((rows(0, 4),), (rows(4, 4, 0, 1), rows(4, 4, 1, 1))))
    assert found.refers == (Refer(0, rows(0, 4)),)
    assert found.copies == tuple(Copy(1, rows(4, 4, column, 1), rows(4, 4), rows(4, 4, column, 1)) for column in (0, 1))
    assert found.transfers == ()


def test_what_is_held_in_part_is_copied_in_part() -> None:
    found = planned(placed((rows(0, 4),), (rows(4, 4),)), placed((rows(0, 6),), (rows(6, 2),)))
    assert found.copies == (
        Copy(0, rows(0, 4), rows(0, 4), rows(0, 6)),
        Copy(1, rows(6, 2), rows(4, 4), rows(6, 2)),
    )
    assert found.transfers == (Transfer(1, 0, rows(4, 2), rows(4, 4), rows(0, 6)),)


def test_a_forward_is_sent_out_of_the_new_shard() -> None:
    found = planned(placed((rows(0, 8),)), placed((rows(0, 8),), (rows(0, 8),), (rows(0, 8),)))
    assert found.transfers == (
        Transfer(0, 1, rows(0, 8), rows(0, 8), rows(0, 8), hop=1),
        Transfer(1, 2, rows(0, 8), rows(0, 8), rows(0, 8), hop=2),
    )


def test_a_device_that_lost_its_memory_keeps_nothing() -> None:
    whole = placed((rows(0, 8),), (rows(0, 8),))
    with pytest.raises(Exception, match="lost"):
        make_plan(whole, whole.layout, devices=(0, 1), lost=(0,))
    plan = make_plan(whole, whole.layout, devices=(1, 2), lost=(0,))
    assert [refer.device for refer in plan.refers] == [1]
    assert [(t.source_device, t.target_device) for t in plan.transfers] == [(1, 2)]
