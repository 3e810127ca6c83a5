"""Roles that a rank plays alone: the ranges of a distributed optimizer (ZeRO-1), each held by one rank.

With them every rank is a class of its own, and a table of rank classes by device classes has a billion entries that
are not zero: DP replicas share their parameters with all replicas of the roles that theirs overlap. But what they
share hangs on the shared roles alone, and ranges meet like intervals, a few each. So the network of ``flow`` gets
both: classes of shared roles in the middle, every rank and device at its ends, and an arc of its own for each pair
whose ranges meet. Its size is that of the job, and its optimum the least over all pairings.

A solution in two steps (roles first, then ranges within a pair of roles) was tried first: as fast, not always the
least. Measured: 131,072 devices in about a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ..values.boxes import Ints
from .classes import Classes, hand_out
from .flow import exact, match, solve
from .lists import Lists, entries, number_values

MOST_CLASSES: Final = 2048
"""Beyond this many classes on both sides, roles that one rank plays alone are taken out of the classes."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """What ranks and devices have in common through roles that one of them plays alone.

    Attributes:
        rank: per pair the rank, or, where the new role is shared, -1.
        role: per pair the new role.
        device: per pair the position of the device, or, where the old role is shared, -1.
        held: per pair the old role.
        nbytes: per pair what they have in common.
        role_count: roles of the new layout.
        held_count: roles of the old layout.
    """

    rank: Ints
    role: Ints
    device: Ints
    held: Ints
    nbytes: Ints
    role_count: int
    held_count: int

    def between(self) -> tuple[Ints, Ints, Ints]:
        """Pairs of one rank and one device, each once: ranks, devices, bytes."""
        both = np.flatnonzero((self.rank >= 0) & (self.device >= 0))
        width = int(self.device.max(initial=0)) + 1
        pair, at = number_values(self.rank[both] * width + self.device[both])
        total = np.zeros(len(pair), np.int64)
        np.add.at(total, at, self.nbytes[both])
        return pair // width, pair % width, total


def without_own_roles(overlap: csr_array, wanted: Ints, held: Ints) -> tuple[csr_array, Ints, Ints, Ranges]:
    """Take the columns of roles that are played alone out of both sides.

    Args:
        overlap: bytes in common, shape (curr roles, prev roles).
        wanted: roles of each rank, shape (ranks, k).
        held: roles of each device, shape (devices, k); -1 for none.

    Returns:
        The overlap of the shared roles alone, shared roles of ranks and of devices, and the ranges.
    """
    alone, held_alone = _alone(wanted), _alone(held)
    rank_of, device_of = _players(wanted[:, alone], overlap.shape[0]), _players(held[:, held_alone], overlap.shape[1])
    table = overlap.tocoo()
    role, old = table.row.astype(np.int64), table.col.astype(np.int64)
    shared = ~np.isin(role, wanted[:, alone]) & ~np.isin(old, held[:, held_alone])
    kept = csr_array((table.data[shared], (role[shared], old[shared])), shape=overlap.shape)
    apart = ~shared
    ranges = Ranges(
        rank_of[role[apart]], role[apart], device_of[old[apart]], old[apart], table.data[apart], *overlap.shape
    )
    return kept, wanted[:, ~alone], held[:, ~held_alone], ranges


def pair_ranges(ranges: Ranges, ranks: Classes, devices: Classes, saved: csr_array) -> tuple[int, Ints]:
    """The pairing that saves the most, classes and ranges together.

    Args:
        ranges: what single ranks and devices have in common.
        ranks: classes of ranks by shared roles.
        devices: classes of devices by shared roles.
        saved: bytes that classes have in common, shape (rank classes, device classes).

    Returns:
        Bytes saved, and per rank the position of its device.
    """
    return _Network(ranges, ranks, devices, saved).solve()


class _Network:
    """Nodes: ranks, rank classes, device classes, devices, a hub for pairs that save nothing, a sink.

    Every arc is a way to go; its saving is what a rank that takes it saves. A rank goes to a device by one of: the
    pair's own arc; its class, the device's class; its class, the device; the device's class.
    """

    def __init__(self, ranges: Ranges, ranks: Classes, devices: Classes, saved: csr_array) -> None:
        self._ranks, self._devices = ranks, devices
        n, m = len(ranks.of), len(devices.of)
        to_class = _sparse(ranges.rank, ranges.held, ranges.nbytes, ranges.device < 0, (n, ranges.held_count))
        to_class = csr_array(to_class @ devices.of_roles(ranges.held_count).T)
        from_class = _sparse(ranges.role, ranges.device, ranges.nbytes, ranges.rank < 0, (ranges.role_count, m))
        from_class = csr_array(ranks.of_roles(ranges.role_count) @ from_class)
        rank, device, nbytes = ranges.between()
        if to_class.nnz and from_class.nnz:  # what a device's class shares and what the rank's class shares add up
            into = csr_array(_present(to_class) @ _members(devices).T)
            out = csr_array(_members(ranks) @ _present(from_class))
            both = np.stack(_nonzero(csr_array(into.multiply(out))))
            more = both[:, ~np.isin(both[0] * m + both[1], rank * m + device)]
            rank, device = np.concatenate([rank, more[0]]), np.concatenate([device, more[1]])
            nbytes = np.concatenate([nbytes, np.zeros(more.shape[1], np.int64)])
        self._pair = (
            rank,
            device,
            nbytes
            + entries(saved, ranks.of[rank], devices.of[device])
            + entries(to_class, rank, devices.of[device])
            + entries(from_class, ranks.of[rank], device),
        )
        rank, kind = _nonzero(to_class)
        self._to_class = rank, kind, entries(to_class, rank, kind) + entries(saved, ranks.of[rank], kind)
        kind, device = _nonzero(from_class)
        self._from_class = kind, device, entries(from_class, kind, device) + entries(saved, kind, devices.of[device])
        kind, other = _nonzero(saved)
        self._classes = kind, other, entries(saved, kind, other)

    def solve(self) -> tuple[int, Ints]:
        """Bytes saved, and per rank the position of its device."""
        ranks, devices = self._ranks, self._devices
        n, i, j, m = len(ranks.of), len(ranks.roles), len(devices.roles), len(devices.of)
        of_class, of_device, device = n, n + i, n + i + j
        hub, sink = device + m, device + m + 1
        saves = (
            (0, device, self._pair, 1),
            (0, of_device, self._to_class, 1),
            (of_class, device, self._from_class, 1),
            (of_class, of_device, self._classes, n),
        )
        ways: list[tuple[Ints, Ints, Ints]] = [  # tails, heads, room
            *((a + way[0], b + way[1], np.full(len(way[0]), room)) for a, b, way, room in saves),
            (np.arange(n), of_class + ranks.of, np.ones(n, np.int64)),
            (of_class + np.arange(i), np.full(i, hub), ranks.counts),
            (np.full(j, hub), of_device + np.arange(j), devices.counts),
            (of_device + devices.of, device + np.arange(m), np.ones(m, np.int64)),
            (device + np.arange(m), np.full(m, sink), np.ones(m, np.int64)),
        ]
        value = np.concatenate([way[2] for _, _, way, _ in saves])
        saving, prefer = exact(value, m, n, sink + 1)
        tail, head, room = (np.concatenate(part) for part in zip(*ways, strict=True))
        cost = np.concatenate([-saving, np.zeros(n + i + j + m, np.int64), prefer])
        flow = solve(tail, head, room, cost, np.ones(n, np.int64), sink)
        parts = np.split(flow, np.cumsum([len(way[0]) for way in ways])[:-1])
        return int(value @ flow[: len(value)]), self._read(parts)

    def _read(self, flow: list[Ints]) -> Ints:
        """The flow of each kind of arc as a pairing."""
        ranks, devices = self._ranks, self._devices
        rank, there = (end[flow[0] > 0] for end in self._pair[:2])
        arriving, arrives = (end[flow[1] > 0] for end in self._to_class[:2])
        kind, taken = (end[flow[2] > 0] for end in self._from_class[:2])
        between = [end[flow[3] > 0] for end in self._classes[:2]]
        through = match(flow[5], flow[6])
        placed = np.full(len(ranks.of), -1, np.int64)
        placed[rank] = there

        def waiting(but: Ints) -> Lists:
            apart = placed < 0
            apart[but] = False
            left = np.flatnonzero(apart)
            return Lists.group(ranks.of[left], left, len(ranks.roles))

        def free(but: Ints) -> Lists:
            left = np.setdiff1d(np.arange(len(devices.of)), np.concatenate([placed, but]))
            return Lists.group(devices.of[left], left, len(devices.roles))

        def put(pairs: tuple[Ints, Ints]) -> None:
            placed[pairs[0]] = pairs[1]

        # By the own class to a device: any rank of the class, but for those that go to a class by themselves.
        each = np.arange(len(kind))
        alone = Lists(np.arange(len(kind) + 1), taken)
        put(hand_out((kind, each, np.ones_like(each)), waiting(arriving), alone))
        each = np.arange(len(arriving))
        alone = Lists(np.arange(len(arriving) + 1), arriving)
        put(hand_out((each, arrives, np.ones_like(each)), alone, free(placed[:0])))
        classes = (
            np.concatenate([between[0], through[0]]),
            np.concatenate([between[1], through[1]]),
            np.concatenate([flow[3][flow[3] > 0], through[2]]),
        )
        put(hand_out(classes, waiting(placed[:0]), free(placed[:0])))
        return placed


def _alone(roles: Ints) -> NDArray[np.bool_]:
    """Per column whether every role in it has one player."""
    found = []
    for column in roles.T:
        known = np.sort(column[column >= 0])
        found.append(bool((known[1:] != known[:-1]).all()))
    return np.array(found, np.bool_)


def _players(roles: Ints, role_count: int) -> Ints:
    """Per role its one player, or -1."""
    players = np.full(role_count, -1, np.int64)
    player, column = np.nonzero(roles >= 0)
    players[roles[player, column]] = player
    return players


def _members(classes: Classes) -> csr_array:
    """Which member is of which class; shape (members, classes)."""
    count = len(classes.of)
    return csr_array((np.ones(count, np.bool_), (np.arange(count), classes.of)), shape=(count, len(classes.roles)))


def _present(matrix: csr_array) -> csr_array:
    """Ones where a matrix has entries."""
    return csr_array((np.ones(matrix.nnz, np.bool_), matrix.indices, matrix.indptr), shape=matrix.shape)


def _sparse(
    row: Ints,
    column: Ints,
    values: Ints,
    chosen: NDArray[np.bool_],
    shape: tuple[int, int],
) -> csr_array:
    matrix = csr_array((values[chosen], (row[chosen], column[chosen])), shape=shape)
    matrix.sum_duplicates()
    return matrix


def _nonzero(matrix: csr_array) -> tuple[Ints, Ints]:
    row, column = matrix.nonzero()
    return row.astype(np.int64), column.astype(np.int64)
