"""Names: which logical tensors a live tensor is made of.

By default a live tensor *is* the logical tensor of its name. Where two jobs name or join the same weights differently
(q, k and v apart or as one matrix, experts stacked or one by one, Megatron's fused matrices), the user says so, once
for each side: a live tensor is a list of ``Part``, boxes of it that are boxes of logical tensors, element by element
in row-major order. What one side calls a part and the other a tensor then is the same region.

A box of the live tensor and its logical box may differ in shape: (groups * rows, hidden) and (groups, rows, hidden)
are one. Dims are matched in groups of equal size from the front; within a group both sides are one flat range, which
is at most 2n - 1 boxes of either (``values.region.flat_range``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...values import Mismatch, Region
from ...values.region import flat_range, overlapping


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a live tensor that is a box of a logical one.

    Attributes:
        name: of the logical tensor.
        shape: of the logical tensor; None if the box is all of it.
        box: where in the logical tensor; None for all of it.
        at: where in the live tensor (its global shape, not a rank's local one); None for all of it.
    """

    name: str
    shape: tuple[int, ...] | None = None
    box: Region | None = None
    at: Region | None = None


Names: TypeAlias = Callable[[str, tuple[int, ...]], "str | Part | Sequence[Part]"]
"""From a live tensor's name and global shape to what it is in logical names."""


def joined(sizes: Mapping[str, int], shape: Sequence[int], dim: int = 0) -> tuple[Part, ...]:
    """The parts of a tensor that is some tensors joined along a dim (``torch.cat``).

    Args:
        sizes: per logical tensor its size in that dim, in order.
        shape: of the joined tensor, global.
        dim: along which.

    Raises:
        Mismatch: if the sizes do not add up.
    """
    if sum(sizes.values()) != shape[dim]:
        raise Mismatch(
            f"{', '.join(f'{name} {size}' for name, size in sizes.items())} add up to {sum(sizes.values())}, dim "
            f"{dim} of the joined tensor of global shape {tuple(shape)} has {shape[dim]}; what to do: give sizes that "
            "fill it"
        )
    parts, start = [], 0
    for name, size in sizes.items():
        offsets, extent = [0] * len(shape), list(shape)
        offsets[dim], extent[dim] = start, size
        parts.append(Part(name, at=Region(tuple(offsets), tuple(extent))))
        start += size
    return tuple(parts)


def stacked(names: Sequence[str], shape: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a tensor that is equal tensors stacked along a new first dim (``torch.stack``), as experts are.

    Raises:
        Mismatch: if there are not as many names as the first dim has.
    """
    if len(names) != shape[0]:
        raise Mismatch(f"{len(names)} names for a stack of {shape[0]}; what to do: name each of the tensors")
    rest = tuple(shape[1:])
    return tuple(
        Part(name, rest, at=Region((index, *(0,) * len(rest)), (1, *rest))) for index, name in enumerate(names)
    )


@dataclass(frozen=True, slots=True)
class Filled:
    """A part with nothing left open.

    Attributes:
        name: of the logical tensor.
        shape: of the logical tensor.
        box: in the logical tensor.
        at: in the live tensor; of as many elements.
    """

    name: str
    shape: tuple[int, ...]
    box: Region
    at: Region


def parts_of(name: str, shape: tuple[int, ...], names: Names | None) -> tuple[Filled, ...]:
    """The parts of a live tensor.

    Args:
        name: of the live tensor.
        shape: its global shape.
        names: the user's, or None.

    Raises:
        Mismatch: if the parts do not fill the tensor exactly once, or a box is not inside its tensor or has other
            elements than its counterpart.
    """
    if names is None:
        whole = Region.whole(shape)
        return (Filled(name, shape, whole, whole),)
    given: object = names(name, shape)
    parts = (given,) if isinstance(given, str | Part) else tuple(given) if isinstance(given, Iterable) else (given,)
    if strange := [part for part in parts if not isinstance(part, str | Part)]:
        raise Mismatch(
            f"names= gives {strange[0]!r} for {name}; nothing was moved. What to do: give a name, a "
            "shardshift.fsdp.Part, or a list of them"
        )
    found = tuple(_filled(Part(part) if isinstance(part, str) else part, name, shape) for part in parts)
    filled = sum(part.at.numel for part in found) == math.prod(shape)
    if not (found and filled) or overlapping([part.at for part in found]):
        raise Mismatch(
            f"the parts of {name} (global shape {shape}) are "
            f"{', '.join(f'{part.name} at {part.at}' for part in found)}, which do not fill it exactly once; nothing "
            "was moved. What to do: mend what names= gives for it"
        )
    return found


def _filled(part: Part, name: str, shape: tuple[int, ...]) -> Filled:
    at = part.at or Region.whole(shape)
    whole = part.shape or (part.box.shape if part.box else at.shape)
    box = part.box or Region.whole(whole)
    fits = len(at.shape) == len(shape) and len(box.shape) == len(whole) and at.numel == box.numel
    # A rank may hold nothing of a tensor with dims, while of one without there is no empty part.
    fits = fits and bool(whole or not shape)
    inside = fits and Region.whole(shape).contains(at) and Region.whole(whole).contains(box)
    if not (inside and groups(at.shape, box.shape)):
        raise Mismatch(
            f"part {part.name} of {name}: box {at} of the live tensor (global shape {shape}) is given as box {box} of "
            f"a logical tensor of shape {whole}; nothing was moved. What to do: give boxes inside their tensors that "
            "hold the same elements in row-major order, and a logical tensor of one element the shape (1,)"
        )
    return Filled(part.name, whole, box, at)


Dims: TypeAlias = tuple[range, range]


def groups(live: Sequence[int], logical: Sequence[int]) -> tuple[Dims, ...]:
    """Dims of two shapes of as many elements, in groups of equal size; none if there are none.

    Two shapes without dims, and equal shapes, are matched dim by dim.
    """
    if tuple(live) == tuple(logical):
        return tuple((range(dim, dim + 1), range(dim, dim + 1)) for dim in range(len(live))) or ((range(0), range(0)),)
    if math.prod(live) != math.prod(logical) or not math.prod(live):
        return ()
    found: list[Dims] = []
    i = j = 0
    while i < len(live) or j < len(logical):
        a, b = i, j
        one, other = 1, 1
        while True:
            if one <= other and a < len(live):
                one, a = one * live[a], a + 1
            elif b < len(logical):
                other, b = other * logical[b], b + 1
            else:
                one, a = one * live[a], a + 1
            if one == other:
                break
        found.append((range(i, a), range(j, b)))
        i, j = a, b
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Match:
    """A box of a live tensor and the logical box that it is.

    Attributes:
        live: in coordinates of the live tensor.
        logical: in those of the logical tensor; of as many elements in the same order.
    """

    live: Region
    logical: Region


def matches(part: Filled, box: Region) -> Iterator[Match]:
    """The logical boxes that a box of a live tensor holds of a part; together they are all that it holds.

    Args:
        part: of the live tensor.
        box: of the live tensor; what of it is outside the part is left out.
    """
    common = part.at.intersect(box)
    if common is None:
        return
    if part.at.shape == part.box.shape:
        offsets = tuple(c - a + b for c, a, b in zip(common.offsets, part.at.offsets, part.box.offsets, strict=True))
        yield Match(common, Region(offsets, common.shape))
        return
    inner = common.relative_to(part.at)
    choices = [
        list(_in_group([part.at.shape[d] for d in live], [part.box.shape[d] for d in logical], inner, live))
        for live, logical in groups(part.at.shape, part.box.shape)
    ]
    for combination in itertools.product(*choices):
        live, logical = (_product(boxes) for boxes in zip(*combination, strict=True))
        yield Match(_shifted(live, part.at.offsets), _shifted(logical, part.box.offsets))


def _in_group(live: Sequence[int], logical: Sequence[int], box: Region, dims: range) -> Iterator[tuple[Region, Region]]:
    """Pairs of boxes, one flat range each, within one group of dims."""
    inner = Region(tuple(box.offsets[d] for d in dims), tuple(box.shape[d] for d in dims))
    for start, stop in _runs(live, inner):
        yield from _pairs(live, logical, start, stop)


def _pairs(live: Sequence[int], logical: Sequence[int], start: int, stop: int) -> Iterator[tuple[Region, Region]]:
    """A flat range in pieces that are one box on either side: cut wherever either side has to be cut."""
    boxes = [flat_range(shape, start, stop) for shape in (live, logical)]
    if len(boxes[0]) == len(boxes[1]) == 1:
        yield boxes[0][0], boxes[1][0]
        return
    stops = (_range(shape, box)[1] for shape, found in zip((live, logical), boxes, strict=True) for box in found)
    for low, high in itertools.pairwise(sorted({start, *stops})):
        yield from _pairs(live, logical, low, high)


def _runs(shape: Sequence[int], box: Region) -> Iterator[tuple[int, int]]:
    """The flat ranges of a box."""
    full = len(shape)
    while full and (box.offsets[full - 1], box.shape[full - 1]) == (0, shape[full - 1]):
        full -= 1
    row = math.prod(shape[full:])
    if not full:
        yield 0, row
        return
    strides = [math.prod(shape[dim + 1 : full]) for dim in range(full)]
    leading = [range(a, a + n) for a, n in zip(box.offsets[: full - 1], box.shape[: full - 1], strict=True)]
    for index in itertools.product(*leading):
        start = sum(i * stride for i, stride in zip(index, strides, strict=False)) + box.offsets[full - 1]
        yield start * row, (start + box.shape[full - 1]) * row


def _range(shape: Sequence[int], box: Region) -> tuple[int, int]:
    """The flat range that a box is, if it is one."""
    start = 0
    for size, offset in zip(shape, box.offsets, strict=True):
        start = start * size + offset
    return start, start + box.numel


def _product(boxes: Sequence[Region]) -> Region:
    return Region(tuple(o for box in boxes for o in box.offsets), tuple(n for box in boxes for n in box.shape))


def _shifted(box: Region, by: Sequence[int]) -> Region:
    return Region(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.shape)
