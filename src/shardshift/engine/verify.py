"""Digests of what was moved, end to end: a bit that flips on the way is found, named, and not committed.

1. The sender takes the digest of each part as it leaves, the receiver as it has landed: while the bytes are in the
   cache, in packed form where they are strided.
2. At the end of an epoch every sender tells each of its receivers the digests of all parts, in one message over the
   same transport; both know how many there are.
3. The receiver compares before the fence, so no device releases what a damaged copy was to replace.

What is forwarded is checked hop by hop: the forwarder digests what it sends out of its own memory. A digest in every
message was rejected, since the last byte of a large one would have to wait for it.
"""

from __future__ import annotations

import numpy as np
import torch

from ..transport import Message, Transport
from ..values import Mismatch
from .pieces import Bound, Parcel


class Ledger:
    """The digests of one device in one epoch."""

    def __init__(self) -> None:
        self._sent: dict[int, list[int]] = {}
        self._received: dict[int, list[int]] = {}
        self._parcels: dict[int, list[Parcel]] = {}

    def sent(self, bound: Bound) -> None:
        """Take the digests of a message that is being sent."""
        self._sent.setdefault(bound.parcel.peer, []).extend(bound.checksums())

    def received(self, bound: Bound) -> None:
        """Take the digests of a message that has landed."""
        self._received.setdefault(bound.parcel.peer, []).extend(bound.checksums())
        self._parcels.setdefault(bound.parcel.peer, []).append(bound.parcel)

    def settle(self, transport: Transport, device: torch.device, timeout_s: float) -> None:
        """Exchange the digests and compare.

        Args:
            transport: that the messages went over.
            device: where it takes payloads.
            timeout_s: the longest that this may take.

        Raises:
            Mismatch: naming the first part that differs, its sender and its receiver.
            TransportError: if a peer is gone or too slow.
        """
        told = {
            peer: torch.zeros(8 * len(own), dtype=torch.uint8, device=device) for peer, own in self._received.items()
        }
        sends = [
            Message.flat(peer, torch.from_numpy(np.array(own, np.uint64).view(np.uint8)).to(device))
            for peer, own in self._sent.items()
        ]
        transport.post(sends, [Message.flat(peer, landing) for peer, landing in told.items()]).complete(timeout_s)
        for peer, landed in told.items():
            differs = np.flatnonzero(landed.cpu().numpy().view(np.uint64) != np.array(self._received[peer], np.uint64))
            if differs.size:
                self._refuse(peer, transport.device, differs)

    def _refuse(self, peer: int, device: int, differs: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        parts = [part for parcel in self._parcels[peer] for part in parcel.parts]
        one, region, _ = parts[int(differs[0])]
        raise Mismatch(
            f"{one.piece.tensor}{region} was damaged on its way from device {peer} to device {device}: the digests of "
            f"{len(differs)} of {len(parts)} parts from there differ. It was not committed. What to do: try again; "
            "if it comes back, examine memory and network of the two"
        )
