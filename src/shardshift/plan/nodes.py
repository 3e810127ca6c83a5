"""Which nodes stay in use when a job needs fewer than it has.

How many nodes of each class stay open is a small integer program over classes (SciPy's HiGHS); the lowest nodes of a
class do. Where classes are many (expert parallel ranks, each a class of its own) that took seconds: there nodes are
closed a few at a time, those that save the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from ..values.boxes import Ints
from .classes import Classes
from .lists import Lists, nth_among_equals
from .pairing import pair

_MOST_NODES: Final = 5000
"""Branches of the integer program: it ends by this, never by time, so that every run gives the same placement."""

_MOST_ARCS: Final = 20_000
"""Pairs of block and slot classes that save something, up to which the integer program is solved."""

_MANY_ARCS: Final = 400_000
"""Beyond so many such pairs nodes are closed in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Places for blocks of one size.

    Attributes:
        devices: per slot the positions of its devices, shape (slots, size).
        node: per slot its node.
        node_class: per slot the class of its node: nodes of one class have slots of the same classes.
        of: per slot its class.
        classes: per class the device classes of its devices, shape (classes, size).
    """

    devices: Ints
    node: Ints
    node_class: Ints
    of: Ints
    classes: Ints


def open_nodes(slots: Slots, of_block: Ints, value: Ints, needed: int, node_worth_bytes: int | None) -> Ints:
    """The nodes that may be used.

    Args:
        slots: places for blocks.
        of_block: per block its class.
        value: what a block of each class saves in a slot of each class.
        needed: the fewest nodes that have room for all blocks.
        node_worth_bytes: what a closed node is worth; None means more than any bytes.
    """
    if np.count_nonzero(value) > _MOST_ARCS:
        return _close_some(slots, of_block, value, needed, node_worth_bytes)
    supply = np.bincount(of_block, minlength=len(value))
    block, slot = np.nonzero(value)
    nodes, first = np.unique(slots.node, return_index=True)
    counts = _open_counts(slots, supply, (block, slot, value[block, slot]), needed, node_worth_bytes)
    node_class = slots.node_class[first]
    return nodes[nth_among_equals(node_class) < counts[node_class]]


def _close_some(slots: Slots, of_block: Ints, value: Ints, needed: int, node_worth_bytes: int | None) -> Ints:
    """Close the nodes that save the least, a few at a time, and see anew where the blocks go.

    Of equals those are closed that are farthest apart: nodes side by side hold what one pipeline stage needs.
    """
    blocks = Classes.numbered(of_block, len(value))
    nodes = np.unique(slots.node)
    # All at once where to see anew takes long.
    at_a_time = 1 if np.count_nonzero(value) > _MANY_ARCS else 4
    while True:
        usable = np.flatnonzero(np.isin(slots.node, nodes))
        places = Classes.numbered(slots.of[usable], len(slots.classes))
        _, taken = pair(blocks, places, csr_array(value))
        saved = np.zeros(int(slots.node.max()) + 1, np.int64)
        np.add.at(saved, slots.node[usable[taken]], value[of_block, slots.of[usable[taken]]])
        excess = len(nodes) - needed
        few = max(1, excess // at_a_time)
        least = np.sort(saved[nodes])[:few]
        if excess <= 0 or (node_worth_bytes is not None and least[0] > node_worth_bytes):
            return nodes
        like = np.flatnonzero(saved[nodes] <= least[-1])
        closed = nodes[like[np.arange(few) * len(like) // few]]
        left = nodes[~np.isin(nodes, closed)]
        if np.isin(slots.node, left).sum() < len(of_block):  # nodes of unequal room
            return nodes
        nodes = left


def _open_counts(slots: Slots, supply: Ints, arcs: Sequence[Ints], needed: int, node_worth_bytes: int | None) -> Ints:
    """How many nodes of each class stay open.

    Variables: units per arc (block class, slot class within a node class), units of each block class that save
    nothing, units that each slot class takes of those, and the open nodes of each class, which alone are integers:
    for whole numbers of them the rest is a network.
    """
    node_classes = int(slots.node_class.max()) + 1
    _, first = np.unique(slots.node, return_index=True)
    nodes_of = np.bincount(slots.node_class[first], minlength=node_classes)
    pair, count = np.unique(slots.node_class * len(slots.classes) + slots.of, return_counts=True)
    in_class, slot_class = np.divmod(pair, len(slots.classes))
    each = count // nodes_of[in_class]  # slots of the class on one node
    block, slot, value = arcs
    by_slot = Lists.group(slot_class, np.arange(len(pair)), len(slots.classes))
    arc, place = by_slot.take(slot)
    origin, worth = block[arc], value[arc].astype(np.float64)
    blocks, places, direct = len(supply), len(pair), len(arc)
    columns = direct + blocks + places + node_classes
    hub_out, hub_in, opened = (
        direct + np.arange(blocks),
        direct + blocks + np.arange(places),
        direct + blocks + places + np.arange(node_classes),
    )
    entries: list[tuple[Ints, Ints, NDArray[np.float64]]] = [
        (origin, np.arange(direct), np.ones(direct)),
        (np.arange(blocks), hub_out, np.ones(blocks)),
        (blocks + place, np.arange(direct), np.ones(direct)),
        (blocks + np.arange(places), hub_in, np.ones(places)),
        (blocks + np.arange(places), opened[in_class], -each.astype(np.float64)),
        (np.full(blocks, blocks + places), hub_out, np.ones(blocks)),
        (np.full(places, blocks + places), hub_in, -np.ones(places)),
    ]
    row, column, coefficient = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_array((coefficient, (row, column)), shape=(blocks + places + 1, columns)).tocsr()
    low = np.concatenate([supply, np.full(places, -np.inf), [0]])
    high = np.concatenate([supply, np.zeros(places), [0]])
    scale = max(1.0, float(worth.max(initial=0.0)))
    cost = np.zeros(columns)
    cost[:direct] = -worth / scale
    upper = np.full(columns, np.inf)
    upper[opened] = nodes_of
    constraints = [LinearConstraint(matrix, low, high)]
    if node_worth_bytes is None:
        total = coo_array((np.ones(node_classes), (np.zeros(node_classes, np.int64), opened)), shape=(1, columns))
        constraints.append(LinearConstraint(total.tocsr(), needed, needed))
    else:
        cost[opened] = node_worth_bytes / scale
    kinds = np.zeros(columns, np.int64)
    kinds[opened] = 1
    answer = milp(
        cost,
        integrality=kinds,
        bounds=Bounds(np.zeros(columns), upper),
        constraints=constraints,
        options={"node_limit": _MOST_NODES, "mip_rel_gap": 0.0},
    )
    if answer.x is None:  # the limit came before any solution: the nodes that are needed, lowest classes first
        first_ones: Ints = np.clip(needed - np.cumsum(nodes_of) + nodes_of, 0, nodes_of)
        return first_ones
    return np.asarray(np.round(answer.x[opened]), np.int64)
