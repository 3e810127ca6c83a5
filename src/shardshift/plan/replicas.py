"""Replicas: how many devices hold each byte, before and after.

The invariant of a move (design, "Moving"): at every moment each byte has at least as many holders as before or as
after, whichever is less, so the loss of one less loses nothing. While sources stay whole until the commit (policy
``keep``) the holders of a cell are those before and, as it goes on, some of those after; at the commit they are those
after. So what has to be shown on the plan is that no cell is without a holder on either side.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..values import Layout, PlacedLayout
from ..values.boxes import Ints
from .cells import Cells
from .lists import Lists, is_in
from .plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """Holders by cell.

    Attributes:
        before: living devices that hold each cell now, shape (cells,).
        after: devices that will.
    """

    before: Ints
    after: Ints

    @property
    def tolerated_before(self) -> int:
        """Any so many devices may be lost now, and every byte is still there."""
        return int(self.before.min(initial=1)) - 1

    @property
    def tolerated_after(self) -> int:
        """The same in the new layout."""
        return int(self.after.min(initial=1)) - 1

    @property
    def tolerated_during(self) -> int:
        """The same at every moment of the move, old shards staying whole until the commit."""
        return min(self.tolerated_before, self.tolerated_after)


def replicas(plan: Plan) -> Replicas:
    """How many devices hold each cell of a plan, before and after it."""
    return Replicas(
        _holders(plan.cells, plan.prev, plan.cells.prev_roles, plan.lost),
        _holders(plan.cells, plan.curr, plan.cells.curr_roles, ()),
    )


def _holders(cells: Cells, placed: PlacedLayout, of_cell: Lists, lost: Collection[int]) -> Ints:
    living = ~is_in(placed.device_ids, np.array(sorted(lost), np.int64))
    players = _players(placed.layout, living)
    cell, role = of_cell.take(np.arange(len(cells)))
    holders = np.zeros(len(cells), np.int64)
    # A rank holds a cell by one of its roles only: roles of one rank have nothing in common.
    np.add.at(holders, cell, players[role])
    return holders


def _players(layout: Layout, living: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Ints:
    """Living ranks that play each role."""
    return np.bincount(layout.roles_of_rank[living].reshape(-1), minlength=layout.role_count)
