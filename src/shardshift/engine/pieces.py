"""From the pieces of a round to messages, and between messages and live tensors.

Both ends of a message derive it from their own lists, so no header, tag or size ever travels. What it is hangs on the
program alone, never on how an end happens to hold its tensors:

1. A piece of ``DIRECT_BYTES`` or more is sent by itself, in boxes of at most ``MESSAGE_BYTES``: so packing, the wire
   and unpacking of a large strided piece run side by side, and no count comes near 2^31. Where a box is contiguous on
   an end, it is sent from, or lands in, the tensor itself.
2. Smaller pieces to one peer share *buckets* of ``MESSAGE_BYTES``, since a message costs 0.1 ms on gloo, whatever its
   size. In a bucket pieces stand by element size (the largest first), dtype and row shape: so every piece is aligned to
   its dtype without padding, and a *run* of pieces of one dtype and row shape is one typed 2-dim matrix, which one
   ``torch.cat`` packs: 0.5 us a piece of 4 KiB, against 2 us for a view and a copy each.
3. To a peer whose transport takes views, all pieces of the round are the parts of one message, and nothing is packed.

Nothing is ever cast: source and target of every copy have the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeAlias

import torch

from ..schedule import DIRECT_BYTES, Copy, Forward, Recv, Send
from ..transport import Message, byte_view
from ..values import Region
from .checksum import checksum, checksums, is_plain
from .journal import Live

MESSAGE_BYTES: Final = 4 << 20

Moved: TypeAlias = Send | Forward | Recv


Part: TypeAlias = tuple[Moved, Region, int]
"""A box of a piece (global), or all of it, as it stands in a message: its instruction, the box, its bytes."""


@dataclass(slots=True)
class Run:
    """Parts of one message that have one dtype and one row shape, one after the other.

    Attributes:
        itemsize: bytes of an element.
        row_shape: the shape of the parts without its first dim.
        parts: the parts.
    """

    itemsize: int
    row_shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(size for _, _, size in self.parts)


@dataclass(slots=True)
class Parcel:
    """A message as both ends know it.

    Attributes:
        peer: device id of the other end.
        runs: its parts, in their order.
        nbytes: bytes in all.
    """

    peer: int
    runs: list[Run] = field(default_factory=list)
    nbytes: int = 0

    def add(self, run: Run, nbytes: int) -> None:
        """Append parts of so many bytes."""
        self.runs.append(run)
        self.nbytes += nbytes

    @property
    def parts(self) -> list[Part]:
        """Every part."""
        return [part for run in self.runs for part in run.parts]


def parcels_of(instructions: Sequence[Moved], takes_views: Callable[[int], bool]) -> list[Parcel]:
    """The messages of one direction of a round.

    Args:
        instructions: what is sent, or what is received, in the order of the program.
        takes_views: whether messages with a peer may have many parts.

    Returns:
        Per peer in an order that both ends derive alike. Empty pieces are in none.
    """
    by_views: dict[int, bool] = {}
    large: list[Parcel] = []
    small: dict[int, dict[tuple[int, str, tuple[int, ...]], Run]] = {}
    for one in instructions:  # a round may have thousands: no calls here that can be done without
        piece, peer = one.piece, one.peer
        tensor, region = piece.tensor, piece.region
        itemsize, shape = tensor.itemsize, region.shape
        size_bytes = prod(shape) * itemsize
        if peer not in by_views:
            by_views[peer] = takes_views(peer)
            small[peer] = {}
        if size_bytes >= DIRECT_BYTES and not by_views[peer]:
            for box in region.pieces(max(MESSAGE_BYTES // itemsize, 1)):
                box_bytes = box.numel * itemsize
                large.append(Parcel(peer, [Run(itemsize, box.shape[1:], [(one, box, box_bytes)])], box_bytes))
        elif size_bytes:
            runs, key = small[peer], (-itemsize, tensor.dtype, shape[1:])
            run = runs.get(key)
            if run is None:
                run = runs[key] = Run(itemsize, shape[1:])
            run.parts.append((one, region, size_bytes))
    buckets = [
        parcel
        for peer, runs in small.items()
        for parcel in _buckets(peer, [runs[key] for key in sorted(runs)], None if by_views[peer] else MESSAGE_BYTES)
    ]
    return large + buckets


def _buckets(peer: int, runs: list[Run], most_bytes: int | None) -> Iterator[Parcel]:
    """Parts in their order, as many a message as fit."""
    parcel = Parcel(peer)
    for run in runs:
        run_bytes = run.nbytes
        if most_bytes is None or parcel.nbytes + run_bytes <= most_bytes:
            parcel.add(run, run_bytes)
            continue
        start = held_bytes = 0
        for index, (_, _, part_bytes) in enumerate(run.parts):
            if parcel.nbytes + held_bytes and parcel.nbytes + held_bytes + part_bytes > most_bytes:
                if held_bytes:
                    parcel.add(Run(run.itemsize, run.row_shape, run.parts[start:index]), held_bytes)
                yield parcel
                parcel, start, held_bytes = Parcel(peer), index, 0
            held_bytes += part_bytes
        parcel.add(Run(run.itemsize, run.row_shape, run.parts[start:]), held_bytes)
    if parcel.runs:
        yield parcel


def part_of(local: torch.Tensor, region: Region, held: Region) -> torch.Tensor:
    """The view of a shard's local tensor that is ``region`` of what it holds (both global).

    Raises:
        ValueError: if part of the region lies outside.
    """
    if region.shape != held.shape:
        for dim, (a, n, b, m) in enumerate(zip(region.offsets, region.shape, held.offsets, held.shape, strict=True)):
            if n != m:
                if not b <= a <= a + n <= b + m:
                    raise ValueError(f"{region} is not inside {held}")
                local = local.narrow(dim, a - b, n)
    return local


def copy_all(copies: Sequence[Copy], live: Live) -> int:
    """Carry out local copies; their bytes."""
    if copies:
        torch._foreach_copy_(
            [part_of(live.new(copy.target), copy.piece.region, copy.target.region) for copy in copies],
            [part_of(live.old(copy.source), copy.piece.region, copy.source.region) for copy in copies],
        )
    return sum(copy.piece.nbytes for copy in copies)


class Bound:
    """A message that has met live memory.

    Args:
        parcel: the message.
        live: old shards, of which ``Send`` reads, and new ones, of which ``Forward`` reads and into which ``Recv``
            writes.
    """

    def __init__(self, parcel: Parcel, live: Live) -> None:
        self.parcel, self._live = parcel, live
        self._payload: torch.Tensor | None = None
        self._views: list[list[torch.Tensor]] | None = None
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(parcel.runs) == 1 and len(parcel.runs[0].parts) == 1 and is_plain(self.views[0][0]):
            self._payload = byte_view(self.views[0][0])
        self.is_direct = self._payload is not None

    @property
    def views(self) -> list[list[torch.Tensor]]:
        """Per run the parts as views of the live tensors, all with at least one dim. Made when first asked for."""
        if self._views is None:
            self._views = [self._resolve(run) for run in self.parcel.runs]
        return self._views

    @property
    def payload(self) -> torch.Tensor:
        """The message's flat bytes: the tensor's own memory if it ``is_direct``, else what it was given."""
        assert self._payload is not None
        return self._payload

    @property
    def device(self) -> torch.device:
        """Where the message is staged: where its tensors are, and on the GPU if they are on both."""
        devices = {view.device for run in self.views for view in run}
        return next((device for device in devices if device.type != "cpu"), None) or devices.pop()

    def stage(self, payload: torch.Tensor) -> None:
        """Give the message memory of its own to be packed into, or to land in."""
        self._payload = payload

    def message_sent(self) -> Message:
        """The message to post: the payload, or else the live tensors; what torch conjugates lazily is written out."""
        if self._payload is not None:
            return Message.flat(self.parcel.peer, self._payload)
        views = (view.resolve_conj().resolve_neg() for run in self.views for view in run)
        return Message(self.parcel.peer, tuple(views))

    def message_received(self) -> Message:
        """The message to post: the payload, or else the live tensors; ``unpack`` fills what torch conjugates lazily."""
        if self._payload is not None:
            return Message.flat(self.parcel.peer, self._payload)
        landing = []
        for view in (view for run in self.views for view in run):
            if view.is_conj() or view.is_neg():
                self._loose.append((view, torch.empty(view.shape, dtype=view.dtype, device=view.device)))
                landing.append(self._loose[-1][1])
            else:
                landing.append(view)
        return Message(self.parcel.peer, tuple(landing))

    def pack(self, *, mixed: bool) -> None:
        """Write the parts into the payload, if they have one that is not their own memory.

        Args:
            mixed: whether they may lie on several torch devices.
        """
        if self.is_direct or self._payload is None:
            return
        for (start, stop, run), views in zip(self._stretches(), self.views, strict=True):
            block = self._typed(start, stop, run, views[0].dtype)
            matrix = torch.empty_like(self.payload[start:stop]) if block is None else block
            if block is None:
                matrix = matrix.view(views[0].dtype).view(-1, *run.row_shape)
            if len(views) == 1:
                matrix.copy_(views[0])
            elif mixed:
                torch._foreach_copy_(list(torch.split(matrix, [view.shape[0] for view in views])), views)
            else:
                torch.cat(views, out=matrix)
            if block is None:
                self.payload[start:stop].copy_(byte_view(matrix))

    def unpack(self) -> None:
        """Write what has landed into the parts, if it has not landed there."""
        for view, landed in self._loose:
            view.copy_(landed)
        if self.is_direct or self._payload is None:
            return
        for (start, stop, run), views in zip(self._stretches(), self.views, strict=True):
            block = self._typed(start, stop, run, views[0].dtype)
            if block is None:
                block = self.payload[start:stop].clone().view(views[0].dtype).view(-1, *run.row_shape)
            if len(views) == 1:
                views[0].copy_(block)
            else:
                torch._foreach_copy_(views, list(torch.split(block, [view.shape[0] for view in views])))

    def checksums(self) -> list[int]:
        """Per part the digest of its bytes: of the payload if there is one, in which they are warm."""
        if self._payload is not None:
            return checksums(self._payload, [size for _, _, size in self.parcel.parts])
        return [checksum(view) for run in self.views for view in run]

    def _resolve(self, run: Run) -> list[torch.Tensor]:
        views, old, new = [], self._live.old, self._live.new
        for one, box, _ in run.parts:
            if isinstance(one, Send):
                shard = one.source
                local = old(shard)
            else:
                shard = one.source if isinstance(one, Forward) else one.target
                local = new(shard)
            views.append(part_of(local, box, shard.region))
        return views if run.row_shape else [view if view.dim() else view.unsqueeze(0) for view in views]

    def _stretches(self) -> Iterator[tuple[int, int, Run]]:
        stop = 0
        for run in self.parcel.runs:
            start, stop = stop, stop + run.nbytes
            yield start, stop, run

    def _typed(self, start: int, stop: int, run: Run, dtype: torch.dtype) -> torch.Tensor | None:
        """A stretch of the payload as the matrix that a run is.

        None if it is not aligned to the dtype, which takes two messages of several dtypes in one round, and a staging
        without a byte to spare: then a run takes memory of its own for a moment.
        """
        if (self.payload.storage_offset() + start) % run.itemsize:
            return None
        return self.payload[start:stop].view(dtype).view(-1, *run.row_shape)
