"""Many lists of numbers in two arrays, and numbers for things that are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ..values.boxes import Ints, expand


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Many lists of numbers in two arrays: list i is ``items[starts[i]:starts[i + 1]]``."""

    starts: Ints
    items: Ints

    @classmethod
    def group(cls, key: NDArray[np.integer], items: NDArray[np.integer], count: int) -> Lists:
        """Per key 0 to ``count - 1`` its items, in the order given."""
        order = np.argsort(key, kind="stable")
        return cls(np.searchsorted(key[order], np.arange(count + 1)), items[order].astype(np.int64))

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """Lists of Python numbers."""
        starts = np.cumsum([0, *map(len, lists)])
        return cls(starts, np.array([item for one in lists for item in one], np.int64))

    @property
    def counts(self) -> Ints:
        """The length of each list."""
        return np.diff(self.starts)

    def __getitem__(self, index: int) -> Ints:
        return self.items[self.starts[index] : self.starts[index + 1]]

    def padded(self) -> Ints:
        """The lists as the rows of a table, -1 behind their items; for items that are not negative."""
        row, item = self.take(np.arange(len(self.counts)))
        table = np.full((len(self.counts), int(self.counts.max(initial=0))), -1, np.int64)
        table[row, nth_in_run(row)] = item
        return table

    def take(self, indices: Ints) -> tuple[Ints, Ints]:
        """The lists of ``indices`` written out: positions in ``indices``, and items."""
        runs, at = expand(self.starts[indices], self.counts[indices])
        return runs, self.items[at]


def number_rows(table: Ints) -> tuple[Ints, Ints]:
    """The first index of each distinct row, and per row the number of its kind."""
    # A hash of the rows sorts much faster than the rows; that equal hashes are equal rows is then checked.
    mixed = np.zeros(len(table), np.uint64)
    for column in table.T.astype(np.uint64):
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, number = np.unique(mixed, return_index=True, return_inverse=True)
    number = number.reshape(-1)
    if not (table == table[first[number]]).all():
        _, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
        number = number.reshape(-1)
    # Numbered by first appearance: the numbers then do not hang on the hash.
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[number]


def number_values(values: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The distinct values, ascending, and per value its place among them."""
    distinct, number = np.unique(values, return_inverse=True)
    return distinct.astype(np.int64), number.reshape(-1)


def distinct(values: Ints) -> Ints:
    """The distinct values, ascending. By sorting: ``np.unique`` hashes, which takes five times as long on a million."""
    ordered = np.sort(values)
    if not len(ordered):
        return ordered
    found: Ints = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    return found


def nth_in_run(ascending: NDArray[np.integer]) -> Ints:
    """Per value how many equal ones are before it."""
    return np.arange(len(ascending)) - np.searchsorted(ascending, ascending)


def nth_among_equals(values: NDArray[np.integer]) -> Ints:
    """The same for values in any order."""
    order = np.argsort(values, kind="stable")
    nth = np.empty(len(values), np.int64)
    nth[order] = nth_in_run(values[order])
    return nth


def is_in(values: Ints, known: Ints) -> NDArray[np.bool_]:
    """Per value whether it is among the known ones, which are ascending."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    found: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found


def entries(matrix: csr_array, rows: Ints, columns: Ints) -> Ints:
    """``matrix[rows[i], columns[i]]`` for every i, dense."""
    # Not by indexing: of SciPy's sparse arrays the result is dense or sparse, as it happens.
    matrix = matrix.sorted_indices()
    width = matrix.shape[1]
    known = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)) * width + matrix.indices
    if not len(known):
        return np.zeros(len(rows), np.int64)
    asked = rows.astype(np.int64) * width + columns
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    found: Ints = np.where(known[at] == asked, matrix.data[at], 0)
    return found
