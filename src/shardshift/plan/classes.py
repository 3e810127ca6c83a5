"""Classes: ranks that are alike, devices that are alike, and how members of one go to members of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.sparse import csr_array

from ..values.boxes import Ints, expand
from .lists import Lists, nth_in_run, number_rows

Used: TypeAlias = tuple[Ints, Ints, Ints]
"""How many members of one class go to another: (origin class, place class, count), shape (used pairs,) each."""


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Ranks or devices by what they hold.

    Attributes:
        of: per rank (or device) its class.
        roles: per class its roles, shape (classes, k); -1 throughout for fresh devices, and where roles do not matter.
        members: per class its ranks (or positions of devices), ascending.
    """

    of: Ints
    roles: Ints
    members: Lists

    @classmethod
    def by_roles(cls, roles: Ints) -> Classes:
        """Classes of rows that are equal."""
        first, of = number_rows(roles)
        return cls(of, roles[first], Lists.group(of, np.arange(len(of)), len(first)))

    @classmethod
    def numbered(cls, of: Ints, count: int) -> Classes:
        """Classes that have numbers already."""
        return cls(of, np.full((count, 1), -1, np.int64), Lists.group(of, np.arange(len(of)), count))

    @property
    def counts(self) -> Ints:
        """Members of each class."""
        return self.members.counts

    def of_roles(self, role_count: int) -> csr_array:
        """Which class plays which role, as ones; shape (classes, roles)."""
        row, column = np.nonzero(self.roles >= 0)
        ones = np.ones(len(row), np.int64)
        return csr_array((ones, (row, self.roles[row, column])), shape=(len(self.roles), role_count))


def hand_out(used: Used, origins: Lists, places: Lists) -> tuple[Ints, Ints]:
    """Which member of each class goes to which member of another, given how many do.

    Args:
        used: (origin class, place class, count).
        origins: per origin class its members, ascending.
        places: per place class its members, ascending.

    Returns:
        Members of origins and of places, pair by pair. A class of places hands its members out in order, lowest
        first, to the classes of origins in order; a class of origins gives its members theirs in ascending order.
    """
    origin, place, count = used
    order = np.lexsort((origin, place))
    origin, place, count = origin[order], place[order], count[order]
    before = np.cumsum(count) - count
    # The place of each run within its class: what was given before it, less what other classes gave.
    begins = np.searchsorted(place, place)
    run, at = expand(places.starts[place] + before - before[begins], count)
    given, runs = places.items[at], origin[run]
    taken = np.lexsort((given, runs))
    runs, given = runs[taken], given[taken]
    return origins.items[origins.starts[runs] + nth_in_run(runs)], given
