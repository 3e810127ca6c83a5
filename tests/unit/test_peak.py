"""Peaks and staging: what a program takes at its worst moment, held against a replay of it, and numpy's contiguity."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, inside
from tests.unit.test_epochs import MOVES, STAGING, moments, old_shards, plan_of, size

from shardshift.schedule import (
    DIRECT_BYTES,
    Epoch,
    Peak,
    Program,
    Recv,
    Round,
    Schedule,
    Send,
    Storage,
    is_direct,
    peak_of,
    staged_bytes,
    staging_in_use_bytes,
)
from shardshift.schedule.staging import is_contiguous
from shardshift.values import Kind, Region, Shard, Tensor


def test_an_old_storage_lives_until_the_last_of_its_shards_has_gone() -> None:
    a, b, c = (Shard(Tensor(Kind.PARAM, name, (8,), "uint8", 1), Region((0,), (8,))) for name in "abc")
    program = Program(0, (), (Epoch((c,), (), (a,)), Epoch((), (), (b,))), "")
    assert peak_of(program, (a, b)) == Peak(16, 8, 24)
    both = Storage((a, b), 20)  # padded
    assert peak_of(program, (a, b), prev_storages=[both]) == Peak(20, 8, 28)
    again = Program(0, (), (Epoch((), (), (a,)), Epoch((c,), (), (b,))), "")
    assert peak_of(again, (a, b)).live_bytes == 16
    assert peak_of(again, (a, b), prev_storages=[both]).live_bytes == 28


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=4))
def test_contiguous_is_what_numpy_calls_so(dims: list[tuple[int, int, int]]) -> None:
    within = Region.whole([sum(dim) for dim in dims])
    region = Region(tuple(before for before, _, _ in dims), tuple(count for _, count, _ in dims))
    view = np.empty(within.shape)[inside(region)]
    assert is_contiguous(region, within) == view.flags.c_contiguous


def test_large_contiguous_pieces_need_no_staging_on_the_end_where_they_are_contiguous() -> None:
    tensor = Tensor(Kind.PARAM, "w", (2048, 2048), "uint8", 1)
    whole = Shard(tensor, Region.whole(tensor.shape))
    rows, columns = (Shard(tensor, Region((0, 0), shape)) for shape in ((1024, 2048), (2048, 512)))
    few = Shard(tensor, Region((0, 0), (10, 2048)))
    assert rows.nbytes >= DIRECT_BYTES
    assert columns.nbytes >= DIRECT_BYTES
    assert is_direct(Send(rows, whole, 1))
    assert not is_direct(Send(columns, whole, 1))
    assert is_direct(Recv(columns, columns, 1))
    assert not is_direct(Recv(few, few, 1))
    step = Round((), (Send(rows, whole, 1), Send(columns, whole, 1)), (Recv(few, few, 1), Recv(columns, columns, 2)))
    assert staged_bytes(step) == columns.nbytes + few.nbytes
    one, two = Round((), (Send(few, few, 1),)), Round((), (Send(columns, whole, 1),))
    assert staging_in_use_bytes([]) == 0
    assert staging_in_use_bytes([one]) == few.nbytes
    assert staging_in_use_bytes([two, one, one, two]) == few.nbytes + columns.nbytes


@settings(max_examples=60, deadline=None)
@given(MOVES, STAGING)
def test_under_keep_the_peak_is_the_old_state_all_that_is_new_and_two_rounds(move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    schedule = Schedule.of(plan, staging_bytes)
    assert schedule.epochs == 1
    for device in plan.devices:
        program, held = schedule.program(device), old_shards(plan, device)
        (epoch,) = program.epochs
        assert epoch.release == ()
        most = max(size(shard for _, shard in live) + staged for live, staged in moments(program, held))
        assert schedule.peak(device) == Peak(size(held), size(plan.curr.shards_on(device)), most)
        assert most <= size(held) + size(epoch.allocate) + staging_bytes
