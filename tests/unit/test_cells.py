"""Cells, held against masks of elements: who holds each before, and who holds it after."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.strategies import Move, inside, moves

from shardshift.plan import Cells
from shardshift.values import Infeasible, Kind, Layout, Region, Shard, Tensor

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)

Holders = frozenset[int]


def rows(start: int, count: int, first: int = 0, width: int = 2) -> Shard:
    """Rows of the weight, or of some of its columns."""
    return Shard(WEIGHT, Region((start, first), (count, width)))


def layout(*roles: tuple[Shard, ...]) -> Layout:
    """One rank for each role."""
    return Layout(roles, tuple(range(len(roles))))


def holders(of: Layout, tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    """Per element the roles that hold it, counted element by element."""
    held = np.empty(tensor.shape, object)
    held[...] = frozenset()
    for role, shards in enumerate(of.roles):
        for shard in shards:
            if shard.tensor == tensor:
                one = np.empty(shard.region.shape, object)
                one[...] = frozenset([role])
                held[inside(shard.region)] |= one
    return held


def check_cells(prev: Layout, curr: Layout) -> Cells:
    """Every element in one cell, of exactly the roles that hold it; one cell for each pair of such sets."""
    cells = Cells(prev, curr)
    named = [
        (frozenset(cells.prev_roles[i].tolist()), frozenset(cells.curr_roles[i].tolist())) for i in range(len(cells))
    ]
    expected_bytes: dict[tuple[Holders, Holders], int] = defaultdict(int)
    pieces = 0
    for tensor in curr.tensors:
        before, after = holders(prev, tensor), holders(curr, tensor)
        found = np.full(tensor.shape, -1)
        for cell in range(len(cells)):
            for region in cells.regions([cell]).get(tensor, []):
                assert region.numel
                assert (found[inside(region)] == -1).all(), "an element is in two cells"
                found[inside(region)] = cell
                pieces += 1
        was: Holders
        becomes: Holders
        for was, becomes, cell in zip(before.flat, after.flat, found.flat, strict=True):  # type: ignore[assignment]
            if was and becomes:
                assert named[cell] == (was, becomes)
                expected_bytes[was, becomes] += tensor.itemsize
            else:
                assert cell == -1
    assert dict(zip(named, cells.nbytes.tolist(), strict=True)) == expected_bytes
    assert len(set(named)) == len(named) == len(cells)
    assert cells.pieces.sum() == pieces
    return cells


@settings(max_examples=120)
@given(moves())
def test_each_element_is_in_the_one_cell_of_those_that_hold_it(move: Move) -> None:
    cells = check_cells(move.prev.layout, move.curr)
    assert not cells.dropped()
    assert not cells.missing()


@settings(max_examples=80)
@given(moves())
def test_what_roles_have_in_common_is_what_counting_elements_gives(move: Move) -> None:
    prev, curr = move.prev.layout, move.curr
    cells = Cells(prev, curr)
    common, same, count, inside_others = (np.zeros((curr.role_count, prev.role_count), np.int64) for _ in range(4))
    for i, wanted in enumerate(curr.roles):
        for j, held in enumerate(prev.roles):
            same[i, j] = sum(shard.nbytes for shard in set(wanted) & set(held))
            count[i, j] = len(set(wanted) & set(held))
            for shard in wanted:
                for other in held:
                    if other.tensor == shard.tensor and (both := shard.region.intersect(other.region)):
                        common[i, j] += both.numel * shard.tensor.itemsize
                        inside_others[i, j] += shard not in held
    assert (cells.overlap_bytes.toarray() == common).all()
    assert (cells.same_bytes.toarray() == same).all()
    assert (cells.same_shards.toarray() == count).all()
    # Where parts of a layout overlap among themselves, pieces are cut finer than shards.
    pieces = cells.copied_pieces.toarray()
    assert (pieces >= inside_others).all()
    assert ((pieces > 0) == (inside_others > 0)).all()
    assert curr.role_bytes.tolist() == [sum(shard.nbytes for shard in role) for role in curr.roles]


def test_a_whole_copy_beside_slices_and_windows() -> None:
    prev = layout((rows(0, 8),), (rows(0, 3),), (rows(0, 8, 1, 1),), (rows(2, 4, 0, 1),), ())
    curr = layout((rows(0, 4),), (rows(4, 4),), (rows(3, 2),), (rows(8, 0),))
    cells = check_cells(prev, curr)
    assert not cells.missing()
    assert cells.nbytes.sum() == WEIGHT.nbytes


def test_the_paper_pp16_to_pp12_has_a_cell_for_each_meeting_of_stages_and_slices() -> None:
    # 96 layers: 24 meetings of a stage of 6 layers and one of 8, and TP8 on both sides.
    tensors = [Tensor(Kind.PARAM, f"layers.{i}", (8,), "bfloat16", 2) for i in range(96)]

    def stages(pp: int) -> Layout:
        per = len(tensors) // pp
        return layout(*[
            tuple(Shard(of, Region((tp,), (1,))) for of in tensors[stage * per : (stage + 1) * per])
            for stage in range(pp)
            for tp in range(8)
        ])  # fmt: skip

    cells = Cells(stages(16), stages(12))
    assert len(cells) == 24 * 8
    assert set(cells.nbytes.tolist()) == {2 * 2, 2 * 4, 2 * 6}
    assert cells.nbytes.sum() == 96 * 16


def test_what_is_dropped_and_what_is_missing_is_named_by_region() -> None:
    cells = check_cells(layout((rows(0, 6),), (rows(1, 3),)), layout((rows(2, 6),), (rows(5, 2),)))
    assert {element for region in cells.dropped()[WEIGHT] for element in range(region.offsets[0], region.stops[0])} == {
        0,
        1,
    }
    assert {element for region in cells.missing()[WEIGHT] for element in range(region.offsets[0], region.stops[0])} == {
        6,
        7,
    }


def test_a_tensor_that_one_layout_holds_nothing_of_is_dropped_or_missing_whole() -> None:
    nothing, whole = layout((rows(0, 0),)), layout((rows(0, 8),))
    assert Cells(whole, nothing).dropped() == {WEIGHT: [Region((0, 0), (8, 2))]}
    assert Cells(nothing, whole).missing() == {WEIGHT: [Region((0, 0), (8, 2))]}
    assert not Cells(whole, nothing).missing()


def test_tensors_may_be_in_another_order_and_bundled_otherwise() -> None:
    names = [Tensor(Kind.PARAM, name, (4,), "float32", 4) for name in "abc"]
    whole = [Shard(tensor, Region((0,), (4,))) for tensor in names]
    prev = layout(tuple(whole), (whole[1],))
    curr = layout((whole[2], whole[0]), (whole[1], whole[0]))
    cells = check_cells(prev, curr)
    assert sorted(cells.nbytes.tolist()) == [16, 16, 16]


def test_scalars_and_empty_shards_meet_like_any_other() -> None:
    scale = Tensor(Kind.PARAM, "scale", (), "float32", 4)
    one = Shard(scale, Region((), ()))
    cells = check_cells(
        layout((one, rows(0, 8)), (rows(8, 0),)), layout((rows(0, 0),), (rows(0, 8), one), (rows(0, 0),))
    )
    assert cells.nbytes.tolist() == [4 + 32]
    assert cells.same_shards.toarray().tolist() == [[0, 0], [2, 0], [0, 0]]


def test_state_beyond_64_bits_is_refused() -> None:
    # Each role is below the limit, all of them together are not.
    many = [Tensor(Kind.PARAM, f"w{i}", (2**60,), "uint8", 1) for i in range(5)]
    one = layout(*[(Shard(tensor, Region((0,), (2**60,))),) for tensor in many])
    with pytest.raises(Infeasible, match="2\\*\\*62 bytes or more"):
        Cells(one, one)
