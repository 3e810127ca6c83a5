"""The arena in which pieces are packed and land that cannot be sent from, or received into, their own memory.

One arena a move and torch device, a ring: a round's payloads lie where those of an earlier round lay, which has to be
complete before. Where each round lies, and which one that is, is laid out for a whole epoch at once:

1. The ring has room for any two rounds, so that one can be packed while another is on the wire, and for
   ``LEAST_BYTES`` of small rounds, of which many may be in flight. It is no larger, so that it stays in the cache, and
   few pages have to be made.
2. A round of more than a quarter of the ring goes to its beginning or its end, whichever was used less recently; so
   two such rounds never wait for each other. A smaller one goes behind the one before it, or to the beginning.

The ring is at most ``staging_bytes``, and there is nothing else to allocate from, so the bound needs no counting.

Within a round, payloads are placed by size: multiples of 64 first, then of 32, and so on down to odd ones. Every
payload of one dtype is then aligned to it without a gap, so it can be packed and unpacked as a typed view, and two
rounds that fill the ring to the last byte fit. Behind a payload of several dtypes there is a gap where there is room
for one. Padding every payload was rejected, since full rounds would not fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..values import Mismatch
from .pages import empty, prefault

LEAST_BYTES: Final = 8 << 20
"""Of small rounds, more than two may be in flight as long as they fit in so much."""

MOST_IN_FLIGHT: Final = 16
"""Rounds that may be in flight, whatever they stage. Two took 1.1 times as long where nothing is staged, 64 no less."""

_ALIGN_BYTES: Final = 64
_WIDEST_BYTES: Final = 16  # complex128


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory for the payloads of a round.

    Attributes:
        payloads: per payload a 1-dim uint8 tensor.
        after: the number of the latest round that has to be complete before they are written; -1 if there is none.
    """

    payloads: list[torch.Tensor]
    after: int


class Arena:
    """Staging memory of one move.

    Args:
        staging_bytes: the most that all staging together may take, per torch device.
    """

    def __init__(self, staging_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._rings: dict[torch.device, torch.Tensor] = {}

    def lay_out(self, device: torch.device, rounds: Sequence[tuple[int, Sequence[int]]]) -> list[Stretch]:
        """Memory for the payloads of the rounds of an epoch; what those of the last epoch had is overwritten.

        Args:
            device: where.
            rounds: per round its number, ascending, and the bytes of each payload. At most ``MOST_IN_FLIGHT`` rounds
                may be in flight.

        Returns:
            One for each.

        Raises:
            Mismatch: if a round needs more than half the staging.
        """
        laid = [self._payloads(number, sizes_bytes) for number, sizes_bytes in rounds]
        extents_bytes = [extent_bytes for _, extent_bytes in laid]
        pair_bytes, all_bytes = 2 * _up(max(extents_bytes, default=0)), sum(map(_up, extents_bytes))
        ring_bytes = min(max(pair_bytes, LEAST_BYTES), all_bytes, self._staging_bytes)
        ring = self._ring(device, ring_bytes)
        placed: deque[tuple[int, int, int]] = deque(maxlen=MOST_IN_FLIGHT)  # number, start, stop
        found = []
        for (number, sizes_bytes), (offsets, extent_bytes) in zip(rounds, laid, strict=True):
            start, after = _place(placed, extent_bytes, ring_bytes)
            placed.append((number, start, start + extent_bytes))
            ends = zip(offsets, sizes_bytes, strict=True)
            found.append(Stretch([ring[start + a : start + a + size] for a, size in ends], after))
        return found

    def _payloads(self, number: int, sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
        """Where each payload of a round lies within its stretch, and how long that is."""
        used_bytes, most_bytes = sum(sizes_bytes), self._staging_bytes // 2
        if used_bytes > most_bytes:
            raise Mismatch(
                f"round {number} stages {used_bytes:,} bytes, half of the staging is {most_bytes:,}; what to do: "
                "compile the program for the staging that it is run with"
            )
        offsets, stop, spare_bytes = [0] * len(sizes_bytes), 0, most_bytes - used_bytes
        for index in sorted(range(len(sizes_bytes)), key=lambda index: -_alignment(sizes_bytes[index])):
            gap_bytes = -stop % _WIDEST_BYTES
            if gap_bytes <= spare_bytes:
                stop, spare_bytes = stop + gap_bytes, spare_bytes - gap_bytes
            offsets[index], stop = stop, stop + sizes_bytes[index]
        return offsets, stop

    def _ring(self, device: torch.device, ring_bytes: int) -> torch.Tensor:
        ring = self._rings.pop(device, None)
        if ring is None or ring.numel() < ring_bytes:
            del ring  # the old one goes before the new one comes
            ring = empty((ring_bytes,), torch.uint8, device)
            prefault([ring])
        self._rings[device] = ring
        return ring


def _place(placed: Sequence[tuple[int, int, int]], extent_bytes: int, ring_bytes: int) -> tuple[int, int]:
    """Where a round begins, and the number of the latest that lay there; -1 if none did."""
    if 4 * extent_bytes > ring_bytes:
        last = ring_bytes - extent_bytes
        starts = [0, last // _ALIGN_BYTES * _ALIGN_BYTES, last]
    else:
        behind = _up(placed[-1][2]) if placed else 0
        starts = [behind, 0] if behind + extent_bytes <= ring_bytes else [0]

    def latest(start: int) -> int:
        return max((number for number, a, b in placed if a < start + extent_bytes and start < b), default=-1)

    start = min(starts, key=latest)
    return start, latest(start)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _alignment(size_bytes: int) -> int:
    """The power of two, up to 64, that a size is a multiple of."""
    return min(size_bytes & -size_bytes, _ALIGN_BYTES) if size_bytes else _ALIGN_BYTES
