"""Making a plan: check, pair, find sources, prove.

1. The two layouts must speak of the same state (``account``), and the devices must suffice.
2. ``place``: the placement of the new ranks that moves the least, with TP groups and free nodes as the topology asks;
   of equals the one that spares slow links and devices (``fast_first``).
3. ``choose_sources``: who sends what a device lacks.
4. ``prove``: nothing that the first three steps could get wrong leaves this module.

The result depends on the arguments alone, so ranks that agree on them by digest have the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..values import Infeasible, Layout, PlacedLayout, Topology
from .pairing import least_bytes, savings
from .placement import place
from .plan import Plan
from .prove import account, prove
from .sources import choose_sources, wants
from .speed import fast_first


def make_plan(
    prev: PlacedLayout,
    curr: Layout,
    *,
    devices: Sequence[int],
    topology: Topology | None = None,
    lost: Collection[int] = (),
    placement: Sequence[int] | None = None,
    group_size: int = 1,
    node_worth_bytes: int | None = None,
) -> Plan:
    """Plan the move from ``prev`` to ``curr`` with the fewest moved bytes.

    Args:
        prev: who holds what now.
        curr: the layout to move to.
        devices: the devices that may run a rank of it; those that ``prev`` does not use are fresh. Devices of
            ``prev`` that are not among them leave, and serve as sources until they have.
        topology: which devices share a node, and rates. None means one node.
        lost: devices of ``prev`` that are gone and can serve as nothing.
        placement: per new rank its device, as another rank has solved it; None means to solve it here. (Two
            versions of a solver may break ties differently, so in a running job one rank solves for all.)
        group_size: consecutive ranks that belong on as few nodes as possible: the TP of ``curr``.
        node_worth_bytes: how many more bytes may move for one more whole free node. None means any number: whole
            nodes first, then bytes. 0 means bytes alone: groups may span nodes too.

    Raises:
        Infeasible: if there are too few devices, a device is lost and usable at once, or outside the topology,
            or the placement uses other devices.
        Mismatch: if a tensor has another global shape or dtype in ``curr``, or the placement does not give each
            rank a device of its own.
        Unaccounted: naming tensors that only one layout knows, or of which ``curr`` drops elements.
        StateLost: naming every tensor and region that no living device holds.
    """
    usable = np.asarray(devices, np.int64)
    if both := sorted(set(usable.tolist()) & set(lost)):
        raise Infeasible(f"devices {both} are lost, yet offered to run ranks; what to do: leave them out of devices")
    if topology:
        every = np.concatenate([usable, prev.device_ids])
        if (outside := every[(every < 0) | (every >= topology.devices)]).size:
            raise Infeasible(
                f"devices {np.unique(outside).tolist()} are outside a topology of {topology.devices} devices"
            )
    cells = account(prev.layout, curr)
    saved = savings(cells, prev, usable)
    least, free = least_bytes(saved)
    if placement is None:
        placed = place(saved, free, prev, topology, group_size=group_size, node_worth_bytes=node_worth_bytes)
        if topology:
            placed = fast_first(saved, placed, curr.rank_bytes, topology, by_node=node_worth_bytes != 0)
    else:
        if strange := sorted(set(placement) - set(usable.tolist())):
            raise Infeasible(f"the placement uses devices {strange}, which are not among those that may run ranks")
        placed = np.asarray(placement, np.int64)
    target = PlacedLayout(curr, tuple(placed.tolist()))
    wanted = wants(cells, prev, target, lost)
    moves = choose_sources(cells, wanted, topology=topology, lost=lost)
    plan = Plan(prev, target, moves, least, tuple(sorted(lost)))
    plan.__dict__["cells"] = cells  # as the property would compute it again
    prove(plan)
    return plan
