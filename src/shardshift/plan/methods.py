"""The three ways to plan a change: exactly, as the paper does, and as the paper does without coalescing.

1. ``exact``: ``make_plan`` places the new ranks: TP groups together, then whole free nodes, then the fewest bytes; or,
   where a free node is worth nothing, the fewest bytes alone.
2. ``paper``: the sketch with DP replicas apart from each other (``paper_placement``) says who runs where; bytes,
   sources and proof are ours, so that only the placement differs.
3. ``migrate-then-defragment``: the sketch, then Algorithm 2, as two moves one after the other. Each is planned and
   proved by itself; what they cost is the sum. If Algorithm 2 has nothing to do there is one move.

The paper counts whole layers and knows pp, tp and dp alone; so do methods 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..values import Infeasible, Layout, ParallelConfig, PlacedLayout, Topology
from .allocator import migrate_then_defragment
from .make import make_plan
from .paper import paper_placement
from .plan import Plan


class Method(StrEnum):
    """How new ranks are placed."""

    EXACT = "exact"
    PAPER = "paper"
    PHASES = "migrate-then-defragment"


@dataclass(frozen=True, slots=True)
class Change:
    """What is asked: from where to where, and on what.

    Attributes:
        prev: the configuration now.
        curr: the configuration to come.
        layers: of the model, for the methods of the paper.
        prev_devices: per virtual rank of ``prev`` its device.
        devices: devices that may run a rank of ``curr``.
        topology: nodes and rates.
        lost: devices of ``prev`` that are gone.
        node_worth_bytes: see ``make_plan``; only the exact method asks.

    Raises:
        Infeasible: if a device is outside the topology, ``prev_devices`` is not one device of its own for each rank, or
            a lost one is not among them.
    """

    prev: ParallelConfig
    curr: ParallelConfig
    layers: int
    prev_devices: tuple[int, ...]
    devices: tuple[int, ...]
    topology: Topology
    lost: tuple[int, ...] = ()
    node_worth_bytes: int | None = None

    def __post_init__(self) -> None:
        named, ranks = self.prev_devices, self.prev.world_size
        if len(named) != ranks or len(set(named)) != ranks:
            raise Infeasible(
                f"{self.prev} runs on {ranks} devices, not on the {len(named)} named, {len(set(named))} of them "
                "distinct; what to do: name one device for each rank, in order of ranks"
            )
        if strange := sorted(set(self.lost) - set(named)):
            raise Infeasible(
                f"devices {_some(strange)} are lost, but {self.prev} does not run on them; what to do: name "
                "devices that it runs on"
            )
        count = self.topology.devices  # once, not for each of a million devices
        if outside := sorted({d for ids in (named, self.devices, self.lost) for d in ids if not 0 <= d < count}):
            raise Infeasible(
                f"devices {_some(outside)} are outside a topology of {self.topology.nodes} nodes x "
                f"{self.topology.devices_per_node} devices; what to do: give a larger one, or other devices"
            )


def solve(change: Change, prev: Layout, curr: Layout, method: Method = Method.EXACT) -> tuple[Plan, ...]:
    """Plan a change by a method.

    Args:
        change: what is asked.
        prev: the layout of ``change.prev``.
        curr: the layout of ``change.curr``.
        method: how to place.

    Returns:
        The moves, one after the other: two for ``Method.PHASES`` (unless the second has nothing to do), else one.

    Raises:
        Infeasible: see ``make_plan``; or if the paper's planner does not know an axis that is used.
        StateLost: naming tensors that no living device holds.
    """
    placed = PlacedLayout(prev, change.prev_devices)
    if method is Method.EXACT:
        plan = make_plan(
            placed,
            curr,
            devices=change.devices,
            topology=change.topology,
            lost=change.lost,
            group_size=change.curr.tp,
            node_worth_bytes=change.node_worth_bytes,
        )
        return (plan,)
    args = (change.prev, change.curr, change.layers, change.prev_devices, change.devices)
    if method is Method.PAPER:
        return (direct(change, placed, curr, paper_placement(*args)),)
    first, second = migrate_then_defragment(*args, change.topology)
    migration = direct(change, placed, curr, first)
    if first == second:
        return (migration,)
    again = make_plan(
        migration.curr, curr, devices=change.devices, topology=change.topology, placement=second, group_size=1
    )
    return migration, again


def direct(change: Change, prev: PlacedLayout, curr: Layout, placement: tuple[int, ...]) -> Plan:
    """The plan to a given placement: what two phases come to if they are coalesced.

    Raises:
        Infeasible: if the placement uses other devices.
        StateLost: naming tensors that no living device holds.
    """
    return make_plan(
        prev, curr, devices=change.devices, topology=change.topology, lost=change.lost, placement=placement
    )


def _some(devices: list[int]) -> str:
    return ", ".join(map(str, devices[:8])) + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
