"""Flat ranges to boxes, many at once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.strategies import mask

from shardshift.models.zero import flat_boxes
from shardshift.values import Region, flat_range


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[tuple[int, ...], int, int]]:
    dims = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.tuples(*[st.integers(1, 5)] * dims))
        start = draw(st.integers(0, math.prod(shape) - 1))
        found.append((shape, start, draw(st.integers(start + 1, math.prod(shape)))))
    return found


@given(ranges())
def test_each_range_is_the_boxes_that_hold_its_elements_and_few_of_them(
    found: list[tuple[tuple[int, ...], int, int]],
) -> None:
    shape, start, stop = (np.array(column, np.int64) for column in zip(*found, strict=True))
    at, low, high = flat_boxes(shape, start, stop)
    for index, (dims, first, end) in enumerate(found):
        boxes = [
            Region(tuple(a.tolist()), tuple((b - a).tolist()))
            for a, b in zip(low[at == index], high[at == index], strict=True)
        ]
        expected = np.zeros(math.prod(dims), np.int64)
        expected[first:end] = 1
        np.testing.assert_array_equal(mask(dims, *boxes).ravel(), expected)
        assert len(boxes) <= 2 * len(dims) - 1
        assert len(boxes) <= len(flat_range(dims, first, end))
