"""What every device and node link carries so far, in seconds; and taking weight off the busiest.

Choosing sources cell by cell (``sources``) sees no further than the next cell. ``relieve`` looks again at the end:

1. Take the busiest device, or the busiest link out of a node.
2. Of what it sends, let the largest cell that fits come from another who has it, the one that is then least busy:
   itself, its link, and the link into the receiver's node.
3. Until nothing is above what the busiest receiver takes anyway, or no such step helps.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values import Topology
from ..values.boxes import Ints
from .lists import Lists
from .moves import Moves

_MOST_STEPS: Final = 2000
_WORTH_WHILE: Final = 0.01

_SLOW: Final = 0.8
"""Below this part of the fastest rate a device sends slowly: a chain runs at the pace of its slowest."""


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


def relieve(loads: Loads, afford_s: float, moves: Moves, sizes_bytes: Ints, holders: Lists) -> None:
    """Change who sends what until the busiest cannot be relieved.

    Args:
        loads: of all moves; kept up to date.
        afford_s: what need not be relieved.
        moves: all of a plan, with cells by number, ascending, and devices by position; sources and hops are changed in
            place.
        sizes_bytes: per cell.
        holders: per cell all who held it before.
    """
    for _ in range(_MOST_STEPS):
        device, node = int(np.argmax(loads.sent_s)), int(np.argmax(loads.left_s))
        limit_s = max(float(loads.sent_s[device]), float(loads.left_s[node]))
        if limit_s <= afford_s * (1 + _WORTH_WHILE):
            return
        if loads.sent_s[device] >= loads.left_s[node]:
            mine = np.flatnonzero(moves.source == device)
        else:
            mine = np.flatnonzero((loads.node[moves.source] == node) & (loads.node[moves.target] != node))
        mine = mine[np.argsort(-sizes_bytes[moves.cell[mine]], kind="stable")]
        if not any(_give_away(loads, limit_s, moves, row, sizes_bytes, holders) for row in mine.tolist()):
            return


def _give_away(loads: Loads, limit_s: float, moves: Moves, row: int, sizes_bytes: Ints, holders: Lists) -> bool:
    cell, source, target = int(moves.cell[row]), int(moves.source[row]), int(moves.target[row])
    same = slice(*np.searchsorted(moves.cell, [cell, cell + 1]).tolist())
    able, has = holders[cell], np.zeros(len(holders[cell]), np.int64)
    if not (moves.source[same] == target).any():
        # Nobody has it from this target, so the target may have it from any other.
        able, has = np.concatenate([able, moves.target[same]]), np.concatenate([has, moves.hop[same]])
    elif moves.hop[row] > 1:
        return False  # those behind it count their hops from its own
    fits = (able != source) & (able != target)
    home = loads.node[target]
    if loads.node[source] == home and not (loads.node[holders[cell]] == home).any():
        fits &= loads.node[able] == home  # the cell has entered the node already
    others = np.flatnonzero(fits)
    if not len(others):
        return False
    size_bytes, one = int(sizes_bytes[cell]), slice(row, row + 1)
    loads.add(moves.source[one], moves.target[one], size_bytes, -1)
    busy = loads.with_one_more(able[others], target, size_bytes)
    best = int(np.lexsort((able[others], has[others], busy))[0])
    better = bool(busy[best] < limit_s * (1 - _WORTH_WHILE))
    if better:
        moves.source[row], moves.hop[row] = able[others[best]], has[others[best]] + 1
    loads.add(moves.source[one], moves.target[one], size_bytes)
    return better
