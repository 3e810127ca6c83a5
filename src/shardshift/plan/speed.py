"""Fast devices first: of placements that move the same bytes, the one whose slow links and devices receive the least.

Nodes whose devices held the same roles are interchangeable, and so are such devices of one node: whoever takes what,
the same bytes move, TP groups stay together and as many nodes are free. So

1. of nodes that are alike, those that lack the most get the fastest links, and the slowest stay free;
2. within a node the same for devices that are alike.

Where nodes do not matter (``by_node`` false), step 2 is done over all devices at once. A placement that moves more
bytes to spare a slow link is not looked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..values import Topology
from ..values.boxes import Ints
from .lists import Lists, entries, number_rows
from .pairing import Savings


def fast_first(saved: Savings, placed: Ints, rank_bytes: Ints, topology: Topology, *, by_node: bool) -> Ints:
    """The placement with equals exchanged.

    Args:
        saved: classes of ranks and devices.
        placed: per rank its device.
        rank_bytes: per rank what it holds.
        topology: nodes and rates.
        by_node: whether ranks of a node stay together.

    Returns:
        Per rank its device.
    """
    if not topology.device_exceptions and not topology.link_exceptions:
        return placed
    at = np.searchsorted(saved.ids, placed)
    node = topology.nodes_of(saved.ids)
    link, rate = topology.node_in_bytes_per_s()[node], topology.device_in_bytes_per_s()[saved.ids]
    kind = saved.devices.of
    if saved.ranges is not None:
        # Devices with ranges of their own are like no other; those that held nothing are all alike.
        fresh = (saved.held < 0).all(axis=1)
        kind = np.where(fresh, -1, np.arange(len(kind)))
    lacks = np.full(len(saved.ids), -1, np.int64)  # a device without a rank lacks less than any other
    lacks[at] = rank_bytes - entries(saved.saved_bytes, saved.ranks.of, saved.devices.of[at])
    becomes = np.arange(len(saved.ids))
    if by_node:
        for alike in _alike_nodes(node, kind):
            need = np.where(lacks[alike] < 0, 0, lacks[alike]).sum(axis=1)
            busy = (lacks[alike] >= 0).any(axis=1)
            speed = np.minimum(link[alike[:, 0]], rate[alike].sum(axis=1))
            tenants, rooms = np.lexsort((-need, ~busy)), np.argsort(-speed, kind="stable")
            becomes[alike[tenants]] = alike[rooms]
        lacks[becomes] = lacks.copy()
    group = np.column_stack([kind, node if by_node else np.zeros_like(node)])
    swap = np.arange(len(saved.ids))
    _, number = number_rows(group)
    tenants = np.lexsort((np.arange(len(lacks)), -lacks, number))
    rooms = np.lexsort((np.arange(len(lacks)), -rate, -link, number))
    swap[tenants] = rooms
    return saved.ids[swap[becomes[at]]]


def _alike_nodes(node: Ints, kind: Ints) -> Iterator[Ints]:
    """Sets of two or more nodes whose devices are of the same kinds: positions, shape (nodes, devices a node)."""
    order = np.lexsort((np.arange(len(node)), kind, node))
    _, starts = np.unique(node[order], return_index=True)
    per_node = Lists(np.append(starts, len(node)), order)
    table = per_node.padded()
    first, number = number_rows(np.where(table < 0, -2, kind[table]))  # -1 is a kind
    for one, example in enumerate(first.tolist()):
        alike = np.flatnonzero(number == one)
        if len(alike) > 1:
            yield table[alike, : per_node.counts[example]]
