"""Boxes by the thousand, held against all pairs looked at one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.values import boxes
from shardshift.values.boxes import Ints, expand, overlapping_pairs, overlapping_within

Columns = tuple[Ints, Ints, Ints]


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[Columns, Columns]:
    """Two lists of boxes of one to four dims, some empty; few keys or many, close together or far apart."""
    dims, keys, reach = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 1000])), draw(st.sampled_from([3, 12]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def columns(count: int) -> Columns:
        low = random.integers(0, reach, (count, dims))
        return random.integers(0, keys, count), low, low + random.integers(0, reach, (count, dims))

    counts = st.integers(0, 40)
    one, other = columns(draw(counts)), columns(draw(counts))
    if draw(st.booleans()):  # far from zero, as the last rows of a large table are
        one[1][:], one[2][:], other[1][:], other[2][:] = (part + 2**61 for part in (*one[1:], *other[1:]))
    return one, other


def all_pairs(one: Columns, other: Columns) -> list[tuple[int, int]]:
    """Pairs that share an element, by the definition: some index lies in both."""
    return [
        (i, j)
        for i, (key, low, high) in enumerate(zip(*one, strict=True))
        for j, (other_key, other_low, other_high) in enumerate(zip(*other, strict=True))
        if key == other_key
        and all(
            set(range(a, b)) & set(range(c, d)) for a, b, c, d in zip(low, high, other_low, other_high, strict=True)
        )
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
@settings(max_examples=60)
@given(box_lists())
def test_pairs_are_those_that_looking_at_each_pair_finds(chunk: int, lists: tuple[Columns, Columns]) -> None:
    one, other = lists
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_CHUNK", chunk)
        first, second = overlapping_pairs(*one, *other)
    found = list(zip(first.tolist(), second.tolist(), strict=True))
    assert sorted(found) == all_pairs(one, other)
    assert first.tolist() == sorted(first.tolist())
    assert first.dtype == second.dtype == np.int64


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
@settings(max_examples=60)
@given(box_lists())
def test_within_a_list_each_pair_is_found_once(chunk: int, lists: tuple[Columns, Columns]) -> None:
    one, _ = lists
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_CHUNK", chunk)
        first, second = overlapping_within(*one)
    found = sorted((min(pair), max(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True))
    assert found == [(i, j) for i, j in all_pairs(one, one) if i < j]


@settings(max_examples=40)
@given(box_lists())
def test_a_list_meets_itself_in_every_box_that_is_not_empty(lists: tuple[Columns, Columns]) -> None:
    one, _ = lists
    first, second = overlapping_pairs(*one, *one)
    full = [i for i, (low, high) in enumerate(zip(*one[1:], strict=True)) if (low < high).all()]
    assert first[first == second].tolist() == full


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5))))
def test_runs_are_written_out(runs: list[tuple[int, int]]) -> None:
    start, count = (np.array([run[i] for run in runs], np.int64) for i in (0, 1))
    which, items = expand(start, count)
    assert list(zip(which.tolist(), items.tolist(), strict=True)) == [
        (i, first + k) for i, (first, many) in enumerate(runs) for k in range(many)
    ]
