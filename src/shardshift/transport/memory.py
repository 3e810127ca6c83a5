"""Transport between threads of one process: for tests, the user's as well.

``MemoryHub(n)`` joins n devices; each thread takes ``hub.transport(device)``. Every ordered pair of devices has
a queue. A sent buffer is copied into the queue at once, as a network would buffer it, so a receiver never sees
what the sender writes later.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

import torch

from .protocol import Message, Pending, TransportError


class MemoryHub:
    """The wires between ``devices`` threads. ``cut(device)`` makes a device unreachable, as if it had died."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._wires: dict[tuple[int, int], queue.Queue[torch.Tensor | None]] = {}
        self._gone: set[int] = set()

    def transport(self, device: int) -> MemoryTransport:
        """The end that belongs to ``device``."""
        if not 0 <= device < self.devices:
            raise ValueError(f"device {device} is not among the {self.devices} of this hub")
        return MemoryTransport(self, device)

    def cut(self, device: int) -> None:
        """From now on every message to or from ``device`` fails, also one that a peer already waits for."""
        self._gone.add(device)
        for peer in range(self.devices):
            self._wire(device, peer).put(None)

    def send(self, source: int, target: int, payload: torch.Tensor) -> None:
        """Put a copy of ``payload`` on the wire."""
        for device in (source, target):
            if device in self._gone:
                raise TransportError(f"device {source} to device {target}: device {device} is gone")
        self._wire(source, target).put(payload.clone())

    def recv(self, source: int, target: int, payload: torch.Tensor, timeout_s: float) -> None:
        """Wait for the next message on the wire and copy it into ``payload``."""
        try:
            arrived = self._wire(source, target).get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            raise TransportError(f"device {target} waited {timeout_s:.1f} s for device {source}") from None
        if arrived is None:
            self._wire(source, target).put(None)  # whoever asks again must not wait either
            raise TransportError(f"device {target} with device {source}: device {source} is gone")
        if arrived.numel() != payload.numel():
            raise TransportError(
                f"device {target} expected {payload.numel()} bytes from device {source}, got {arrived.numel()}"
            )
        payload.copy_(arrived)

    def _wire(self, source: int, target: int) -> queue.Queue[torch.Tensor | None]:
        # setdefault is atomic; a defaultdict lets two threads make two queues, and one end's messages are lost.
        return self._wires.setdefault((source, target), queue.Queue())


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

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Put the sends on their wires; the receives are read when waited for."""
        if self._closed:
            raise TransportError("the transport is closed")
        for message in sends:
            self._hub.send(self._device, message.peer, message.payload)
        return _PendingReads(self._hub, self._device, recvs)

    def close(self) -> None:
        """Nothing may be posted afterwards."""
        self._closed = True


class _PendingReads:
    def __init__(self, hub: MemoryHub, device: int, recvs: Sequence[Message]) -> None:
        self._hub, self._device, self._recvs = hub, device, recvs

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for message in self._recvs:
            self._hub.recv(message.peer, self._device, message.payload, deadline - time.monotonic())
