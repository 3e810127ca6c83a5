"""Pairing, held against all permutations, and against SciPy on costs counted element by element."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.unit.strategies import Model, Move, Rule, element_costs, even_split, grid_layout, moves

from shardshift.plan import Pairing, lacking_bytes, pair
from shardshift.values import Infeasible, Kind, Layout, ParallelConfig, PlacedLayout, Region, Shard, Tensor


def paired(move: Move) -> Pairing:
    """The pairing of a move."""
    return pair(lacking_bytes(move.prev.layout, move.curr), move.prev, move.curr, move.devices)


def equal_layers(count: int, *, width: int = 24) -> Model:
    """A model of equal layers, one matrix each, cut on dim 0."""
    return Model(
        count,
        tuple(Rule(Tensor(Kind.PARAM, f"layers.{i}", (width,), "bfloat16", 1), i, 0) for i in range(count)),
    )


def grid(model: Model, text: str) -> Layout:
    """The layout of an even split."""
    config = ParallelConfig.parse(text)
    return grid_layout(model, config, even_split(model.layers, config.pp))


def opaque(numbers: list[list[int]]) -> tuple[PlacedLayout, Layout, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Layouts of as many roles as a cost matrix has; the last column is the fresh one."""

    def roles(count: int) -> Layout:
        return Layout(tuple(() for _ in range(count)), tuple(range(count)))

    columns = len(numbers[0]) - 1
    return PlacedLayout(roles(columns), tuple(range(columns))), roles(len(numbers)), np.array(numbers, dtype=np.int64)


@settings(max_examples=40)
@given(moves(most_ranks=4))
def test_no_permutation_moves_less(move: Move) -> None:
    costs = element_costs(move.prev, move.curr, move.devices)
    least = min(
        sum(costs[rank, column] for rank, column in enumerate(columns))
        for columns in itertools.permutations(range(len(move.devices)), move.curr.world_size)
    )
    assert paired(move).lacking_bytes == least


@settings(max_examples=60)
@given(moves(losses=True))
def test_no_assignment_of_any_size_moves_less_and_the_total_is_that_of_the_devices(move: Move) -> None:
    pairing = paired(move)
    costs = element_costs(move.prev, move.curr, move.devices)
    assert pairing.lacking_bytes == costs[linear_sum_assignment(costs)].sum()
    assert pairing.lacking_bytes == sum(
        costs[rank, move.devices.index(device)] for rank, device in enumerate(pairing.devices)
    )
    assert len(set(pairing.devices)) == move.curr.world_size
    assert set(pairing.devices) <= set(move.devices)


@settings(max_examples=30)
@given(moves(), st.randoms())
def test_the_order_in_which_devices_are_named_does_not_matter(move: Move, random: Random) -> None:
    shuffled = list(move.devices)
    random.shuffle(shuffled)
    assert paired(Move(move.prev, move.curr, tuple(shuffled))) == paired(move)


@pytest.mark.parametrize("text", ["pp1tp1dp1", "pp2tp2dp3", "pp4tp1dp2", "pp1tp4dp1"])
def test_a_layout_paired_with_itself_stays_where_it_is(text: str) -> None:
    layout = grid(equal_layers(8), text)
    devices = tuple(range(layout.world_size))
    pairing = paired(Move(PlacedLayout(layout, devices), layout, (*devices, 90, 91)))
    assert pairing == Pairing(devices, 0)


def test_the_paper_pp4tp2dp3_to_pp4tp8dp1_moves_nine_layers() -> None:
    # etc-paper.md: 36 equal layers; 27 layer-equivalents when DP replicas are paired apart, 9 over all pairings.
    model = equal_layers(36)
    prev, curr = grid(model, "pp4tp2dp3"), grid(model, "pp4tp8dp1")
    pairing = paired(Move(PlacedLayout(prev, tuple(range(24))), curr, tuple(range(32))))
    assert pairing.lacking_bytes == 9 * 24


def test_the_paper_figure_4_takes_the_lower_of_two_equal_stages() -> None:
    model = equal_layers(16)
    prev = PlacedLayout(grid(model, "pp4"), (0, 1, 2, 3))
    assert paired(Move(prev, grid(model, "pp2"), (0, 1, 2, 3))).devices == (0, 2)


def test_a_tp_group_stays_on_the_devices_of_one_stage() -> None:
    model = equal_layers(16)
    prev = PlacedLayout(grid(model, "pp4tp4"), tuple(range(16)))
    assert paired(Move(prev, grid(model, "pp2tp4"), tuple(range(16)))).devices == (0, 1, 2, 3, 8, 9, 10, 11)


def test_a_replica_is_kept_whole_when_replicas_go() -> None:
    model = equal_layers(4)
    prev = PlacedLayout(grid(model, "pp1tp4dp3"), tuple(range(12)))
    assert paired(Move(prev, grid(model, "pp1tp4dp1"), tuple(range(12)))).devices == (0, 1, 2, 3)


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    prev, curr, cost = opaque([[0, 1], [1, 0]])
    with pytest.raises(Infeasible, match="needs 2 devices, 1 are available"):
        pair(cost, prev, curr, [0])


def test_costs_beyond_53_bits_are_paired_exactly_where_they_share_a_divisor() -> None:
    # As floats, 2**60 and 2**60 + 16 are equal; the cheaper pairing is the crossed one.
    big = 2**60
    prev, curr, cost = opaque([[big + 32, big, big + 64], [big, big + 16, big + 64]])
    assert pair(cost, prev, curr, [0, 1]) == Pairing((1, 0), 2 * big)


def test_costs_that_cannot_be_compared_exactly_are_refused() -> None:
    prev, curr, cost = opaque([[2**60 + 1, 0, 2**60], [0, 1, 2**60]])
    with pytest.raises(Infeasible, match="not exact"):
        pair(cost, prev, curr, [0, 1])


def test_shards_of_one_name_but_other_kinds_are_apart() -> None:
    region = Region((0,), (4,))
    param, master = (Shard(Tensor(kind, "w", (4,), "float32", 4), region) for kind in (Kind.PARAM, Kind.MASTER))
    prev = PlacedLayout(Layout(((param,), (master,)), (0, 1)), (0, 1))
    assert paired(Move(prev, Layout(((master,), (param,)), (0, 1)), (0, 1))) == Pairing((1, 0), 0)
