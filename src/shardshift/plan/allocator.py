"""The paper's virtual rank allocator: moving virtual ranks between devices so that jobs sit well on their nodes.

The reference for placements that are solved jointly with the pairing (arXiv 2607.04749v1, III-E, Algorithm 2,
Fig. 7). After a change by the sketch, devices keep their state where they can, wherever they stand. Two faults
follow: nodes that are half empty (occupancy), and TP groups that cross nodes (efficiency).

1. Occupancy: number the slots node by node. Pair idle slots in order with busy ones in reverse until they meet.
2. Efficiency: the target is the curr ranks node by node. Where a node's load is not its target, each position that
   differs is an operator.
3. Coalescing: what migration sends i -> k and defragmentation k -> j goes i -> j at once. So the coalesced change
   goes straight to the placement after both, and the change without coalescing pays for both one after the other.

Algorithm 2 as printed does not run; mended here:
- its ranges count from 1 and so lose a rank: from 0;
- `target` and `targets` are mixed: one target;
- `zip` over the nodes of curr and of prev drops the devices that join where curr is larger: the nodes are those
  that curr uses;
- its efficiency operators name positions of two lists: an operator here is (source device, target device), and
  all of them happen at once, so that they may swap ranks and no two ranks ever share a device;
- nodes whose slots are not all the job's: the fullest come first in occupancy, which else could end on more nodes
  than before; in efficiency a TP group skips a rest of a node that it does not fit. On whole nodes both are the
  paper's orders (efficiency: where TP divides the node, or the node TP).

Kept, though better is easy: idle nodes attract ranks even when half-busy nodes would do, and ranks that merely
stand in another order within their node are moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..values import Infeasible, Mismatch, ParallelConfig, Topology
from .paper import Layers, paper_placement
from .workload import require_paper_axes


@dataclass(frozen=True, slots=True, order=True)
class Remap:
    """The virtual rank on device ``source`` moves to device ``target``."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"<{self.source}->{self.target}>"


def defragment_occupancy(placement: Sequence[int], devices: Iterable[int], topology: Topology) -> tuple[Remap, ...]:
    """Operators that pack the ranks onto the fewest nodes (Algorithm 2, first function).

    Args:
        placement: per virtual rank its device, after migration.
        devices: the slots: devices that may run a rank (the paper's are those of prev). Those of ``placement`` count
            as well.
        topology: which devices share a node.

    Returns:
        In order of the idle slots that they fill.
    """
    by_node = _by_node({*devices, *placement}, topology)
    slots = [
        device for node in sorted(by_node, key=lambda node: (-len(by_node[node]), node)) for device in by_node[node]
    ]
    at = {device: index for index, device in enumerate(slots)}
    busy = sorted(placement, key=at.__getitem__, reverse=True)
    occupied = set(placement)
    idle = [device for device in slots if device not in occupied]
    return tuple(Remap(source, target) for source, target in zip(busy, idle, strict=False) if at[target] < at[source])


def defragment_efficiency(
    config: ParallelConfig, placement: Sequence[int], devices: Iterable[int], topology: Topology
) -> tuple[Remap, ...]:
    """Operators that put the ranks on the nodes in use in ascending order, TP groups whole (Algorithm 2, second).

    Args:
        config: the configuration of ``placement``.
        placement: per virtual rank its device, after migration.
        devices: devices that may run a rank; those of nodes in use are slots, others stay free.
        topology: which devices share a node.

    Returns:
        By ascending target device.

    Raises:
        Infeasible: if the configuration uses other axes than pp, tp and dp.
    """
    require_paper_axes(config)
    used = {topology.node_of(device) for device in placement}
    slots = {device for device in devices if topology.node_of(device) in used}
    target = _target(config, _by_node({*slots, *placement}, topology))
    moved = (Remap(source, target[rank]) for rank, source in enumerate(placement) if source != target[rank])
    return tuple(sorted(moved, key=lambda remap: remap.target))


def apply(placement: Sequence[int], operators: Iterable[Remap]) -> tuple[int, ...]:
    """The placement after all operators at once.

    Raises:
        Mismatch: if an operator moves from a device that no rank is on, or two ranks would share a device.
    """
    moves: dict[int, int] = {}
    occupied = set(placement)
    for operator in operators:
        if operator.source not in occupied or operator.source in moves:
            why = "twice" if operator.source in moves else "where no rank is"
            raise Mismatch(f"{operator} moves from device {operator.source} {why}; what to do: make operators anew")
        moves[operator.source] = operator.target
    moved = tuple(moves.get(device, device) for device in placement)
    if len(set(moved)) != len(moved):
        twice = sorted({device for device in moved if moved.count(device) > 1})
        raise Mismatch(f"two ranks would be on each of devices {twice}; what to do: make operators anew")
    return moved


def defragment(
    config: ParallelConfig, placement: Sequence[int], devices: Iterable[int], topology: Topology
) -> tuple[int, ...]:
    """Both functions of Algorithm 2, occupancy first; efficiency only if a TP group then crosses nodes needlessly.

    (Efficiency where no group does would only reorder ranks at a cost.)
    """
    slots = {*devices, *placement}
    packed = apply(placement, defragment_occupancy(placement, slots, topology))
    if not cross_node_tp_groups(config, packed, topology):
        return packed
    return apply(packed, defragment_efficiency(config, packed, slots, topology))


def migrate_then_defragment(
    prev_config: ParallelConfig,
    curr_config: ParallelConfig,
    layers: Layers,
    prev_devices: Sequence[int],
    devices: Sequence[int],
    topology: Topology,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The paper's change in two phases: ``paper_placement``, then ``defragment``.

    Without coalescing it costs prev -> first plus first -> second (curr to curr); coalesced, prev -> second.
    The slots of defragmentation are the devices that prev or the first placement uses: a spare one that neither
    needs stays out of it.

    Returns:
        Per virtual rank of curr its device, (after migration, after defragmentation).

    Raises:
        Infeasible: if there are too few devices, one is outside the topology, or the configurations use other axes
            than pp, tp and dp.
        Mismatch: if ``prev_devices`` is not one device of its own for each rank, or splits do not fit.
    """
    if outside := sorted(device for device in {*prev_devices, *devices} if not 0 <= device < topology.devices):
        raise Infeasible(
            f"devices {outside} are outside a topology of {topology.devices} devices; what to do: give a larger one"
        )
    migrated = paper_placement(prev_config, curr_config, layers, prev_devices, devices)
    return migrated, defragment(curr_config, migrated, set(prev_devices) & set(devices), topology)


def free_nodes(placement: Iterable[int], topology: Topology, devices: Iterable[int]) -> int:
    """Nodes on which the job has some of ``devices`` and runs no rank: whole ones, as far as they are the job's."""
    offered, used = (topology.nodes_of(np.fromiter(ids, np.int64)) for ids in (devices, placement))
    return len(np.setdiff1d(offered, used))


def cross_node_tp_groups(config: ParallelConfig, placement: Sequence[int], topology: Topology) -> int:
    """TP groups that span more nodes than they must, ceil(TP / devices a node)."""
    must = -(-config.tp // topology.devices_per_node)
    return sum(len({topology.node_of(placement[rank]) for rank in group}) > must for group in _tp_groups(config))


def _target(config: ParallelConfig, by_node: dict[int, list[int]]) -> dict[int, int]:
    """Per rank its device: TP groups in order into nodes in order; what fits no node whole, into what is left."""
    groups = iter(_tp_groups(config))
    left: list[int] = []
    target: dict[int, int] = {}
    for node in sorted(by_node):
        slots = by_node[node]
        while len(slots) >= config.tp and (group := next(groups, None)):
            target |= zip(group, slots[: config.tp], strict=True)
            slots = slots[config.tp :]
        left += slots
    rest = [rank for group in groups for rank in group]
    return target | dict(zip(rest, left, strict=False))


def _tp_groups(config: ParallelConfig) -> list[list[int]]:
    """The ranks of each TP group, groups in order of their first rank."""
    return sorted(
        [config.rank(pp=pp, tp=tp, dp=dp) for tp in range(config.tp)]
        for pp in range(config.pp)
        for dp in range(config.dp)
    )


def _by_node(devices: Iterable[int], topology: Topology) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for device in sorted(devices):
        by_node.setdefault(topology.node_of(device), []).append(device)
    return by_node
