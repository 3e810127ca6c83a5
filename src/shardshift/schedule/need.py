"""The order of need: which tensor comes first, and how far into the move.

Both ends of a piece must agree on when it travels, and each knows only its own program. So the time of a tensor is
computed from the new layout alone, which all devices have:

1. Parameters come first, then buffers, fp32 masters and moments: the first forward after a move needs none of these.
2. Within a kind, a tensor stands where its bytes begin when a role's tensors of that kind are laid one after the
   other in the layout's order. Where several roles hold it, the earliest counts.
3. A kind begins where the kind before it ends in the largest role. So positions of two kinds never mix, also where a
   rank plays several roles (a dense one, and one of its own optimizer ranges).

A position is a label and no promise: where all want the same sender at once, the order of need yields within a kind
(``timetable``), and a device that lacks nothing between two positions goes from one to the other at once. The order of
each rank's own tensors (which may differ between pipeline chunks) was rejected: the two ends of a piece would have to
know each other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values import Kind, Layout, Tensor
from ..values.boxes import expand

KINDS: Final = (
    Kind.PARAM,
    Kind.BUFFER,
    Kind.MASTER,
    Kind.EXP_AVG,
    Kind.EXP_AVG_SQ,
    Kind.MAX_EXP_AVG_SQ,
    Kind.MOMENTUM,
)
"""Kinds as they are needed; whatever else an optimizer keeps comes last."""
PLACES: Final = len(KINDS) + 1

_NEED: Final = {kind: place for place, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class NeedOrder:
    """When each tensor of a layout is needed.

    Attributes:
        at: per tensor its rank (0 is needed first; all differ) and its position in bytes.
        position: the positions again, as the layout lists its tensors, shape (tensors,).
        kind: likewise the place of a tensor's kind in ``KINDS``, shape (tensors,); ``PLACES - 1`` for all others.
    """

    at: dict[Tensor, tuple[int, int]]
    position: NDArray[np.int64]
    kind: NDArray[np.int64]

    @classmethod
    def of(cls, layout: Layout) -> NeedOrder:
        """The order of need of a (new) layout."""
        tensors = layout.tensors
        if not tensors:
            return cls({}, np.empty(0, np.int64), np.empty(0, np.int64))
        count = len(tensors)
        kind = np.array([_NEED.get(tensor.kind, len(KINDS)) for tensor in tensors], np.int64)
        order = np.argsort(kind, kind="stable")  # by kind, then as the layout lists them
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)

        # One entry per (role, row, tensor), sorted by role and place; then sums inside each (role, kind).
        rows = layout.rows
        sizes = np.bincount(layout.bundle_of)
        members = np.argsort(layout.bundle_of, kind="stable")
        row, at = expand((np.cumsum(sizes) - sizes)[rows.bundle], sizes[rows.bundle])
        tensor = members[at]
        role = rows.role[row].astype(np.int64)
        held_bytes = (rows.high - rows.low).prod(axis=1)[row] * layout.itemsizes[tensor]
        line = np.argsort(role * count + place[tensor], kind="stable")
        tensor, role, held_bytes = tensor[line], role[line], held_bytes[line]
        before_bytes = np.cumsum(held_bytes) - held_bytes
        group = role * PLACES + kind[tensor]
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        lengths = np.diff(np.append(begins, len(group)))
        before_bytes -= np.repeat(before_bytes[begins], lengths)

        of_kind_bytes = np.zeros(PLACES, np.int64)
        np.maximum.at(of_kind_bytes, kind[tensor], before_bytes + held_bytes)
        position = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(position, tensor, before_bytes)
        position[position == np.iinfo(np.int64).max] = 0  # tensors that no role holds
        position += (np.cumsum(of_kind_bytes) - of_kind_bytes)[kind]

        rank = np.empty(count, np.int64)
        rank[np.lexsort((np.arange(count), position, kind))] = np.arange(count)
        return cls(dict(zip(tensors, zip(rank.tolist(), position.tolist(), strict=True), strict=True)), position, kind)
