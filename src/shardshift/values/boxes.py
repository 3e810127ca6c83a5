"""Many boxes at once: which of two lists of regions share elements.

Planning compares every shard that is held with every shard that is wanted, a million of each for a large job with
a distributed optimizer. So boxes are columns here: ``low`` and ``high`` of shape (n, dims), with a key per box, and
only boxes of equal keys can meet.

1. In every dim but the first, intervals that touch, directly or through others, are a cluster: the slices of tensor
   parallel ranks, say. Boxes of different clusters cannot meet, so the cluster becomes part of the key.
2. Sort the one list by (key, first dim's low). For each box of the other, those that can meet it in the first dim
   are a run of that order: its end is a binary search over the lows, its start one over the running maximum of
   the highs.
3. Compare the pairs of the runs in all dims.

An interval tree was rejected: shards of a tensor seldom overlap among themselves, so the runs are nearly exact.
"""

from __future__ import annotations

import itertools
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_CHUNK: Final = 1 << 22
"""Pairs that are compared at once: bounds the memory, a few hundred MB."""


def overlapping_pairs(
    key: Ints, low: Ints, high: Ints, other_key: Ints, other_low: Ints, other_high: Ints
) -> tuple[Ints, Ints]:
    """Every pair of a box and another box of its key that share an element.

    Args:
        key: shape (n,), not negative.
        low: first indices, shape (n, dims), dims at least 1.
        high: one past the last indices, shape (n, dims).
        other_key: shape (m,).
        other_low: shape (m, dims).
        other_high: shape (m, dims).

    Returns:
        Indices into the first list and into the other one, in ascending order of the first. Empty boxes meet none.
    """
    one_filled, other_filled = np.all(high > low, axis=1), np.all(other_high > other_low, axis=1)
    full, order = np.flatnonzero(one_filled), np.flatnonzero(other_filled)
    if not len(order) or not len(full):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = np.concatenate([key[full], other_key[order]])
    for dim in range(low.shape[1] - 1, 0, -1):
        lows = np.concatenate([low[full, dim], other_low[order, dim]])
        keys = _clusters(keys, lows, np.concatenate([high[full, dim], other_high[order, dim]]))
    begin, end = _composite(
        keys,
        np.concatenate([low[full, 0], other_low[order, 0]]),
        np.concatenate([high[full, 0], other_high[order, 0]]),
    )
    mine = len(full)
    by_begin = np.argsort(begin[mine:], kind="stable")
    order, then_begin, then_end = order[by_begin], begin[mine:][by_begin], end[mine:][by_begin]
    start = np.searchsorted(np.maximum.accumulate(then_end), begin[:mine], side="right")
    stop = np.searchsorted(then_begin, end[:mine], side="left")
    count = np.maximum(stop - start, 0)
    return _compared(full, order, start, count, (low, high), (other_low, other_high))


def overlapping_within(key: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Every pair of two boxes of one list and key that share an element, each pair once; arguments as above."""
    full = np.flatnonzero(np.all(high > low, axis=1))
    if not len(full):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = key[full]
    for dim in range(low.shape[1] - 1, 0, -1):
        keys = _clusters(keys, low[full, dim], high[full, dim])
    begin, end = _composite(keys, low[full, 0], high[full, 0])
    by_begin = np.argsort(begin, kind="stable")
    full, begin, end = full[by_begin], begin[by_begin], end[by_begin]
    # In this order a box meets, of those behind it, only such as begin before it ends.
    start = np.arange(1, len(full) + 1)
    count = np.searchsorted(begin, end, side="left") - start
    return _compared(full, full, start, count, (low, high), (low, high))


def _compared(
    ones: Ints, others: Ints, start: Ints, count: Ints, boxes: tuple[Ints, Ints], other_boxes: tuple[Ints, Ints]
) -> tuple[Ints, Ints]:
    """Of runs of candidates the pairs that do meet: per one a run of others, which have its key."""
    low, high, other_low, other_high = (np.ascontiguousarray(side.T) for side in (*boxes, *other_boxes))
    found: list[tuple[Ints, Ints]] = []
    for chunk in _chunks(count):
        run, at = expand(start[chunk], count[chunk])
        one, other = ones[chunk][run], others[at]
        for dim in reversed(range(len(low))):  # dim 0 last: it is what the runs are made by
            meet = (low[dim][one] < other_high[dim][other]) & (other_low[dim][other] < high[dim][one])
            one, other = one[meet], other[meet]
        found.append((one, other))
    return np.concatenate([one for one, _ in found]), np.concatenate([other for _, other in found])


def _composite(key: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Lows and highs as single integers that sort by key first; no interval of one key reaches into another's."""
    width = int(high.max()) + 1
    if (int(key.max()) + 1) * width >= 2**62:
        points, at = np.unique(np.concatenate([low, high]), return_inverse=True)
        low, high = np.split(at.reshape(-1).astype(np.int64), 2)
        width = len(points) + 1
    return key * width + low, key * width + high


def _clusters(key: Ints, low: Ints, high: Ints) -> Ints:
    """A number for each set of intervals of one key that touch, directly or through others."""
    begin, end = _composite(key, low, high)
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    cluster = np.empty(len(key), np.int64)
    cluster[order] = np.cumsum(np.concatenate([[True], begin[1:] >= reach[:-1]])) - 1
    return cluster


def expand(start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Runs written out: per run i and each of its ``count[i]`` members the pair (i, start[i] + k)."""
    runs = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(runs)) - np.repeat(np.cumsum(count) - count, count)
    return runs, start[runs] + within


def _chunks(count: Ints) -> list[slice]:
    """Slices of the runs that hold about ``_CHUNK`` pairs each."""
    total = np.cumsum(count)
    if not len(total) or total[-1] <= _CHUNK:
        return [slice(0, len(count))]
    cuts = np.searchsorted(total, np.arange(_CHUNK, int(total[-1]), _CHUNK), side="left") + 1
    edges = [0, *dict.fromkeys(cuts.tolist()), len(count)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]
