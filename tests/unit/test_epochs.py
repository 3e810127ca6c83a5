"""Epochs: memory is bounded and no element loses a holder at any moment of a move that gives old memory back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, equal_layers, even_grid, growths, identities, inside, mask, moves, state_of

from shardshift.models import Catalogue, Model
from shardshift.plan import Plan, make_plan
from shardshift.schedule import (
    Epoch,
    Peak,
    Program,
    Recv,
    Round,
    Schedule,
    Send,
    Storage,
    describe,
)
from shardshift.simulator import execute, simulate
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    PlacedLayout,
    Region,
    Shard,
    StateLost,
    Tensor,
    Topology,
)
from shardshift.values.topology import Rates

MOVES = st.one_of(moves(losses=True), growths())
STAGING = st.sampled_from([24, 80, 400, 1 << 20])


def plan_of(move: Move) -> Plan:
    try:
        return make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost)
    except StateLost:
        assume(False)
        raise


def released(plan: Plan, staging_bytes: int) -> Schedule:
    """The schedule under ``release``; an example for which there is none is passed over."""
    try:
        return Schedule.of(plan, staging_bytes, policy="release")
    except Infeasible:
        assume(False)
        raise


def grid_plan(prev: str, curr: str, layers: int = 8, width: int = 24) -> Plan:
    model = equal_layers(layers, width=width)
    return placed_plan(even_grid(model, prev), even_grid(model, curr))


def placed_plan(before: Layout, after: Layout) -> Plan:
    devices = tuple(range(max(before.world_size, after.world_size)))
    return make_plan(PlacedLayout(before, devices[: before.world_size]), after, devices=devices)


def old_shards(plan: Plan, device: int) -> tuple[Shard, ...]:
    return () if device in plan.lost else plan.prev.shards_on(device)


def size(shards: Iterable[Shard]) -> int:
    return sum(shard.nbytes for shard in shards)


def moments(program: Program, held: Iterable[Shard]) -> list[tuple[set[tuple[str, Shard]], int]]:
    """Everything that is live on a device, and staged beside it, at each moment; by replaying its program."""
    live = {("old", shard) for shard in held}
    found = [(set(live), 0)]
    for epoch in program.epochs:
        live |= {("new", shard) for shard in epoch.allocate}
        for one, other in pairwise((Round(), *epoch.rounds)):
            pieces = [*one.sends, *one.recvs, *other.sends, *other.recvs]
            found.append((set(live), sum(piece.piece.nbytes for piece in pieces)))
        found.append((set(live), 0))
        live -= {("old", shard) for shard in epoch.release}
        found.append((set(live), 0))
    return found


def whole_at(program: Program, held: Iterable[Shard], fences: int) -> set[Shard]:
    """The shards that a device holds whole after so many fences."""
    found = set(held)
    for epoch in program.epochs[:fences]:
        found = (found - set(epoch.release)) | set(epoch.allocate)
    return found


@settings(max_examples=50, deadline=None)
@given(MOVES, STAGING)
def test_live_bytes_stay_within_the_larger_state_the_staging_and_one_storage_at_every_moment(
    move: Move, staging_bytes: int
) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    for device in plan.devices:
        program, held = schedule.program(device), old_shards(plan, device)
        before, after = size(held), size(plan.curr.shards_on(device))
        largest = max((shard.nbytes for shard in (*held, *plan.curr.shards_on(device))), default=0)
        found = moments(program, held)
        most = max(size(shard for _, shard in live) + staged for live, staged in found)
        assert most <= max(before, after) + staging_bytes + largest
        assert schedule.peak(device) == Peak(before, after, most)
        assert schedule.peak_extra_bytes(device) == most - before
        assert size(shard for _, shard in found[-1][0]) == after


@settings(max_examples=50, deadline=None)
@given(MOVES, STAGING)
def test_every_element_has_as_many_holders_as_before_or_as_after_at_every_moment(
    move: Move, staging_bytes: int
) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    programs = {device: schedule.program(device) for device in plan.devices}

    def holders(fences: int) -> dict[Tensor, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        shards = [
            shard
            for device, program in programs.items()
            for shard in whole_at(program, old_shards(plan, device), fences)
        ]
        return {
            tensor: mask(tensor.shape, *(shard.region for shard in shards if shard.tensor == tensor))
            for tensor in plan.curr.layout.tensors
        }

    before = holders(0)
    after = {
        tensor: mask(
            tensor.shape,
            *(s.region for d in plan.curr.devices for s in plan.curr.shards_on(d) if s.tensor == tensor),
        )
        for tensor in plan.curr.layout.tensors
    }
    # Inside an epoch, what was whole at its beginning still is: old shards go after its fence.
    for fences in range(schedule.epochs + 1):
        for tensor, count in holders(fences).items():
            assert (count >= np.minimum(before[tensor], after[tensor])).all()
    for tensor, count in holders(schedule.epochs).items():
        np.testing.assert_array_equal(count, after[tensor])


@settings(max_examples=60, deadline=None)
@given(MOVES, STAGING, st.sampled_from([None, 1, 7, 40]))
def test_every_element_arrives_as_itself_though_old_shards_are_released(
    move: Move, staging_bytes: int, round_bytes: int | None
) -> None:
    plan = plan_of(move)
    try:
        schedule = Schedule.of(plan, staging_bytes, round_bytes, policy="release")
    except Infeasible:
        assume(False)
    values = identities(move.prev.layout)
    programs = {device: schedule.program(device) for device in plan.devices}
    result = execute(programs, state_of(move.prev, values, lost=move.lost))
    for device in plan.devices:
        assert set(result[device]) == set(plan.curr.shards_on(device))
        for shard, array in result[device].items():
            np.testing.assert_array_equal(array, values[shard.tensor][inside(shard.region)])


@settings(max_examples=60, deadline=None)
@given(MOVES, STAGING)
def test_whole_tensors_move_in_an_epoch_and_what_all_keep_is_in_none(move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    touched: dict[Tensor, set[int]] = {}
    for device in plan.devices:
        program = schedule.program(device)
        assert len(program.epochs) == schedule.epochs
        kept = {refer.shard for refer in program.refers}
        assert sorted(map(str, [*kept, *program.allocate])) == sorted(map(str, plan.curr.shards_on(device)))
        gone = [shard for epoch in program.epochs for shard in epoch.release]
        assert sorted(map(str, [*kept, *gone])) == sorted(map(str, old_shards(plan, device)))
        for number, epoch in enumerate(program.epochs):
            steps = [one.piece for step in epoch.rounds for one in (*step.copies, *step.sends, *step.recvs)]
            for shard in (*epoch.allocate, *epoch.release, *steps):
                touched.setdefault(shard.tensor, set()).add(number)
    assert touched == {tensor: {epoch} for tensor, epoch in schedule.epoch_of.items()}
    assert set(range(schedule.epochs)) == {*schedule.epoch_of.values()} or not touched


@settings(max_examples=30, deadline=None)
@given(MOVES, STAGING)
def test_all_devices_find_the_same_epochs(move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    again = Schedule.of(Plan.from_json(json.loads(json.dumps(plan.to_json()))), staging_bytes, policy="release")
    assert again.epoch_of == schedule.epoch_of
    assert all(again.program(device) == schedule.program(device) for device in plan.devices)


GRIDS = ["pp4", "tp4", "dp4", "pp2tp2", "pp2dp2", "tp2dp2", "pp2", "tp2", "dp2", "dp1", "pp8", "tp8", "pp3tp2", "tp3"]


@pytest.mark.parametrize("staging_bytes", [8, 40, 400])
@pytest.mark.parametrize("prev", GRIDS)
def test_from_any_grid_to_any_other_there_is_an_order_within_the_bound(prev: str, staging_bytes: int) -> None:
    for curr in GRIDS:
        schedule = Schedule.of(grid_plan(prev, curr), staging_bytes, policy="release")
        assert 1 <= schedule.epochs <= max(len(schedule.epoch_of), 1)


CATALOGUE = Catalogue.of(Model.from_dimensions(layers=5, hidden=24, heads=12, kv_heads=12, vocab=40, positions=4))
CHANGES = [
    ("pp4", "tp4"),
    ("tp4", "pp4"),
    ("dp4", "dp2"),
    ("dp2", "dp4"),
    ("pp2tp2dp2", "pp1tp2dp4"),
    ("pp1tp2dp4", "pp4tp2dp1"),
    ("pp5dp2", "pp2tp3dp1"),
    ("pp4tp2", "pp5tp2dp2"),
    ("pp1dp8", "pp5dp1"),
    ("pp3dp2", "tp3dp4"),
]


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("staging_bytes", [256, 1 << 20])
@pytest.mark.parametrize(("prev", "curr"), CHANGES)
def test_whole_training_jobs_have_an_order_within_the_bound(
    prev: str, curr: str, staging_bytes: int, zero1: bool
) -> None:
    plan = placed_plan(CATALOGUE.layout(prev, zero1=zero1), CATALOGUE.layout(curr, zero1=zero1))
    schedule = Schedule.of(plan, staging_bytes, policy="release")
    assert schedule.epochs <= len(schedule.epoch_of)
    if prev == "dp4" and not zero1:
        assert schedule.epochs == 1  # replicas that leave


def test_parameters_move_before_moments_where_memory_allows() -> None:
    plan = placed_plan(CATALOGUE.layout("pp4"), CATALOGUE.layout("pp2tp2"))
    schedule = Schedule.of(plan, 4096, policy="release")
    kinds = [Kind.PARAM, Kind.BUFFER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]
    ends = [[epoch for tensor, epoch in schedule.epoch_of.items() if tensor.kind is kind] for kind in kinds]
    for before, after in pairwise(filter(None, ends)):
        assert max(before) <= min(after)
    assert schedule.epochs > 4


def test_a_move_that_fits_has_one_epoch_and_one_that_does_not_has_no_more_than_it_must() -> None:
    assert Schedule.of(grid_plan("pp2", "pp2dp2"), 1 << 20, policy="release").epochs == 1
    assert Schedule.of(grid_plan("pp2", "pp2"), 8, policy="release").epochs == 1  # nothing moves: a fence all the same
    # A device may hold its 4 layers, one more and the staging: of 4 that cross each way, one each way at a time.
    swap = PlacedLayout(even_grid(equal_layers(8), "pp2"), (0, 1))
    plan = make_plan(swap, swap.layout, devices=(0, 1), placement=(1, 0))
    schedule = Schedule.of(plan, 24, policy="release")
    assert schedule.epochs == 4
    for device in (0, 1):
        for epoch in schedule.program(device).epochs:
            assert size(epoch.allocate) == size(epoch.release) == 24


def test_tensors_that_share_a_storage_move_together() -> None:
    plan = grid_plan("pp4", "tp4")
    tensors = plan.curr.layout.tensors
    alone = Schedule.of(plan, 16, policy="release")
    assert len({alone.epoch_of[tensor] for tensor in tensors}) > 1
    groups = [{tensors[0], tensors[7]}, {tensors[3], tensors[7]}, {tensors[4]}]
    shared = Schedule.of(plan, 16, policy="release", storages=groups)
    assert len({shared.epoch_of[tensors[i]] for i in (0, 3, 7)}) == 1
    assert shared.epoch_of.keys() == alone.epoch_of.keys()


@settings(max_examples=80, deadline=None)
@given(moves(), STAGING, st.data())
def test_memory_is_bounded_where_tensors_share_storages(move: Move, staging_bytes: int, data: st.DataObject) -> None:
    plan = plan_of(move)
    tensors = plan.curr.layout.tensors
    of = [data.draw(st.integers(0, 3)) for _ in tensors]
    groups = [[tensor for tensor, own in zip(tensors, of, strict=True) if own == group] for group in range(3)]
    try:
        schedule = Schedule.of(plan, staging_bytes, policy="release", storages=groups)
    except Infeasible:
        assume(False)
    for device in plan.devices:
        program = schedule.program(device)
        held = plan.prev.shards_on(device)

        def storages(shards: Iterable[Shard]) -> list[Storage]:
            found = [tuple(shard for shard in shards if shard.tensor in group) for group in groups]
            return [Storage(inside_it, size(inside_it)) for inside_it in found if inside_it]

        old, new = storages(held), storages(program.allocate)
        peak = schedule.peak(device, program=program, prev_storages=old, curr_storages=new)
        alone = [shard.nbytes for shard in (*held, *plan.curr.shards_on(device))]
        largest = max([*alone, *(storage.nbytes for storage in (*old, *new))], default=0)
        assert peak.prev_bytes == size(held)
        assert peak.over_steady_bytes <= staging_bytes + largest


def test_a_move_without_an_order_is_refused_with_the_device_and_both_figures() -> None:
    tensors = [Tensor(Kind.PARAM, name, (400,), "uint8", 1) for name in "ab"]
    halves = [tuple(Shard(tensor, Region((at,), (200,))) for at in (0, 200)) for tensor in tensors]
    layout = Layout(tuple(halves), (0, 1))
    plan = make_plan(PlacedLayout(layout, (5, 7)), layout, devices=(5, 7), placement=(7, 5))
    # To take the other's two halves a device needs 800 and the staging, and may hold 400, the staging and 200.
    with pytest.raises(Infeasible, match=r"device [57] would hold 1200 bytes .*, 1000 are allowed: .* at least 200 "):
        Schedule.of(plan, 400, policy="release")
    assert Schedule.of(plan, 600, policy="release").epochs == 2


def test_a_fence_is_waited_for_by_all() -> None:
    plan = grid_plan("pp4", "tp4")
    topology = Topology(1, 4, Rates.both(1.0), latency_s=0.0)
    schedule = Schedule.of(plan, 16, policy="release")
    programs = {device: schedule.program(device) for device in plan.devices}
    found = simulate(programs, topology)
    by_epoch = [
        simulate({d: Program(d, (), (p.epochs[number],), p.digest) for d, p in programs.items()}, topology).total_s
        for number in range(schedule.epochs)
    ]
    assert found.total_s == pytest.approx(sum(by_epoch))
    assert sum(found.link_bytes.values()) == plan.moved_bytes
    assert found.peak_extra_bytes == {device: schedule.peak_extra_bytes(device) for device in plan.devices}


def test_a_released_shard_cannot_be_read_and_epochs_must_be_as_many() -> None:
    a, b = (Shard(Tensor(Kind.PARAM, name, (2,), "uint8", 1), Region((0,), (2,))) for name in "ab")
    late = {
        0: Program(0, (), (Epoch((), (), (a,)), Epoch((), (Round((), (Send(a, a, 1),)),))), ""),
        1: Program(1, (), (Epoch(), Epoch((a,), (Round((), (), (Recv(a, a, 0),)),))), ""),
    }
    with pytest.raises(Mismatch, match=r"device 0, round 0: reads param:a.* or has released"):
        execute(late, {0: {a: np.arange(2.0), b: np.arange(2.0)}})
    with pytest.raises(Mismatch, match=r"different numbers of epochs: \{0: 2, 1: 1\}"):
        execute({**late, 1: Program(1, (), (Epoch(),), "")}, {})


def test_epochs_are_told_in_words() -> None:
    schedule = Schedule.of(grid_plan("pp4", "tp4"), 16, policy="release")
    lines = list(describe(schedule.program(0)))
    assert [line for line in lines if line.startswith("epoch")] == [f"epoch {i}" for i in range(schedule.epochs)]
    assert any(line.startswith("  release  param:layers.0[0:24") for line in lines)
