"""Plans as a whole: the least bytes, determinism, JSON, and what is refused before anything moves."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.unit.processes import printed_in_new_processes
from tests.unit.strategies import (
    Model,
    Move,
    Rule,
    element_costs,
    equal_layers,
    even_grid,
    grid_layout,
    identities,
    inside,
    moves,
    state_of,
)

from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.simulator import execute
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    ParallelConfig,
    PlacedLayout,
    Region,
    Shard,
    StateLost,
    Tensor,
    Topology,
    Unaccounted,
)


def planned(model: Model, before: str, after: str, *, nodes: int = 1) -> Plan:
    """The plan between two even configurations on as many devices as the larger one has."""
    prev, curr = even_grid(model, before), even_grid(model, after)
    count = max(prev.world_size, curr.world_size)
    placed = PlacedLayout(prev, tuple(range(prev.world_size)))
    return make_plan(placed, curr, devices=range(count), topology=Topology(nodes, -(-count // nodes)))


def plan_of(move: Move) -> Plan:
    return make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost)


@settings(max_examples=80)
@given(moves())
def test_what_moves_is_the_least_over_all_placements(move: Move) -> None:
    plan = plan_of(move)
    costs = element_costs(move.prev, move.curr, move.devices)
    assert plan.moved_bytes == plan.least_moved_bytes == costs[linear_sum_assignment(costs)].sum()
    held_bytes = sum(shard.nbytes for rank in range(move.curr.world_size) for shard in move.curr.shards(rank))
    assert plan.referred_bytes + plan.copied_bytes + plan.moved_bytes == held_bytes


@settings(max_examples=40)
@given(moves())
def test_a_plan_survives_json_with_its_digest(move: Move) -> None:
    plan = plan_of(move)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again != "anything else"
    assert (again.digest, hash(again)) == (plan.digest, hash(plan))
    assert again.transfers == plan.transfers
    assert again.instructions == plan.instructions


@settings(max_examples=40)
@given(moves(losses=True), st.randoms())
def test_the_order_in_which_devices_and_losses_are_named_does_not_matter(move: Move, random: Random) -> None:
    try:
        plan = plan_of(move)
    except StateLost:
        return
    devices, lost = list(move.devices), list(move.lost)
    random.shuffle(devices)
    assert make_plan(move.prev, move.curr, devices=devices, lost=lost[::-1]).digest == plan.digest


@settings(max_examples=40)
@given(moves())
def test_plans_that_differ_have_other_digests(move: Move) -> None:
    plan = plan_of(move)
    assert replace(plan, least_moved_bytes=plan.least_moved_bytes + 1) != plan
    assert replace(plan, lost=(99,)) != plan
    if len(plan.moves):
        assert replace(plan, moves=plan.moves.take(np.arange(len(plan.moves) - 1))) != plan


@settings(max_examples=40)
@given(moves())
def test_staying_moves_nothing_and_keeps_every_shard(move: Move) -> None:
    plan = make_plan(move.prev, move.prev.layout, devices=move.prev.devices)
    assert (plan.moved_bytes, plan.copied_bytes, plan.transfers, plan.copies) == (0, 0, (), ())
    assert plan.referred_bytes == sum(shard.nbytes for d in move.prev.devices for shard in move.prev.shards_on(d))


@settings(max_examples=40)
@given(moves())
def test_a_solved_placement_gives_the_very_same_plan(move: Move) -> None:
    plan = plan_of(move)
    assert make_plan(move.prev, move.curr, devices=move.devices, placement=plan.curr.devices).digest == plan.digest


SCRIPT = """
from tests.unit.strategies import equal_layers
from tests.unit.test_plan import planned
print(planned(equal_layers(12), "pp4tp2dp2", "pp3tp4dp1", nodes=2).digest)
"""


def test_plans_are_equal_in_every_process_and_for_every_hash_seed() -> None:
    expected = planned(equal_layers(12), "pp4tp2dp2", "pp3tp4dp1", nodes=2).digest
    assert list(printed_in_new_processes(SCRIPT)) == [expected, expected]


def test_the_paper_pp4tp2dp3_to_pp4tp8dp1_moves_nine_layers() -> None:
    plan = planned(equal_layers(36), "pp4tp2dp3", "pp4tp8dp1")
    assert plan.state_bytes == 36 * 24
    assert plan.moved_bytes == 9 * 24


def test_the_paper_figure_4_moves_half_of_the_layers() -> None:
    # PP4 -> PP2 of 16 layers: each of the two stages keeps four layers and takes four.
    assert planned(equal_layers(16), "pp4", "pp2").moved_bytes == 8 * 24


@pytest.mark.parametrize("splits", [[(10,), (4, 3, 3), (2, 5, 3), (10,)], [(2,), (1, 0, 1, 0), (0, 2), (2,)]])
def test_no_layer_is_lost_on_the_way_through_uneven_and_empty_stages(splits: list[tuple[int, ...]]) -> None:
    model = equal_layers(sum(splits[0]), width=3)
    values = identities(grid_layout(model, ParallelConfig(), splits[0]))
    prev = PlacedLayout(grid_layout(model, ParallelConfig(), splits[0]), (0,))
    state = state_of(prev, values)
    for split in splits[1:]:
        curr = grid_layout(model, ParallelConfig(pp=len(split)), split)
        plan = make_plan(prev, curr, devices=range(4))
        state, prev = execute(compile_programs(plan, 4), state), plan.curr
        held = sorted(shard.tensor.name for shards in state.values() for shard in shards)
        assert held == sorted(tensor.name for tensor in values)
    for shard, array in state[prev.devices[0]].items():
        assert (array == values[shard.tensor][inside(shard.region)]).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_offsets_of_more_than_2_to_the_31_elements_are_exact(dim: int) -> None:
    tensor = Tensor(Kind.PARAM, "w", (262144, 8960), "bfloat16", 2)
    model = Model(1, (Rule(tensor, 0, dim),))
    plan = planned(model, "tp2", "tp3")
    size = tensor.shape[dim]
    # Thirds and halves: the middle third takes a sixth from each half, one outer third stays, one is fresh.
    thirds = [size * i // 3 for i in range(4)]
    assert (
        sorted(shard.region.offsets[dim] for rank in range(3) for shard in plan.curr.layout.shards(rank)) == thirds[:3]
    )
    whole_bytes = 262144 * 8960 * 2
    written = sum(copy.piece.nbytes for copy in plan.copies) + plan.moved_bytes
    assert written == whole_bytes > 2**32
    row_bytes = whole_bytes // size
    kept = thirds[1] + (size - thirds[2])
    assert plan.moved_bytes == plan.least_moved_bytes == (size - kept) * row_bytes
    last = max(plan.copies, key=lambda copy: copy.piece.region.offsets)
    assert last.piece.region.stops == tensor.shape
    assert all(type(n) is int for t in plan.transfers for n in (*t.piece.region.offsets, *t.piece.region.shape))
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    model = equal_layers(4)
    with pytest.raises(Infeasible, match="needs 4 devices, 3 are available"):
        make_plan(PlacedLayout(even_grid(model, "pp2"), (0, 1)), even_grid(model, "pp4"), devices=range(3))


def test_a_lost_device_cannot_run_a_rank() -> None:
    layout = even_grid(equal_layers(4), "pp1dp2")
    with pytest.raises(Infeasible, match=r"\[1\] are lost"):
        make_plan(PlacedLayout(layout, (0, 1)), layout, devices=range(2), lost=[1])


def test_devices_outside_the_topology_are_refused() -> None:
    layout = even_grid(equal_layers(4), "pp2")
    with pytest.raises(Infeasible, match="outside"):
        make_plan(PlacedLayout(layout, (0, 1)), layout, devices=range(5), topology=Topology(2, 2))


def test_a_placement_keeps_to_the_devices_and_to_one_rank_each() -> None:
    layout = even_grid(equal_layers(4), "pp2")
    prev = PlacedLayout(layout, (0, 1))
    with pytest.raises(Infeasible, match=r"\[7\]"):
        make_plan(prev, layout, devices=range(3), placement=(0, 7))
    with pytest.raises(Mismatch, match="twice"):
        make_plan(prev, layout, devices=range(3), placement=(0, 0))


def test_ranks_that_are_no_whole_tp_groups_are_refused() -> None:
    layout = even_grid(equal_layers(4), "pp3")
    prev = PlacedLayout(layout, (0, 1, 2))
    with pytest.raises(Infeasible, match="3 ranks are not groups of 2"):
        make_plan(prev, layout, devices=range(3), topology=Topology(3, 1), group_size=2)


def test_a_placement_that_is_too_short_is_refused() -> None:
    layout = even_grid(equal_layers(4), "pp2")
    with pytest.raises(Mismatch, match="2 ranks cannot be placed on 1 devices"):
        make_plan(PlacedLayout(layout, (0, 1)), layout, devices=range(3), placement=(0,))


def test_a_worse_placement_is_taken_as_given_and_its_cost_is_told() -> None:
    layout = even_grid(equal_layers(4), "pp2")
    plan = make_plan(PlacedLayout(layout, (0, 1)), layout, devices=range(2), placement=(1, 0))
    assert plan.curr.devices == (1, 0)
    assert (plan.moved_bytes, plan.least_moved_bytes) == (4 * 24, 0)


@pytest.mark.parametrize("devices", [(), (0, 0, 0)])
def test_a_device_named_twice_is_one(devices: tuple[int, ...]) -> None:
    layout = even_grid(equal_layers(4), "pp2")
    with pytest.raises(Infeasible, match="are available"):
        make_plan(PlacedLayout(layout, (0, 1)), layout, devices=devices)


def test_a_replica_fills_in_for_a_lost_device() -> None:
    model = equal_layers(4)
    prev = PlacedLayout(even_grid(model, "pp2dp2"), (0, 1, 2, 3))
    plan = make_plan(prev, even_grid(model, "pp2dp1"), devices=(1, 2, 3), lost=(0,))
    assert plan.moved_bytes == 0
    assert plan.curr.devices == (1, 2)


def test_a_loss_without_a_replica_is_refused_by_name() -> None:
    model = equal_layers(4)
    with pytest.raises(StateLost) as caught:
        make_plan(PlacedLayout(even_grid(model, "pp2"), (0, 1)), even_grid(model, "pp1"), devices=(1,), lost=(0,))
    assert caught.value.names == ("param:layers.0", "param:layers.1")


@pytest.mark.parametrize(("before", "after", "where"), [(5, 4, "old"), (4, 5, "new")])
def test_tensors_of_one_side_are_refused_by_name(before: int, after: int, where: str) -> None:
    prev, curr = PlacedLayout(even_grid(equal_layers(before), "pp1"), (0,)), even_grid(equal_layers(after), "pp1")
    with pytest.raises(Unaccounted, match=f"only the {where} layout") as caught:
        make_plan(prev, curr, devices=[0])
    assert caught.value.names == ("param:layers.4",)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    prev, curr = even_grid(equal_layers(2, width=24), "pp1"), even_grid(equal_layers(2, width=32), "pp1")
    with pytest.raises(Mismatch, match=r"param:layers.0: expected global shape \(24, 1\).*says \(32, 1\)"):
        make_plan(PlacedLayout(prev, (0,)), curr, devices=[0])


def test_a_layout_that_drops_elements_is_refused_by_region() -> None:
    tensor = Tensor(Kind.PARAM, "w", (10,), "uint8", 1)

    def held(*parts: tuple[int, int]) -> Layout:
        roles = tuple((Shard(tensor, Region((start,), (count,))),) for start, count in parts)
        return Layout(roles, tuple(range(len(roles))))

    with pytest.raises(Unaccounted, match=r"param:w \[9:10\]") as caught:
        make_plan(PlacedLayout(held((0, 10)), (0,)), held((0, 3), (3, 3), (6, 3)), devices=range(3))
    assert caught.value.names == ("param:w",)
