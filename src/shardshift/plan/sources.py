"""Sources: from whom each device gets each cell that it lacks.

What limits a move is the busiest device or node link. A device must take in what it lacks; the art is to let none
send more than that. Receivers help: who has received a cell (or a piece of it) can send it on, so k new replicas cost
about the time of one. Cell by cell, the heaviest first:

1. On a node with holders, each of them serves one receiver of the node; further receivers get it from those, in
   chains inside the node.
2. Nodes without a holder are strung on chains: each crosses into a node once, runs through its receivers, and goes on
   to the next node. Every device on a chain sends a cell once. There are as many chains as devices that can afford to
   head one: holders, and the last of chains inside a node; those that have sent the least so far come first.
3. A cell that only one device holds and only one lacks, as ranges of a distributed optimizer are, has no choice; all
   such are done at once, and first, since the others have to give way to them.
4. Devices that send slowly (or whose node's link does) are in no chain: each gets the cell from whoever is least busy.
5. At the end weight is taken off the busiest (``loads.relieve``).

Cells without a living holder are lost: all are gathered before the plan is refused. Trees were rejected: the root of
a binary tree sends twice what it holds, a chain's head once, and pieces in flight hide a chain's length. An exact
min-max flow was rejected for its cost at a hundred thousand devices; the bound says how far this is from it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..values import PlacedLayout, StateLost, Topology
from ..values.boxes import Ints
from .cells import Cells, listed
from .lists import Lists, distinct, is_in, nth_among_equals, nth_in_run, number_rows
from .loads import Loads, relieve
from .moves import Moves
from .pairing import held_roles


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """Which device lacks which cell, and who could give it.

    Attributes:
        cell: per want its cell, ascending.
        device: per want the device that lacks it.
        cells: the distinct cells that anyone lacks, ascending.
        holders: per entry of ``cells`` the living devices that hold it, ascending within a role.
    """

    cell: Ints
    device: Ints
    cells: Ints
    holders: Lists


def wants(cells: Cells, prev: PlacedLayout, curr: PlacedLayout, lost: Collection[int] = ()) -> Wants:
    """What each device of ``curr`` lacks, and the living holders of it."""
    held = held_roles(prev, curr.device_ids, lost)
    wanted = curr.layout.roles_of_rank.astype(np.int64)
    # Devices that held the same roles and take the same roles lack the same cells.
    first, kind = number_rows(np.column_stack([wanted, held]))
    want_kind, want_cell = _cells_of(wanted[first], cells.curr_roles, cells.curr.role_count)
    have_kind, have_cell = _cells_of(held[first], cells.prev_roles, cells.prev.role_count)
    lacks = ~is_in(want_kind * len(cells) + want_cell, np.sort(have_kind * len(cells) + have_cell))
    want_kind, want_cell = want_kind[lacks], want_cell[lacks]
    position, device = Lists.group(kind, curr.device_ids, len(first)).take(want_kind)
    cell = want_cell[position]
    order = np.lexsort((device, cell))
    cell, device = cell[order], device[order]
    lacked = distinct(cell)

    lives = ~is_in(prev.device_ids, np.array(sorted(lost), np.int64))
    living, roles = prev.device_ids[lives], prev.layout.roles_of_rank[lives]
    of_role = Lists.group(roles.reshape(-1), np.repeat(living, roles.shape[1]), cells.prev.role_count)
    at, role = cells.prev_roles.take(lacked)
    pair, holder = of_role.take(role)
    counts = np.bincount(at[pair], minlength=len(lacked))
    return Wants(cell, device, lacked, Lists(np.concatenate([[0], np.cumsum(counts)]), holder))


def _cells_of(roles: Ints, of_cell: Lists, role_count: int) -> tuple[Ints, Ints]:
    """Per row of roles (-1: none) the cells of all of them: row numbers and cells."""
    at, role = of_cell.take(np.arange(len(of_cell.counts)))
    by_role = Lists.group(role, at, role_count)
    row, column = np.nonzero(roles >= 0)
    position, cell = by_role.take(roles[row, column])
    return row[position], cell


def choose_sources(
    cells: Cells, wanted: Wants, *, topology: Topology | None = None, lost: Collection[int] = ()
) -> Moves:
    """Choose who sends each cell to each device that lacks it.

    Args:
        cells: of both layouts.
        wanted: who lacks what, and who could give it.
        topology: nodes and rates; None means one node of equal devices.
        lost: devices that are gone, for the message.

    Raises:
        StateLost: naming every tensor and region that no living device holds.
    """
    if (orphans := wanted.cells[wanted.holders.counts == 0]).size:
        raise _state_lost(cells, orphans, lost)
    if not len(wanted.cell):
        return Moves(*(np.empty(0, np.int64) for _ in range(4)))
    ids, at = np.unique(np.concatenate([wanted.device, wanted.holders.items]), return_inverse=True)
    at = at.reshape(-1)
    loads = Loads(ids, topology)
    chooser = _Chooser(loads)
    target, holder = at[: len(wanted.device)], at[len(wanted.device) :]
    want_starts = np.searchsorted(wanted.cell, np.append(wanted.cells, len(cells)))
    want_counts, holder_counts = np.diff(want_starts), wanted.holders.counts
    size_bytes = cells.nbytes[wanted.cells]
    number = np.repeat(np.arange(len(size_bytes)), want_counts)
    chooser.expect(number, size_bytes, target, Lists(wanted.holders.starts, holder))

    forced = (want_counts == 1) & (holder_counts == 1)
    sources = np.empty(len(target), np.int64)
    hops = np.ones(len(target), np.int64)
    only = want_starts[:-1][forced]
    sources[only] = holder[wanted.holders.starts[:-1][forced]]
    loads.add(sources[only], target[only], size_bytes[forced])

    rest = np.flatnonzero(~forced)
    weight = size_bytes[rest] / holder_counts[rest]
    for index in rest[np.argsort(-weight, kind="stable")].tolist():
        span = slice(want_starts[index], want_starts[index + 1])
        holders = holder[wanted.holders.starts[index] : wanted.holders.starts[index + 1]]
        sources[span], hops[span] = chooser.choose(int(size_bytes[index]), target[span], holders)
    moves = Moves(number, sources, target, hops)
    relieve(loads, chooser.afford_s, moves, size_bytes, Lists(wanted.holders.starts, holder))
    order = np.lexsort((wanted.device, hops, wanted.cell))
    return Moves(*(column[order] for column in (wanted.cell, ids[sources], wanted.device, hops)))


class _Chooser:
    """Whom to ask next, from what every device and link carries so far."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self.afford_s = 0.0

    def expect(self, cell: Ints, size_bytes: Ints, target: Ints, holders: Lists) -> None:
        """Learn what the busiest receiver takes, device or node link: a sender that stays below it costs no time.

        Args:
            cell: per want the number of its cell.
            size_bytes: per cell.
            target: per want who lacks it.
            holders: per cell.
        """
        loads = self._loads
        received = np.bincount(target, size_bytes[cell], minlength=len(loads.rate))
        # Into a node without a holder a cell comes once, however many of its devices lack it.
        nodes = len(loads.link_rate)
        at, holder = holders.take(np.arange(len(size_bytes)))
        entered = distinct(cell * nodes + loads.node[target])
        entered = entered[~is_in(entered, np.sort(at * nodes + loads.node[holder]))]
        link = np.bincount(entered % nodes, size_bytes[entered // nodes], minlength=nodes) / loads.link_in_rate
        self.afford_s = max(float((received / loads.in_rate).max(initial=0.0)), float(link.max(initial=0.0)))

    def choose(self, size_bytes: int, targets: Ints, holders: Ints) -> tuple[Ints, Ints]:
        """Sources and hops for all targets of one cell."""
        slow = self._loads.slow
        if not slow.any():
            return self._chains(size_bytes, targets, holders)
        # Who sends slowly is in no chain, and gives only where nobody else has the cell.
        quick = holders[~slow[holders]]
        sources, hops = np.empty(len(targets), np.int64), np.empty(len(targets), np.int64)
        first = ~slow[targets] if len(quick) else np.zeros(len(targets), np.bool_)
        if first.any():
            sources[first], hops[first] = self._chains(size_bytes, targets[first], quick)
        able = np.concatenate([holders, targets[first]])
        has = np.concatenate([np.zeros(len(holders), np.int64), hops[first]])
        rest = np.flatnonzero(~first)
        for at in rest[np.lexsort((targets[rest], slow[targets[rest]]))].tolist():
            busy_s = self._loads.with_one_more(able, int(targets[at]), size_bytes)
            best = int(np.lexsort((able, has, busy_s))[0])
            sources[at], hops[at] = able[best], has[best] + 1
            self._loads.add(sources[at : at + 1], targets[at : at + 1], size_bytes)
            able, has = np.append(able, targets[at]), np.append(has, hops[at])
        return sources, hops

    def _chains(self, size_bytes: int, targets: Ints, holders: Ints) -> tuple[Ints, Ints]:
        node, sent_s = self._loads.node, self._loads.sent_s
        # Within a node the least busy first: the last of a chain need not send.
        order = np.lexsort((targets, sent_s[targets], node[targets]))
        sorted_targets = targets[order]
        sorted_holders = holders[np.lexsort((holders, sent_s[holders], node[holders]))]
        holder_node, target_node = node[sorted_holders], node[sorted_targets]
        first_here = np.searchsorted(holder_node, target_node)
        here = np.searchsorted(holder_node, target_node, side="right") - first_here
        nth = nth_in_run(target_node)
        sources, hops = np.empty(len(targets), np.int64), np.ones(len(targets), np.int64)

        inside = np.flatnonzero(here)
        direct = inside[nth[inside] < here[inside]]
        sources[direct] = sorted_holders[first_here[direct] + nth[direct]]
        passed = inside[nth[inside] >= here[inside]]
        sources[passed] = sorted_targets[passed - here[passed]]
        hops[passed] = nth[passed] // here[passed] + 1

        self._loads.add(sources[inside], sorted_targets[inside], size_bytes)

        outside = np.flatnonzero(here == 0)
        if len(outside):
            # Chains are cut where a node begins; chain c has the nodes of rank n with n * chains // nodes == c.
            enters = nth[outside] == 0
            rank = np.cumsum(enters) - 1
            last = inside[~np.isin(sorted_targets[inside], sources[inside])]
            heads, after = self._heads(size_bytes, holders, sorted_targets[last], hops[last], int(rank[-1]) + 1)
            chain = rank * len(heads) // (int(rank[-1]) + 1)
            begins = np.searchsorted(chain, np.arange(len(heads)))
            sources[outside] = np.concatenate([sorted_targets[outside][:1], sorted_targets[outside][:-1]])
            sources[outside[begins]] = heads
            hops[outside] = np.arange(len(outside)) - begins[chain] + 1 + after[chain]
            self._loads.add(sources[outside], sorted_targets[outside], size_bytes)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return sources[back], hops[back]

    def _heads(self, size_bytes: int, holders: Ints, last: Ints, hops: Ints, most: int) -> tuple[Ints, Ints]:
        """Who heads a chain to other nodes, and at which hop each has the cell (0: held before).

        Holders that can afford it, then the last of chains inside nodes that can; at least one, at most ``most``.
        """
        loads = self._loads
        able, has = np.concatenate([holders, last]), np.concatenate([np.zeros(len(holders), np.int64), hops])
        node = loads.node[able]
        sends_s, leaves_s = size_bytes / loads.rate[able], size_bytes / loads.link_rate[node]
        busy_s = np.maximum(loads.sent_s[able] + sends_s, loads.left_s[node] + leaves_s)
        best = np.lexsort((able, busy_s, has > 0, busy_s > self.afford_s))
        # Heads on one node share its link: the second finds the first's cell on it.
        earlier = nth_among_equals(node[best])
        busy_s = np.maximum(busy_s[best], loads.left_s[node[best]] + (earlier + 1) * leaves_s[best])
        best = best[np.argsort(busy_s > self.afford_s, kind="stable")]
        most = min(most, int((busy_s <= self.afford_s).sum()))
        return able[best[: max(1, most)]], has[best[: max(1, most)]]


def _state_lost(cells: Cells, orphans: Ints, lost: Collection[int]) -> StateLost:
    found = cells.regions(orphans.tolist())
    cause = f"devices {sorted(lost)} are lost" if lost else "the old layout does not hold them"
    return StateLost(
        f"no living device holds these elements ({cause}): {listed(found)}; nothing was moved. "
        "What to do: bring one of their holders back, or restart from a checkpoint",
        [str(tensor) for tensor in found],
    )
