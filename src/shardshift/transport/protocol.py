"""The transport protocol: how one round's bytes get from device to device.

A transport knows nothing of layouts or plans. It is handed bytes and the ids of peers, and its contract is small enough
that one conformance suite (``tests/transport/conformance.py``) holds every implementation to it:

1. ``post`` starts every message of a round and returns without waiting for any. Several rounds may be under way.
2. Between one sender and one receiver, messages match in the order in which each side posts and lists them; there are
   no tags, since NCCL has none.
3. ``Pending.complete`` returns only when every posted byte has landed and every sent buffer may be reused. Only that
   says so: ``wait`` may return before, as ``Work.wait`` does on NCCL, where it orders a stream and no more.
4. A peer that is gone, or a ``complete`` longer than allowed, raises ``TransportError``; it never hangs. The error says
   "device 0 with device 3", which is how it is found out who is to blame.
5. Both ends of a message say how many bytes it has. How these are cut into parts is each end's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


class TransportError(Exception):
    """The bytes of a round did not all arrive: a peer is gone, or did not answer in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Bytes to or from one peer.

    Attributes:
        peer: device id of the other end.
        parts: the tensors whose bytes make up the message, one after the other, each in row-major order. A single
            contiguous 1-dim uint8 tensor, unless the transport ``takes_views`` of this peer; then any number, of any
            strides and dtypes, none of them lazily conjugated or negated.
    """

    peer: int
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def flat(cls, peer: int, payload: torch.Tensor) -> Message:
        """A message that is one contiguous 1-dim uint8 tensor, which every transport takes."""
        return cls(peer, (payload,))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class Pending(Protocol):
    """Messages under way."""

    def wait(self, timeout_s: float) -> None:
        """Order what this thread puts on its current stream from now on after the messages.

        Nothing has to have arrived when it returns: see ``complete``.

        Raises:
            TransportError: if a peer is gone, or ``timeout_s`` passed first.
        """

    def complete(self, timeout_s: float) -> None:
        """Return when all messages of the round are complete on this side: landed, or their buffers free for reuse.

        Raises:
            TransportError: if a peer is gone, or ``timeout_s`` passed first.
        """


class Transport(Protocol):
    """Moves bytes between devices."""

    @property
    def device(self) -> int:
        """This side's device id."""

    def takes_views(self, peer: int) -> bool:
        """Whether messages from and to this peer may have several parts, strided ones too. Both ends say the same."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages of a round.

        Raises:
            TransportError: if a peer is already known to be gone.
        """

    def close(self) -> None:
        """Give back sockets and threads. Nothing may be posted afterwards."""


@runtime_checkable
class Foresees(Protocol):
    """A transport that can do a part of its work on a message before the devices agree to move."""

    def foresee(self, message: Message, *, arrives: bool) -> Message:
        """What to post in place of a message, once.

        Only where its parts lie is looked at, never what they hold: what is sent may be written until it is posted.

        Args:
            message: to be posted later.
            arrives: whether it will be received.
        """
