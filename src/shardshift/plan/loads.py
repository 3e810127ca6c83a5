"""What every device and node link carries so far, in seconds; and taking weight off the busiest.

Choosing sources cell by cell (``sources``) sees no further than the next cell. ``relieve`` looks again at the end:

1. Take the busiest device, or the busiest link out of a node.
2. Of what it sends, let the largest cell that fits come from another who has it, the one that is then least busy:
   itself, its link, and the link into the receiver's node.
3. Until nothing is above what the busiest receiver takes anyway, or no such step helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values import Topology
from ..values.boxes import Ints
from .lists import Lists

_MOST_STEPS: Final = 2000
_WORTH_WHILE: Final = 0.01

_SLOW: Final = 0.8
"""Below this part of the fastest rate a device sends slowly: a chain runs at the pace of its slowest."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Transfers as columns, by ascending cell; devices are positions.

    Attributes:
        cell: the cell.
        source: the sender.
        target: the receiver.
        hop: 1 if the sender held it before, else one more than the sender's own.
    """

    cell: Ints
    source: Ints
    target: Ints
    hop: Ints


class Loads:
    """Seconds of sending by device, and of crossing by node and direction. Devices are positions in ``ids``."""

    def __init__(self, ids: Ints, topology: Topology | None) -> None:
        count, nodes = len(ids), topology.nodes if topology else 1
        self.node = topology.nodes_of(ids) if topology else np.zeros(count, np.int64)
        self.rate = topology.device_out_bytes_per_s()[ids] if topology else np.ones(count)
        self.in_rate = topology.device_in_bytes_per_s()[ids] if topology else np.ones(count)
        self.link_rate = topology.node_out_bytes_per_s() if topology else np.ones(nodes)
        self.link_in_rate = topology.node_in_bytes_per_s() if topology else np.ones(nodes)
        # By itself or through its node's link, each against the fastest of its kind.
        self.slow = (self.rate < self.rate.max(initial=0.0) * _SLOW) | (
            (self.link_rate < self.link_rate.max() * _SLOW)[self.node]
        )
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


def relieve(loads: Loads, afford_s: float, rows: Rows, sizes_bytes: Ints, holders: Lists) -> None:
    """Change who sends what until the busiest cannot be relieved.

    Args:
        loads: of all rows; kept up to date.
        afford_s: what need not be relieved.
        rows: all transfers; sources and hops are changed in place.
        sizes_bytes: per cell.
        holders: per cell all who held it before.
    """
    for _ in range(_MOST_STEPS):
        device, node = int(np.argmax(loads.sent_s)), int(np.argmax(loads.left_s))
        limit_s = max(float(loads.sent_s[device]), float(loads.left_s[node]))
        if limit_s <= afford_s * (1 + _WORTH_WHILE):
            return
        if loads.sent_s[device] >= loads.left_s[node]:
            mine = np.flatnonzero(rows.source == device)
        else:
            mine = np.flatnonzero((loads.node[rows.source] == node) & (loads.node[rows.target] != node))
        mine = mine[np.argsort(-sizes_bytes[rows.cell[mine]], kind="stable")]
        if not any(_give_away(loads, limit_s, rows, row, sizes_bytes, holders) for row in mine.tolist()):
            return


def _give_away(loads: Loads, limit_s: float, rows: Rows, row: int, sizes_bytes: Ints, holders: Lists) -> bool:
    cell, source, target = int(rows.cell[row]), int(rows.source[row]), int(rows.target[row])
    same = slice(*np.searchsorted(rows.cell, [cell, cell + 1]).tolist())
    able, has = holders[cell], np.zeros(len(holders[cell]), np.int64)
    if not (rows.source[same] == target).any():
        # Nobody has it from this target, so the target may have it from any other.
        able, has = np.concatenate([able, rows.target[same]]), np.concatenate([has, rows.hop[same]])
    elif rows.hop[row] > 1:
        return False  # those behind it count their hops from its own
    fits = (able != source) & (able != target)
    home = loads.node[target]
    if loads.node[source] == home and not (loads.node[holders[cell]] == home).any():
        fits &= loads.node[able] == home  # the cell has entered the node already
    others = np.flatnonzero(fits)
    if not len(others):
        return False
    size_bytes, one = int(sizes_bytes[cell]), slice(row, row + 1)
    loads.add(rows.source[one], rows.target[one], size_bytes, -1)
    busy = loads.with_one_more(able[others], target, size_bytes)
    best = int(np.lexsort((able[others], has[others], busy))[0])
    better = bool(busy[best] < limit_s * (1 - _WORTH_WHILE))
    if better:
        rows.source[row], rows.hop[row] = able[others[best]], has[others[best]] + 1
    loads.add(rows.source[one], rows.target[one], size_bytes)
    return better
