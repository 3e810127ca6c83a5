"""Moves: what crosses between devices, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..values.boxes import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Which cell goes from which device to which, as columns of one length, ordered by cell, hop, target.

    Attributes:
        cell: the cell.
        source: the device that sends it.
        target: the device that lacks it.
        hop: 1 if the source held the cell before the move; h > 1 if it receives it itself, at hop h - 1.
    """

    cell: Ints
    source: Ints
    target: Ints
    hop: Ints

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """All four, in the order of the attributes."""
        return self.cell, self.source, self.target, self.hop

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Moves:
        """Some of the rows."""
        return Moves(*(column[rows] for column in self.columns))
