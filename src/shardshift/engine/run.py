"""Run one device's program on live tensors.

The idea: a program is lists of pieces, and both ends of a pair derive the same messages from the same lists,
so no header, tag or size ever travels. Rounds are this device's own (``schedule.compile``): the peers of one round
may be in rounds of other numbers, and nobody waits for a device that it has no message with. Per round:

1. Pieces of ``DIRECT_BYTES`` or more are messages of their own, sent from and received into the tensors
   themselves where those are contiguous.
2. Smaller pieces to one peer share one flat bucket: a message costs about 0.1 ms on gloo, whatever its size.
3. Receives and sends are posted, local copies run under them, then the round is waited for and unpacked.

Old shards are only read (policy ``keep``): whatever fails, the old state is whole, and dropping the new ones is the
whole of an abort. A forward reads a new shard, of which an earlier round has received that piece. Pieces that are not
contiguous are staged by copying; handing strided views to the transport was rejected, since gloo sends the wrong
bytes of them without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import torch

from ..schedule import Copy, Forward, Program, Recv, Round, Send
from ..transport import Message, Transport, byte_view
from ..values import Mismatch, Region, Shard

DIRECT_BYTES: Final = 1 << 20

Locals = Mapping[Shard, torch.Tensor]
"""Per shard its live tensor: shape ``shard.region.shape``, any strides, dtype ``shard.tensor.dtype``."""


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """What one finished round did on this device.

    Attributes:
        index: this device's round, from 0; other devices count their own.
        rounds: this device's rounds in all.
        sent_bytes: bytes that left this device, forwarded ones included.
        received_bytes: bytes that arrived.
        copied_bytes: bytes copied locally.
        elapsed_s: seconds that the round took.
    """

    index: int
    rounds: int
    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    elapsed_s: float


def run_program(
    program: Program,
    sources: Locals,
    transport: Transport,
    *,
    allocate: Callable[[Shard], torch.Tensor],
    timeout_s: float,
    on_round: Callable[[RoundEvent], None] = lambda event: None,
) -> dict[Shard, torch.Tensor]:
    """Carry out a device's program and return its tensors in the new layout.

    Args:
        program: what this device refers, copies, sends, forwards and receives.
        sources: the shards that it holds now; only read.
        transport: connects the devices of the plan.
        allocate: gives the tensor that a new shard is written to, of the region's shape and the shard's dtype.
        timeout_s: the longest that one round may take; in it, a device may wait for peers that are behind.
        on_round: called after each round.

    Returns:
        Per new shard its tensor. A referred shard's tensor is the very one in ``sources``.

    Raises:
        Mismatch: if a live tensor is not what its shard says. Nothing has moved.
        TransportError: if a peer is gone or too slow. The sources are as they were.
    """
    read = {refer.shard for refer in program.refers}
    read |= {copy.source for step in program.rounds for copy in step.copies}
    read |= {send.source for step in program.rounds for send in step.sends if isinstance(send, Send)}
    for shard in sorted(read, key=str):
        _check(shard, sources.get(shard), "holds")
    targets: dict[Shard, torch.Tensor] = {}
    for shard in program.allocate:
        targets[shard] = allocate(shard)
        _check(shard, targets[shard], "was given memory for")
    for refer in program.refers:
        targets[refer.shard] = sources[refer.shard]
    with torch.no_grad():
        for index, step in enumerate(program.rounds):
            started_s = time.perf_counter()
            _run_round(step, sources, targets, transport, timeout_s)
            on_round(
                RoundEvent(
                    index,
                    len(program.rounds),
                    _piece_bytes(step.sends),
                    _piece_bytes(step.recvs),
                    _piece_bytes(step.copies),
                    time.perf_counter() - started_s,
                )
            )
    return targets


def _run_round(step: Round, sources: Locals, targets: Locals, transport: Transport, timeout_s: float) -> None:
    sends = [
        Message(peer, _packed(pieces))
        for peer, pieces in _messages((send, _sent_from(send, sources, targets)) for send in step.sends)
    ]
    arriving = [
        (pieces, Message(peer, _landing(pieces)))
        for peer, pieces in _messages((recv, targets[recv.target]) for recv in step.recvs)
    ]
    pending = transport.post(sends, [message for _, message in arriving])
    for copy in step.copies:
        into = _part(targets[copy.target], copy.piece.region, copy.target.region)
        into.copy_(_part(sources[copy.source], copy.piece.region, copy.source.region))
    pending.wait(timeout_s)
    for pieces, message in arriving:
        _unpack(pieces, message.payload)


def _sent_from(send: Send | Forward, sources: Locals, targets: Locals) -> torch.Tensor:
    match send:
        case Send():
            return sources[send.source]
        case Forward():
            return targets[send.source]
        case _:
            assert_never(send)


def _messages(
    pieces: Iterable[tuple[Send | Forward | Recv, torch.Tensor]],
) -> list[tuple[int, list[torch.Tensor]]]:
    """Group a round's pieces into messages: (peer, tensors), in an order that both ends derive alike.

    Large pieces come first, each alone, then one bucket of the small ones per peer.
    """
    direct: list[tuple[int, list[torch.Tensor]]] = []
    buckets: dict[int, list[torch.Tensor]] = {}
    for instruction, local in pieces:
        shard = instruction.target if isinstance(instruction, Recv) else instruction.source
        tensor = _part(local, instruction.piece.region, shard.region)
        if instruction.piece.nbytes >= DIRECT_BYTES:
            direct.append((instruction.peer, [tensor]))
        else:
            buckets.setdefault(instruction.peer, []).append(tensor)
    return direct + list(buckets.items())


def _packed(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of the pieces, one after the other; of a single contiguous piece, its own memory."""
    if len(pieces) == 1:
        return byte_view(_plain(pieces[0]))
    return torch.cat([byte_view(_plain(piece)) for piece in pieces])


def _plain(piece: torch.Tensor) -> torch.Tensor:
    """The piece as contiguous memory that holds its values; torch conjugates and negates views lazily."""
    return piece.resolve_conj().resolve_neg().contiguous()


def _landing(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Where a message lands: the piece's own memory if it is one contiguous piece, else a staging buffer."""
    if len(pieces) == 1 and pieces[0].is_contiguous():
        return byte_view(pieces[0])
    size_bytes = sum(piece.numel() * piece.element_size() for piece in pieces)
    return torch.empty(size_bytes, dtype=torch.uint8, device=pieces[0].device)


def _unpack(pieces: list[torch.Tensor], payload: torch.Tensor) -> None:
    if len(pieces) == 1 and pieces[0].is_contiguous():
        return  # landed in place
    start = 0
    for piece in pieces:
        stop = start + piece.numel() * piece.element_size()
        # Through bytes, not through payload.view(dtype): a bucket's offsets need not be aligned to the dtype.
        staged = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        byte_view(staged).copy_(payload[start:stop])
        piece.copy_(staged)
        start = stop


def _part(local: torch.Tensor, region: Region, shard_region: Region) -> torch.Tensor:
    """The view of a shard's local tensor that is ``region`` (both global)."""
    inside = region.relative_to(shard_region)
    for dim, (offset, size) in enumerate(zip(inside.offsets, inside.shape, strict=True)):
        local = local.narrow(dim, offset, size)
    return local


def _piece_bytes(instructions: Sequence[Copy | Send | Forward | Recv]) -> int:
    return sum(instruction.piece.nbytes for instruction in instructions)


def _check(shard: Shard, tensor: torch.Tensor | None, what: str) -> None:
    if tensor is None:
        raise Mismatch(f"{shard}: the layout says that this device {what} it, but no tensor was given")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != shard.region.shape or dtype != shard.tensor.dtype:
        raise Mismatch(
            f"{shard}: this device {what} a tensor of shape {tuple(tensor.shape)} and dtype {dtype}; "
            f"expected shape {shard.region.shape} and dtype {shard.tensor.dtype}; nothing was moved. "
            "What to do: describe the layout as the tensors really are"
        )
