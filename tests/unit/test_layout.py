"""Layouts: two ways to write one down, what they refuse, and that they survive JSON and other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.processes import printed_in_new_processes
from tests.unit.strategies import Model, Move, equal_layers, even_grid, in_two_columns, layouts, mask, models, moves

from shardshift.values import Infeasible, Kind, Layout, Mismatch, PlacedLayout, Region, Rows, Shard, Tensor

WEIGHT = Tensor(Kind.PARAM, "w", (4, 3), "bfloat16", 2)
BIAS = Tensor(Kind.PARAM, "b", (4,), "bfloat16", 2)
SCALE = Tensor(Kind.PARAM, "s", (), "float32", 4)


def rows(start: int, count: int) -> Shard:
    """Rows of the weight."""
    return Shard(WEIGHT, Region((start, 0), (count, 3)))


def of_columns(
    boxes: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]],
    *,
    tensors: tuple[Tensor, ...] = (WEIGHT,),
    bundle_of: tuple[int, ...] = (0,),
    ranks: Any = ((0,),),
) -> Layout:
    """A layout from (role, bundle, low, high) rows."""
    role, bundle, low, high = zip(*boxes, strict=True)
    columns = Rows(
        np.array(role, np.int32), np.array(bundle, np.int32), np.array(low, np.int64), np.array(high, np.int64)
    )
    return Layout.of_rows(tensors, np.array(bundle_of, np.int32), columns, np.array(ranks, np.int32))


@settings(max_examples=60)
@given(moves())
def test_layouts_survive_json(move: Move) -> None:
    record = json.loads(json.dumps(move.prev.to_json()))
    again = PlacedLayout.from_json(record)
    assert again == move.prev
    assert again.layout.digest == move.prev.layout.digest
    assert hash(again.layout) == hash(move.prev.layout)
    assert [again.layout.shards(rank) for rank in range(again.layout.world_size)] == [
        move.prev.layout.shards(rank) for rank in range(again.layout.world_size)
    ]


@settings(max_examples=60)
@given(models(), st.data())
def test_columns_and_shards_are_two_ways_to_write_one_layout(model: Model, data: st.DataObject) -> None:
    layout = data.draw(layouts(model).filter(lambda found: found.roles_of_rank.shape[1] == 1))
    again = Layout.of_rows(layout.tensors, layout.bundle_of, layout.rows, layout.roles_of_rank)
    assert again == layout
    assert Layout(layout.roles, layout.role_of_rank) == layout
    assert again.roles == layout.roles


@settings(max_examples=60)
@given(models(), st.data())
def test_a_rank_of_two_roles_holds_what_both_hold(model: Model, data: st.DataObject) -> None:
    layout = data.draw(layouts(model).filter(lambda found: found.roles_of_rank.shape[1] == 1))
    second = [data.draw(st.booleans()) for _ in layout.tensors]
    split = in_two_columns(layout, second)
    for rank in range(layout.world_size):
        assert split.shards(rank) == layout.shards(rank)
        first, then = split.roles_of_rank[rank].tolist()
        parts = [{shard.tensor for shard in split.roles[role]} for role in (first, then)]
        assert parts[1] == {shard.tensor for shard in layout.shards(rank) if second[layout.tensors.index(shard.tensor)]}
        assert not parts[0] & parts[1]
    with pytest.raises(ValueError, match="play 2 roles"):
        _ = split.role_of_rank


def test_bytes_count_each_tensor_once() -> None:
    layout = Layout(((rows(0, 2),), (rows(2, 2),)), (0, 1, 0, 1))
    assert WEIGHT.nbytes == 24
    assert rows(0, 2).nbytes == 12
    assert layout.state_bytes == 24
    assert layout.tensors == (WEIGHT,)
    assert layout.shards(3) == (rows(2, 2),)
    assert (layout.world_size, layout.role_count, layout.role_of_rank) == (4, 2, (0, 1, 0, 1))


def test_tensors_that_all_roles_hold_alike_are_one_bundle() -> None:
    pair = [Tensor(kind, "w", (4, 3), "float32", 4) for kind in (Kind.PARAM, Kind.EXP_AVG)]
    halves = [tuple(Shard(tensor, Region((start, 0), (2, 3))) for tensor in pair) for start in (0, 2)]
    layout = Layout((*halves, (Shard(BIAS, Region((0,), (4,))),)), (0, 1, 2))
    assert layout.bundle_of.tolist() == [0, 0, 1]
    assert layout.bundle_itemsizes.tolist() == [8, 2]
    assert len(layout.rows) == 3
    assert layout.members == ((0, 1), (2,))


def test_shards_are_in_order_of_need_whatever_their_dims() -> None:
    shards = (Shard(SCALE, Region((), ())), rows(2, 2), rows(0, 1), Shard(BIAS, Region((4,), (0,))))
    layout = Layout((shards, ()), (0, 1))
    # Of one tensor the first box first.
    assert layout.shards(0) == (shards[0], shards[2], shards[1], shards[3])
    assert layout.shards(1) == ()
    assert layout.roles == (layout.shards(0), ())
    assert layout.state_bytes == 4 + 24 + 8


def test_roles_that_no_rank_plays_are_counted() -> None:
    layout = Layout(((rows(0, 4),), (rows(0, 2),), ()), (0,))
    assert (layout.role_count, layout.world_size, len(layout.roles)) == (3, 1, 3)


def test_a_layout_of_nothing_is_a_layout() -> None:
    layout = Layout(((), ()), (0, 1))
    assert (layout.world_size, layout.state_bytes, layout.shards(1)) == (2, 0, ())
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_a_device_without_a_rank_holds_nothing() -> None:
    placed = PlacedLayout(Layout(((rows(0, 4),),), (0,)), (7,))
    assert placed.shards_on(7) == (rows(0, 4),)
    assert placed.shards_on(0) == ()


def test_a_layout_never_changes() -> None:
    layout = Layout(((rows(0, 4),),), (0,))
    for column in (layout.bundle_of, layout.roles_of_rank, *layout.rows.columns):
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 0


def test_a_shard_lies_inside_its_tensor() -> None:
    with pytest.raises(Mismatch, match="not inside"):
        rows(3, 2)
    with pytest.raises(Mismatch, match="not inside"):
        Shard(WEIGHT, Region((0,), (4,)))


@pytest.mark.parametrize(
    ("low", "high"), [((0, 0), (5, 3)), ((-1, 0), (4, 3)), ((2, 0), (1, 3)), ((0, 2), (4, 4)), ((5, 0), (5, 3))]
)
def test_a_box_lies_inside_its_tensor(low: tuple[int, int], high: tuple[int, int]) -> None:
    with pytest.raises(Mismatch, match=r"param:w: role 0 holds .* not inside the global shape \(4, 3\)"):
        of_columns([(0, 0, low, high)])


def test_dims_that_a_tensor_has_not_are_padded_with_one() -> None:
    with pytest.raises(Mismatch, match=r"param:b: role 0 holds .* not inside the global shape \(4,\)"):
        of_columns([(0, 0, (0, 0), (4, 3)), (0, 1, (0, 0), (4, 2))], tensors=(WEIGHT, BIAS), bundle_of=(0, 1))


def test_a_role_holds_no_element_twice() -> None:
    with pytest.raises(Mismatch, match=r"param:w: role 0 holds \[0:3, 0:3\] and \[2:4, 0:3\], which overlap"):
        Layout(((rows(0, 3), rows(2, 2)),), (0,))
    with pytest.raises(Mismatch, match=r"param:w: role 1 holds \[0:3, 0:3\] and \[2:4, 0:3\], which overlap"):
        of_columns([(0, 0, (0, 0), (4, 3)), (1, 0, (0, 0), (3, 3)), (1, 0, (2, 0), (4, 3))], ranks=((0,), (1,)))
    # Two roles may hold the same elements.
    of_columns([(0, 0, (0, 0), (4, 3)), (1, 0, (0, 0), (4, 3))], ranks=((0,), (1,)))


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_columns_are_refused_exactly_when_counting_elements_finds_one_twice(
    drawn: list[tuple[int, int, int, int, int]],
) -> None:
    boxes = sorted((role, 0, (min(a, c), min(b, d)), (max(a, c), max(b, d))) for role, a, b, c, d in drawn)
    twice = any(
        (
            mask(
                WEIGHT.shape,
                *(Region(low, (high[0] - low[0], high[1] - low[1])) for r, _, low, high in boxes if r == role),
            )
            > 1
        ).any()
        for role in (0, 1)
    )
    if twice:
        with pytest.raises(Mismatch, match="overlap"):
            of_columns(boxes)
    else:
        of_columns(boxes)


def test_rows_are_sorted_by_role() -> None:
    with pytest.raises(Mismatch, match="sorted by role"):
        of_columns([(1, 0, (0, 0), (2, 3)), (0, 0, (2, 0), (4, 3))], ranks=((0,), (1,)))


@pytest.mark.parametrize("bundle", [-1, 1, 7])
def test_rows_name_bundles_that_exist(bundle: int) -> None:
    with pytest.raises(Mismatch, match=f"names bundle {bundle}, outside 0..0"):
        of_columns([(0, bundle, (0, 0), (4, 3))])


@pytest.mark.parametrize("bundle_of", [(-1,), (1,), (0, 2), (0,) * 3])
def test_tensors_name_bundles_that_exist(bundle_of: tuple[int, ...]) -> None:
    with pytest.raises(Mismatch, match="bundle"):
        of_columns([(0, 0, (0, 0), (4, 3))], bundle_of=bundle_of, tensors=(WEIGHT, BIAS)[: len(bundle_of)])


def test_tensors_of_a_bundle_are_of_one_shape() -> None:
    other = Tensor(Kind.EXP_AVG, "w", (4, 2), "float32", 4)
    with pytest.raises(Mismatch, match=r"exp_avg:w has global shape \(4, 2\), and param:w of the same bundle \(4, 3\)"):
        of_columns([(0, 0, (0, 0), (4, 2))], tensors=(WEIGHT, other), bundle_of=(0, 0))


def test_all_roles_agree_on_a_tensor() -> None:
    other = Shard(Tensor(Kind.PARAM, "w", (4, 3), "float32", 4), Region.whole((4, 3)))
    with pytest.raises(Mismatch, match="role 1 describes it"):
        Layout(((rows(0, 2),), (other,)), (0, 1))


def test_a_tensor_is_named_once() -> None:
    other = Tensor(Kind.PARAM, "w", (4, 3), "float32", 4)
    with pytest.raises(Mismatch, match="param:w is named twice"):
        of_columns([(0, 0, (0, 0), (4, 3))], tensors=(WEIGHT, other), bundle_of=(0, 0))


@pytest.mark.parametrize("rank", [1, -1])
def test_ranks_name_roles_that_exist(rank: int) -> None:
    with pytest.raises(Mismatch, match="outside"):
        Layout(((rows(0, 2),),), (0, rank))


def test_columns_name_roles_that_exist() -> None:
    with pytest.raises(Mismatch, match="outside"):
        of_columns([(0, 0, (0, 0), (4, 3))], ranks=((0,), (-1,)))
    with pytest.raises(Mismatch, match="numbered from 0"):
        of_columns([(-1, 0, (0, 0), (4, 3))])


@pytest.mark.parametrize("shape", [(2**31, 2**31), (2**62, 2), (2**40, 2**40)])
def test_a_role_of_2_to_the_62_bytes_is_refused(shape: tuple[int, int]) -> None:
    huge = Tensor(Kind.PARAM, "w", shape, "bfloat16", 2)
    with pytest.raises(Infeasible, match="the most is"):
        Layout(((Shard(huge, Region.whole(shape)),),), (0,))
    with pytest.raises(Infeasible, match="the most is"):
        of_columns([(0, 0, (0, 0), shape)], tensors=(huge,))


@pytest.mark.parametrize("size", [2**63, 2**64, 2**70])
def test_indices_beyond_64_bits_are_refused(size: int) -> None:
    huge = Tensor(Kind.PARAM, "w", (size,), "bfloat16", 2)
    with pytest.raises(Infeasible, match="what to do: check the global shapes"):
        Layout(((Shard(huge, Region((size - 1,), (1,))),),), (0,))
    with pytest.raises(Infeasible, match="what to do: check the global shapes"):
        of_columns([(0, 0, (0,), (1,))], tensors=(huge,))


def test_a_small_shard_far_out_is_exact() -> None:
    far = Tensor(Kind.PARAM, "w", (2**62, 3), "bfloat16", 2)
    shard = Shard(far, Region((2**62 - 1, 1), (1, 2)))
    layout = Layout(((shard,),), (0,))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))).shards(0) == (shard,)
    assert layout.state_bytes == 2**62 * 6, "a Python number, which does not wrap around"


@pytest.mark.parametrize("devices", [(0,), (0, 0)])
def test_every_rank_has_a_device_of_its_own(devices: tuple[int, ...]) -> None:
    with pytest.raises(Mismatch):
        PlacedLayout(Layout(((rows(0, 2),),), (0, 0)), devices)


SCRIPT = """
from tests.unit.strategies import equal_layers, even_grid
print(even_grid(equal_layers(12), "pp3tp4dp2").digest)
"""


def test_digests_do_not_depend_on_the_process() -> None:
    expected = even_grid(equal_layers(12), "pp3tp4dp2").digest
    assert list(printed_in_new_processes(SCRIPT)) == [expected, expected]


def test_layouts_that_differ_in_anything_have_other_digests() -> None:
    base = [(0, 0, (0, 0), (2, 3)), (1, 0, (2, 0), (4, 3))]
    found = [
        of_columns(base, ranks=((0,), (1,))),
        of_columns(base, ranks=((1,), (0,))),
        of_columns(base, ranks=((0, 1),)),
        of_columns(base, ranks=((0,), (1,), (1,))),
        of_columns([base[0], (1, 0, (3, 0), (4, 3))], ranks=((0,), (1,))),
        of_columns(base, ranks=((0,), (1,)), tensors=(Tensor(Kind.MASTER, "w", (4, 3), "bfloat16", 2),)),
        of_columns(base, ranks=((0,), (1,)), tensors=(WEIGHT, BIAS), bundle_of=(0, 1)),
    ]
    assert len({layout.digest for layout in found}) == len(found) == len(set(found))
    assert found[0] != "anything else"


def test_roles_of_one_rank_that_hold_the_same_part_are_refused() -> None:
    halves = [(0, 0, (0, 0), (2, 3)), (1, 0, (1, 0), (4, 3))]
    with pytest.raises(Mismatch, match=r"rank 1 plays roles \[0, 1\], of which two hold the same part"):
        of_columns(halves, ranks=((0, 2), (0, 1)))
    apart = [halves[0], (1, 0, (2, 0), (4, 3))]
    assert len(of_columns(apart, ranks=((0, 1),)).shards(0)) == 2
