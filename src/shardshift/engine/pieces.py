"""From the pieces of a round to messages, and between messages and live tensors.

Both ends of a message derive it from their own lists, so no header, tag or size ever travels. What it is hangs on the
program alone, never on how an end happens to hold its tensors:

1. A piece of ``DIRECT_BYTES`` or more is sent by itself. If it is a run of whole rows of its logical tensor, it is
   contiguous on both ends and goes from tensor to tensor, in boxes of at most ``whole_bytes``. If not, in boxes of at
   most ``MESSAGE_BYTES``, so that packing, the wire and unpacking run side by side; where such a box is contiguous on
   an end, it is sent from, or lands in, the tensor itself. No count comes near 2^31.
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
from ..schedule.staging import is_contiguous
from ..transport import Foresees, Message, byte_view
from ..values import Region
from .checksum import checksum, checksums, is_plain
from .journal import Live

MESSAGE_BYTES: Final = 4 << 20
WHOLE_BYTES: Final = 16 << 20

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


def parcels_of(
    instructions: Sequence[Moved], takes_views: Callable[[int], bool], whole_bytes: int = WHOLE_BYTES
) -> list[Parcel]:
    """The messages of one direction of a round.

    Args:
        instructions: what is sent, or what is received, in the order of the program.
        takes_views: whether messages with a peer may have many parts.
        whole_bytes: the most bytes of a message that is contiguous on both ends; the same on both.

    Returns:
        Peer by peer, in the order of the program's first pieces of each, which is the order of all units (``compile``);
        per peer in an order that both ends derive alike. Empty pieces are in none.
    """
    by_views: dict[int, bool] = {}
    large: dict[int, list[Parcel]] = {}
    small: dict[int, dict[tuple[int, str, tuple[int, ...]], Run]] = {}
    for one in instructions:  # a round may have thousands: no calls here that can be done without
        piece, peer = one.piece, one.peer
        tensor, region = piece.tensor, piece.region
        itemsize, shape = tensor.itemsize, region.shape
        size_bytes = prod(shape) * itemsize
        if peer not in by_views:
            by_views[peer] = takes_views(peer)
            large[peer], small[peer] = [], {}
        if size_bytes >= DIRECT_BYTES and not by_views[peer]:
            most_bytes = whole_bytes if is_contiguous(region, Region.whole(tensor.shape)) else MESSAGE_BYTES
            for box in region.pieces(max(most_bytes // itemsize, 1)):
                box_bytes = box.numel * itemsize
                large[peer].append(Parcel(peer, [Run(itemsize, box.shape[1:], [(one, box, box_bytes)])], box_bytes))
        elif size_bytes:
            runs, key = small[peer], (-itemsize, tensor.dtype, shape[1:])
            run = runs.get(key)
            if run is None:
                run = runs[key] = Run(itemsize, shape[1:])
            run.parts.append((one, region, size_bytes))
    found: list[Parcel] = []
    for peer, runs in small.items():
        found += large[peer]
        found += _buckets(peer, [runs[key] for key in sorted(runs)], None if by_views[peer] else MESSAGE_BYTES)
    return found


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


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The local copies of a round that have met live memory.

    Attributes:
        targets: views to write to.
        sources: views to read.
        nbytes: bytes in all.
    """

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    nbytes: int

    @classmethod
    def of(cls, copies: Sequence[Copy], live: Live) -> Copies:
        """Find the live memory of copies."""
        return cls(
            [part_of(live.new(copy.target), copy.piece.region, copy.target.region) for copy in copies],
            [part_of(live.old(copy.source), copy.piece.region, copy.source.region) for copy in copies],
            sum(copy.piece.nbytes for copy in copies),
        )

    def carry_out(self) -> None:
        """Copy."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


@dataclass(slots=True, eq=False)
class _Block:
    """A run of a staged message: its place in the payload, and its parts as views of live tensors.

    Attributes:
        row_shape: of the parts.
        views: the parts.
        raw: the place as bytes.
        matrix: the place as rows of the parts' dtype. None if it is not aligned to that, which takes two messages of
            several dtypes in one round, and a staging without a byte to spare: then a run takes memory of its own for
            a moment.
        rows: the place of each part in the matrix, where parts are copied one by one.
    """

    row_shape: tuple[int, ...]
    views: list[torch.Tensor]
    raw: torch.Tensor
    matrix: torch.Tensor | None
    rows: list[torch.Tensor]

    def typed(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(self.views[0].dtype).view(-1, *self.row_shape)

    def rows_of(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(matrix, [view.shape[0] for view in self.views]))

    def pack(self) -> None:
        matrix = self.typed(torch.empty_like(self.raw)) if self.matrix is None else self.matrix
        if len(self.views) == 1:
            matrix.copy_(self.views[0])
        elif self.rows:
            torch._foreach_copy_(self.rows, self.views)
        else:
            torch.cat(self.views, out=matrix)
        if self.matrix is None:
            self.raw.copy_(byte_view(matrix))

    def unpack(self) -> None:
        matrix = self.typed(self.raw.clone()) if self.matrix is None else self.matrix
        if len(self.views) == 1:
            self.views[0].copy_(matrix)
        else:
            torch._foreach_copy_(self.views, self.rows if self.matrix is not None else self.rows_of(matrix))


class Bound:
    """A message that has met live memory. All that can be made beforehand is made here.

    Args:
        parcel: the message.
        live: old shards, of which ``Send`` reads, and new ones, of which ``Forward`` reads and into which ``Recv``
            writes.

    Attributes:
        parcel: the message.
        views: per run the parts as views of the live tensors, all with at least one dim.
        is_direct: whether the message's bytes are the tensor's own memory.
        is_staged: whether they have been given memory of their own.
    """

    def __init__(self, parcel: Parcel, live: Live) -> None:
        self.parcel = parcel
        self.views = [_resolve(run, live) for run in parcel.runs]
        self._arrives = isinstance(parcel.runs[0].parts[0][0], Recv)
        self.is_staged = False
        self._blocks: list[_Block] = []
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = self.views[0][0]
        self.is_direct = len(self.views) == len(self.views[0]) == 1 and is_plain(first)
        self._payload = byte_view(first) if self.is_direct else None
        self._message = None if self._payload is None else Message.flat(parcel.peer, self._payload)

    @property
    def device(self) -> torch.device:
        """Where the message is staged: where its tensors are, and on the GPU if they are on both."""
        devices = {view.device for run in self.views for view in run}
        return next((device for device in devices if device.type != "cpu"), None) or devices.pop()

    def stage(self, payload: torch.Tensor, *, mixed: bool) -> None:
        """Give the message memory of its own to be packed into, or to land in.

        Args:
            payload: 1-dim uint8.
            mixed: whether the parts may lie on several torch devices.
        """
        self._payload, self._message, self.is_staged = payload, Message.flat(self.parcel.peer, payload), True
        stop = 0
        for run, views in zip(self.parcel.runs, self.views, strict=True):
            start, stop = stop, stop + run.nbytes
            block = _Block(run.row_shape, views, payload[start:stop], None, [])
            if (payload.storage_offset() + start) % run.itemsize == 0:
                block.matrix = block.typed(block.raw)
                if len(views) > 1 and (self._arrives or mixed):
                    block.rows = block.rows_of(block.matrix)
            self._blocks.append(block)

    def message(self) -> Message:
        """The message to post: the payload, or else the live tensors.

        Of tensors that torch conjugates lazily a written out copy is sent, and one is received that ``unpack`` reads.
        """
        if self._message is not None:
            return self._message
        return Message(self.parcel.peer, tuple([self._plain(view) for run in self.views for view in run]))

    def foresee(self, transport: Foresees) -> None:
        """Let the transport work the message out now, unless it is one that is written out when it is posted."""
        if self._message is None and any(view.is_conj() or view.is_neg() for run in self.views for view in run):
            return
        self._message = transport.foresee(self.message(), arrives=self._arrives)

    def pack(self) -> None:
        """Write the parts into the payload, if they have one that is not their own memory."""
        for block in self._blocks:
            block.pack()

    def unpack(self) -> None:
        """Write what has landed into the parts, if it has not landed there."""
        for view, landed in self._loose:
            view.copy_(landed)
        for block in self._blocks:
            block.unpack()

    def checksums(self) -> list[int]:
        """Per part the digest of its bytes: of the payload if there is one, in which they are warm."""
        if self._payload is not None:
            return checksums(self._payload, [size for _, _, size in self.parcel.parts])
        return [checksum(view) for run in self.views for view in run]

    def _plain(self, view: torch.Tensor) -> torch.Tensor:
        if not view.is_conj() and not view.is_neg():
            return view
        if not self._arrives:
            return view.resolve_conj().resolve_neg()
        self._loose.append((view, torch.empty(view.shape, dtype=view.dtype, device=view.device)))
        return self._loose[-1][1]


def _resolve(run: Run, live: Live) -> list[torch.Tensor]:
    views, old, new = [], live.old, live.new
    for one, box, _ in run.parts:
        if isinstance(one, Send):
            shard = one.source
            local = old(shard)
        else:
            shard = one.source if isinstance(one, Forward) else one.target
            local = new(shard)
        views.append(part_of(local, box, shard.region))
    return views if run.row_shape else [view if view.dim() else view.unsqueeze(0) for view in views]
