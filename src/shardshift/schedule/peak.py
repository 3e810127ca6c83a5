"""Peaks: how much memory a device's state takes at the worst moment of a move, under either policy.

Memory is counted in *storages*: what is allocated and given back as one. A shard is a storage of its own unless told
otherwise; a framework's flat buffer is one, whatever the number of shards that are views of it.

1. Before the move all old storages live.
2. When an epoch begins, the new storages of its shards are allocated; what is referred stays where it is.
3. Its rounds stage, two of them at a time (``staging``): the peak of the epoch is here.
4. After its fence, the old storages of which no shard is left are given back. Under the policy ``keep`` that is after
   the commit, hence after the peak: the old state, all that is new, and the staging.

Allocator rounding and the transport's own buffers are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..values import Shard
from .program import Program
from .staging import staging_in_use_bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that is allocated and given back as one.

    Attributes:
        shards: what lies in it.
        nbytes: its size, which may be more than that of its shards, by padding, or less, where some are tied.
    """

    shards: tuple[Shard, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of state on one device during a move.

    Attributes:
        prev_bytes: before it.
        curr_bytes: after it.
        live_bytes: the most at any moment, staging included.
    """

    prev_bytes: int
    curr_bytes: int
    live_bytes: int

    @property
    def beside_prev_bytes(self) -> int:
        """What the device needs beside its old state."""
        return self.live_bytes - self.prev_bytes

    @property
    def over_steady_bytes(self) -> int:
        """What it needs over the larger of old and new state; under ``release`` at most staging and one storage."""
        return self.live_bytes - max(self.prev_bytes, self.curr_bytes)


def peak_of(
    program: Program,
    held: Iterable[Shard],
    *,
    prev_storages: Sequence[Storage] = (),
    curr_storages: Sequence[Storage] = (),
) -> Peak:
    """The peak of a device that runs a program.

    Args:
        program: its program.
        held: all of its old shards; none for a device that joins.
        prev_storages: how old shards lie in storages; one that is in none of them is a storage of its own.
        curr_storages: the same of the new shards that are allocated. A storage is allocated with the first of them.
    """
    old = _Storages(prev_storages, held)
    new = _Storages(curr_storages, program.allocate)
    prev_bytes = live_bytes = peak_bytes = sum(old.sizes_bytes)
    allocated: set[int] = set()
    for epoch in program.epochs:
        begun = {new.of[shard] for shard in epoch.allocate} - allocated
        allocated |= begun
        live_bytes += sum(new.sizes_bytes[storage] for storage in begun)
        peak_bytes = max(peak_bytes, live_bytes + staging_in_use_bytes(epoch.rounds))
        live_bytes -= old.give_back(epoch.release)
    if all(not epoch.release for epoch in program.epochs):  # ``keep``: all but what is referred goes with the commit
        refers = {refer.shard for refer in program.refers}
        live_bytes -= old.give_back([shard for shard in old.of if shard not in refers])
    return Peak(prev_bytes, live_bytes, peak_bytes)


def peak_extra_bytes(program: Program) -> int:
    """Bytes that a device needs beside its old state at the worst moment, each shard a storage of its own."""
    held = [refer.shard for refer in program.refers]
    return peak_of(program, held + [shard for epoch in program.epochs for shard in epoch.release]).beside_prev_bytes


class _Storages:
    """Shards by storage."""

    def __init__(self, storages: Sequence[Storage], shards: Iterable[Shard]) -> None:
        self.sizes_bytes = [storage.nbytes for storage in storages]
        self.of = {shard: index for index, storage in enumerate(storages) for shard in storage.shards}
        for shard in shards:
            if shard not in self.of:
                self.of[shard] = len(self.sizes_bytes)
                self.sizes_bytes.append(shard.nbytes)
        self._left = [0] * len(self.sizes_bytes)
        for index in self.of.values():
            self._left[index] += 1

    def give_back(self, shards: Iterable[Shard]) -> int:
        """Let go of shards; the bytes of the storages that are empty now."""
        freed_bytes = 0
        for shard in shards:
            index = self.of[shard]
            self._left[index] -= 1
            freed_bytes += self.sizes_bytes[index] if not self._left[index] else 0
        return freed_bytes
