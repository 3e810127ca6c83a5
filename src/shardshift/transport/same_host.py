"""Transport between processes of one machine that read one another's memory (Linux ``process_vm_readv``).

A wrapper: ``inner`` carries what cannot go directly, between hosts above all. On CPU a socket costs a copy into the
kernel and one out of it, and gloo needs flat bytes before that; here a receiver copies once, from the sender's tensors
into its own, strided or not. ``probe`` finds out between which processes that works, ``wires`` has the protocol of
a pair. One thread per transport serves all wires, so bytes move as soon as both ends have posted, whoever waits for
whom; it reads without the interpreter lock.

Offers and acknowledgements go over sockets of their own and not over ``inner``: a thread that waits for the next of
several peers' messages needs something to poll, and a socket tells at once when the peer is gone.

After an error of a round its buffers may still be written or read until the transport is closed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from .offers import Bounces
from .probe import Link, MemoryReader, connect_links, why_not
from .process_group import device_ids
from .protocol import Message, Pending, Transport, TransportError
from .wires import Arrival, Departure, Ticket, Wire

Work = TypeVar("Work", Arrival, Departure)

_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Foreseen(Message):
    """A message to or from a direct peer, worked out."""

    work: Departure | Arrival


class SameHostTransport:
    """Direct copies where ``links`` lead, ``inner`` for everything else. Used from one thread at a time.

    Args:
        inner: carries messages to other peers, and those of tensors that are not in host memory, which have to be
            flat and have to be so on both sides. Closed with this one.
        links: as ``connect_links`` gives them; owned from now on.
    """

    def __init__(self, inner: Transport, links: Mapping[int, Link]) -> None:
        self._inner = inner
        self._peers = frozenset(links)
        self._closed = False
        self._worker = _Worker(inner.device, links) if links else None

    @classmethod
    def over(
        cls,
        inner: Transport,
        store: dist.Store,
        devices: int | Sequence[int],
        timeout_s: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> SameHostTransport:
        """Probe which peers can be reached directly, and wrap ``inner``.

        Args:
            inner: between the same devices.
            store: a prefix that nothing else uses.
            devices: as ``inner`` was given them; every one of them calls this.
            timeout_s: for meeting.
            say: is told in one line with whom the direct path is not used, and why; not called if it always is.

        Raises:
            TransportError: if the devices did not all come within ``timeout_s``.
        """
        links, faults = connect_links(store, inner.device, device_ids(inner.device, devices), timeout_s)
        if faults:
            say(why_not(faults))
        return cls(inner, links)

    @property
    def device(self) -> int:
        """This side's device id."""
        return self._inner.device

    @property
    def direct_peers(self) -> frozenset[int]:
        """The peers whose memory is read."""
        return self._peers

    def takes_views(self, peer: int) -> bool:
        """Yes for a direct peer, of tensors in host memory; else what ``inner`` says."""
        return peer in self._peers or self._inner.takes_views(peer)

    def foresee(self, message: Message, *, arrives: bool) -> Message:
        """With its table of runs, if it goes directly. Its memory must stay where it is."""
        if not self._is_direct(message):
            return message
        work = Arrival(message) if arrives else Departure(message, foreseen=True)
        return _Foreseen(message.peer, message.parts, work)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages of a round."""
        if self._closed:
            raise TransportError("the transport is closed")
        near_sends, far_sends = self._parted(sends)
        near_recvs, far_recvs = self._parted(recvs)
        far = self._inner.post(far_sends, far_recvs) if far_sends or far_recvs else None
        if self._worker is None or not (near_sends or near_recvs):
            return _PendingRound(None, None, far)
        return _PendingRound(self._worker, self._worker.post(near_sends, near_recvs), far)

    def close(self) -> None:
        """End the thread, close sockets and ``inner``; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._worker is not None:
                self._worker.stop()
            self._inner.close()

    def _parted(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        near: list[Message] = []
        far: list[Message] = []
        for message in messages:
            (near if self._is_direct(message) else far).append(message)
        return near, far

    def _is_direct(self, message: Message) -> bool:
        if isinstance(message, _Foreseen):
            return True
        return message.peer in self._peers and all(part.is_cpu for part in message.parts)


class _PendingRound:
    def __init__(self, worker: _Worker | None, ticket: Ticket | None, far: Pending | None) -> None:
        self._worker, self._ticket, self._far = worker, ticket, far

    def wait(self, timeout_s: float) -> None:
        if self._ticket is not None:
            self.complete(timeout_s)
        elif self._far is not None:
            self._far.wait(timeout_s)

    def complete(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._worker is not None and self._ticket is not None:
            if not self._ticket.done.wait(max(timeout_s, 0.0)):
                self._worker.give_up(self._ticket, f"not complete within {timeout_s:.1f} s")
            if self._ticket.fault:
                raise TransportError(self._ticket.fault)
        if self._far is not None:
            self._far.complete(deadline - time.monotonic())


class _Worker:
    """The thread that serves all wires of a transport. Other threads only leave orders, and wake it."""

    def __init__(self, device: int, links: Mapping[int, Link]) -> None:
        reader, bounces = MemoryReader(), Bounces()
        self._device = device
        self._wires = {peer: Wire(device, link, reader, bounces) for peer, link in links.items()}
        self._orders: deque[Callable[[], None]] = deque()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._waker, select.POLLIN)
        self._by_fd: dict[int, Wire] = {}
        self._blocked = set[int]()  # peers of wires whose sockets are watched for room
        self._stirred: dict[int, Wire] = {}  # by peer the wires that may have something due
        for wire in self._wires.values():
            for fd in (wire.link.socket.fileno(), wire.link.pidfd):
                self._by_fd[fd] = wire
                self._poll.register(fd, select.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"shardshift-same-host-{device}", daemon=True)
        self._thread.start()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Ticket:
        """Start messages.

        Raises:
            TransportError: if a peer is known to be gone.
        """
        for message in (*sends, *recvs):
            if fault := self._wires[message.peer].fault:
                raise TransportError(fault)
        ticket = Ticket(len(sends) + len(recvs))

        def start() -> None:
            try:
                for message in recvs:
                    self._stir(message.peer).ask(_worked_out(message, Arrival), ticket)
                for message in sends:
                    self._stir(message.peer).give(_worked_out(message, Departure), ticket)
            except Exception as error:  # their order says which is which, so no message may be left out of it
                fault = f"{type(error).__name__}: {error}"
                for message in (*recvs, *sends):
                    self._break(self._wires[message.peer], fault)
                ticket.fail(f"device {self._device}: {fault}")

        self._order(start)
        return ticket

    def give_up(self, ticket: Ticket, fault: str) -> None:
        """Break the wires on which a round is not complete; return when it has failed or, at the last, succeeded."""

        def give_up() -> None:
            for wire in self._wires.values():
                if wire.has(ticket):
                    self._break(wire, fault)

        self._order(give_up)
        if not ticket.done.wait(_JOIN_S if self._thread.is_alive() else 0.0):
            ticket.fail(f"device {self._device}: {fault}")

    def stop(self) -> None:
        """End the thread and close all wires."""

        def stop() -> None:
            self._stopping = True

        self._order(stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._waker)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._waker, 1)

    def _run(self) -> None:
        fault = ""
        try:
            # A thread has a mode of its own. Parts may be parameters, and may have been made in inference mode.
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException as error:  # of ours: whoever waits must hear of it
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            for wire in self._wires.values():
                wire.fail(fault or "the transport was closed", tell=bool(fault))
            while self._orders:
                self._orders.popleft()()

    def _turn(self) -> None:
        while self._orders:
            self._orders.popleft()()
        busy = False
        for peer, wire in list(self._stirred.items()):  # a device may have hundreds of peers, and bytes for a few
            if wire.due and not wire.fault:
                busy |= self._on(wire, Wire.step)
            else:
                del self._stirred[peer]
        for fd, _ in self._poll.poll(0 if busy or self._orders or self._stopping else None):
            if fd == self._waker:
                os.eventfd_read(self._waker)
            elif (of := self._by_fd.get(fd)) is not None:  # else broken a moment ago
                self._on(self._stir(of.link.peer), Wire.hear)
                if fd == of.link.pidfd:  # what it has said before it ended counted
                    self._break(of, "its process has ended")

    def _stir(self, peer: int) -> Wire:
        """A wire that may have something due from now on."""
        wire = self._stirred[peer] = self._wires[peer]
        return wire

    def _on(self, wire: Wire, act: Callable[[Wire], object]) -> bool:
        """Do something with a wire; break it if that fails."""
        try:
            more = bool(act(wire))
            if wire.blocked != (wire.link.peer in self._blocked) and not wire.fault:
                self._blocked ^= {wire.link.peer}
                events = select.POLLIN | (select.POLLOUT if wire.blocked else 0)
                self._poll.modify(wire.link.socket.fileno(), events)
            return more
        except TransportError as error:
            self._break(wire, str(error))
        except OSError as error:
            self._break(wire, error.strerror or str(error))
        return False

    def _break(self, wire: Wire, fault: str) -> None:
        if not wire.fault:
            for fd in (wire.link.socket.fileno(), wire.link.pidfd):
                self._poll.unregister(fd)
                del self._by_fd[fd]
            wire.fail(fault)


def _worked_out(message: Message, way: type[Work]) -> Work:
    """A message as a wire takes it: as it was foreseen, or made now."""
    if isinstance(message, _Foreseen) and isinstance(message.work, way):
        return message.work
    return way(message)
