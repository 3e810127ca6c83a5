"""Who holds which parts, for all devices at once: devices that held alike and will hold alike are one *class*."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Plan
from ..plan.cells import Parts
from ..plan.lists import distinct, is_in, number_rows
from ..values.boxes import Ints


@dataclass(frozen=True, slots=True, eq=False)
class DeviceClasses:
    """Classes of devices, and the parts of a plan's layouts (``plan.cells``) that each has.

    The devices that a plan says are lost hold nothing before it.

    Attributes:
        devices: all devices of the plan, ascending, shape (devices,).
        of_device: per device its class, shape (devices,).
        count: how many classes there are.
        prev: (class, old part) of what a class held, each once; two arrays.
        curr: (class, new part) of what it will hold, likewise.
    """

    devices: Ints
    of_device: Ints
    count: int
    prev: tuple[Ints, Ints]
    curr: tuple[Ints, Ints]

    @classmethod
    def of(cls, plan: Plan) -> DeviceClasses:
        """The classes of a plan's devices."""
        devices = np.array(plan.devices, np.int64)
        played = []
        for placed, lost in ((plan.prev, plan.lost), (plan.curr, ())):
            ranks = placed.ranks_of(devices)
            ranks[is_in(devices, np.array(lost, np.int64))] = -1
            roles = np.full((len(devices), placed.layout.roles_of_rank.shape[1]), -1, np.int64)
            roles[ranks >= 0] = placed.layout.roles_of_rank[ranks[ranks >= 0]]
            played.append(roles)
        first, of_device = number_rows(np.hstack(played))
        prev, curr = (roles[first] for roles in played)
        return cls(
            devices,
            of_device,
            len(first),
            _parts(plan.cells.prev_parts, prev),
            _parts(plan.cells.curr_parts, curr),
        )


def _parts(parts: Parts, roles: Ints) -> tuple[Ints, Ints]:
    player, column = np.nonzero(roles >= 0)
    entry, part = parts.of_role.take(roles[player, column])
    # Two roles of a rank may both name an empty part; a shard is held once.
    width = max(len(parts.joint), 1)
    return np.divmod(distinct(player[entry] * width + part), width)
