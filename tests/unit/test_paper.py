"""The paper's matrices and sketch, held against its figures, against sets, and against all permutations."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from math import lcm
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.plan.paper import (
    CostMatrix,
    Layers,
    group_matrix,
    lacking_layers,
    merge,
    merge_as_worded,
    paper_placement,
    pp_matrix,
    replica_sources,
    sketch,
    tp_matrix,
)
from shardshift.plan.workload import workload
from shardshift.values import Infeasible, Mismatch, ParallelConfig

parse = ParallelConfig.parse


@st.composite
def changes(draw: st.DrawFn, most_ranks: int = 4) -> tuple[ParallelConfig, ParallelConfig, Layers]:
    """Two configurations and layers: equal, uneven, or split at random with empty stages."""
    sizes = st.integers(1, most_ranks)
    prev, curr = (ParallelConfig(draw(sizes), draw(sizes), draw(st.integers(1, 3))) for _ in range(2))
    layers = draw(st.integers(max(prev.pp, curr.pp), 14))
    if draw(st.booleans()):
        return prev, curr, layers
    splits = []
    for pp in (prev.pp, curr.pp):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp - 1, max_size=pp - 1)))
        splits.append([stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)])
    return prev, curr, (splits[0], splits[1])


def figure(matrix: CostMatrix) -> list[list[object]]:
    """The entries as a figure prints them."""
    return [list(row) for row in matrix.printed()]


def set_matrix(prev: ParallelConfig, curr: ParallelConfig, layers: Layers) -> list[list[int]]:
    """|curr| - |curr n prev| over sets of (layer, slice), between the ranks of one DP group."""
    before, after = (layers, layers) if isinstance(layers, int) else layers
    slices = lcm(prev.tp, curr.tp)
    one_prev, one_curr = ParallelConfig(prev.pp, prev.tp), ParallelConfig(curr.pp, curr.tp)
    held = [workload(one_prev, before, rank, slices=slices) for rank in range(one_prev.world_size)]
    wanted = [workload(one_curr, after, rank, slices=slices) for rank in range(one_curr.world_size)]
    return [[len(new) - len(new & old) for old in held] for new in wanted]


# Figs. 4 and 5


def test_fig_4_pp4_to_pp2_of_16_layers() -> None:
    matrix = pp_matrix(4, 2, 16)
    assert figure(matrix) == [[4, 4, 8, 8], [8, 8, 4, 4]]
    assert " ".join(map(str, sketch(matrix.cost))) == "<C:0,P:0> <C:1,P:2>"


def test_fig_5_pp4tp2_to_pp6tp4_of_24_layers() -> None:
    pp, tp = pp_matrix(4, 6, 24), tp_matrix(2, 4)
    assert figure(pp) == [[0, 4, 4, 4], [2, 2, 4, 4], [4, 0, 4, 4], [4, 4, 0, 4], [4, 4, 2, 2], [4, 4, 4, 0]]
    assert figure(tp) == [[0, 1], [0, 1], [1, 0], [1, 0]]
    merged = figure(merge(pp, tp))
    assert merged[:4] == [[0, *[4] * 7]] * 2 + [[4, 0, *[4] * 6]] * 2
    # The rows of C1, which the figure leaves out: half the layers, of the right slice.
    assert merged[4:8] == [[2, 4, 2, 4, 4, 4, 4, 4]] * 2 + [[4, 2, 4, 2, 4, 4, 4, 4]] * 2


def test_the_merge_rule_as_worded_does_not_give_fig_5() -> None:
    pp, tp = pp_matrix(4, 6, 24), tp_matrix(2, 4)
    worded, ours = figure(merge_as_worded(pp, tp)), figure(merge(pp, tp))
    assert (worded[0][1], ours[0][1]) == (0, 4)  # C P0T0, P P0T1: no slice in common, yet 0 by the words
    assert (worded[4][0], ours[4][0]) == (0, 2)  # C P1T0, P P0T0: two of four layers missing, yet 0 by the words
    assert (worded[0][2], ours[0][2]) == (4, 4)  # no layer in common: the same


def test_by_the_words_a_sketch_that_moves_20_layers_is_as_good_as_one_that_moves_16() -> None:
    matrix = group_matrix(parse("pp4tp2"), parse("pp6tp4"), 24)
    worded = merge_as_worded(pp_matrix(4, 6, 24), tp_matrix(2, 4))
    good = {pair.curr: pair.prev for pair in sketch(matrix.cost)}
    poor = {0: 0, 1: 1, 4: 2, 6: 3, 12: 4, 13: 5, 16: 6, 18: 7}  # C P0T1 (slice b) gets P P0T1 (slices c and d)
    assert [sum(int(worded.cost[pair]) for pair in pairs.items()) for pairs in (good, poor)] == [0, 0]
    slices = [
        sum(int(matrix.cost[rank, pairs[rank]]) if rank in pairs else int(matrix.whole[rank]) for rank in range(24))
        for pairs in (good, poor)
    ]
    assert slices == [16 * 4, 20 * 4]


# Matrices


@given(changes())
@settings(max_examples=60)
def test_the_merged_matrix_counts_missing_layer_slices(case: tuple[ParallelConfig, ParallelConfig, Layers]) -> None:
    prev, curr, layers = case
    matrix = group_matrix(prev, curr, layers)
    assert matrix.cost.tolist() == set_matrix(prev, curr, layers)
    assert matrix.printed()[0][0] == Fraction(int(matrix.cost[0, 0]), lcm(prev.tp, curr.tp) // curr.tp)


@given(changes())
@settings(max_examples=60)
def test_the_merged_matrix_is_the_formula_with_max_the_whole_workload(
    case: tuple[ParallelConfig, ParallelConfig, Layers],
) -> None:
    prev, curr, layers = case
    pp, tp = pp_matrix(prev.pp, curr.pp, layers), tp_matrix(prev.tp, curr.tp)
    merged = merge(pp, tp).printed()
    for row, columns in enumerate(merged):
        most, tp_most = int(pp.whole[row // curr.tp]), int(tp.whole[row % curr.tp])
        for column, entry in enumerate(columns):
            stage = int(pp.cost[row // curr.tp, column // prev.tp])
            share = Fraction(int(tp.cost[row % curr.tp, column % prev.tp]), tp_most)
            assert entry == most - (most - stage) * (1 - share)


def test_the_largest_entry_of_a_matrix_would_be_a_wrong_max() -> None:
    """PP1 holds every layer, so no PP cost is above 0; taken as max it would hide all that TP lacks."""
    assert pp_matrix(1, 2, 4).cost.max() == 0
    assert merge(pp_matrix(1, 2, 4), tp_matrix(2, 2)).cost.tolist() == [[0, 2], [2, 0]] * 2


def test_splits_of_different_models_are_refused() -> None:
    with pytest.raises(Mismatch, match="prev has 4 layers, curr 5"):
        pp_matrix(2, 2, ([2, 2], [2, 3]))


# Sketch


@given(st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=60)
def test_the_sketch_is_the_best_of_all_permutations_of_its_padded_matrix(
    rows: int, columns: int, data: st.DataObject
) -> None:
    size = max(rows, columns)
    cells = data.draw(st.lists(st.integers(0, 9), min_size=rows * columns, max_size=rows * columns))
    cost = np.array(cells, dtype=np.int64).reshape(rows, columns)
    padded = np.zeros((size, size), dtype=np.int64)
    padded[:rows, :columns] = cost
    pairs = sketch(cost)
    assert len(pairs) == min(rows, columns)
    assert len({pair.curr for pair in pairs}) == len({pair.prev for pair in pairs}) == len(pairs)
    best = min(padded[range(size), order].sum() for order in permutations(range(size)))
    assert sum(cost[pair.curr, pair.prev] for pair in pairs) == best


@given(changes(most_ranks=2))
@settings(max_examples=60)
def test_the_isolated_pairing_is_optimal_for_its_own_merged_matrix(
    case: tuple[ParallelConfig, ParallelConfig, Layers],
) -> None:
    prev, curr, layers = case
    cost = np.array(set_matrix(prev, curr, layers))
    size = max(cost.shape)
    padded = np.pad(cost, [(0, size - side) for side in cost.shape])
    best = min(padded[range(size), order].sum() for order in permutations(range(size)))
    assert sum(cost[pair.curr, pair.prev] for pair in sketch(group_matrix(prev, curr, layers).cost)) == best


def test_zero_padding_misses_the_least_where_stages_are_uneven() -> None:
    """C1 shares three of its four layers with P1, C2 its only one: C2-P1 costs 0, and C1, unpaired, seems free."""
    prev, curr, layers = parse("pp2"), parse("pp3"), ([6, 4], [5, 4, 1])
    placed = paper_placement(prev, curr, layers, range(2), range(3))
    assert placed == (0, 2, 1)
    moved = {order: sum(lacking_layers(prev, curr, layers, range(2), order)) for order in permutations(range(3))}
    assert (int(moved[placed]), int(min(moved.values()))) == (4, 2)


# DP replicas


def test_isolation_moves_27_layers_where_tp_grows_into_dropped_replicas() -> None:
    prev, curr = parse("pp4tp2dp3"), parse("pp4tp8dp1")
    placed = paper_placement(prev, curr, 36, range(24), range(32))
    assert int(sum(lacking_layers(prev, curr, 36, range(24), placed, isolated=True))) == 27
    # What the free devices happen to hold still counts when bytes are counted.
    assert sum(lacking_layers(prev, curr, 36, range(24), placed)) == Fraction(45, 2)


def test_replicas_keep_their_order_and_are_paired_alike() -> None:
    prev, curr = parse("pp2tp2dp2"), parse("pp1tp2dp2")
    placed = paper_placement(prev, curr, 4, range(100, 108), range(100, 108))
    partners = [prev.coordinate(device - 100) for device in placed]
    assert [at.dp for at in partners] == [0, 0, 1, 1]
    assert [(at.pp, at.tp) for at in partners[:2]] == [(at.pp, at.tp) for at in partners[2:]]


def test_a_new_replica_takes_free_devices_and_has_a_source_by_round_robin() -> None:
    assert paper_placement(parse("tp2dp1"), parse("tp2dp3"), 1, [4, 5], range(8)) == (4, 5, 0, 1, 2, 3)
    assert replica_sources(2, 5) == (0, 1, 0, 1, 0)
    assert replica_sources(3, 2) == (0, 1)


def test_a_device_that_leaves_is_replaced_by_the_lowest_free_one() -> None:
    assert paper_placement(parse("pp4"), parse("pp4"), 4, range(4), [0, 2, 3, 8, 9]) == (0, 8, 2, 3)


@given(changes(), st.randoms(use_true_random=False), st.integers(0, 6))
@settings(max_examples=80)
def test_every_placement_is_injective_and_within_the_devices(
    case: tuple[ParallelConfig, ParallelConfig, Layers], random: Random, spare: int
) -> None:
    prev, curr, layers = case
    pool = list(range(max(prev.world_size, curr.world_size) + spare))
    random.shuffle(pool)
    prev_devices, devices = pool[: prev.world_size], pool[-(curr.world_size + spare // 2) :]
    placed = paper_placement(prev, curr, layers, prev_devices, devices)
    assert len(placed) == len(set(placed)) == curr.world_size
    assert set(placed) <= set(devices)
    free = set(devices) - set(placed)
    newcomers = [device for device in placed if device not in prev_devices]
    assert newcomers == sorted(newcomers)
    assert not newcomers or all(device > max(newcomers) or device in placed for device in free)


@given(changes())
@settings(max_examples=40)
def test_a_layout_paired_with_itself_stays(case: tuple[ParallelConfig, ParallelConfig, Layers]) -> None:
    prev, _, layers = case
    same: Layers = layers if isinstance(layers, int) else (layers[0], layers[0])
    placed = paper_placement(prev, prev, same, range(prev.world_size), range(prev.world_size))
    assert not any(lacking_layers(prev, prev, same, range(prev.world_size), placed))


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(Infeasible, match="needs 4 devices, 3 are available"):
        paper_placement(parse("pp2"), parse("pp4"), 4, range(2), range(3))
    with pytest.raises(Mismatch, match="2 ranks; got 3 devices"):
        paper_placement(parse("pp2"), parse("pp2"), 4, range(3), range(3))
    with pytest.raises(Infeasible, match="knows only pp, tp, dp"):
        paper_placement(parse("pp2"), parse("pp2cp2"), 4, range(2), range(4))
