"""Regions, held against numpy masks of whole tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.strategies import mask

from shardshift.values import Region, flat_range, overlapping, subtract_all

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any region of a tensor of this shape, empty ones included."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def tensors_with_boxes(draw: st.DrawFn, most: int = 4) -> tuple[tuple[int, ...], list[Region]]:
    """A global shape and some regions of it."""
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes(shape), min_size=2, max_size=most))


@given(tensors_with_boxes())
def test_the_intersection_holds_the_elements_that_both_hold(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, b, *_) = case
    common = a.intersect(b)
    expected = mask(shape, a) & mask(shape, b)
    assert (mask(shape, *([common] if common else [])) == expected).all()
    assert (common is None) == (expected.sum() == 0)


@given(tensors_with_boxes())
def test_a_difference_is_disjoint_and_exact(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, b, *_) = case
    rest = a.subtract(b)
    assert (mask(shape, *rest) == (mask(shape, a) & ~mask(shape, b) & 1)).all()
    assert len(rest) <= 2 * max(1, len(shape))


@given(tensors_with_boxes())
def test_subtracting_many_leaves_what_is_in_none(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, *taken) = case
    expected = (mask(shape, a) > 0) & (mask(shape, *taken) == 0)
    assert (mask(shape, *subtract_all(a, taken)) == expected).all()


@given(tensors_with_boxes(most=6))
def test_overlaps_are_found_exactly_when_an_element_is_shared(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, regions = case
    found = overlapping(regions)
    assert (found is not None) == bool((mask(shape, *regions) > 1).any())
    if found:
        assert found[0].intersect(found[1]) is not None


@given(tensors_with_boxes(), st.integers(1, 30))
def test_pieces_are_small_enough_and_cover_once_in_row_major_order(
    case: tuple[tuple[int, ...], list[Region]], most_numel: int
) -> None:
    shape, (region, *_) = case
    pieces = list(region.pieces(most_numel))
    assert all(piece.numel <= most_numel for piece in pieces)
    assert (mask(shape, *pieces) == mask(shape, region)).all()
    assert [piece.offsets for piece in pieces] == sorted(piece.offsets for piece in pieces)


@given(SHAPES.flatmap(lambda s: st.tuples(st.just(s), st.integers(0, math.prod(s)), st.integers(0, math.prod(s)))))
def test_a_flat_range_is_exactly_its_elements_in_few_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, a, b = case
    start, stop = sorted((a, b))
    found = flat_range(shape, start, stop)
    expected = np.zeros(math.prod(shape), dtype=np.int64)
    expected[start:stop] = 1
    assert (mask(shape, *found) == expected.reshape(shape)).all()
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_scalar_has_one_element() -> None:
    one = Region((), ())
    assert one.numel == 1
    assert one.intersect(one) == one
    assert one.subtract(one) == ()
    assert list(one.pieces(1)) == [one]


def test_offsets_are_relative_to_an_outer_region() -> None:
    assert Region((3, 4), (1, 2)).relative_to(Region((2, 4), (5, 5))) == Region((1, 0), (1, 2))
    with pytest.raises(ValueError, match="is not inside"):
        Region((0,), (2,)).relative_to(Region((1,), (2,)))


def test_counts_beyond_64_bits_are_exact() -> None:
    huge = Region.whole((2**40, 2**40))
    assert huge.numel == 2**80
    assert huge.subtract(Region((0, 0), (2**40 - 1, 2**40))) == (Region((2**40 - 1, 0), (1, 2**40)),)


@pytest.mark.parametrize(("offsets", "shape"), [((0,), ()), ((-1,), (2,)), ((0,), (-2,))])
def test_nonsense_is_refused(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="region"):
        Region(offsets, shape)


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        flat_range((2, 3), 0, 7)


def test_pieces_need_room_for_one_element() -> None:
    with pytest.raises(ValueError, match="at least one"):
        list(Region((0,), (2,)).pieces(0))
