"""The timetable: no lane is taken twice, need decides where lanes do not, and any timetable gives sound programs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import (
    Move,
    equal_layers,
    even_grid,
    growths,
    identities,
    inside,
    moves,
    state_of,
)

from shardshift.plan import Plan, make_plan
from shardshift.schedule import NeedOrder, Schedule, compile_programs, timetable
from shardshift.schedule.timetable import Timetable
from shardshift.simulator import execute
from shardshift.values import Kind, PlacedLayout

MOVES = st.one_of(moves(), growths())
KINDS = [Kind.PARAM, Kind.BUFFER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]


def plan_of(move: Move) -> Plan:
    return make_plan(move.prev, move.curr, devices=move.devices)


def table_of(plan: Plan) -> Timetable:
    return Timetable.of(plan, NeedOrder.of(plan.curr.layout))


def grid_plan(prev: str, curr: str, layers: int = 16) -> Plan:
    model = equal_layers(layers)
    before, after = even_grid(model, prev), even_grid(model, curr)
    devices = range(max(before.world_size, after.world_size))
    return make_plan(PlacedLayout(before, tuple(devices)[: before.world_size]), after, devices=devices)


def pieces(plan: Plan) -> list[tuple[int, tuple[str, int], Kind, int, int]]:
    """Per transfer of the plan: cell, lanes' device and side, kind, position at which it begins and its bytes."""
    table, found = table_of(plan), []
    for row, (cell, source, target, _) in enumerate(zip(*(c.tolist() for c in plan.moves.columns), strict=True)):
        places = table.places(cell)
        for transfer in plan._transfers(np.array([row])):
            at = places[transfer.piece.tensor, transfer.piece.region.offsets]
            for lane in (("out", source), ("in", target)):
                found.append((cell, lane, transfer.piece.tensor.kind, at, transfer.piece.nbytes))
    return found


@settings(max_examples=60)
@given(MOVES)
def test_no_lane_carries_two_cells_at_once_and_kinds_follow_one_another(move: Move) -> None:
    by_lane: defaultdict[tuple[str, int], list[tuple[int, int, Kind, int]]] = defaultdict(list)
    for cell, lane, kind, at, size in pieces(plan_of(move)):
        by_lane[lane].append((at, at + size, kind, cell))
    for spans in by_lane.values():
        spans.sort(key=lambda span: span[:2])
        for (_, end, before, cell), (begin, _, kind, other) in pairwise(spans):
            assert end <= begin or cell == other  # a source may send one cell to several
            assert KINDS.index(before) <= KINDS.index(kind)


@settings(max_examples=60)
@given(MOVES)
def test_no_task_waits_while_its_lanes_are_free(move: Move) -> None:
    plan = plan_of(move)
    table = table_of(plan)
    if table.start is None:
        assert not len(plan.moves)
        return
    took: defaultdict[tuple[int, int], int] = defaultdict(int)  # bytes of (cell, kind)
    spans: defaultdict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    lanes: defaultdict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    for cell, source, target, _ in zip(*(column.tolist() for column in plan.moves.columns), strict=True):
        for lane in (("out", source), ("in", target)):
            lanes[cell][lane] = lanes[cell].get(lane, 0) + 1
    for cell in lanes:
        for tensor, regions in plan.cells.regions([cell]).items():
            took[cell, KINDS.index(tensor.kind)] += sum(region.numel for region in regions) * tensor.itemsize
    for (cell, kind), size in took.items():
        start = int(table.start[0, cell, kind])
        for lane in lanes[cell]:
            spans[lane].append((start, start + size * max(lanes[cell].values()), kind))
    for cell, kind in took:
        start = int(table.start[0, cell, kind])
        ends = [end for lane in lanes[cell] for begin, end, of in spans[lane] if end <= start and of <= kind]
        assert start == max(ends, default=0)


@pytest.mark.parametrize(("prev", "curr"), [("pp8", "pp4"), ("pp8tp2", "pp4tp2"), ("tp2dp1", "tp2dp4")])
def test_where_nobody_competes_for_a_sender_the_order_is_that_of_need(prev: str, curr: str) -> None:
    plan = grid_plan(prev, curr)
    need = NeedOrder.of(plan.curr.layout)
    table = Timetable.of(plan, need)
    for device in plan.curr.devices:
        got = [transfer.piece for transfer in plan.transfers_of(device) if transfer.target_device == device]
        cells = plan.moves.cell[plan.moves.target == device].tolist()
        at = {key: place for cell in cells for key, place in table.places(cell).items()}
        order = sorted(got, key=lambda piece: at[piece.tensor, piece.region.offsets])
        assert [need.at[piece.tensor] for piece in order] == sorted(need.at[piece.tensor] for piece in got)


@pytest.mark.parametrize(("prev", "curr"), [("pp8", "tp8"), ("tp8", "pp8")])
def test_where_all_want_all_every_device_begins_with_a_peer_of_its_own(prev: str, curr: str) -> None:
    plan = grid_plan(prev, curr)
    table = table_of(plan)
    assert table.start is not None
    first = [row for row, cell in enumerate(plan.moves.cell.tolist()) if table.start[0, cell, 0] == 0]
    for end in (plan.moves.source[first], plan.moves.target[first]):
        assert len(set(end.tolist())) == len(end) >= 7


@settings(max_examples=60, deadline=None)
@given(MOVES, st.integers(8, 80), st.sampled_from([None, 1, 3, 20]), st.integers(0, 2**32 - 1))
def test_any_timetable_gives_programs_that_end_and_put_every_element_in_place(
    move: Move, staging_bytes: int, round_bytes: int | None, seed: int
) -> None:
    plan = plan_of(move)
    values = identities(move.prev.layout)
    made = Schedule.of(plan, staging_bytes, round_bytes)
    if made.timetable.start is not None:
        made.timetable.start[...] = np.random.default_rng(seed).integers(0, 300, made.timetable.start.shape)
    result = execute({device: made.program(device) for device in plan.devices}, state_of(move.prev, values))
    for device in plan.devices:
        for shard, array in result[device].items():
            np.testing.assert_array_equal(array, values[shard.tensor][inside(shard.region)])


@pytest.mark.parametrize("name", ["MOST_CELLS", "MANY_MOVES"])
@settings(max_examples=25, deadline=None)
@given(MOVES, st.integers(8, 120))
def test_plans_too_large_for_the_full_timetable_arrive_as_well(name: str, move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    values = identities(move.prev.layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timetable, name, 0)
        programs = compile_programs(plan, staging_bytes)
    result = execute(programs, state_of(move.prev, values))
    for device in plan.devices:
        for shard, array in result[device].items():
            np.testing.assert_array_equal(array, values[shard.tensor][inside(shard.region)])
