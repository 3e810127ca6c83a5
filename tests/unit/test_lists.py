"""Lists in two arrays, held against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from shardshift.plan.lists import Lists, distinct, entries, is_in, number_rows, number_values

nested = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8)


def as_lists(found: Lists) -> list[list[int]]:
    return [found[i].tolist() for i in range(len(found.counts))]


@given(nested)
def test_lists_stay_what_they_were(given_lists: list[list[int]]) -> None:
    found = Lists.of(given_lists)
    assert as_lists(found) == given_lists
    assert found.counts.tolist() == [len(one) for one in given_lists]


@given(nested.filter(bool), st.data())
def test_taking_lists_writes_them_out(given_lists: list[list[int]], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(given_lists) - 1)))
    at, items = Lists.of(given_lists).take(np.array(indices, np.int64))
    assert list(zip(at.tolist(), items.tolist(), strict=True)) == [
        (place, item) for place, index in enumerate(indices) for item in given_lists[index]
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99))))
def test_items_are_grouped_by_key_in_the_order_given(pairs: list[tuple[int, int]]) -> None:
    key, items = (np.array([pair[i] for pair in pairs], np.int32) for i in (0, 1))
    assert as_lists(Lists.group(key, items, 7)) == [[item for k, item in pairs if k == wanted] for wanted in range(7)]


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2)), max_size=12))
def test_equal_rows_have_one_number_in_order_of_appearance(rows: list[tuple[int, int]]) -> None:
    first, number = number_rows(np.array(rows, np.int64).reshape(-1, 2))
    distinct = list(dict.fromkeys(rows))
    assert number.tolist() == [distinct.index(row) for row in rows]
    assert first.tolist() == [rows.index(row) for row in distinct]


def test_rows_whose_hashes_are_equal_are_told_apart() -> None:
    # The hash of one step takes 64 bits to 64 bits one to one, so a second column can be chosen that undoes the first.
    def mixed(value: int) -> int:
        product = value * 0x9E3779B97F4A7C15 % 2**64
        return product ^ product >> 29

    rows = np.array([[1, mixed(1)], [2, mixed(2)], [1, mixed(1)]], np.uint64).astype(np.int64)
    first, number = number_rows(rows)
    assert (first.tolist(), number.tolist()) == ([0, 1], [0, 1, 0])


@given(st.lists(st.integers(-5, 5)))
def test_values_are_numbered_in_ascending_order(values: list[int]) -> None:
    distinct, number = number_values(np.array(values, np.int64))
    assert distinct.tolist() == sorted(set(values))
    assert distinct[number].tolist() == values


@given(st.lists(st.integers(-5, 5)), st.lists(st.integers(-5, 5)))
def test_distinct_values_and_membership_are_those_of_sets(values: list[int], known: list[int]) -> None:
    found = distinct(np.array(known, np.int64))
    assert found.tolist() == sorted(set(known))
    assert is_in(np.array(values, np.int64), found).tolist() == [value in known for value in values]


@given(st.integers(0, 2**32))
def test_entries_of_a_sparse_matrix_are_those_of_the_dense_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    dense = random.integers(0, 3, random.integers(1, 6, 2))
    rows, columns = (random.integers(0, size, 9) for size in dense.shape)
    # In no order within a row, as a product of sparse matrices may be.
    row, column = dense.nonzero()
    shuffled = random.permutation(len(row))
    matrix = csr_array((dense[row, column][shuffled], (row[shuffled], column[shuffled])), shape=dense.shape)
    assert entries(matrix, rows, columns).tolist() == dense[rows, columns].tolist()
    assert entries(csr_array(dense * 0), rows, columns).tolist() == [0] * 9
