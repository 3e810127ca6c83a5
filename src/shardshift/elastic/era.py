"""What one process has for an era, the time until a loss: its end of the control plane, its watch, its wires.

Wires (a transport) join all devices that could take part in a change. A set of wires has a number, which the lead puts
into each proposal: whoever has not that one yet meets the others of the proposal to make it. So as long as nobody
joins, all changes go over one set, and a set for a joiner is made while training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ..coordination import Control, Watch, era_store
from ..engine.events import Notice
from ..transport import Transport, connect
from .member import Member
from .settings import Settings


class Era:
    """One process's part in an era. It is closed when the era fails, and when the session ends.

    Args:
        number: of the era.
        member: this process.
        store: the member's, as it is asked here: each request is answered in time, or raises.
        settings: of the session.
        concerned: the devices whose loss is this process's loss, until the watch is told otherwise.
        failed: called once, in another thread, when the era has failed.
        store_lost: the same when the store does not answer any more.

    Attributes:
        number: of the era.
        control: this process's end of the control plane.
        watch: tells who is behind a failure.
        wires_number: which wires there are; -1 for none.
        ends: the devices that they join.
    """

    def __init__(
        self,
        number: int,
        member: Member,
        store: dist.Store,
        settings: Settings,
        concerned: Sequence[int],
        failed: Callable[[], None],
        store_lost: Callable[[], None],
    ) -> None:
        self.number = number
        self._settings = settings
        self._store = era_store(member.store, number)
        self.control = Control(era_store(store, number), member.device, settings.timeout_s)
        self.watch = Watch(self.control, concerned, failed, store_lost)
        self.wires_number = -1
        self.ends: tuple[int, ...] = ()
        self._wires: Transport | None = None

    def start(self) -> None:
        """Show life from now on."""
        self.watch.start()

    def next_wires(self, devices: Sequence[int]) -> int:
        """The lead's part: the number of the wires for a change among some devices."""
        return self.wires_number if self._wires is not None and {*devices} <= {*self.ends} else self.wires_number + 1

    def join(self, number: int, devices: Sequence[int]) -> None:
        """Have wires of a number; made now, with all of its devices, unless they are there.

        Raises:
            TransportError: if the others did not come.
        """
        if number == self.wires_number:
            return
        self._cut()
        self.wires_number, self.ends = number, tuple(devices)
        self._wires = connect(
            dist.PrefixStore(f"wires/{number}", self._store),
            self.control.device,
            self.ends,
            self._settings.timeout_s,
            kind=self._settings.transport,
            address=self._settings.address,
            say=self._say,
        )

    @property
    def wires(self) -> Transport:
        """The transport; ``join`` comes first."""
        assert self._wires is not None
        return self._wires

    def end(self) -> None:
        """Give back threads, sockets and memory, in whatever state they are."""
        self.watch.stop()
        self._cut()

    def _cut(self) -> None:
        wires, self._wires = self._wires, None
        if wires is not None:
            wires.close()

    def _say(self, text: str) -> None:
        self._settings.sink(Notice(self.control.device, text, time.perf_counter()))
