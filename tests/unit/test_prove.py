"""The proof refuses every mutation of a good plan, and says what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, moves

from shardshift.plan import Copy, Plan, Transfer, make_plan, prove
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, ShardshiftError, Tensor

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)


def rows(start: int, count: int) -> Shard:
    return Shard(WEIGHT, Region((start, 0), (count, 2)))


@pytest.fixture
def plan() -> Plan:
    """Two halves become a whole and a half: one refer, one copy, one transfer."""
    prev = Layout(((rows(0, 4),), (rows(4, 4),)), (0, 1))
    curr = Layout(((rows(0, 8),), (rows(4, 4),)), (0, 1))
    made = make_plan(PlacedLayout(prev, (0, 1)), curr, devices=(0, 1))
    assert (len(made.refers), len(made.copies), len(made.transfers)) == (1, 1, 1)
    return made


@st.composite
def mutations(draw: st.DrawFn) -> Plan:
    """A proved plan with one instruction dropped, doubled, redirected or shifted."""
    move = draw(moves())
    made = make_plan(move.prev, move.curr, devices=move.devices)
    lists = [name for name in ("refers", "copies", "transfers") if getattr(made, name)]
    assume(lists)
    name = draw(st.sampled_from(lists))
    items = list(getattr(made, name))
    i = draw(st.integers(0, len(items) - 1))
    item = items[i]
    changes = ["drop", "double"] if name == "refers" else ["drop", "double", "shift", "shrink"]
    change = draw(st.sampled_from([*changes, "sender"] if name == "transfers" else changes))
    if change == "drop":
        # Without its refer, an empty shard is still wholly written.
        assume(name != "refers" or item.shard.nbytes)
        del items[i]
    elif change == "double":
        items.append(item)
    elif change == "sender":
        others = [d for d in move.prev.devices if item.source not in move.prev.shards_on(d)]
        assume(others)
        items[i] = replace(item, source_device=draw(st.sampled_from(others)))
    else:
        region = item.piece.region
        assume(region.shape)
        dim = draw(st.integers(0, len(region.shape) - 1))
        step = 1 if change == "shift" else 0
        offsets = tuple(offset + step * (d == dim) for d, offset in enumerate(region.offsets))
        shape = tuple(size - (1 - step) * (d == dim) for d, size in enumerate(region.shape))
        assume(all(a + n <= most for a, n, most in zip(offsets, shape, item.piece.tensor.shape, strict=True)))
        items[i] = replace(item, piece=Shard(item.piece.tensor, Region(offsets, shape)))
    changed: dict[str, Any] = {name: tuple(items)}
    return replace(made, **changed)


@settings(max_examples=150)
@given(mutations())
def test_no_mutation_is_proved(broken: Plan) -> None:
    with pytest.raises(ShardshiftError, match="nothing was moved"):
        prove(broken)


@settings(max_examples=40)
@given(moves())
def test_a_plan_without_one_of_its_senders_is_refused(move: Move) -> None:
    made = make_plan(move.prev, move.curr, devices=move.devices)
    for transfer in made.transfers[:1]:
        with pytest.raises(Mismatch, match="is lost"):
            prove(made, lost=[transfer.source_device])


def test_a_good_plan_is_proved(plan: Plan) -> None:
    prove(plan)


def test_a_missing_transfer_is_named_by_region(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"on device 0: 8 of 16 elements are written, \[4:8, 0:2\] are not"):
        prove(replace(plan, transfers=()))


def test_a_second_writer_is_named_by_region(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"\[4:8, 0:2\] and \[4:8, 0:2\] write the same elements twice"):
        prove(replace(plan, transfers=plan.transfers * 2))


def test_a_referred_shard_is_written_by_nothing_else(plan: Plan) -> None:
    copy = Copy(1, rows(4, 1), rows(4, 4), rows(4, 4))
    with pytest.raises(Mismatch, match="refers to already"):
        prove(replace(plan, copies=(*plan.copies, copy)))


def test_a_source_that_the_device_does_not_hold_is_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match="of device 1, which does not hold it"):
        prove(replace(plan, transfers=(Transfer(1, 0, rows(4, 4), rows(0, 8), rows(0, 8)),)))


def test_a_target_that_the_device_shall_not_hold_is_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match="which device 0 shall not hold"):
        prove(replace(plan, transfers=(Transfer(1, 0, rows(4, 4), rows(4, 4), rows(4, 4)),)))


def test_a_piece_outside_its_source_is_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"piece param:w\[3:7, 0:2\] is not inside param:w\[4:8, 0:2\]"):
        prove(replace(plan, transfers=(Transfer(1, 0, rows(3, 4), rows(4, 4), rows(0, 8)),)))


def test_a_device_does_not_send_to_itself(plan: Plan) -> None:
    copy = plan.copies[0]
    itself = Transfer(0, 0, copy.piece, copy.source, copy.target)
    with pytest.raises(Mismatch, match="sends to itself"):
        prove(replace(plan, copies=(), transfers=(*plan.transfers, itself)))


def test_moving_more_than_the_least_is_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match="moves 16 bytes, expected 15"):
        prove(replace(plan, least_moved_bytes=15))
