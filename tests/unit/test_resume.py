"""Resuming: after any fence, and whoever is lost, the survivors come to a whole layout or are told what is gone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, equal_layers, even_grid, growths, identities, inside, mask, moves, state_of
from tests.unit.test_epochs import old_shards, plan_of, released, whole_at

from shardshift.plan import Plan, make_plan
from shardshift.schedule import Schedule, compile_programs, holdings, resume_plan
from shardshift.simulator import execute
from shardshift.values import Infeasible, Kind, Layout, PlacedLayout, Region, Shard, StateLost, Tensor, Unaccounted

MOVES = st.one_of(moves(), moves(losses=True), growths())


def covers(shards: list[Shard], tensor: Tensor) -> bool:
    return bool((mask(tensor.shape, *(shard.region for shard in shards if shard.tensor == tensor)) > 0).all())


def less(placed: PlacedLayout, gone: set[int]) -> PlacedLayout:
    """The layout on the devices that are left, written out shard by shard."""
    devices = tuple(device for device in placed.devices if device not in gone)
    roles = tuple(placed.shards_on(device) for device in devices)
    return PlacedLayout(Layout(roles, tuple(range(len(roles)))), devices)


@settings(max_examples=150, deadline=None)
@given(MOVES, st.sampled_from([16, 40, 200]), st.data())
def test_after_any_fence_and_loss_all_values_are_there_or_exactly_the_lost_ones_are_named(
    move: Move, staging_bytes: int, data: st.DataObject
) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    fences = data.draw(st.integers(0, schedule.epochs), label="fences")
    living = [device for device in plan.devices if device not in plan.lost]
    lost = data.draw(st.lists(st.sampled_from(living), max_size=2, unique=True), label="lost")
    programs = {device: schedule.program(device) for device in plan.devices}
    values = identities(plan.prev.layout)
    state = execute(programs, state_of(plan.prev, values, lost=plan.lost), fences=fences)
    survivors = {device: held for device, held in state.items() if device not in lost}

    whole = [s for d in survivors for s in whole_at(programs[d], old_shards(plan, d), fences)]
    gone = {str(tensor) for tensor in plan.curr.layout.tensors if not covers(whole, tensor)}
    if gone:
        with pytest.raises(StateLost) as caught:
            resume_plan(schedule, fences, lost)
        assert sorted(caught.value.names) == sorted(gone)
        return
    try:
        direction, found = resume_plan(schedule, fences, lost)
    except Infeasible:
        for placed in (plan.prev, plan.curr):
            left = [s for d in placed.devices if d not in {*lost, *plan.lost} for s in placed.shards_on(d)]
            assert not all(covers(left, tensor) for tensor in plan.curr.layout.tensors)
        return
    assert found.prev == holdings(schedule, fences)
    rest = less(plan.curr if direction == "forward" else plan.prev, {*lost, *plan.lost})
    assert found.curr.devices == rest.devices
    result = execute(compile_programs(found, staging_bytes), survivors)
    for device in rest.devices:
        assert set(result[device]) == set(rest.shards_on(device))
        for shard, array in result[device].items():
            np.testing.assert_array_equal(array, values[shard.tensor][inside(shard.region)])


@settings(max_examples=60, deadline=None)
@given(MOVES, st.sampled_from([16, 40]), st.data())
def test_holdings_are_what_devices_hold(move: Move, staging_bytes: int, data: st.DataObject) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    fences = data.draw(st.integers(0, schedule.epochs))
    held = holdings(schedule, fences)
    assert held.devices == plan.devices
    for device in plan.devices:
        expected = whole_at(schedule.program(device), old_shards(plan, device), fences)
        found = held.shards_on(device)
        assert len(found) == len(expected)
        assert set(found) == expected


@settings(max_examples=100, deadline=None)
@given(MOVES, st.sampled_from([16, 40, 200]), st.data())
def test_what_survivors_have_finished_of_the_epoch_under_way_counts_too(
    move: Move, staging_bytes: int, data: st.DataObject
) -> None:
    plan = plan_of(move)
    schedule = released(plan, staging_bytes)
    fences = data.draw(st.integers(0, schedule.epochs - 1), label="fences")
    living = [device for device in plan.devices if device not in plan.lost]
    lost = data.draw(st.lists(st.sampled_from(living), max_size=2, unique=True), label="lost")
    ahead = data.draw(st.sets(st.sampled_from(plan.devices)), label="ahead")
    finished = {device: fences + (device in ahead) for device in plan.devices}

    def has(device: int) -> set[Shard]:
        program = schedule.program(device)
        whole = whole_at(program, old_shards(plan, device), fences)
        return whole | (set(program.epochs[fences].allocate) if device in ahead else set())

    held = holdings(schedule, fences, finished)
    for device in plan.devices:
        for tensor in plan.curr.layout.tensors:
            regions = [shard.region for shard in held.shards_on(device) if shard.tensor == tensor]
            once = mask(tensor.shape, *(shard.region for shard in has(device) if shard.tensor == tensor)) > 0
            np.testing.assert_array_equal(mask(tensor.shape, *regions), once)
        for shard in held.shards_on(device):
            assert any(one.tensor == shard.tensor and one.region.contains(shard.region) for one in has(device))

    survivors = {*living} - {*lost}
    whole = [shard for device in survivors for shard in has(device)]
    gone = {str(tensor) for tensor in plan.curr.layout.tensors if not covers(whole, tensor)}
    if gone:
        with pytest.raises(StateLost) as caught:
            resume_plan(schedule, fences, lost, finished=finished)
        assert sorted(caught.value.names) == sorted(gone)
        return
    try:
        direction, found = resume_plan(schedule, fences, lost, finished=finished)
    except Infeasible:
        return  # see above
    values = identities(plan.prev.layout)
    rest = less(plan.curr if direction == "forward" else plan.prev, {*lost, *plan.lost})
    state = {device: of for device, of in state_of(held, values).items() if device in survivors}
    result = execute(compile_programs(found, staging_bytes), state)
    for device in rest.devices:
        for shard in rest.shards_on(device):
            np.testing.assert_array_equal(result[device][shard], values[shard.tensor][inside(shard.region)])


@settings(max_examples=60, deadline=None)
@given(MOVES, st.data())
def test_the_way_that_moves_less_is_taken(move: Move, data: st.DataObject) -> None:
    plan = plan_of(move)
    schedule = released(plan, 40)
    fences = data.draw(st.integers(0, schedule.epochs))
    lost = data.draw(st.lists(st.sampled_from(plan.devices), max_size=1))
    try:
        direction, found = resume_plan(schedule, fences, lost)
    except (StateLost, Infeasible):
        assume(False)
    moved: dict[str, int] = {}
    for way, placed in (("forward", plan.curr), ("back", plan.prev)):
        try:
            asked, other = resume_plan(schedule, fences, lost, less(placed, {*lost, *plan.lost}))
        except Unaccounted:
            continue
        assert asked == "to"
        moved[way] = other.moved_bytes
    assert found.moved_bytes == min(moved.values())
    assert direction == min(moved, key=lambda way: (moved[way], way == "back"))


def pipeline() -> tuple[Plan, Schedule]:
    """Eight layers from two stages to two halves: four devices in two replicas, before and after."""
    model = equal_layers(8)
    before = PlacedLayout(even_grid(model, "pp2dp2"), (0, 1, 2, 3))
    plan = make_plan(before, even_grid(model, "tp2dp2"), devices=range(4))
    return plan, Schedule.of(plan, 16, policy="release")


def test_a_move_that_has_just_begun_goes_back_and_one_that_is_nearly_done_goes_forward() -> None:
    plan, schedule = pipeline()
    assert schedule.epochs >= 3
    ways = [resume_plan(schedule, fences, ()) for fences in range(schedule.epochs + 1)]
    assert ways[0][0] == "back"
    assert ways[0][1].moved_bytes == 0
    assert ways[-1][0] == "forward"
    assert ways[-1][1].moved_bytes == 0
    directions = [direction for direction, _ in ways]
    assert directions == sorted(directions)  # back, then forward
    assert all(found.moved_bytes < plan.moved_bytes for _, found in ways)


@pytest.mark.parametrize("device", range(4))
def test_with_two_replicas_on_either_side_any_one_device_may_be_lost_at_any_fence(device: int) -> None:
    _, schedule = pipeline()
    for fences in range(schedule.epochs + 1):
        _, found = resume_plan(schedule, fences, [device])
        assert device not in found.curr.devices
        assert found.lost == (device,)


def test_where_all_that_is_left_has_finished_the_epoch_the_way_is_forward_and_nothing_is_lost() -> None:
    model = equal_layers(1)
    tensor = model.rules[0].tensor
    shard = Shard(tensor, Region.whole(tensor.shape))
    before = PlacedLayout(Layout(((shard,),), (0,)), (0,))
    schedule = Schedule.of(make_plan(before, before.layout, devices=(0, 1), placement=(1,)), 64, policy="release")
    with pytest.raises(StateLost):
        resume_plan(schedule, 0, [0])
    direction, found = resume_plan(schedule, 0, [0], finished={1: 1})
    assert (direction, found.moved_bytes) == ("forward", 0)


def test_many_lost_tensors_are_counted_and_the_first_of_them_named_in_the_text() -> None:
    model = equal_layers(40)
    before = PlacedLayout(even_grid(model, "pp1"), (0,))
    schedule = Schedule.of(make_plan(before, before.layout, devices=(0, 1), placement=(1,)), 64, policy="release")
    with pytest.raises(StateLost, match=r"all of 40 tensors: .* and 20 more; ") as caught:
        resume_plan(schedule, 0, [0])
    assert len(caught.value.names) == 40


def test_where_neither_layout_is_whole_one_has_to_be_given() -> None:
    a, b = (Shard(Tensor(Kind.PARAM, name, (4,), "uint8", 1), Region((0,), (4,))) for name in "ab")
    before = PlacedLayout(Layout(((a,), (b,), (a, b)), (0, 1, 2)), (0, 1, 2))
    # Device 2 alone holds the new layout's second stage, and 0 and 1 still have all.
    plan = make_plan(before, Layout(((a,), (b,)), (0, 1)), devices=(0, 2), placement=(0, 2))
    schedule = Schedule.of(plan, 64, policy="release")
    direction, _ = resume_plan(schedule, 0, [2])
    assert direction == "back"
    pair = PlacedLayout(Layout(((a,), (b,)), (0, 1)), (0, 1))
    swap = make_plan(pair, Layout(((b, a), ()), (0, 1)), devices=(0, 1), placement=(1, 0))
    once = Schedule.of(swap, 64, policy="release")
    with pytest.raises(StateLost, match=r"devices \[1\] are lost, and no other holds all of 1 tensors: param:b"):
        resume_plan(once, 0, [1])


def test_a_layout_may_be_given_and_must_hold_everything() -> None:
    a, b, c = (Shard(Tensor(Kind.PARAM, name, (4,), "uint8", 1), Region((0,), (4,))) for name in "abc")
    before = PlacedLayout(Layout(((a, b), (b, c), (a, c)), (0, 1, 2)), (0, 1, 2))
    plan = make_plan(before, Layout(((b, c), (a,)), (0, 1)), devices=(0, 1), placement=(0, 1))
    schedule = Schedule.of(plan, 64, policy="release")
    # After the loss of 0 and no fence: c, and a and b by 1 and 2; the old layout is whole, the new one is not.
    direction, found = resume_plan(schedule, 0, [0])
    assert direction == "back"
    to = PlacedLayout(Layout(((a, b, c),), (0,)), (2,))
    direction, found = resume_plan(schedule, 0, [0], to)
    assert (direction, found.curr) == ("to", to)
    with pytest.raises(Unaccounted, match="only the old layout knows 1 tensors: param:c"):
        resume_plan(schedule, 0, [0], PlacedLayout(Layout(((a, b),), (0,)), (2,)))
    with pytest.raises(Infeasible, match="are lost, yet offered"):
        resume_plan(schedule, 0, [0], PlacedLayout(Layout(((a, b, c),), (0,)), (0,)))


def test_if_the_survivors_hold_all_but_neither_layout_does_without_the_lost_it_is_said() -> None:
    a, b = (Shard(Tensor(Kind.PARAM, name, (4,), "uint8", 1), Region((0,), (4,))) for name in "ab")
    before = PlacedLayout(Layout(((a, b), (a, b), ()), (0, 1, 2)), (0, 1, 2))
    plan = make_plan(before, Layout(((a,), (b,)), (0, 1)), devices=(1, 2), placement=(1, 2))
    schedule = Schedule.of(plan, 64, policy="release")
    after = schedule.epochs
    # Devices 0 and 1 lost before any fence: both tensors are gone. 2 lost after the last: b is gone.
    for fences, lost, names in ((0, [0, 1], {"param:a", "param:b"}), (after, [2], {"param:b"})):
        with pytest.raises(StateLost) as caught:
            resume_plan(schedule, fences, lost)
        assert {*caught.value.names} == names
    with pytest.raises(ValueError, match="fences"):
        holdings(schedule, after + 1)


def test_between_two_layouts_the_survivors_may_have_everything_and_either_layout_a_hole() -> None:
    model = equal_layers(2)
    first, second = ((Shard(rule.tensor, Region.whole(rule.tensor.shape))) for rule in model.rules)
    # Layer 0 goes from device 0 to 1, layer 1 from 1 to 0; half way both are with device 1, and 0 is lost.
    before = PlacedLayout(Layout(((first,), (second,)), (0, 1)), (0, 1))
    plan = make_plan(before, before.layout, devices=(0, 1), placement=(1, 0))
    # As if there were memory for one at a time only.
    order = dict(zip((first.tensor, second.tensor), range(2), strict=True))
    schedule = replace(Schedule.of(plan, 16, policy="release"), epochs=2, epoch_of=order)
    with_both = next(d for d in (0, 1) if set(holdings(schedule, 1).shards_on(d)) == {first, second})
    with pytest.raises(Infeasible, match=r"neither the new layout nor the old one .* give the layout to go to"):
        resume_plan(schedule, 1, [1 - with_both])
    alone = PlacedLayout(Layout(((first, second),), (0,)), (with_both,))
    _, found = resume_plan(schedule, 1, [1 - with_both], alone)
    assert found.moved_bytes == 0
