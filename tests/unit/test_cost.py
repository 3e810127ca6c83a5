"""The cost matrix, held against a count element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.strategies import Move, element_costs, moves

from shardshift.plan import lacking_bytes
from shardshift.values import Infeasible, Kind, Layout, PlacedLayout, Region, Shard, Tensor


@settings(max_examples=60)
@given(moves())
def test_costs_are_what_counting_elements_gives(move: Move) -> None:
    prev, fresh = move.prev, max(move.prev.devices) + 1
    cost = lacking_bytes(prev.layout, move.curr)
    columns = [*prev.layout.role_of_rank, len(prev.layout.roles)]
    expected = element_costs(prev, move.curr, [*prev.devices, fresh])
    assert cost.dtype == np.int64
    assert cost.shape == (len(move.curr.roles), len(prev.layout.roles) + 1)
    assert (cost[np.ix_(move.curr.role_of_rank, columns)] == expected).all()


def test_several_regions_of_one_tensor_all_count() -> None:
    tensor = Tensor(Kind.EXP_AVG, "w", (6,), "float32", 4)

    def piece(start: int, count: int) -> Shard:
        return Shard(tensor, Region((start,), (count,)))

    prev = Layout(((piece(0, 2), piece(4, 2)), (piece(2, 2),)), (0, 1))
    curr = Layout(((piece(0, 3), piece(3, 3)),), (0,))
    assert lacking_bytes(prev, curr).tolist() == [[8, 16, 24]]


def test_the_paper_figure_4_in_layers() -> None:
    # PP4 -> PP2 of 16 layers: C0 lacks 4 4 8 8 layers, C1 8 8 4 4, and a fresh device all 8.
    layers = [Tensor(Kind.PARAM, f"layers.{i}", (1,), "bfloat16", 1) for i in range(16)]

    def stages(pp: int) -> Layout:
        per = len(layers) // pp
        role = [tuple(Shard(t, Region((0,), (1,))) for t in layers[s * per : (s + 1) * per]) for s in range(pp)]
        return Layout(tuple(role), tuple(range(pp)))

    assert lacking_bytes(stages(4), stages(2)).tolist() == [[4, 4, 8, 8, 8], [8, 8, 4, 4, 8]]


def test_a_role_beyond_64_bits_is_refused() -> None:
    huge = Tensor(Kind.PARAM, "w", (2**40, 2**40), "bfloat16", 2)
    layout = Layout(((Shard(huge, Region.whole(huge.shape)),),), (0,))
    with pytest.raises(Infeasible, match="holds"):
        lacking_bytes(layout, PlacedLayout(layout, (0,)).layout)
