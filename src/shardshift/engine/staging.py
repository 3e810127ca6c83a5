"""The arena in which pieces are packed and land that cannot be sent from, or received into, their own memory.

One arena a move and torch device, in two halves, so that one round can be on the wire while the next is packed: round
r takes half r % 2, and is through before round r + 2 begins. Together the halves never hold more than
``staging_bytes``: there is nothing else to allocate from, so the bound needs no counting. Pages stay warm.

Payloads are placed by size: multiples of 64 first, then of 32, and so on down to odd ones. Every payload of one dtype
is then aligned to it without a gap, so it can be packed and unpacked as a typed view, and a round that fills its half
to the last byte fits. Behind a payload of several dtypes there is a gap where the half has room for one.
Padding every payload was rejected, since a full round would not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..values import Mismatch
from .pages import empty

_ALIGN_BYTES: Final = 64
_WIDEST_BYTES: Final = 16  # complex128


class Arena:
    """Staging memory of one move.

    Args:
        staging_bytes: the most that all staging together may take, per torch device.
    """

    def __init__(self, staging_bytes: int) -> None:
        self._half_bytes = staging_bytes // 2
        self._halves: dict[tuple[torch.device, int], torch.Tensor] = {}

    def place(self, number: int, device: torch.device, sizes_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Memory for the payloads of a round; what the round before the last had is overwritten.

        Args:
            number: the round's, from 0.
            device: where.
            sizes_bytes: of each payload.

        Returns:
            Per payload a 1-dim uint8 tensor.

        Raises:
            Mismatch: if the round needs more than half the staging.
        """
        used_bytes = sum(sizes_bytes)
        if used_bytes > self._half_bytes:
            raise Mismatch(
                f"round {number} stages {used_bytes:,} bytes, half of the staging is {self._half_bytes:,}; what to do: "
                "compile the program for the staging that it is run with"
            )
        offsets, stop, spare_bytes = [0] * len(sizes_bytes), 0, self._half_bytes - used_bytes
        for index in sorted(range(len(sizes_bytes)), key=lambda index: -_alignment(sizes_bytes[index])):
            gap_bytes = -stop % _WIDEST_BYTES
            if gap_bytes <= spare_bytes:
                stop, spare_bytes = stop + gap_bytes, spare_bytes - gap_bytes
            offsets[index], stop = stop, stop + sizes_bytes[index]
        buffer = self._halves.get((device, number % 2))
        if buffer is None or buffer.numel() < stop:
            self._halves.pop((device, number % 2), None)
            buffer = None  # the old buffer goes before the new one comes
            buffer = self._halves[device, number % 2] = empty((stop,), torch.uint8, device)
        return [buffer[a : a + size] for a, size in zip(offsets, sizes_bytes, strict=True)]


def _alignment(size_bytes: int) -> int:
    """The power of two, up to 64, that a size is a multiple of."""
    return min(size_bytes & -size_bytes, _ALIGN_BYTES) if size_bytes else _ALIGN_BYTES
