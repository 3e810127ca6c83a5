"""Cutting a region at the ends of slots: see step 2 of ``compile``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..values import Region, flat_range


def cut_by_slots(region: Region, itemsize: int, start_bytes: int, round_bytes: int) -> Iterator[tuple[int, Region]]:
    """Cut a region at slots' ends.

    The region is taken as *granules* in row-major order: the largest blocks of whole trailing dims (or the region as
    a whole) of at most an eighth of a slot, or else single elements. A granule belongs to the slot in which it begins.

    Args:
        region: the elements.
        itemsize: bytes of one.
        start_bytes: the position of the first.
        round_bytes: the length of a slot.

    Yields:
        (slot, box) in row-major order: one box a slot if a row of the first dim is a granule, else up to 2n - 1 for
        the n leading dims that are cut.
    """
    first, last = start_bytes // round_bytes, (start_bytes + region.numel * itemsize - 1) // round_bytes
    if first == last or region.numel * itemsize * 8 <= round_bytes or region.numel == 1:
        yield first, region
        return
    shape, dims = region.shape, len(region.shape)
    block_numel = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    cut = next((dim for dim in range(dims) if block_numel[dim] * itemsize * 8 <= round_bytes), dims - 1)
    granule_bytes, leading = block_numel[cut] * itemsize, shape[: cut + 1]
    count, begin = math.prod(leading), 0
    for slot in range(first, last + 1):
        end = min(-(-((slot + 1) * round_bytes - start_bytes) // granule_bytes), count)
        if begin == end:
            continue
        boxes = flat_range(leading, begin, end) if cut else (Region((begin,), (end - begin,)),)
        for box in boxes:
            offsets = tuple(a + b for a, b in zip(region.offsets, box.offsets, strict=False))
            yield slot, Region((*offsets, *region.offsets[cut + 1 :]), (*box.shape, *shape[cut + 1 :]))
        begin = end
