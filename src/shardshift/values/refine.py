"""Regions cut along one another: boxes whose elements all lie in the same of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .boxes import overlapping_within
from .region import Region, subtract_all
from .rows import columns


def refine(regions: Sequence[Region]) -> list[tuple[Region, list[int]]]:
    """The common refinement of regions of one tensor, which may overlap in any way, be equal, or be empty.

    Returns:
        Disjoint boxes that together are all regions, in order, and per box the indices, ascending, of all regions that
        contain it. No region's edge runs through a box.

    A box comes from the smallest region that it is in: so a whole tensor beside many slices costs one cut for each.
    """
    order = sorted(range(len(regions)), key=lambda index: (regions[index].numel, index))
    boxes = [regions[index] for index in order]
    dims = max((len(box.shape) for box in boxes), default=0) or 1
    low, high = columns([box.offsets for box in boxes], dims, 0), columns([box.stops for box in boxes], dims, 1)
    smaller: list[list[int]] = [[] for _ in boxes]
    larger: list[list[int]] = [[] for _ in boxes]
    meeting = overlapping_within(np.zeros(len(boxes), np.int64), low, high)
    for pair in zip(*(side.tolist() for side in meeting), strict=True):
        small, large = sorted(pair)
        smaller[large].append(small)
        larger[small].append(large)
    found: list[tuple[Region, list[int]]] = []
    for at, box in enumerate(boxes):
        pieces = [(part, [at]) for part in subtract_all(box, [boxes[other] for other in sorted(smaller[at])])]
        for other in sorted(larger[at]):
            pieces = [
                (part, [*of, other] if inside else of)
                for piece, of in pieces
                for part, inside in _cut(piece, boxes[other])
            ]
        found += [(piece, sorted(order[one] for one in of)) for piece, of in pieces]
    return sorted(found)


def _cut(piece: Region, along: Region) -> list[tuple[Region, bool]]:
    common = piece.intersect(along)
    if common is None:
        return [(piece, False)]
    return [(common, True), *((rest, False) for rest in piece.subtract(along))]
