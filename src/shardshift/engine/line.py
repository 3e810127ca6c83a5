"""A line: what one process needs to move state with a fixed set of others. If the set changes, a new one is opened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch.distributed as dist

from ..coordination import AnsweringStore, Control, Watch
from ..transport import Transport, connect
from .events import Notice, Sink, guarded

Kind: TypeAlias = str | Callable[[dist.Store, int, Sequence[int]], Transport]


class Line:
    """Control plane, failure detection and transport between some devices.

    Args:
        store: where they meet; a prefix that nothing else uses.
        device: this process's id.
        devices: all ids; every one of them has to open its line.
        kind: of transport; see ``shardshift.transport.connect``. Or a function of (store, device, devices)
            that gives one.
        timeout_s: the longest that meeting, a round or an agreement may take.
        sink: is told of paths that are not taken.

    Raises:
        PeerLost: if not all come in time.

    Attributes:
        device: this process's id.
        devices: all ids, ascending.
        control: this process's end of the control plane.
        watch: tells who is behind a failure.
        transport: moves bytes.
        timeout_s: see above.
        sink: where the events of this process go.
    """

    def __init__(
        self, store: dist.Store, device: int, devices: Sequence[int], kind: Kind, timeout_s: float, sink: Sink
    ) -> None:
        self.device, self.devices, self.timeout_s, self.sink = device, tuple(sorted(devices)), timeout_s, guarded(sink)
        self.control = Control(AnsweringStore.over(store, timeout_s), device, timeout_s)
        self.watch = Watch(self.control, self.devices)
        self.transport: Transport | None = None
        try:
            with self.watch.peers():
                self.watch.start()
                self.watch.concern(self.devices)
                wires = dist.PrefixStore("wires", store)
                if callable(kind):
                    self.transport = kind(wires, device, self.devices)
                else:
                    self.transport = connect(wires, device, self.devices, timeout_s, kind=kind, say=self._say)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back threads and sockets; a second call does nothing."""
        self.watch.stop()
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()
        self.control.close()

    def _say(self, text: str) -> None:
        self.sink(Notice(self.device, text, time.perf_counter()))
