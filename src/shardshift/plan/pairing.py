"""Pairing: which device each new rank runs on, so that the fewest bytes move (the paper's sketch, III-C).

1. Ranks that play the same roles are alike, and so are devices that held the same roles: each is a *class*, with a
   count. A device outside the old layout is of the fresh class, which holds nothing; one that leaves has no place,
   yet may still be a source.
2. What a device saves by taking a rank is what the two have in common (``Cells.overlap_bytes``). The most saved over
   *all* pairings is a transportation problem between classes (``flow.transport``). The paper pairs DP replicas apart
   from each other, and pads with zeros; both miss the least.
3. Classes are written out: each class of ranks takes its devices in ascending order, so that replicas stay in order
   and a layout paired with itself stays where it is.
4. Where nearly every rank is a class of its own (ranges of a distributed optimizer) classes are made of the roles
   that ranks share, and what single ranks and devices have in common is added (``ranges``): still exact.

An assignment between ranks (``scipy.optimize.linear_sum_assignment``) gives the same total, is what tests compare
with, and needs a matrix of ranks by devices: 17 billion entries where this has some thousand arcs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from ..values import Infeasible, Layout, PlacedLayout
from ..values.boxes import Ints
from .cells import Cells
from .classes import Classes, hand_out
from .flow import transport
from .lists import distinct, entries, is_in
from .ranges import MOST_CLASSES, Ranges, pair_ranges, without_own_roles


@dataclass(frozen=True, slots=True, eq=False)
class Savings:
    """What devices save by taking ranks.

    Attributes:
        ranks: classes of the new layout's ranks.
        devices: classes of the devices that may run them.
        ids: per position in ``devices`` the device, ascending.
        saved_bytes: what a device of each class saves by taking a rank of each class; sparse, shape (rank classes,
            device classes).
        wanted_bytes: what all new ranks hold.
        ranges: what single ranks and devices have in common beyond their classes, where classes leave out roles
            that ranks play alone.
        overlap_bytes: what roles have in common, shape (curr roles, prev roles).
        wanted: per rank its roles, shape (ranks, k).
        held: per device its old roles, shape (devices, k); -1 for none.
    """

    ranks: Classes
    devices: Classes
    ids: Ints
    saved_bytes: csr_array
    wanted_bytes: int
    ranges: Ranges | None
    overlap_bytes: csr_array
    wanted: Ints
    held: Ints

    def kept_bytes(self, at: Ints) -> int:
        """What all devices save in a placement: per rank the position of its device in ``ids``."""
        total = 0
        for held in self.held[at].T:
            known = np.flatnonzero(held >= 0)
            total += sum(int(entries(self.overlap_bytes, wanted[known], held[known]).sum()) for wanted in self.wanted.T)
        return total


def savings(cells: Cells, prev: PlacedLayout, devices: Sequence[int] | Ints) -> Savings:
    """Classes of ranks and devices, and what they have in common.

    Args:
        cells: of the old and the new layout.
        prev: who holds what now.
        devices: the devices that may run a rank, in any order; at least as many as ranks.

    Raises:
        Infeasible: if there are too few devices, or all ranks together hold 2**62 bytes or more.
    """
    ids = distinct(np.asarray(devices, np.int64))
    if len(ids) < cells.curr.world_size:
        raise Infeasible(
            f"the new layout needs {cells.curr.world_size} devices, {len(ids)} are available; "
            "what to do: add devices or choose a smaller configuration"
        )
    wanted, held = cells.curr.roles_of_rank.astype(np.int64), held_roles(prev, ids)
    every = cells.overlap_bytes, wanted, held
    ranks, holders = Classes.by_roles(wanted), Classes.by_roles(held)
    overlap, ranges = cells.overlap_bytes, None
    if min(len(ranks.roles), len(holders.roles)) > MOST_CLASSES:
        overlap, wanted, held, ranges = without_own_roles(overlap, wanted, held)
        ranks, holders = Classes.by_roles(wanted), Classes.by_roles(held)
    of_rank, of_device = ranks.of_roles(cells.curr.role_count), holders.of_roles(prev.layout.role_count)
    saved = csr_array(of_rank @ overlap @ of_device.T)
    rank_bytes = cells.curr.rank_bytes
    if rank_bytes.sum(dtype=np.float64) > 2**62:
        raise Infeasible("all ranks together hold 2**62 bytes or more; what to do: check the global shapes")
    return Savings(ranks, holders, ids, saved, int(rank_bytes.sum()), ranges, *every)


def least_bytes(saved: Savings) -> tuple[int, Ints]:
    """The bytes that must move under any pairing, and a pairing that moves no more: per rank its device."""
    kept_bytes, at = pair(saved.ranks, saved.devices, saved.saved_bytes, saved.ranges)
    return saved.wanted_bytes - kept_bytes, saved.ids[at]


def pair(origins: Classes, places: Classes, saved: csr_array, ranges: Ranges | None = None) -> tuple[int, Ints]:
    """Give every origin a place of its own so that the most is saved in all.

    Args:
        origins: what is to be placed, by classes.
        places: at least as many places, by classes.
        saved: what classes save, sparse, shape (origin classes, place classes).
        ranges: what single origins and places save beyond that.

    Returns:
        Bytes saved, and per origin its place.
    """
    if ranges is not None:
        return pair_ranges(ranges, origins, places, saved)
    at = saved.nonzero()
    one, other = at[0].astype(np.int64), at[1].astype(np.int64)
    used = transport(origins.counts, places.counts, one, other, entries(saved, one, other))
    placed = np.empty(len(origins.of), np.int64)
    members, taken = hand_out(used, origins.members, places.members)
    placed[members] = taken
    return int(entries(saved, used[0], used[1]) @ used[2]), placed


def held_roles(prev: PlacedLayout, devices: Ints, lost: Collection[int] = ()) -> Ints:
    """Per device the roles that it plays in the old layout, shape (devices, k); -1 where it plays none, or is lost."""
    ranks = prev.ranks_of(devices)
    ranks[is_in(devices, np.array(sorted(lost), np.int64))] = -1
    roles = np.full((len(devices), prev.layout.roles_of_rank.shape[1]), -1, np.int64)
    roles[ranks >= 0] = prev.layout.roles_of_rank[ranks[ranks >= 0]]
    return roles


def lacking_bytes(prev: Layout, curr: Layout) -> Ints:
    """The exact cost matrix: bytes that a device of prev role j lacks if it becomes curr role i.

    Returns:
        An int64 array of shape (curr roles, prev roles + 1); the last column is a fresh device.
    """
    cells = Cells(prev, curr)
    lacking = np.repeat(curr.role_bytes[:, None], prev.role_count + 1, axis=1)
    lacking[:, :-1] -= cells.overlap_bytes.toarray()
    return lacking
