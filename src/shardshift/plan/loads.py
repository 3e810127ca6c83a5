"""What every device and node link carries so far, in seconds; and taking weight off the busiest.

Choosing sources cell by cell (``sources``) sees no further than the next cell. ``relieve`` looks again at the end:

1. Take the busiest device, or the busiest link out of a node.
2. Of what it sends out of old shards, give the largest cell that fits to the holder that is then least busy: itself,
   its link, and the link into the receiver's node.
3. Until nothing is above what the busiest receiver takes anyway, or no such step helps.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values import Topology
from ..values.boxes import Ints
from .lists import Lists

_MOST_STEPS: Final = 2000
_WORTH_WHILE: Final = 0.01


class Loads:
    """Seconds of sending by device, and of crossing by node and direction. Devices are positions in ``ids``."""

    def __init__(self, ids: Ints, topology: Topology | None) -> None:
        count, nodes = len(ids), topology.nodes if topology else 1
        self.node = topology.nodes_of(ids) if topology else np.zeros(count, np.int64)
        self.rate = topology.device_out_bytes_per_s()[ids] if topology else np.ones(count)
        self.in_rate = topology.device_in_bytes_per_s()[ids] if topology else np.ones(count)
        self.link_rate = topology.node_out_bytes_per_s() if topology else np.ones(nodes)
        self.link_in_rate = topology.node_in_bytes_per_s() if topology else np.ones(nodes)
        self.sent_s = np.zeros(count)
        self.left_s = np.zeros(nodes)
        self.entered_s = np.zeros(nodes)

    def add(self, sources: Ints, targets: Ints, size_bytes: Ints | int, sign: int = 1) -> None:
        """Count what sources send to targets; with ``sign`` -1, no longer."""
        sizes = np.broadcast_to(np.asarray(size_bytes, np.float64) * sign, sources.shape)
        np.add.at(self.sent_s, sources, sizes / self.rate[sources])
        crossing = self.node[sources] != self.node[targets]
        out, into = self.node[sources][crossing], self.node[targets][crossing]
        np.add.at(self.left_s, out, sizes[crossing] / self.link_rate[out])
        np.add.at(self.entered_s, into, sizes[crossing] / self.link_in_rate[into])

    def with_one_more(self, holders: Ints, target: int, size_bytes: int) -> NDArray[np.float64]:
        """Per holder how busy it, its link and the target's link would be, if it sent that much to the target."""
        busy = self.sent_s[holders] + size_bytes / self.rate[holders]
        out, into = self.node[holders], int(self.node[target])
        links = np.maximum(
            self.left_s[out] + size_bytes / self.link_rate[out],
            self.entered_s[into] + size_bytes / self.link_in_rate[into],
        )
        return np.where(out == into, busy, np.maximum(busy, links))


def relieve(
    loads: Loads,
    afford_s: float,
    sources: Ints,
    targets: Ints,
    hops: Ints,
    number: Ints,
    sizes_bytes: Ints,
    holders: Lists,
) -> None:
    """Change sources of rows sent out of old shards until the busiest cannot be relieved.

    Args:
        loads: of all rows; kept up to date.
        afford_s: what need not be relieved.
        sources: per row the sender; changed in place.
        targets: per row the receiver.
        hops: per row; only rows of hop 1 are changed.
        number: per row its cell.
        sizes_bytes: per cell.
        holders: per cell all who held it before.
    """
    first = np.flatnonzero(hops == 1)
    first = first[holders.counts[number[first]] > 1]
    for _ in range(_MOST_STEPS):
        device, node = int(np.argmax(loads.sent_s)), int(np.argmax(loads.left_s))
        limit_s = max(float(loads.sent_s[device]), float(loads.left_s[node]))
        if limit_s <= afford_s * (1 + _WORTH_WHILE):
            return
        if loads.sent_s[device] >= loads.left_s[node]:
            mine = np.flatnonzero(sources[first] == device)
        else:
            senders = sources[first]
            mine = np.flatnonzero((loads.node[senders] == node) & (loads.node[targets[first]] != node))
        mine = mine[np.argsort(-sizes_bytes[number[first[mine]]], kind="stable")]
        rows = ((row, int(number[row])) for row in first[mine].tolist())
        if not any(
            _give_away(loads, limit_s, sources, targets, row, int(sizes_bytes[cell]), holders[cell])
            for row, cell in rows
        ):
            return


def _give_away(
    loads: Loads, limit_s: float, sources: Ints, targets: Ints, row: int, size_bytes: int, holders: Ints
) -> bool:
    others = holders[holders != sources[row]]
    if not len(others):
        return False
    target = int(targets[row])
    one = slice(row, row + 1)
    loads.add(sources[one], targets[one], size_bytes, -1)
    busy = loads.with_one_more(others, target, size_bytes)
    best = int(np.argmin(busy))
    better = bool(busy[best] < limit_s * (1 - _WORTH_WHILE))
    if better:
        sources[row] = others[best]
    loads.add(sources[one], targets[one], size_bytes)
    return better
