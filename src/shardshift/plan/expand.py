"""Writing cells out: from columns back to tensors, regions and shards, for one device at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from ..values import Mismatch, Shard
from ..values.rows import box
from .cells import Cells
from .lists import Lists

RoleIds: TypeAlias = tuple[int, ...]
"""The roles that one device plays in one layout; empty if it plays none."""


class Expansion:
    """Cells and parts of two layouts as values. Remembers what it has written out, since devices share roles."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._parts: dict[tuple[bool, RoleIds], dict[int, None]] = {}
        self._shards: dict[tuple[bool, int], tuple[Shard, ...]] = {}
        one, other = cells.same_parts
        self._same = dict(zip(other.tolist(), one.tolist(), strict=True))
        self._need = {tensor: place for place, tensor in enumerate(cells.curr.tensors)}
        atom, part = cells.atoms.curr_parts.take(np.arange(len(cells.atoms.joint)))
        self._atoms_of_part = Lists.group(part, atom, len(cells.curr_parts.joint))

    def same(self, held: RoleIds, wanted: RoleIds) -> Iterator[Shard]:
        """The new shards of a device that it holds already, exactly so."""
        before = self._parts_of(held, new=False)
        found = [part for part in self._parts_of(wanted, new=True) if self._same.get(part) in before]
        yield from self._in_order(found)

    def allocated(self, held: RoleIds, wanted: RoleIds) -> Iterator[Shard]:
        """The new shards of a device that need storage."""
        before = self._parts_of(held, new=False)
        found = [part for part in self._parts_of(wanted, new=True) if self._same.get(part) not in before]
        yield from self._in_order(found)

    def local(self, held: RoleIds, wanted: RoleIds) -> Iterator[tuple[Shard, Shard, Shard]]:
        """What a device holds of new shards within other old ones: (piece, old shard, new shard)."""
        before = self._parts_of(held, new=False)
        found: list[tuple[Shard, Shard, Shard]] = []
        for part in self._parts_of(wanted, new=True):
            if self._same.get(part) in before:
                continue
            for atom in self._atoms_of_part[part].tolist():
                origin = next((p for p in self._cells.atoms.prev_parts[atom].tolist() if p in before), None)
                if origin is not None:
                    found += self._pieces(atom, (False, origin), part)
        order = self._need
        yield from sorted(found, key=lambda three: (order[three[2].tensor], three[2].region, three[0].region))

    def pieces(
        self, cell: int, source: RoleIds, forwarded: bool, wanted: RoleIds
    ) -> Iterator[tuple[Shard, Shard, Shard]]:
        """A cell from one device to another: (piece, the sender's shard, the receiver's new shard).

        Args:
            cell: the cell.
            source: the sender's old roles; its new ones, if ``forwarded``.
            forwarded: whether it sends out of what it has received.
            wanted: the receiver's new roles.

        Raises:
            Mismatch: if the sender does not hold the cell, or the receiver does not want it; no proved plan has that.
        """
        atoms = self._cells.atoms
        origins, targets = self._parts_of(source, new=forwarded), self._parts_of(wanted, new=True)
        from_parts = atoms.curr_parts if forwarded else atoms.prev_parts
        for atom in self._cells.atoms_of[cell].tolist():
            origin = next((part for part in from_parts[atom].tolist() if part in origins), None)
            target = next((part for part in atoms.curr_parts[atom].tolist() if part in targets), None)
            if origin is None or target is None:
                what, lacks = next(iter(self._cells.regions([cell]))), "first" if origin is None else "second"
                raise Mismatch(
                    f"cell {cell} ({what}, ...) goes from {'new' if forwarded else 'old'} roles {source} to new "
                    f"roles {wanted}; expected a holder and one who wants it, but the {lacks} have no part of it; "
                    "what to do: run only plans that prove accepts"
                )
            yield from self._pieces(atom, (forwarded, origin), target)

    def _pieces(self, atom: int, origin: tuple[bool, int], target: int) -> Iterator[tuple[Shard, Shard, Shard]]:
        cells = self._cells
        joint = int(cells.atoms.joint[atom])
        region = box(cells.atoms.low[atom], cells.atoms.high[atom], int(cells.dims[joint]))
        for source, into in zip(self._shards_of(*origin), self._shards_of(True, target), strict=True):
            yield (into if region == into.region else Shard(into.tensor, region)), source, into

    def _in_order(self, parts: list[int]) -> list[Shard]:
        order = self._need
        found = [shard for part in parts for shard in self._shards_of(True, part)]
        return sorted(found, key=lambda shard: (order[shard.tensor], shard.region))

    def _shards_of(self, new: bool, part: int) -> tuple[Shard, ...]:
        """One shard per tensor of the part's joint bundle."""
        if (new, part) not in self._shards:
            cells = self._cells
            parts = cells.curr_parts if new else cells.prev_parts
            joint = int(parts.joint[part])
            region = parts.region(part, int(cells.dims[joint]))
            tensors = cells.curr.tensors
            self._shards[new, part] = tuple(Shard(tensors[t], region) for t in cells.tensors_of[joint].tolist())
        return self._shards[new, part]

    def _parts_of(self, roles: RoleIds, *, new: bool) -> dict[int, None]:
        key = (new, roles)
        if key not in self._parts:
            parts = self._cells.curr_parts if new else self._cells.prev_parts
            self._parts[key] = dict.fromkeys(part for role in roles for part in parts.of_role[role].tolist())
        return self._parts[key]
