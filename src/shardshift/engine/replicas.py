"""Copies of one tensor on several devices: they must be equal, or whichever is read wins without a word.

1. Each device gives one digest per *group*: all its shards of one bundle and box (``values.layout``) that some other
   device holds exactly so. There are some dozen, whatever the number of layers; their keys are the same everywhere.
2. Boxes of a bundle that overlap without being equal (a whole tensor beside slices, rows beside columns) are cut along
   one another: a group is what one set of such boxes holds in common, and its digest that of parts of shards.
3. Only where digests of a group differ, a second exchange names the tensor: one digest per part of that group.

Digests per shard at once were rejected: for a thousand tensors on eight devices each would read eight thousand records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..plan.lists import is_in, number_rows
from ..values import Mismatch, PlacedLayout, Region, Shard
from ..values.boxes import Ints, overlapping_within
from ..values.refine import refine
from ..values.rows import box
from .checksum import checksum
from .pieces import part_of

Digests = Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """The distinct boxes of bundles that living devices hold.

    Attributes:
        row: per box one of its rows in the layout, shape (boxes,).
        holders: per box how many living devices hold it, shape (boxes,).
        crossing: per box whether it shares elements with another one, shape (boxes,).
        of_row: per row of the layout its box, -1 if no living device holds it; shape (rows,).
    """

    row: Ints
    holders: Ints
    crossing: NDArray[np.bool_]
    of_row: Ints


class Copies:
    """What one device holds and other living devices hold too: shards, and parts of shards.

    Args:
        placed: who holds what.
        device: one of its devices, or another one, which has none.
        lost: devices that are gone.
    """

    def __init__(self, placed: PlacedLayout, device: int, lost: Collection[int] = ()) -> None:
        self._placed, self._device, self._lost = placed, device, tuple(sorted(lost))
        self._refined: dict[int, dict[tuple[int, ...], list[Region]]] = {}

    @cached_property
    def groups(self) -> dict[str, dict[Shard, Shard]]:
        """By group its parts, and of each the shard of this device that it lies in, as a rule the part itself.

        Equal keys on two devices stand for the same parts in the same order.
        """
        layout, rows = self._placed.layout, self._placed.layout.rows
        rank = self._placed.rank_of(self._device)
        if rank is None or self._device in self._lost or not len(rows):
            return {}
        boxes = self._boxes
        mine = np.flatnonzero(np.isin(rows.role, layout.roles_of_rank[rank]))
        shared = boxes.crossing | (boxes.holders > 1)
        found: dict[str, dict[Shard, Shard]] = {}
        for number in boxes.of_row[mine][shared[boxes.of_row[mine]]].tolist():
            whole = self._region(number)
            if not boxes.crossing[number]:
                found[str(number)] = {shard: shard for shard in self._shards(number, [whole])}
                continue
            for cell, regions in self._cells(number).items():
                if number in cell:
                    parts, shards = self._shards(number, regions), self._shards(number, [whole] * len(regions))
                    found["+".join(map(str, cell))] = dict(zip(parts, shards, strict=True))
        return found

    def parts(self, key: str) -> tuple[Shard, ...]:
        """The parts of a group, whoever holds them."""
        cell = tuple(map(int, key.split("+")))
        number = cell[0]
        return self._shards(
            number, self._cells(number)[cell] if self._boxes.crossing[number] else [self._region(number)]
        )

    def digests(self, live: Mapping[Shard, torch.Tensor]) -> dict[str, int]:
        """One digest per group, of this device's live tensors."""
        return {key: _together(_digest(live, *pair) for pair in parts.items()) for key, parts in self.groups.items()}

    def details(self, live: Mapping[Shard, torch.Tensor], suspects: Collection[str]) -> dict[str, int]:
        """One digest per part of the groups that differ."""
        held = (pair for key in suspects for pair in self.groups.get(key, {}).items())
        return {str(part): _digest(live, part, shard) for part, shard in held}

    @cached_property
    def _boxes(self) -> _Boxes:
        layout, rows = self._placed.layout, self._placed.layout.rows
        living = ~is_in(self._placed.device_ids, np.array(self._lost, np.int64))
        players = np.bincount(layout.roles_of_rank[living].reshape(-1), minlength=layout.role_count)
        held = np.flatnonzero(players[rows.role])
        first, number = number_rows(np.column_stack([rows.bundle, rows.low, rows.high])[held])
        holders, of_row = np.zeros(len(first), np.int64), np.full(len(rows), -1)
        np.add.at(holders, number, players[rows.role[held]])
        of_row[held] = number
        row, crossing = held[first], np.zeros(len(first), np.bool_)
        for side in overlapping_within(rows.bundle[row].astype(np.int64), rows.low[row], rows.high[row]):
            crossing[side] = True
        return _Boxes(row, holders, crossing, of_row)

    def _cells(self, number: int) -> dict[tuple[int, ...], list[Region]]:
        """Of a box's bundle what crossing boxes hold, by the boxes that hold it, as far as several devices do."""
        boxes, bundle_of = self._boxes, self._placed.layout.rows.bundle
        bundle = int(bundle_of[boxes.row[number]])
        if bundle not in self._refined:
            numbers = np.flatnonzero(boxes.crossing & (bundle_of[boxes.row] == bundle)).tolist()
            found: dict[tuple[int, ...], list[Region]] = {}
            for region, held in refine([self._region(each) for each in numbers]):
                cell = tuple(numbers[index] for index in held)
                if boxes.holders[list(cell)].sum() > 1:
                    found.setdefault(cell, []).append(region)
            self._refined[bundle] = found
        return self._refined[bundle]

    def _region(self, number: int) -> Region:
        rows, row = self._placed.layout.rows, int(self._boxes.row[number])
        tensor = self._placed.layout.members[int(rows.bundle[row])][0]
        return box(rows.low[row], rows.high[row], len(self._placed.layout.tensors[tensor].shape))

    def _shards(self, number: int, regions: Iterable[Region]) -> tuple[Shard, ...]:
        layout, of = self._placed.layout, tuple(regions)
        members = layout.members[int(layout.rows.bundle[self._boxes.row[number]])]
        return tuple(Shard(layout.tensors[tensor], region) for tensor in members for region in of)


def _digest(live: Mapping[Shard, torch.Tensor], part: Shard, shard: Shard) -> int:
    return checksum(part_of(live[shard], part.region, shard.region))


def differing(digests: Mapping[int, Digests]) -> tuple[str, ...]:
    """The keys, ascending, whose digests are not the same on all devices (``digests``: by device) that give them."""
    first: dict[str, int] = {}
    found = (entry for given in digests.values() for entry in given.items())
    return tuple(sorted({key for key, digest in found if first.setdefault(key, digest) != digest}))


def _together(digests: Iterable[int]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(digest.to_bytes(8, "little") for digest in digests))


def refuse_differing(details: Mapping[int, Digests]) -> None:
    """Refuse to move copies that differ.

    Args:
        details: by device its ``Copies.details``.

    Raises:
        Mismatch: naming a tensor and two devices.
    """
    first: dict[str, tuple[int, int]] = {}
    for device, given in sorted(details.items()):
        for shard, found in given.items():
            other, expected = first.setdefault(shard, (device, found))
            if found != expected:
                raise Mismatch(
                    f"{shard}: devices {other} and {device} hold different bits of what must be one tensor; nothing "
                    "was moved. What to do: find out why these replicas have drifted apart, or what marks the "
                    "parameter as cut or shared"
                )
    raise Mismatch(
        "the digests of several copies differ, but those of the single tensors do not: state changes while it is "
        "moved; nothing was moved. What to do: stop whatever writes to it (prefetch, asynchronous saves, hooks)"
    )
