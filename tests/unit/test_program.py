"""Programs: both ends meet, no round exceeds the staging bound, and what is needed first comes first."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, moves

from shardshift.plan import make_plan
from shardshift.schedule import Copy, Program, Refer, compile_program, compile_programs, peak_extra_bytes
from shardshift.values import Infeasible, Kind, Layout, PlacedLayout, Region, Shard, Tensor

STAGING = st.integers(4, 200)


def programs_of(move: Move, staging_bytes: int) -> dict[int, Program]:
    return compile_programs(make_plan(move.prev, move.curr, devices=move.devices), staging_bytes)


def whole(kind: Kind, name: str, count: int, itemsize: int = 1) -> Shard:
    return Shard(Tensor(kind, name, (count,), "uint8", itemsize), Region((0,), (count,)))


def handover(*shards: Shard, staging_bytes: int) -> dict[int, Program]:
    """Device 0 gives everything to device 1."""
    prev = PlacedLayout(Layout((shards,), (0,)), (0,))
    return compile_programs(make_plan(prev, prev.layout, devices=(1,)), staging_bytes)


@settings(max_examples=80)
@given(moves(), STAGING)
def test_both_ends_list_the_same_pieces_in_the_same_round_and_order(move: Move, staging_bytes: int) -> None:
    programs = programs_of(move, staging_bytes)
    assert len({len(program.rounds) for program in programs.values()}) == 1
    sent, received = defaultdict(list), defaultdict(list)
    for device, program in programs.items():
        for index, step in enumerate(program.rounds):
            for send in step.sends:
                sent[index, device, send.peer].append(send.piece)
            for recv in step.recvs:
                received[index, recv.peer, device].append(recv.piece)
    assert sent == received


@settings(max_examples=80)
@given(moves(), STAGING)
def test_no_device_sends_or_receives_more_than_the_bound_in_a_round(move: Move, staging_bytes: int) -> None:
    for program in programs_of(move, staging_bytes).values():
        for step in program.rounds:
            assert sum(send.piece.nbytes for send in step.sends) <= staging_bytes
            assert sum(recv.piece.nbytes for recv in step.recvs) <= staging_bytes


@settings(max_examples=60)
@given(moves(), STAGING)
def test_one_device_compiles_what_all_compile_for_it(move: Move, staging_bytes: int) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    programs = compile_programs(plan, staging_bytes)
    assert tuple(programs) == plan.devices
    for device, program in programs.items():
        assert compile_program(plan, device, staging_bytes) == program
        assert program.digest == plan.digest


@settings(max_examples=60)
@given(moves(), STAGING)
def test_programs_carry_exactly_the_bytes_of_the_plan(move: Move, staging_bytes: int) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    steps = [step for program in compile_programs(plan, staging_bytes).values() for step in program.rounds]
    assert sum(recv.piece.nbytes for step in steps for recv in step.recvs) == plan.moved_bytes
    assert sum(copy.piece.nbytes for step in steps for copy in step.copies) == plan.copied_bytes


@settings(max_examples=60)
@given(moves(), STAGING)
def test_every_new_shard_is_referred_or_allocated(move: Move, staging_bytes: int) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    for device, program in compile_programs(plan, staging_bytes).items():
        kept = [refer.shard for refer in program.refers]
        assert sorted(map(str, [*kept, *program.allocate])) == sorted(map(str, plan.curr.shards_on(device)))


def test_parameters_come_first_and_moments_last() -> None:
    kinds = [Kind.EXP_AVG_SQ, Kind.PARAM, Kind.EXP_AVG, Kind.BUFFER, Kind.MASTER]
    shards = [whole(kind, f"layers.{i}", 8) for kind in kinds for i in (1, 0)]
    received = [
        (recv.piece.tensor.kind, recv.piece.tensor.name)
        for step in handover(*shards, staging_bytes=8)[1].rounds
        for recv in step.recvs
    ]
    ordered = [Kind.PARAM, Kind.BUFFER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]
    # Within a kind it is the order of the role, here layer 1 before layer 0.
    assert received == [(kind, f"layers.{i}") for kind in ordered for i in (1, 0)]


def test_disjoint_pairs_move_in_the_same_round() -> None:
    a, b = whole(Kind.PARAM, "a", 8), whole(Kind.PARAM, "b", 8)
    prev = PlacedLayout(Layout(((a,), (b,)), (0, 1)), (0, 1))
    programs = compile_programs(make_plan(prev, prev.layout, devices=(2, 3)), staging_bytes=8)
    assert all(len(program.rounds) == 1 for program in programs.values())


def test_large_pieces_are_cut_to_the_bound_on_elements() -> None:
    rounds = handover(whole(Kind.PARAM, "w", 10, itemsize=4), staging_bytes=15)[0].rounds
    assert [send.piece.region.shape for step in rounds for send in step.sends] == [(3,), (3,), (3,), (1,)]


def test_an_element_larger_than_the_bound_is_refused() -> None:
    with pytest.raises(Infeasible, match="one element has 4 bytes, the staging bound is 3"):
        handover(whole(Kind.PARAM, "w", 10, itemsize=4), staging_bytes=3)


def test_an_unknown_device_has_no_program() -> None:
    prev = PlacedLayout(Layout(((whole(Kind.PARAM, "w", 4),),), (0,)), (0,))
    with pytest.raises(KeyError, match="device 9"):
        compile_program(make_plan(prev, prev.layout, devices=(0,)), 9, 64)


def test_a_plan_of_copies_alone_has_one_round_and_one_of_refers_has_none() -> None:
    shard = whole(Kind.PARAM, "w", 8)
    halves = tuple(Shard(shard.tensor, Region((start,), (4,))) for start in (0, 4))
    prev = PlacedLayout(Layout(((shard,),), (0,)), (0,))
    (step,) = compile_programs(make_plan(prev, Layout((halves,), (0,)), devices=(0,)), 64)[0].rounds
    assert step.copies == tuple(Copy(half, shard, half) for half in halves)
    stay = compile_programs(make_plan(prev, prev.layout, devices=(0,)), 64)[0]
    assert (stay.refers, stay.allocate, stay.rounds) == ((Refer(shard),), (), ())


def test_the_peak_is_new_shards_plus_the_largest_round() -> None:
    programs = handover(whole(Kind.PARAM, "a", 10), whole(Kind.PARAM, "b", 3), staging_bytes=8)
    assert peak_extra_bytes(programs[0]) == 8
    assert peak_extra_bytes(programs[1]) == 13 + 8
