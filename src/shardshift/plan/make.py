"""Making a plan: check, pair, find sources, prove.

1. The two layouts must speak of the same state, and the devices must suffice.
2. ``lacking_bytes`` between roles, then ``pair``: the placement of the new ranks that moves the least.
3. ``source``: a holder for every byte that a device lacks.
4. ``prove``: nothing that the first three steps could get wrong leaves this module.

The result depends on the arguments alone, so ranks that agree on them by digest have the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..values import Infeasible, Layout, PlacedLayout, Topology
from .cost import lacking_bytes
from .pairing import pair, placement_bytes
from .plan import Plan
from .prove import account, prove
from .sources import source


def make_plan(
    prev: PlacedLayout,
    curr: Layout,
    *,
    devices: Sequence[int],
    topology: Topology | None = None,
    lost: Collection[int] = (),
    placement: Sequence[int] | None = None,
) -> Plan:
    """Plan the move from ``prev`` to ``curr`` with the fewest moved bytes.

    Args:
        prev: who holds what now.
        curr: the layout to move to.
        devices: the devices that may run a rank of it; those that ``prev`` does not use are fresh. Devices of
            ``prev`` that are not among them leave, and serve as sources until they have.
        topology: which devices share a node; sources on the same node come first. None means one node.
        lost: devices of ``prev`` that are gone and can serve as nothing.
        placement: per new rank its device, as another rank has solved it; None means to solve it here. (Two
            versions of a solver may break ties differently, so in a running job one rank solves for all.)

    Raises:
        Infeasible: if there are too few devices, a device is lost and usable at once, or outside the topology,
            or the placement uses other devices.
        Mismatch: if a tensor has another global shape or dtype in ``curr``, or the placement does not give each
            rank a device of its own.
        Unaccounted: naming tensors that only one layout knows, or of which ``curr`` drops elements.
        StateLost: naming every tensor and region that no living device holds.
    """
    if both := sorted(set(devices) & set(lost)):
        raise Infeasible(f"devices {both} are lost, yet offered to run ranks; what to do: leave them out of devices")
    if topology and (outside := sorted(d for d in {*devices, *prev.devices} if not 0 <= d < topology.devices)):
        raise Infeasible(f"devices {outside} are outside a topology of {topology.devices} devices")
    account(prev.layout, curr)
    cost = lacking_bytes(prev.layout, curr)
    if placement is None:
        pairing = pair(cost, prev, curr, devices)
        placed, least_bytes = PlacedLayout(curr, pairing.devices), pairing.lacking_bytes
    else:
        if strange := sorted(set(placement) - set(devices)):
            raise Infeasible(f"the placement uses devices {strange}, which are not among those that may run ranks")
        placed = PlacedLayout(curr, tuple(placement))
        least_bytes = placement_bytes(cost, prev, placed)
    sourced = source(prev, placed, topology=topology, lost=lost)
    plan = Plan(prev, placed, sourced.refers, sourced.copies, sourced.transfers, least_bytes)
    prove(plan, lost)
    return plan
