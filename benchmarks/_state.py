"""State of a job for benchmarks: tensors whose values say where they belong, in memory whose page state is known.

An element's code is its global index, mixed with odd numbers, and the name of its tensor; it is written as the
element's bits. So a shard that came from somewhere else, or only in part, is told from a right one, at the speed of
memory: no table of expected values is held.

Pages are *warm* if they have been written before, *fresh* if the kernel has yet to give them. ``torch.empty`` gives
fresh ones for large tensors, but may give back what was freed before; ``fresh`` is a mapping of its own, always new.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from shardshift.engine.pages import empty
from shardshift.models import Catalogue, Model
from shardshift.plan import Plan, make_plan
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard, Tensor

_ODD: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAPPED_BYTES: Final = 128 << 10
"""From here on malloc maps memory of its own; smaller tensors share pages, and none of them is fresh for sure."""

Locals = dict[Shard, torch.Tensor]
Allocate = Callable[[Shard], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model the cases move.

    Attributes:
        layers: transformer layers.
        hidden: hidden size; the feed-forward network has four times as much.
        vocab: rows of the embedding.
    """

    layers: int = 8
    hidden: int = 896
    vocab: int = 8192

    @property
    def model(self) -> Model:
        """Of GPT's kind: column- and row-parallel matrices, biases, norms, a tied embedding."""
        return Model.from_dimensions(
            layers=self.layers, hidden=self.hidden, heads=16, vocab=self.vocab, positions=self.hidden
        )


def change(size: Size, prev: str, curr: str, *, zero1: bool = False, moments: bool = True) -> Plan:
    """The plan of a change; device r runs rank r before, and devices are as many as the larger layout has ranks."""
    catalogue = Catalogue.of(size.model, moments=moments)
    before, after = (catalogue.layout(config, zero1=zero1) for config in (prev, curr))
    devices = range(max(before.world_size, after.world_size))
    return make_plan(PlacedLayout(before, tuple(range(before.world_size))), after, devices=devices)


def copies(tensors: int, bytes_each: int, before: int, after: int) -> Plan:
    """The plan to go from so many whole copies of some equal tensors to so many."""
    listed = [Tensor(Kind.PARAM, f"tensor.{index}", (bytes_each // 4,), "float32", 4) for index in range(tensors)]
    role = tuple(Shard(tensor, Region.whole(tensor.shape)) for tensor in listed)
    prev = PlacedLayout(Layout((role,), (0,) * before), tuple(range(before)))
    return make_plan(prev, Layout((role,), (0,) * after), devices=range(max(before, after)))


def pair_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """What goes from device to device in all: bytes by (source, target)."""
    moves = plan.moves
    pairs, row = np.unique(np.stack([moves.source, moves.target], axis=1), axis=0, return_inverse=True)
    total = np.bincount(row.reshape(-1), plan.cells.nbytes[moves.cell], len(pairs)).astype(np.int64)
    return {(source, target): nbytes for (source, target), nbytes in zip(pairs.tolist(), total.tolist(), strict=True)}


def held(plan: Plan, device: int, memory: Allocate | None = None) -> Locals:
    """What a device holds before the move, coded; in memory that has been written to, or that is given."""
    return {shard: coded(shard, (memory or warm)(shard)) for shard in plan.prev.shards_on(device)}


def check(plan: Plan, device: int, found: Mapping[Shard, torch.Tensor]) -> None:
    """Hold what a device has after the move to the codes.

    Raises:
        AssertionError: naming the first shard that is missing or wrong.
    """
    for shard in plan.curr.shards_on(device):
        right = coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard)))
        assert torch.equal(_words(found[shard]), _words(right)), f"device {device}: {shard} is wrong"


def coded(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """Write the codes of a shard's elements into a contiguous tensor, which is returned."""
    words = _words(tensor)
    total = torch.tensor(zlib.crc32(str(shard.tensor).encode())).to(words.dtype)
    dims = len(shard.region.shape)
    sums = total
    for dim, (offset, count) in enumerate(zip(shard.region.offsets, shard.region.shape, strict=True)):
        steps = (torch.arange(offset, offset + count) * _ODD[dims - 1 - dim]).to(words.dtype)
        if dim == dims - 1:
            return torch.add(sums.unsqueeze(-1), steps, out=words).view(tensor.dtype)
        sums = sums.unsqueeze(-1) + steps
    words.copy_(sums)
    return tensor


def warm(shard: Shard) -> torch.Tensor:
    """Memory for a shard that has been written."""
    return torch.ones(shard.region.shape, dtype=dtype_of(shard))


def fresh(shard: Shard) -> torch.Tensor:
    """Memory for a shard that the kernel has yet to give, if it is large enough to have pages of its own."""
    return fresh_bytes(shard.nbytes).view(dtype_of(shard)).view(shard.region.shape)


def by_engine(shard: Shard) -> torch.Tensor:
    """Memory for a shard as the engine asks for it: on huge pages, if it is large."""
    return empty(shard.region.shape, dtype_of(shard))


def warm_bytes(nbytes: int) -> torch.Tensor:
    """Bytes that have been written."""
    return torch.full((nbytes,), 1, dtype=torch.uint8)


def fresh_bytes(nbytes: int) -> torch.Tensor:
    """Bytes that the kernel has yet to give; see ``fresh``."""
    if nbytes < _MAPPED_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def huge_bytes(nbytes: int) -> torch.Tensor:
    """Bytes that have been written, on huge pages if there are many."""
    return empty((nbytes,), torch.uint8).fill_(1)


def memcpy(source: torch.Tensor, into: torch.Tensor) -> None:
    """libc's, which knows how to go around the cache."""
    ctypes.memmove(into.data_ptr(), source.data_ptr(), into.numel())


def dtype_of(shard: Shard) -> torch.dtype:
    """The element type of a shard."""
    found = getattr(torch, shard.tensor.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS[tensor.element_size()])
