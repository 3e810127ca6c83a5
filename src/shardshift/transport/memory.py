"""Transport between threads of one process: for tests, the user's as well.

``MemoryHub(n)`` joins n devices; each thread takes ``hub.transport(device)``. The k-th message sent from one device to
another meets the k-th that is asked for; ``complete`` of either end copies it once both are there.

What the hub can do beside: give the contract its sharpest reading (``views``, ``deferred``), and break on demand
(``cut``, ``fail_post``, ``cut_at_post``, ``flip``, ``hold``). By default a message is copied when it is sent, as a
network would buffer it. *Deferred* is the opposite: nothing is copied before ``complete``, and ``wait`` returns at
once, as it does on NCCL. An engine that trusts ``wait`` then reads targets full of ``POISON``, or sends what it has
written over a source; such sources are in ``violations`` too.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .faults import Faults, Violation
from .protocol import Message, Pending, TransportError
from .views import byte_view, pack, spread

POISON: Final = 0xDB
"""Every byte of a target from its post to its landing, in a deferred hub; and what a released source sends."""


@dataclass(eq=False, slots=True)
class _Sent:
    source: int
    target: int
    number: int
    parts: tuple[torch.Tensor, ...]
    nbytes: int
    checksum: int = 0  # of a deferred message when it was posted
    buffered: bool = False  # the sender's buffers are free
    landed: bool = False
    fault: str = ""


@dataclass(eq=False, slots=True)
class _Asked:
    message: Message
    sent: _Sent | None = None  # once it was claimed by whoever copies it
    landed: bool = False
    fault: str = ""


@dataclass(slots=True)
class _Wire:
    """One ordered pair: messages that have not met yet."""

    sent: list[_Sent] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)
    count: int = 0


class MemoryHub:
    """The wires between some threads.

    Args:
        devices: how many, with ids from 0, or their ids.
        views: whether messages may have several parts, strided ones too.
        deferred: whether bytes land at ``complete`` only, and are read only then.

    Attributes:
        devices: the ids.
        views: see above.
        deferred: see above.
        violations: sources of a deferred hub that were written or released too early.
    """

    def __init__(self, devices: int | Sequence[int], *, views: bool = False, deferred: bool = False) -> None:
        self.devices = tuple(range(devices)) if isinstance(devices, int) else tuple(devices)
        self.views, self.deferred = views, deferred
        self.violations: list[Violation] = []
        self._faults = Faults()
        self._wires: dict[tuple[int, int], _Wire] = {}
        self._posts = dict.fromkeys(self.devices, 0)
        self._changed = threading.Condition()

    def transport(self, device: int) -> MemoryTransport:
        """The end that belongs to ``device``."""
        if device not in self.devices:
            raise ValueError(f"device {device} is not among the {len(self.devices)} of this hub: {self.devices}")
        return MemoryTransport(self, device)

    def cut(self, device: int) -> None:
        """From now on every message to or from ``device`` fails, also one that a peer already waits for."""
        with self._changed:
            self._cut(device)

    def cut_at_post(self, device: int, number: int) -> None:
        """Cut ``device`` when it posts for the time ``number`` (from 0): that post raises, and all later ones."""
        with self._changed:
            self._faults.dying.add((device, number))

    def fail_post(self, device: int, number: int) -> None:
        """Let the post ``number`` (from 0) of ``device`` raise and post nothing; the device lives on."""
        with self._changed:
            self._faults.failing.add((device, number))

    def flip(self, source: int, target: int, number: int, bit: int = 0) -> None:
        """Turn one bit, counted from the first byte's lowest, of the message ``number`` (from 0) of a pair."""
        with self._changed:
            self._faults.flipped.setdefault((source, target, number), []).append(bit)

    def hold(self, source: int, target: int) -> None:
        """Keep the messages of a pair on their way until ``release``, also those that are under way."""
        with self._changed:
            self._faults.held.add((source, target))

    def release(self, source: int, target: int) -> None:
        """Let the messages of a pair go on."""
        with self._changed:
            self._faults.held.discard((source, target))
            self._changed.notify_all()

    def _cut(self, device: int) -> None:
        self._faults.gone.add(device)
        self._changed.notify_all()

    def _post(self, device: int, sends: Sequence[Message], recvs: Sequence[Message]) -> _PendingRound:
        sent, asked = [], []
        copies = [None if self.deferred else pack(message.parts).clone() for message in sends]
        with self._changed:
            number = self._posts[device]
            self._posts[device] += 1
            if (device, number) in self._faults.dying:
                self._cut(device)
            if (device, number) in self._faults.failing:
                raise TransportError(f"device {device}: its post {number} was made to fail")
            for message in (*sends, *recvs):
                if gone := self._faults.gone & {device, message.peer}:
                    raise TransportError(_is_gone(device, message.peer, min(gone)))
            for message, copy in zip(sends, copies, strict=True):
                wire = self._wire(device, message.peer)
                one = _Sent(device, message.peer, wire.count, message.parts, message.nbytes)
                if copy is None:
                    one.checksum = _checksum(message.parts)
                else:
                    one.parts, one.buffered = (copy,), True
                wire.count += 1
                wire.sent.append(one)
                sent.append(one)
            for message in recvs:
                wanted = _Asked(message)
                self._wire(message.peer, device).asked.append(wanted)
                asked.append(wanted)
                if self.deferred:
                    _poison(message.parts)
            self._changed.notify_all()
        return _PendingRound(self, device, sent, asked)

    def _complete(self, device: int, sent: list[_Sent], asked: list[_Asked], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pairs = {(one.source, one.target) for one in sent} | {(one.message.peer, device) for one in asked}
        with self._changed:
            while True:
                for source, target in sorted(pairs):
                    while self._land(source, target):
                        pass
                if faults := [one.fault for one in sent if one.fault] + [one.fault for one in asked if one.fault]:
                    raise TransportError(faults[0])
                late = {one.target for one in sent if not (one.landed or one.buffered)}
                late |= {one.message.peer for one in asked if not one.landed}
                if not late:
                    return
                if gone := self._faults.gone & {*late, device}:
                    raise TransportError(_is_gone(device, min(late), min(gone)))
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TransportError(
                        f"device {device} waited {timeout_s:.1f} s for device {', '.join(map(str, sorted(late)))}"
                    )
                self._changed.wait(left_s)

    def _land(self, source: int, target: int) -> bool:
        """Copy the next message of a pair, if both ends are there; under the lock, so that each is copied once."""
        wire = self._wire(source, target)
        if not wire.sent or not wire.asked or (source, target) in self._faults.held:
            return False
        if self._faults.gone & {source, target} and not wire.sent[0].buffered:
            return False
        one, wanted = wire.sent.pop(0), wire.asked.pop(0)
        if one.nbytes != wanted.message.nbytes:
            one.fault = wanted.fault = (
                f"device {target} expected {wanted.message.nbytes} bytes from device {source}, got {one.nbytes}"
            )
        else:
            spread(self._payload(one), wanted.message.parts)
            one.landed = one.buffered = wanted.landed = True
        one.parts = ()
        self._changed.notify_all()
        return True

    def _payload(self, one: _Sent) -> torch.Tensor:
        """What arrives of a message, with the faults that are due."""
        if any(_released(part) for part in one.parts):
            self.violations.append(Violation(one.source, one.target, one.number, "released"))
            return torch.full((one.nbytes,), POISON, dtype=torch.uint8)
        if self.deferred and _checksum(one.parts) != one.checksum:
            self.violations.append(Violation(one.source, one.target, one.number, "written"))
        payload = pack(one.parts)
        if bits := self._faults.flipped.get((one.source, one.target, one.number)):
            payload = payload.clone()
            for bit in bits:
                payload[bit // 8] ^= 1 << bit % 8
        return payload

    def _wire(self, source: int, target: int) -> _Wire:
        return self._wires.setdefault((source, target), _Wire())


class MemoryTransport:
    """One device's end of a ``MemoryHub``."""

    def __init__(self, hub: MemoryHub, device: int) -> None:
        self._hub = hub
        self._device = device
        self._closed = False

    @property
    def device(self) -> int:
        """This side's device id."""
        return self._device

    def takes_views(self, peer: int) -> bool:
        """What the hub was made with."""
        return self._hub.views

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Put messages on their wires."""
        if self._closed:
            raise TransportError("the transport is closed")
        for message in (*sends, *recvs):
            if not self._hub.views and not (
                len(message.parts) == 1 and message.parts[0].dtype == torch.uint8 and message.parts[0].is_contiguous()
            ):
                raise ValueError(f"the message with device {message.peer} is not flat, and this hub takes no views")
        return self._hub._post(self._device, sends, recvs)

    def close(self) -> None:
        """Nothing may be posted afterwards."""
        self._closed = True


class _PendingRound:
    def __init__(self, hub: MemoryHub, device: int, sent: list[_Sent], asked: list[_Asked]) -> None:
        self._hub, self._device, self._sent, self._asked = hub, device, sent, asked

    def wait(self, timeout_s: float) -> None:
        if not self._hub.deferred:
            self.complete(timeout_s)

    def complete(self, timeout_s: float) -> None:
        with torch.inference_mode():
            self._hub._complete(self._device, self._sent, self._asked, timeout_s)


def _is_gone(device: int, peer: int, gone: int) -> str:
    return f"device {device} with device {peer}: device {gone} is gone"


def _released(part: torch.Tensor) -> bool:
    """Whether the storage of a view was given back under it."""
    if not part.numel():
        return False
    last = part.storage_offset() + sum((size - 1) * s for size, s in zip(part.shape, part.stride(), strict=True))
    return part.untyped_storage().nbytes() < (last + 1) * part.element_size()


def _checksum(parts: Sequence[torch.Tensor]) -> int:
    # Of a copy: a storage that numpy has seen cannot be resized any more, which is how a source is released.
    array: Any = pack(parts).clone().numpy()  # a buffer, which numpy's stub does not say
    return zlib.crc32(array)


def _poison(parts: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():
        for part in parts:
            if part.is_contiguous():
                byte_view(part).fill_(POISON)
            else:
                plain = torch.empty(part.shape, dtype=part.dtype)
                byte_view(plain).fill_(POISON)
                part.copy_(plain)
