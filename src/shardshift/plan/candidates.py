"""The best of several placements: the joint one, and others that are better where TP does not fit nodes.

The joint solution (``placement``) is exact for the slots and blocks that it makes. Where a node's devices should have
been cut into other slots, or a TP group that spans nodes into other blocks, another way can be better. So each of
these is priced, and the best taken; of equals the first:

1. The joint placement.
2. The pairing that moves the least, as if there were no nodes: replicas by device, and in their old order; and the
   same on the nodes that 1 uses.
3. That pairing after the paper's Algorithm 2 (``allocator``, here on columns): so no placement is worse than pairing,
   defragmentation and coalescing.
4. Each of these with the ranks of every node dealt to its devices anew, which is exact for who is on which node.

Priced is, in this order: TP groups on more nodes than need be, nodes in use, bytes; or bytes and nodes at once, where
a node has a price. Of small jobs the best is improved by exchanges of two ranks; a large job cannot pay for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..values.boxes import Ints
from .classes import Classes
from .lists import Lists, distinct, nth_in_run, number_rows, number_values
from .pairing import Savings, pair

FRESH: Final = int(np.iinfo(np.int64).max)
"""The old rank of a device that has none."""

_MOST_KINDS: Final = 1000
"""Kinds of nodes up to which ranks are dealt anew within nodes."""


_MOST_EXCHANGED: Final = 256
"""Ranks up to which exchanges are looked for."""

_MOST_TRIED: Final = 200
"""Exchanges that are tried, those that save the most first, before the search ends."""

_NEAR: Final = 10_000
"""Of a very large job a placement this near the bound (one part in so many) ends the search."""


class Candidates:
    """Placements of one change. A placement gives per rank the position of its device in ``saved.ids``.

    Args:
        saved: what devices save by taking ranks.
        nodes: per device its node.
        old_ranks: per device its old rank, or ``FRESH``.
        group_size: consecutive ranks that belong together (TP).
        devices_per_node: of the topology.
        node_worth_bytes: how many more bytes may move for one more free node; None means any number.
    """

    def __init__(
        self,
        saved: Savings,
        nodes: Ints,
        old_ranks: Ints,
        group_size: int,
        devices_per_node: int,
        node_worth_bytes: int | None,
    ) -> None:
        self._saved, self._node, self._old_rank, self._size = saved, nodes, old_ranks, group_size
        self._fewest_nodes = -(-group_size // devices_per_node)
        self._worth_bytes = node_worth_bytes

    def best(self, joint: Iterable[Ints], free: Ints) -> Ints:
        """The best placement.

        Args:
            joint: solved with the nodes in mind; taken one by one, and only if needed.
            free: solved without.
        """
        solved: list[Ints] = []
        for at in joint:
            solved.append(at)
            if self._as_good_as_any(at, free):
                return at
        every = [*solved, free, self._in_old_order(free), *self._paired_on(solved[0]), *self._defragmented(free)]
        if self._worth_bytes is None:  # bytes only matter among the best by nodes, which dealing anew leaves as it is
            nodes = [self._nodes(at) for at in every]
            every = [at for at, found in zip(every, nodes, strict=True) if found == min(nodes)]
        every += [dealt for at in every for dealt in self._dealt(at)]
        return self._exchanged(min(every, key=self.price))

    def _exchanged(self, at: Ints) -> Ints:
        """The placement after exchanges of two ranks, or of a rank and an idle device, on the nodes that it uses.

        For jobs of a size at which looking at all pairs is nothing; as long as it saves bytes and splits no group more.
        """
        saved = self._saved
        if saved.ranges is not None or len(at) > _MOST_EXCHANGED:
            return at
        places = np.flatnonzero(np.isin(self._node, distinct(self._node[at])))
        table = saved.saved_bytes.toarray()[saved.ranks.of][:, saved.devices.of[places]]
        place, ranks = np.searchsorted(places, at), np.arange(len(at))
        crossing = self._crossing(at)
        for _ in range(len(at)):
            tenant = np.full(len(places), -1)
            tenant[place] = ranks
            now = table[ranks, place]
            # What rank r saves more at place p, and the tenant of p at r's.
            gain = table - now[:, None]
            busy = np.flatnonzero(tenant >= 0)
            gain[:, busy] += table[tenant[busy]][:, place].T - now[tenant[busy]]
            best = np.argsort(-gain, axis=None, kind="stable")[:_MOST_TRIED]
            for one in best[gain.reshape(-1)[best] > 0].tolist():
                rank, there = divmod(one, len(places))
                tried = place.copy()
                if tenant[there] >= 0:
                    tried[tenant[there]] = place[rank]
                tried[rank] = there
                if self._crossing(places[tried]) <= crossing:
                    place = tried
                    break
            else:
                break
        return places[place]

    def price(self, at: Ints) -> tuple[int, ...]:
        """What is compared; less is better."""
        crossing, opened = self._nodes(at)
        moved_bytes = self._saved.wanted_bytes - self._saved.kept_bytes(at)
        if self._worth_bytes is None:
            return crossing, opened, moved_bytes
        return crossing, moved_bytes + opened * self._worth_bytes, opened

    def _as_good_as_any(self, at: Ints, free: Ints) -> bool:
        """Whether nothing is to be gained; of a job whose ranks are too many for classes, nothing to speak of."""
        price, bound = self.price(at), self._bound(free)
        if self._saved.ranges is None:
            return price == bound
        crossing, opened = self._nodes(at)
        near = crossing == 0 and opened == min(bound[1:])
        return near and max(price) <= max(bound) + max(bound) // _NEAR

    def _bound(self, free: Ints) -> tuple[int, ...]:
        """A price that no placement is below."""
        room = np.sort(np.bincount(self._node))[::-1]
        opened = int(np.searchsorted(np.cumsum(room), len(free))) + 1
        moved_bytes = self._saved.wanted_bytes - self._saved.kept_bytes(free)
        if self._worth_bytes is None:
            return 0, opened, moved_bytes
        return 0, moved_bytes + opened * self._worth_bytes, opened

    def _nodes(self, at: Ints) -> tuple[int, int]:
        """TP groups on more nodes than need be, and nodes in use."""
        return self._crossing(at), len(distinct(self._node[at]))

    def _crossing(self, at: Ints) -> int:
        """TP groups on more nodes than need be."""
        nodes = np.sort(self._node[at].reshape(-1, self._size), axis=1)
        return int(((np.diff(nodes, axis=1) != 0).sum(axis=1) >= self._fewest_nodes).sum())

    def _in_old_order(self, at: Ints) -> Ints:
        """The same for each class, replicas in the order of old ranks: old TP groups then stay together."""
        ranks, classes = np.arange(len(at)), self._saved.devices.of[at]
        dealt = np.empty_like(at)
        dealt[np.lexsort((ranks, classes, self._saved.ranks.of))] = at[
            np.lexsort((self._old_rank[at], classes, self._saved.ranks.of))
        ]
        return dealt

    def _paired_on(self, at: Ints) -> Iterator[Ints]:
        """The pairing that moves the least on the nodes that a placement uses."""
        saved = self._saved
        inside = np.flatnonzero(np.isin(self._node, distinct(self._node[at])))
        if saved.ranges is None and len(inside) < len(self._node):
            devices = Classes.numbered(saved.devices.of[inside], len(saved.devices.roles))
            yield inside[pair(saved.ranks, devices, saved.saved_bytes)[1]]

    def _defragmented(self, at: Ints) -> Iterator[Ints]:
        """A placement after Algorithm 2: on all devices, and on those that it or the old layout uses."""
        every, known = np.arange(len(self._node)), np.flatnonzero(self._old_rank < FRESH)
        used = distinct(np.concatenate([at, known]))
        for slots in (every, used)[: 1 + (len(used) < len(every))]:
            packed = self._packed(at, slots)
            yield packed
            if self._crossing(packed):
                yield self._in_order(packed, slots)

    def _packed(self, at: Ints, slots: Ints) -> Ints:
        """Idle slots in order take the ranks of busy ones in reverse, until they meet (Algorithm 2, occupancy)."""
        node = self._node[slots]
        slots = slots[np.lexsort((slots, node, -np.bincount(node)[node]))]
        place = np.empty(len(self._node), np.int64)
        place[slots] = np.arange(len(slots))
        busy, idle = at[np.argsort(-place[at])], slots[~np.isin(slots, at)]
        pairs = min(len(busy), len(idle))
        moves = place[idle[:pairs]] < place[busy[:pairs]]
        becomes = np.arange(len(self._node))
        becomes[busy[:pairs][moves]] = idle[:pairs][moves]
        return becomes[at]

    def _in_order(self, at: Ints, slots: Ints) -> Ints:
        """TP groups in order on the nodes in use, what fits none in what is left (Algorithm 2, efficiency)."""
        slots = slots[np.isin(self._node[slots], distinct(self._node[at]))]
        node = self._node[slots]
        fits = nth_in_run(node) < np.bincount(node)[node] // self._size * self._size
        whole = slots[fits][: len(at)]
        rest = np.concatenate([slots[~fits], slots[fits][len(at) :]])
        return np.concatenate([whole, np.sort(rest)])[: len(at)]

    def _dealt(self, at: Ints) -> Iterator[Ints]:
        """A placement with the ranks of each node on those of its devices that save the most."""
        saved, node = self._saved, self._node
        rank_of = np.full(len(node), -1)
        rank_of[at] = np.arange(len(at))
        used = np.flatnonzero(np.isin(node, distinct(node[at])))
        nodes, row = number_values(node[used])
        device = Lists.group(row, used, len(nodes)).padded()
        rank = np.where(device < 0, -1, rank_of[device])
        kinds, kind = number_rows(
            np.hstack(
                [np.where(device < 0, -1, saved.devices.of[device]), np.where(rank < 0, -1, saved.ranks.of[rank])]
            )
        )
        if len(kinds) > _MOST_KINDS:
            return
        dealt = at.copy()
        table = saved.saved_bytes
        for number, example in enumerate(kinds.tolist()):
            there, here = np.flatnonzero(device[example] >= 0), np.flatnonzero(rank[example] >= 0)
            one, other = saved.ranks.of[rank[example, here]], saved.devices.of[device[example, there]]
            gives = linear_sum_assignment(table[one][:, other].toarray(), maximize=True)[1]
            rows = np.flatnonzero(kind == number)
            dealt[rank[rows][:, here]] = device[rows][:, there[gives]]
        yield dealt
