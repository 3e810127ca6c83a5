"""The plan: where every element of the new layout comes from.

A plan says what, not when: it knows nothing of rounds, memory or transports. It is two placed layouts and the
*moves* between devices, cell by cell (``cells``, ``sources``); all else follows from the layouts. Written out, every
element of every new shard is the subject of exactly one of three facts:

1. ``Refer``: the device held exactly this shard before. Its storage is kept and nothing moves.
2. ``Copy``: the device held the elements, but within another shard. They move inside the device.
3. ``Transfer``: another device sends them, out of what it held before, or (a *forward*) out of what it has received.

The words are those of the paper (arXiv 2607.04749, section IV), whose Send / Recv pair is one transfer here:
the plan is global, and only a program (``shardshift.schedule``) has two ends. A plan that lists facts was rejected:
for a hundred thousand devices it is some hundred million of them, of which a device needs a thousand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from ..values import PlacedLayout, Shard
from ..values.boxes import Ints
from .cells import Cells
from .expand import Expansion
from .lists import entries
from .moves import Moves
from .pairing import held_roles


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
    """``piece`` goes from ``source`` of one device into ``target``, a curr shard of another.

    Attributes:
        hop: 1 if ``source`` is a shard that the sender held before; h > 1 if it is one of its new shards, into which
            the piece came at hop h - 1.
    """

    source_device: int
    target_device: int
    piece: Shard
    source: Shard
    target: Shard
    hop: int = 1


@dataclass(frozen=True)
class Plan:
    """A migration from ``prev`` to ``curr``; ``prove`` holds it to both.

    Attributes:
        prev: the layout that the job runs in now.
        curr: the layout that it will run in.
        moves: which cell goes from which device to which.
        least_moved_bytes: the least that any placement of ``curr`` on the allowed devices would have to move; what
            this one moves is more where TP groups or whole free nodes ask for it, or where the placement was given.
        lost: devices of ``prev`` that are gone.
    """

    prev: PlacedLayout
    curr: PlacedLayout
    moves: Moves
    least_moved_bytes: int
    lost: tuple[int, ...] = ()

    @cached_property
    def cells(self) -> Cells:
        """What the state is cut into; ``moves`` counts in it."""
        return Cells(self.prev.layout, self.curr.layout)

    @property
    def state_bytes(self) -> int:
        """Bytes of the logical state, each tensor counted once."""
        return self.curr.layout.state_bytes

    @cached_property
    def held(self) -> Ints:
        """Per rank of ``curr`` the old roles of its device, shape (ranks, k); -1 for none, or if it is lost."""
        return held_roles(self.prev, self.curr.device_ids, self.lost)

    @cached_property
    def kept_by_rank_bytes(self) -> Ints:
        """Per rank of ``curr`` the bytes of it that its device holds already."""
        return self._in_common(self.cells.overlap_bytes)

    @cached_property
    def referred_by_rank_bytes(self) -> Ints:
        """Per rank of ``curr`` the bytes of shards that its device holds exactly so."""
        return self._in_common(self.cells.same_bytes)

    @property
    def referred_bytes(self) -> int:
        """Bytes that stay where they are, over all devices."""
        return int(self.referred_by_rank_bytes.sum())

    @property
    def copied_bytes(self) -> int:
        """Bytes that move inside a device, over all devices."""
        return int(self.kept_by_rank_bytes.sum()) - self.referred_bytes

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that move between devices."""
        return int(self.cells.nbytes[self.moves.cell].sum())

    @cached_property
    def instructions(self) -> dict[str, int]:
        """How many instructions of each type all devices run, before pieces are cut to the staging bound."""
        pieces = self.cells.pieces[self.moves.cell]
        first = self.moves.hop == 1
        return {
            "refer": int(self._in_common(self.cells.same_shards).sum()),
            "copy": int(self._in_common(self.cells.copied_pieces).sum()),
            "send": int(pieces[first].sum()),
            "recv": int(pieces.sum()),
            "forward": int(pieces[~first].sum()),
        }

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Every device of either layout, ascending."""
        return tuple(np.union1d(self.prev.device_ids, self.curr.device_ids).tolist())

    @cached_property
    def expansion(self) -> Expansion:
        """Cells and parts as tensors and shards."""
        return Expansion(self.cells)

    def refers_of(self, device: int) -> Iterator[Refer]:
        """What a device keeps as it is, in order of need."""
        held, wanted = self._roles(device)
        return (Refer(device, shard) for shard in self.expansion.same(held, wanted))

    def allocated_of(self, device: int) -> Iterator[Shard]:
        """The new shards for which a device needs storage, in order of need."""
        return self.expansion.allocated(*self._roles(device))

    def copies_of(self, device: int) -> Iterator[Copy]:
        """What a device copies locally, in order of need."""
        held, wanted = self._roles(device)
        return (Copy(device, *three) for three in self.expansion.local(held, wanted))

    def transfers_of(self, device: int) -> Iterator[Transfer]:
        """What a device sends and receives; in no order."""
        return self._transfers(np.flatnonzero((self.moves.source == device) | (self.moves.target == device)))

    @cached_property
    def refers(self) -> tuple[Refer, ...]:
        """Of all devices, ascending. For plans of a size that a person can read."""
        return tuple(refer for device in sorted(self.curr.devices) for refer in self.refers_of(device))

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Of all devices, ascending. For plans of a size that a person can read."""
        return tuple(copy for device in sorted(self.curr.devices) for copy in self.copies_of(device))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Of all devices. For plans of a size that a person can read."""
        return tuple(self._transfers(np.arange(len(self.moves))))

    def _transfers(self, rows: Ints) -> Iterator[Transfer]:
        moves = self.moves.take(rows)
        for cell, source, target, hop in zip(*(column.tolist() for column in moves.columns), strict=True):
            (before, after), (_, wanted) = self._roles(source), self._roles(target)
            for piece, origin, into in self.expansion.pieces(cell, before if hop == 1 else after, hop > 1, wanted):
                yield Transfer(source, target, piece, origin, into, hop)

    def _roles(self, device: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Old and new roles of a device."""
        before, after = self.prev.rank_of(device), self.curr.rank_of(device)
        gone = before is None or device in self.lost
        return (
            () if gone else tuple(self.prev.layout.roles_of_rank[before].tolist()),
            () if after is None else tuple(self.curr.layout.roles_of_rank[after].tolist()),
        )

    def _in_common(self, matrix: csr_array) -> Ints:
        """Per rank of ``curr`` the sum of a (curr roles, prev roles) matrix over what it and its device play."""
        total = np.zeros(len(self.held), np.int64)
        for wanted in self.curr.layout.roles_of_rank.T:
            for held in self.held.T:
                has = np.flatnonzero(held >= 0)
                total[has] += entries(matrix, wanted[has], held[has])
        return total

    @cached_property
    def digest(self) -> str:
        """A fingerprint that is equal on all ranks that made the same plan."""
        state = hashlib.blake2b(digest_size=8)
        state.update(f"{self.prev.layout.digest} {self.curr.layout.digest} {self.least_moved_bytes}".encode())
        for column in (self.prev.device_ids, self.curr.device_ids, np.array(self.lost, np.int64), *self.moves.columns):
            kind = "<i4" if column.max(initial=0) < 2**31 else "<i8"
            state.update(f"{len(column)}{kind}".encode())
            state.update(np.ascontiguousarray(column, kind).data)
        return state.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives an equal plan."""
        return {
            "prev": self.prev.to_json(),
            "curr": self.curr.to_json(),
            "moves": [column.tolist() for column in self.moves.columns],
            "least_moved_bytes": self.least_moved_bytes,
            "lost": list(self.lost),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` described."""
        return cls(
            PlacedLayout.from_json(record["prev"]),
            PlacedLayout.from_json(record["curr"]),
            Moves(*(np.array(column, np.int64) for column in record["moves"])),
            record["least_moved_bytes"],
            tuple(record["lost"]),
        )

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)
