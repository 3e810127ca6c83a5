"""The plan: where every element of the new layout comes from.

A plan says what, not when: it knows nothing of rounds, memory or transports. Every element of every new shard
is the subject of exactly one of three facts:

1. ``Refer``: the device held exactly this shard before. Its storage is kept and nothing moves.
2. ``Copy``: the device held the elements, but within another shard. They move inside the device.
3. ``Transfer``: another device held them. They cross a link.

The words are those of the paper (arXiv 2607.04749, section IV), whose Send / Recv pair is one transfer here:
the plan is global, and only a program (``shardshift.schedule``) has two ends. Opcode strings with optional
fields were rejected: three classes say which fields each fact has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..values import Kind, PlacedLayout, Region, Shard, Tensor, digest


@dataclass(frozen=True, slots=True)
class Refer:
    """The device held exactly this shard before: storage is kept, nothing moves."""

    device: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Copy:
    """The device held ``piece`` within ``source`` (prev) and needs it within ``target`` (curr)."""

    device: int
    piece: Shard
    source: Shard
    target: Shard


@dataclass(frozen=True, slots=True)
class Transfer:
    """``piece`` goes from ``source``, a prev shard of one device, into ``target``, a curr shard of another."""

    source_device: int
    target_device: int
    piece: Shard
    source: Shard
    target: Shard


@dataclass(frozen=True)
class Plan:
    """A migration from ``prev`` to ``curr``; ``prove`` holds it to both.

    Attributes:
        prev: the layout that the job runs in now.
        curr: the layout that it will run in.
        refers: shards that stay as they are.
        copies: pieces that move inside a device.
        transfers: pieces that move between devices.
        least_moved_bytes: the least that any placement of ``curr`` on the allowed devices would have to move (or
            that the placement would, where one was given).
    """

    prev: PlacedLayout
    curr: PlacedLayout
    refers: tuple[Refer, ...]
    copies: tuple[Copy, ...]
    transfers: tuple[Transfer, ...]
    least_moved_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of the logical state, each tensor counted once."""
        return self.curr.layout.state_bytes

    @property
    def referred_bytes(self) -> int:
        """Bytes that stay where they are, over all devices."""
        return sum(refer.shard.nbytes for refer in self.refers)

    @property
    def copied_bytes(self) -> int:
        """Bytes that move inside a device, over all devices."""
        return sum(copy.piece.nbytes for copy in self.copies)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between devices."""
        return sum(transfer.piece.nbytes for transfer in self.transfers)

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device of either layout, ascending."""
        return tuple(sorted({*self.prev.devices, *self.curr.devices}))

    @cached_property
    def digest(self) -> str:
        """A fingerprint that is equal on all ranks that made the same plan."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives an equal plan."""
        # Tables of tensors and shards, filled in order of appearance: a shard is named by many instructions.
        tensors: dict[Tensor, int] = {}
        shards: dict[Shard, int] = {}

        def index(shard: Shard) -> int:
            return shards.setdefault(shard, len(shards))

        record: dict[str, Any] = {
            "prev": self.prev.to_json(),
            "curr": self.curr.to_json(),
            "refers": [[r.device, index(r.shard)] for r in self.refers],
            "copies": [[c.device, index(c.piece), index(c.source), index(c.target)] for c in self.copies],
            "transfers": [
                [t.source_device, t.target_device, index(t.piece), index(t.source), index(t.target)]
                for t in self.transfers
            ],
            "least_moved_bytes": self.least_moved_bytes,
        }
        record["shards"] = [
            [tensors.setdefault(shard.tensor, len(tensors)), list(shard.region.offsets), list(shard.region.shape)]
            for shard in shards
        ]
        record["tensors"] = [[t.kind, t.name, list(t.shape), t.dtype, t.itemsize] for t in tensors]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` described."""
        tensors = [
            Tensor(Kind(kind), name, tuple(shape), dtype, itemsize)
            for kind, name, shape, dtype, itemsize in record["tensors"]
        ]
        shards = [
            Shard(tensors[tensor], Region(tuple(offsets), tuple(shape))) for tensor, offsets, shape in record["shards"]
        ]
        return cls(
            PlacedLayout.from_json(record["prev"]),
            PlacedLayout.from_json(record["curr"]),
            tuple(Refer(device, shards[shard]) for device, shard in record["refers"]),
            tuple(Copy(device, *(shards[i] for i in three)) for device, *three in record["copies"]),
            tuple(Transfer(a, b, *(shards[i] for i in three)) for a, b, *three in record["transfers"]),
            record["least_moved_bytes"],
        )
