"""Regions: axis-aligned boxes of a logical tensor, in elements, in global coordinates.

Everything that shardshift knows about where state lives is a region of a logical tensor. Tensor parallel
slices, pipeline stages, ranges of the distributed optimizer and tied copies are rules that yield regions;
planning, moving and proving are then the same for all of them.

Offsets are Python ints: a logical tensor may have more elements than 32 or 64 bits of a native index would
hold once multiplied out. Bitmaps and index lists were rejected: their size grows with the tensor, a box's
does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box: ``offsets[d] <= index[d] < offsets[d] + shape[d]`` for each dim ``d``.

    A 0-dim region (``Region((), ())``) is the one element of a scalar. A region with a zero in its shape is
    empty; empty regions are legal shards (a stage without layers, an uneven shard of a small tensor).

    Raises:
        ValueError: if offsets and shape differ in length, or either holds a negative number.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape):
            raise ValueError(f"region has {len(self.offsets)} offsets but {len(self.shape)} dims")
        if any(n < 0 for n in (*self.offsets, *self.shape)):
            raise ValueError(f"region offsets and shape must not be negative: {self}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The region that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Elements in the region."""
        return math.prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """The elements in both, or None when there are none."""
        offsets, shape = [], []
        for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            shape.append(stop - start)
        return Region(tuple(offsets), tuple(shape))

    def contains(self, other: Region) -> bool:
        """Whether every element of ``other`` is in this region (an empty one always is)."""
        return other.numel == 0 or self.intersect(other) == other

    def subtract(self, other: Region) -> tuple[Region, ...]:
        """The elements of this region that are not in ``other``, as at most 2n disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        boxes = []
        offsets, shape = list(self.offsets), list(self.shape)
        # Cut dim by dim: what lies before and after the common part in this dim is whole in the later dims.
        for dim, (start, size) in enumerate(zip(common.offsets, common.shape, strict=True)):
            for low, high in ((offsets[dim], start), (start + size, offsets[dim] + shape[dim])):
                if low < high:
                    boxes.append(
                        Region(
                            (*offsets[:dim], low, *offsets[dim + 1 :]),
                            (*shape[:dim], high - low, *shape[dim + 1 :]),
                        )
                    )
            offsets[dim], shape[dim] = start, size
        return tuple(boxes)

    def relative_to(self, outer: Region) -> Region:
        """This region in the coordinates of ``outer``, which must contain it.

        Raises:
            ValueError: if part of the region lies outside.
        """
        if not outer.contains(self):
            raise ValueError(f"{self} is not inside {outer}")
        return Region(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def pieces(self, most_numel: int) -> Iterator[Region]:
        """Cut into boxes of at most ``most_numel`` elements, in row-major order.

        The outermost dims are cut first, so that a piece of a contiguous tensor stays contiguous whenever
        one row of the dim being cut fits.
        """
        if most_numel < 1:
            raise ValueError(f"a piece must hold at least one element, not {most_numel}")
        if self.numel <= most_numel:
            yield self
            return
        # The first dim whose rows fit is cut into runs of rows; the dims before it are cut to single rows.
        row_numel = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        cut = next(dim for dim, numel in enumerate(row_numel) if numel <= most_numel)
        run = most_numel // row_numel[cut]
        leading = [range(a, a + n) for a, n in zip(self.offsets[:cut], self.shape[:cut], strict=True)]
        first, stop = self.offsets[cut], self.offsets[cut] + self.shape[cut]
        for index in itertools.product(*leading):
            for start in range(first, stop, run):
                yield Region(
                    (*index, start, *self.offsets[cut + 1 :]),
                    (*(1,) * cut, min(run, stop - start), *self.shape[cut + 1 :]),
                )

    def __str__(self) -> str:
        inside = ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.stops, strict=True))
        return f"[{inside}]"


def subtract_all(region: Region, taken: Iterable[Region]) -> tuple[Region, ...]:
    """The elements of ``region`` that are in none of ``taken``, as disjoint boxes."""
    left: tuple[Region, ...] = (region,) if region.numel else ()
    for other in taken:
        if not left:
            break
        left = tuple(box for part in left for box in part.subtract(other))
    return left


def overlapping(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """The first two regions that share an element, or None when all are disjoint.

    Sweeps over dim 0, so it costs n log n for the usual cuts of a tensor into rows.
    """
    order = sorted((r for r in regions if r.numel), key=lambda r: r.offsets)
    open_boxes: list[Region] = []
    for region in order:
        if not region.offsets:
            if open_boxes:
                return open_boxes[0], region
        else:
            open_boxes = [box for box in open_boxes if box.stops[0] > region.offsets[0]]
            for box in open_boxes:
                if box.intersect(region) is not None:
                    return box, region
        open_boxes.append(region)
    return None


def flat_range(shape: Sequence[int], start: int, stop: int) -> tuple[Region, ...]:
    """The boxes that hold elements ``start`` to ``stop`` (row-major) of a tensor of this shape.

    A flat range of n dims is at most 2n - 1 boxes: partial rows before and after in each dim but the last,
    and one run of whole rows. Used for the distributed optimizer, whose shards ignore dims (Megatron's
    ``distrib_optimizer.py``, ``_build_model_gbuf_param_range_map``).

    Raises:
        ValueError: if the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}:{stop} is outside a tensor of {math.prod(shape)} elements")
    return tuple(_flat_boxes(tuple(shape), start, stop)) if start < stop else ()


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    if len(shape) <= 1:
        yield Region((start,), (stop - start,)) if shape else Region((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def in_row(index: int, low: int, high: int) -> Iterator[Region]:
        for box in _flat_boxes(shape[1:], low, high):
            yield Region((index, *box.offsets), (1, *box.shape))

    if first == last:
        if stop - start == row:
            yield Region((first, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
        else:
            yield from in_row(first, start - first * row, stop - first * row)
        return
    whole_first = first if start == first * row else first + 1
    whole_stop = last + 1 if stop == (last + 1) * row else last
    if whole_first > first:
        yield from in_row(first, start - first * row, row)
    if whole_first < whole_stop:
        rest = (0,) * (len(shape) - 1)
        yield Region((whole_first, *rest), (whole_stop - whole_first, *shape[1:]))
    if whole_stop == last:
        yield from in_row(last, 0, stop - last * row)
