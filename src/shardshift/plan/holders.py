"""Holders: how many losses a layout outlives, what only one rank holds, and who keeps copies of it.

Survival is decided per byte, never by the data parallel degree: with a distributed optimizer masters and moments have
one holder, whatever DP is. A shard is *lonely* if some element of it is held by one rank alone. A *buddy* keeps copies
of the lonely shards of another rank, its *ward*.

1. The layout is cut into atoms (``cells``): boxes of which all elements have the same holders.
2. Per atom the distinct holders are counted, ranks or the nodes that they are on; a copy counts where its buddy is.
3. Once ranks are lost, copies are holders like others: ``with_copies`` is the layout in which each buddy plays one role
   more. What a buddy holds itself is left out of it, since a rank holds no element twice.

Copies of lonely elements alone, instead of shards, were rejected: the message would be cut into more pieces, and where
it matters (a distributed optimizer) a lonely shard is lonely to its last element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np

from ..values import Layout, Region, Role, Shard, subtract_all
from ..values.boxes import Ints
from ..values.rows import Rows, box, columns
from .cells import Cells
from .lists import Lists, distinct


class Holders:
    """Who holds what of one layout.

    Args:
        layout: the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._cells = Cells(layout, layout)
        self._players = np.bincount(layout.roles_of_rank.reshape(-1), minlength=layout.role_count)

    def tolerates(self, nodes: Sequence[int] | None = None, buddies: Sequence[int] | None = None) -> dict[str, int]:
        """How many losses of any ranks, or of any whole nodes, each kind of state outlives.

        Args:
            nodes: per rank its node, to count losses of nodes; None to count ranks.
            buddies: per rank the rank that keeps copies of its lonely shards (-1: none); None for no copies.

        Returns:
            Per kind with any elements the number of holders of the element that has the fewest, less one; so -1 if
            an element has none.
        """
        places = np.arange(self.layout.world_size) if nodes is None else np.asarray(nodes, np.int64)
        return {kind: held - 1 for kind, held in self._fewest(places, buddies).items()}

    def lost_with(self, ranks: Collection[int], buddies: Sequence[int] | None = None) -> tuple[str, ...]:
        """The kinds of state of which something is gone once exactly these ranks are; empty if none is.

        Args:
            ranks: that are lost together.
            buddies: as in ``tolerates``.
        """
        places = np.zeros(self.layout.world_size, np.int64)
        places[list(ranks)] = -1
        return tuple(kind for kind, held in self._fewest(places, buddies).items() if held < 1)

    def _fewest(self, places: Ints, buddies: Sequence[int] | None) -> dict[str, int]:
        """Per kind the number of places that hold the element that the fewest do; ranks at place -1 do not count."""
        layout, cells = self.layout, self._cells
        atoms, parts = cells.atoms, cells.prev_parts
        width = int(places.max(initial=0)) + 1
        ranks, roles = np.indices(layout.roles_of_rank.shape)[0], layout.roles_of_rank.astype(np.int64)
        at_role = distinct((roles * width + places[ranks])[places[ranks] >= 0])
        of_role = Lists.group(at_role // width, at_role % width, layout.role_count)
        held, role = cells.prev_roles.take(atoms.cell)
        pair, place = of_role.take(role)
        found = [held[pair] * width + place]
        if buddies is not None:
            role, part = self._lonely
            keeper = np.asarray(buddies, np.int64)[self._player[role]]
            kept = (keeper >= 0) & (places[keeper] >= 0)
            of_part = Lists.group(part[kept], places[keeper[kept]], len(parts.joint))
            atom, part = atoms.prev_parts.take(np.arange(len(atoms.joint)))
            pair, place = of_part.take(part)
            found.append(atom[pair] * width + place)
        count = np.bincount(distinct(np.concatenate(found)) // width, minlength=len(atoms.joint))
        volume = atoms.volume
        fewest = np.full(len(cells.itemsizes), layout.world_size, np.int64)
        np.minimum.at(fewest, atoms.joint[volume > 0], count[volume > 0])
        there = np.zeros(len(fewest), np.int64)
        np.add.at(there, atoms.joint, volume)
        least: dict[str, int] = {}
        for tensor, joint in zip(layout.tensors, cells.joint_of.tolist(), strict=True):
            numel = Region.whole(tensor.shape).numel
            if numel:
                held_by = int(fewest[joint]) if there[joint] == numel else 0
                least[str(tensor.kind)] = min(held_by, least.get(str(tensor.kind), held_by))
        return least

    def lonely(self, rank: int) -> Role:
        """The shards of a rank that hold something that no other rank holds, in order of need."""
        cells = self._cells
        found = [
            (tensor, self._box(part))
            for part in self._lonely_parts(rank).tolist()
            for tensor in cells.tensors_of[int(cells.prev_parts.joint[part])].tolist()
        ]
        return tuple(Shard(self.layout.tensors[tensor], region) for tensor, region in sorted(found))

    def with_copies(self, wards: Mapping[int, Sequence[int]]) -> Layout:
        """The layout in which buddies also hold the lonely shards of their wards, as far as they do not hold them.

        Args:
            wards: per buddy the ranks whose copies it gives; a rank is the ward of one buddy.
        """
        layout, parts = self.layout, self._cells.prev_parts
        extra = np.full(layout.world_size, layout.role_count + len(wards), np.int32)  # a role that holds nothing
        table: list[tuple[int, int, Region]] = []
        for role, (buddy, of_buddy) in enumerate(sorted(wards.items()), layout.role_count):
            extra[buddy] = role
            taken: dict[int, list[Region]] = {}
            for part in parts.of_role.take(layout.roles_of_rank[buddy].astype(np.int64))[1].tolist():
                taken.setdefault(int(parts.joint[part]), []).append(self._box(part))
            for ward in sorted(of_buddy):
                for part in self._lonely_parts(ward).tolist():
                    others = taken.setdefault(int(parts.joint[part]), [])
                    pieces = subtract_all(self._box(part), others)
                    others.extend(pieces)
                    table += [(role, self._bundle(part), piece) for piece in pieces]
        table.sort(key=lambda row: row[:2])
        rows, dims = layout.rows, layout.rows.low.shape[1]
        return Layout.of_rows(
            layout.tensors,
            layout.bundle_of,
            Rows(
                np.concatenate([rows.role, np.array([role for role, _, _ in table], np.int32)]),
                np.concatenate([rows.bundle, np.array([bundle for _, bundle, _ in table], np.int32)]),
                np.concatenate([rows.low, columns([region.offsets for _, _, region in table], dims, 0)]),
                np.concatenate([rows.high, columns([region.stops for _, _, region in table], dims, 1)]),
            ),
            np.column_stack([layout.roles_of_rank, extra]),
        )

    @cached_property
    def _player(self) -> Ints:
        """Per role a rank that plays it; of use where there is only one."""
        player = np.full(self.layout.role_count, -1, np.int64)
        for column in self.layout.roles_of_rank.T:
            player[column] = np.arange(len(column))
        return player

    @cached_property
    def _lonely(self) -> tuple[Ints, Ints]:
        """Every lonely shard: its role, which one rank plays, and its part."""
        cells, players = self._cells, self._players
        atoms, parts = cells.atoms, cells.prev_parts
        cell, role = cells.prev_roles.take(np.arange(len(cells)))
        # A rank holds a cell by one of its roles only: roles of one rank have nothing in common.
        holders = np.zeros(len(cells), np.int64)
        np.add.at(holders, cell, players[role])
        _, part = atoms.prev_parts.take(np.flatnonzero(holders[atoms.cell] == 1))
        part = distinct(part)
        of, role = parts.roles.take(part)
        played = players[role] > 0  # of a part's roles one, by one rank: others would hold its atoms too
        return role[played], part[of[played]]

    def _lonely_parts(self, rank: int) -> Ints:
        role, part = self._lonely
        found: Ints = part[np.isin(role, self.layout.roles_of_rank[rank])]
        return found

    def _bundle(self, part: int) -> int:
        tensors = self._cells.tensors_of[int(self._cells.prev_parts.joint[part])]
        return int(self.layout.bundle_of[int(tensors[0])])

    def _box(self, part: int) -> Region:
        parts = self._cells.prev_parts
        return box(parts.low[part], parts.high[part], int(self._cells.dims[int(parts.joint[part])]))


def buddies_of(devices: Sequence[int], devices_per_node: int) -> tuple[int, ...]:
    """Who keeps whose copies: per rank the rank of its buddy, on another node where there is one.

    The devices, in order, are turned by as many places as the largest node has. Where that one has more than half of
    all, its devices share the others. So no rank has more than one ward as long as that can be.

    Args:
        devices: per rank its device; device ids count node by node.
        devices_per_node: devices of each node.

    Returns:
        Per rank a rank; -1 if there is but one.
    """
    order = sorted(range(len(devices)), key=devices.__getitem__)
    count = len(order)
    if count < 2:
        return (-1,) * count
    of_node: dict[int, list[int]] = {}
    for rank in order:
        of_node.setdefault(devices[rank] // devices_per_node, []).append(rank)
    largest = max(of_node.values(), key=len)
    turn = len(largest) if len(of_node) > 1 else 1
    buddies = [order[(place + turn) % count] for place in range(count)]
    of = dict(zip(order, buddies, strict=True))
    if len(of_node) > 1 and 2 * turn > count:
        others = [rank for rank in order if rank not in largest]
        of |= {rank: others[place % len(others)] for place, rank in enumerate(largest)}
        of |= dict(zip(others, largest, strict=False))
    return tuple(of[rank] for rank in range(count))
