"""Pairing: which device each new rank runs on, so that the fewest bytes move (the paper's sketch, III-C).

1. Lay the role costs out over ranks and devices. A device outside the previous layout is fresh and lacks
   everything; one that leaves has no column, yet may still be a source.
2. Solve the rectangular assignment (``scipy.optimize.linear_sum_assignment``): the least total over *all*
   pairings. The paper pairs DP replicas apart from each other, and pads with zeros; both miss the least.
   Among equals it takes low device ids: a TP group then stays on one stage's devices, and high nodes go free.
3. Keep of the solution only how many devices of each prev role go to each curr role, and hand devices out anew,
   rank by rank, the lowest device that the counts allow. Devices of one role are alike, so the total is
   untouched, and replicas stay in order: whole TP groups stay together, and a layout paired with itself stays.

Solvers count in float64. Every number inside is an alternating sum of at most 2n costs, so integers stay exact
while 2n times the largest cost is below 2**53. Subtracting each row's least cost and dividing by the common
divisor keeps the optimum and nearly always gets there; otherwise the pairing is refused, never approximated.
The preference for low ids is mixed into the costs below their unit, and only where the same bound has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..values import Infeasible, Layout, PlacedLayout


@dataclass(frozen=True, slots=True)
class Pairing:
    """Devices for the new ranks.

    Attributes:
        devices: per virtual rank of the new layout its device.
        lacking_bytes: what those devices lack in all, the least over all pairings.
    """

    devices: tuple[int, ...]
    lacking_bytes: int


def pair(cost: NDArray[np.int64], prev: PlacedLayout, curr: Layout, devices: Sequence[int]) -> Pairing:
    """Place every rank of ``curr`` on one of ``devices`` so that the devices lack the fewest bytes in all.

    Args:
        cost: ``lacking_bytes(prev.layout, curr)``, shape (curr roles, prev roles + 1).
        prev: who holds what now.
        curr: the new layout.
        devices: the devices that may run a rank, in any order; at least ``curr.world_size``.

    Raises:
        Infeasible: if there are too few devices, or the costs are too fine to be compared exactly.
    """
    available = sorted(set(devices))
    if len(available) < curr.world_size:
        raise Infeasible(
            f"the new layout needs {curr.world_size} devices, {len(available)} are available; "
            "what to do: add devices or choose a smaller configuration"
        )
    held_role = _held_roles(prev, available)
    full = cost[np.ix_(curr.role_of_rank, held_role)]
    ranks, columns = linear_sum_assignment(_exact(full))
    lacking = sum(full[ranks, columns].tolist())

    counts = Counter((curr.role_of_rank[rank], held_role[column]) for rank, column in zip(ranks, columns, strict=True))
    # Per prev role its devices, the lowest last, so that handing one out is a pop.
    stock: dict[int, list[int]] = {}
    for device, role in reversed(list(zip(available, held_role, strict=True))):
        stock.setdefault(role, []).append(device)
    placed = []
    for role in curr.role_of_rank:
        held = min((held for held in stock if counts[role, held] and stock[held]), key=lambda held: stock[held][-1])
        counts[role, held] -= 1
        placed.append(stock[held].pop())
    return Pairing(tuple(placed), lacking)


def placement_bytes(cost: NDArray[np.int64], prev: PlacedLayout, curr: PlacedLayout) -> int:
    """Bytes that the devices of ``curr`` lack in all, for a placement that is given."""
    return sum(cost[list(curr.layout.role_of_rank), _held_roles(prev, curr.devices)].tolist())


def _held_roles(prev: PlacedLayout, devices: Sequence[int]) -> list[int]:
    """Per device its column of the cost matrix: its prev role, or the last column if it is fresh."""
    ranks = [prev.rank_of_device.get(device) for device in devices]
    return [len(prev.layout.roles) if rank is None else prev.layout.role_of_rank[rank] for rank in ranks]


def _exact(cost: NDArray[np.int64]) -> NDArray[np.float64]:
    """A cost matrix with the same optimal pairings on which float64 arithmetic is exact."""
    if not cost.size:
        return cost.astype(np.float64)
    cost = cost - cost.min(axis=1, keepdims=True)
    cost //= max(1, int(np.gcd.reduce(cost, axis=None)))
    rows, columns = cost.shape
    largest, most = int(cost.max()), (2**53 - 1) // (2 * rows)
    if largest > most:
        raise Infeasible(
            f"pairing {rows} ranks whose costs reach {largest} units is not exact in float64; "
            "what to do: give dims and stages a larger common divisor, or plan fewer ranks at once"
        )
    unit = rows * columns  # more than the column indices of all ranks can sum to
    if unit * largest + columns <= most:
        cost = cost * unit + np.arange(columns)
    return cost.astype(np.float64)
