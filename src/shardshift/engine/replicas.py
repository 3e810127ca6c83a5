"""Copies of one tensor on several devices: they must be equal, or whichever is read wins without a word.

1. Each device gives one digest per *group*: all its shards of one bundle and box (``values.layout``) that some other
   device holds exactly so. There are some dozen, whatever the number of layers; their keys are the same everywhere.
2. Only where digests of a group differ, a second exchange names the tensor: one digest per shard of that group.

Digests per shard at once were rejected: for a thousand tensors on eight devices each would read eight thousand records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import numpy as np
import torch
import xxhash

from ..plan.lists import is_in
from ..values import Mismatch, PlacedLayout, Region, Shard
from .checksum import checksum

Digests = Mapping[str, int]


class Copies:
    """The shards of one device that other living devices hold exactly so.

    Args:
        placed: who holds what.
        device: one of its devices, or another one, which has none.
        lost: devices that are gone.
    """

    def __init__(self, placed: PlacedLayout, device: int, lost: Collection[int] = ()) -> None:
        self._placed, self._device, self._lost = placed, device, tuple(lost)

    @cached_property
    def groups(self) -> dict[str, tuple[Shard, ...]]:
        """Shards by group; equal keys on two devices stand for the same shards in the same order."""
        placed = self._placed
        layout, rows = placed.layout, placed.layout.rows
        rank = placed.rank_of(self._device)
        if rank is None or self._device in self._lost or not len(rows):
            return {}
        living = ~is_in(placed.device_ids, np.array(self._lost, np.int64))
        players = np.bincount(layout.roles_of_rank[living].reshape(-1), minlength=layout.role_count)
        boxes = np.column_stack([rows.bundle, rows.low, rows.high])
        _, box_of = np.unique(boxes, axis=0, return_inverse=True)
        box_of = box_of.reshape(-1)
        holders = np.bincount(box_of, weights=players[rows.role])
        mine = np.isin(rows.role, layout.roles_of_rank[rank]) & (holders[box_of] > 1)
        tensors: dict[int, list[int]] = {}
        for tensor, bundle in enumerate(layout.bundle_of.tolist()):
            tensors.setdefault(bundle, []).append(tensor)
        found: dict[str, tuple[Shard, ...]] = {}
        for row in np.flatnonzero(mine).tolist():
            members = [layout.tensors[tensor] for tensor in tensors[int(rows.bundle[row])]]
            dims = len(members[0].shape)
            low, high = rows.low[row, :dims].tolist(), rows.high[row, :dims].tolist()
            region = Region(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
            found[str(box_of[row])] = tuple(Shard(tensor, region) for tensor in members)
        return found

    def digests(self, live: Mapping[Shard, torch.Tensor]) -> dict[str, int]:
        """One digest per group, of this device's live tensors."""
        return {key: _together(checksum(live[shard]) for shard in shards) for key, shards in self.groups.items()}

    def details(self, live: Mapping[Shard, torch.Tensor], suspects: Collection[str]) -> dict[str, int]:
        """One digest per shard of the groups that differ."""
        groups = self.groups
        return {str(shard): checksum(live[shard]) for key in suspects if key in groups for shard in groups[key]}


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
