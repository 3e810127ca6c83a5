"""Pairing, held against all permutations, and against SciPy on costs counted element by element."""

from __future__ import annotations

import itertools
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.unit.strategies import Move, element_costs, equal_layers, even_grid, moves

from shardshift.plan import Cells, lacking_bytes, pairing
from shardshift.plan.pairing import held_roles, least_bytes, savings
from shardshift.plan.paper import lacking_layers
from shardshift.values import Infeasible, Kind, Layout, ParallelConfig, PlacedLayout, Region, Shard, Tensor


def paired(move: Move) -> tuple[int, tuple[int, ...]]:
    """The least bytes of a move, and per rank its device."""
    least, devices = least_bytes(savings(Cells(move.prev.layout, move.curr), move.prev, move.devices))
    return least, tuple(devices.tolist())


def stays(prev: PlacedLayout, curr: Layout, count: int) -> tuple[int, ...]:
    """The pairing on the first ``count`` devices."""
    return paired(Move(prev, curr, tuple(range(count))))[1]


@settings(max_examples=40)
@given(moves(most_ranks=4))
def test_no_permutation_moves_less(move: Move) -> None:
    costs = element_costs(move.prev, move.curr, move.devices)
    least = min(
        sum(costs[rank, column] for rank, column in enumerate(columns))
        for columns in itertools.permutations(range(len(move.devices)), move.curr.world_size)
    )
    assert paired(move)[0] == least


@pytest.mark.parametrize("most_classes", [2048, 0], ids=["classes", "classes and ranges"])
@settings(max_examples=80)
@given(moves(losses=True))
def test_no_assignment_of_any_size_moves_less_and_the_total_is_that_of_the_devices(
    most_classes: int, move: Move
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "MOST_CLASSES", most_classes)
        least, devices = paired(move)
    costs = element_costs(move.prev, move.curr, move.devices)
    assert least == costs[linear_sum_assignment(costs)].sum()
    assert least == sum(costs[rank, move.devices.index(device)] for rank, device in enumerate(devices))
    assert len(set(devices)) == move.curr.world_size
    assert set(devices) <= set(move.devices)


@pytest.mark.parametrize("most_classes", [2048, 0], ids=["classes", "classes and ranges"])
@pytest.mark.parametrize("spare", [0, 2])
def test_what_was_whole_may_become_ranges_while_ranges_become_whole(most_classes: int, spare: int) -> None:
    def layout(whole: str, cut: str, sizes: tuple[int, ...]) -> Layout:
        """A role that all ranks play and that holds one tensor; beside it ranges of the other, one for each rank."""
        tensors = {name: Tensor(Kind.PARAM, name, (size,), "uint8", 1) for name, size in (("a", 12), ("b", 15))}
        starts = np.cumsum([0, *sizes])[:-1].tolist()
        ranges = [(Shard(tensors[cut], Region((a,), (n,))),) for a, n in zip(starts, sizes, strict=True)]
        roles = Layout(((Shard(tensors[whole], Region.whole(tensors[whole].shape)),), *ranges), (0,))
        of_rank = np.array([[0, 1 + rank] for rank in range(len(sizes))], np.int32)
        return Layout.of_rows(roles.tensors, roles.bundle_of, roles.rows, of_rank)

    curr = layout("b", "a", (1, 5, 6))
    move = Move(PlacedLayout(layout("a", "b", (1, 2, 4, 8)), (0, 1, 2, 3)), curr, tuple(range(4 + spare)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "MOST_CLASSES", most_classes)
        least, devices = paired(move)
    costs = element_costs(move.prev, move.curr, move.devices)
    assert least == costs[linear_sum_assignment(costs)].sum()
    assert least == sum(costs[rank, device] for rank, device in enumerate(devices))


@settings(max_examples=60)
@given(moves())
def test_costs_are_what_counting_elements_gives(move: Move) -> None:
    prev, fresh = move.prev, max(move.prev.devices) + 1
    cost = lacking_bytes(prev.layout, move.curr)
    assert cost.dtype == np.int64
    assert cost.shape == (move.curr.role_count, prev.layout.role_count + 1)
    expected = element_costs(prev, move.curr, [*prev.devices, fresh])
    # What a rank lacks beyond one of its device's roles; the roles of a rank hold different tensors.
    whole = cost[:, -1:]
    kept = whole - cost
    for rank, wanted in enumerate(move.curr.roles_of_rank):
        assert whole[wanted].sum() == expected[rank, -1]
        for at, held in enumerate(prev.layout.roles_of_rank):
            assert expected[rank, -1] - kept[np.ix_(wanted, held)].sum() == expected[rank, at]


@settings(max_examples=30)
@given(moves(), st.randoms())
def test_the_order_in_which_devices_are_named_does_not_matter(move: Move, random: Random) -> None:
    shuffled = list(move.devices)
    random.shuffle(shuffled)
    assert paired(Move(move.prev, move.curr, tuple(shuffled))) == paired(move)


@settings(max_examples=30)
@given(moves())
def test_a_layout_paired_with_itself_moves_nothing_whoever_else_is_there(move: Move) -> None:
    fresh = tuple(max(move.prev.devices) + 1 + extra for extra in range(2))
    least, devices = paired(Move(move.prev, move.prev.layout, (*move.prev.devices, *fresh)))
    assert least == 0
    costs = element_costs(move.prev, move.prev.layout, devices)
    assert not costs.diagonal().any()


@pytest.mark.parametrize("text", ["pp1tp1dp1", "pp2tp2dp3", "pp4tp1dp2", "pp1tp4dp1"])
def test_a_layout_paired_with_itself_stays_where_it_is(text: str) -> None:
    layout = even_grid(equal_layers(8), text)
    devices = tuple(range(layout.world_size))
    assert paired(Move(PlacedLayout(layout, devices), layout, (*devices, 90, 91))) == (0, devices)


def test_the_paper_pp4tp2dp3_to_pp4tp8dp1_moves_nine_layers() -> None:
    # etc-paper.md: 36 equal layers; 27 layer-equivalents when DP replicas are paired apart, 9 over all pairings.
    model = equal_layers(36)
    prev, curr = even_grid(model, "pp4tp2dp3"), even_grid(model, "pp4tp8dp1")
    least, devices = paired(Move(PlacedLayout(prev, tuple(range(24))), curr, tuple(range(32))))
    assert least == 9 * 24
    # The paper's count of layers agrees, given that pairing.
    before, after = ParallelConfig.parse("pp4tp2dp3"), ParallelConfig.parse("pp4tp8dp1")
    assert sum(lacking_layers(before, after, 36, range(24), devices), Fraction()) == 9


def test_the_paper_figure_4_in_layers() -> None:
    # PP4 -> PP2 of 16 layers: C0 lacks 4 4 8 8 layers, C1 8 8 4 4, and a fresh device all 8.
    model = equal_layers(16, width=1)
    cost = lacking_bytes(even_grid(model, "pp4"), even_grid(model, "pp2"))
    assert cost.tolist() == [[4, 4, 8, 8, 8], [8, 8, 4, 4, 8]]


def test_the_paper_figure_4_takes_the_lower_of_two_equal_stages() -> None:
    model = equal_layers(16)
    assert stays(PlacedLayout(even_grid(model, "pp4"), (0, 1, 2, 3)), even_grid(model, "pp2"), 4) == (0, 2)


def test_a_tp_group_stays_on_the_devices_of_one_stage() -> None:
    model = equal_layers(16)
    prev = PlacedLayout(even_grid(model, "pp4tp4"), tuple(range(16)))
    assert stays(prev, even_grid(model, "pp2tp4"), 16) == (0, 1, 2, 3, 8, 9, 10, 11)


def test_a_replica_is_kept_whole_when_replicas_go() -> None:
    model = equal_layers(4)
    prev = PlacedLayout(even_grid(model, "pp1tp4dp3"), tuple(range(12)))
    assert stays(prev, even_grid(model, "pp1tp4dp1"), 12) == (0, 1, 2, 3)


def test_a_device_that_leaves_is_no_place_and_one_that_is_fresh_is() -> None:
    model = equal_layers(4)
    prev = PlacedLayout(even_grid(model, "pp2"), (5, 3))
    move = Move(prev, even_grid(model, "pp2"), (9, 3))
    assert paired(move) == (2 * 24, (9, 3))
    assert held_roles(prev, np.array([3, 5, 9])).tolist() == [[1], [0], [-1]]


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    layout = even_grid(equal_layers(4), "pp2")
    with pytest.raises(Infeasible, match="needs 2 devices, 1 are available"):
        paired(Move(PlacedLayout(layout, (0, 1)), layout, (0, 0)))


def test_several_regions_of_one_tensor_all_count() -> None:
    tensor = Tensor(Kind.EXP_AVG, "w", (6,), "float32", 4)

    def piece(start: int, count: int) -> Shard:
        return Shard(tensor, Region((start,), (count,)))

    prev = Layout(((piece(0, 2), piece(4, 2)), (piece(2, 2),)), (0, 1))
    curr = Layout(((piece(0, 3), piece(3, 3)),), (0,))
    assert lacking_bytes(prev, curr).tolist() == [[8, 16, 24]]


def test_shards_of_one_name_but_other_kinds_are_apart() -> None:
    region = Region((0,), (4,))
    param, master = (Shard(Tensor(kind, "w", (4,), "float32", 4), region) for kind in (Kind.PARAM, Kind.MASTER))
    prev = PlacedLayout(Layout(((param,), (master,)), (0, 1)), (0, 1))
    assert paired(Move(prev, Layout(((master,), (param,)), (0, 1)), (0, 1))) == (0, (1, 0))


@pytest.mark.parametrize("numel", [2**50 // 24, 2**57 // 24])
def test_a_byte_more_in_a_petabyte_decides(numel: int) -> None:
    """Two devices hold all but one element of what a rank wants, and one holds all of it."""
    tensor = Tensor(Kind.PARAM, "w", (numel,), "uint8", 1)

    def part(start: int, stop: int) -> tuple[Shard, ...]:
        return (Shard(tensor, Region((start,), (stop - start,))),)

    prev = Layout((part(0, numel - 1), part(0, numel), part(1, numel)), (0, 1, 2))
    curr = Layout((part(0, numel),), (0,))
    assert paired(Move(PlacedLayout(prev, (0, 1, 2)), curr, (0, 1, 2))) == (0, (1,))
    assert paired(Move(PlacedLayout(prev, (0, 1, 2)), curr, (0, 2))) == (1, (0,))


def test_ranks_that_together_hold_more_than_64_bits_count_are_refused() -> None:
    tensor = Tensor(Kind.PARAM, "w", (2**61,), "uint8", 1)
    layout = Layout(((Shard(tensor, Region((0,), (2**61,))),),), (0,) * 8)
    with pytest.raises(Infeasible, match="2\\*\\*62"):
        paired(Move(PlacedLayout(layout, tuple(range(8))), layout, tuple(range(8))))
