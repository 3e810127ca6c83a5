"""The transport protocol: how one round's bytes get from device to device.

A transport knows nothing of tensors, layouts or plans. It is handed flat, contiguous byte views and the ids
of peers, and its contract is small enough that one conformance suite (``tests/transport/conformance.py``)
holds every implementation to it:

1. ``post`` starts every message of a round and returns without waiting for any.
2. Between one sender and one receiver, messages match in the order in which each side lists them; there are
   no tags, since NCCL has none.
3. ``Pending.wait`` returns only when every posted byte has landed and every sent buffer may be reused.
4. A peer that is gone, or a wait longer than allowed, raises ``TransportError``; it never hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class TransportError(Exception):
    """The bytes of a round did not all arrive: a peer is gone, or did not answer in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One buffer to or from one peer.

    Attributes:
        peer: device id of the other end.
        payload: contiguous 1-dim uint8 tensor; sent from or received into.
    """

    peer: int
    payload: torch.Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when all messages of the round are complete on this side.

        Raises:
            TransportError: if a peer is gone, or ``timeout_s`` passed first.
        """


class Transport(Protocol):
    """Moves byte buffers between devices."""

    @property
    def device(self) -> int:
        """This side's device id."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages of a round.

        Raises:
            TransportError: if a peer is already known to be gone.
        """

    def close(self) -> None:
        """Give back sockets and threads. Nothing may be posted afterwards."""
