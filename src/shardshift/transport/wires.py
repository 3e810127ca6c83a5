"""What goes over the socket between two processes of one host, while one reads the other's memory.

1. The sender of a message *offers* it, in pieces: tables of up to ``IOV_MAX`` runs of its memory and of a bounce buffer
   that short runs were packed in; a small message is sent itself (``offers``).
2. The receiver takes offers in their order, as soon as it has been asked for a message: it reads the runs (or takes the
   bytes) into the runs of its own parts, and acknowledges. Parts with short runs are filled by way of a scratch buffer.
3. A sender has at most ``WINDOW`` offers open on a wire, so what waits at the receiver is bounded. Its message is
   complete when all its offers are acknowledged; until then the source must be neither freed nor written.

An acknowledgement that cannot be sent means that the sender is gone, and what was read from it may be anything: so a
message is complete only after its last acknowledgement was sent and the sender's process was seen alive after that.
Where the socket has no room for the acknowledgement, the message waits for that, landed and not complete.

Whoever gives up says why, if there is room, so that the error at the other end is not only that this one is gone.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from .offers import INLINE_BYTES, Bounces, Read, Say, offers_of, prepared
from .probe import IOV_MAX, Link, MemoryReader
from .protocol import Message, TransportError
from .views import Runs, one_run, segments, spread

WINDOW: Final = 16
_CALL_BYTES: Final = 16 << 20
_SHORTEST_IN_BYTES: Final = 256
_SCRATCH_BYTES: Final = 1 << 18
_ACKS_TOGETHER: Final = WINDOW // 4

_HEAD: Final = struct.Struct("<IIQQ")  # what, how many (runs or acknowledgements), bytes, bytes of the whole message
_RUNS, _INLINE, _ACK, _FAULT = 1, 2, 3, 4
_FAULT_BYTES: Final = 1000

_Packet: TypeAlias = list[Any]  # buffers


class Ticket:
    """A round's messages over wires: how many are open, and what went wrong. Changed by the worker's thread only."""

    def __init__(self, messages: int) -> None:
        self.open = messages
        self.fault = ""
        self.done = threading.Event()

    def ended(self) -> None:
        """One more message is complete."""
        self.open -= 1
        if not self.open:
            self.done.set()

    def fail(self, fault: str) -> None:
        """A message will never be complete."""
        self.fault = self.fault or fault
        self.done.set()


class Departure:
    """A message to the peer, as far as it was offered.

    Args:
        message: to send.
        foreseen: whether all its offers are worked out now, at 1/500 of its bytes, and not as there is room for them.
    """

    ticket: Ticket

    def __init__(self, message: Message, *, foreseen: bool = False) -> None:
        self.message = message
        self.nbytes = message.nbytes
        self.unacknowledged = 0
        offers = offers_of(message, self.nbytes)
        self._offers = iter(list(offers)) if foreseen else offers
        self.ahead = next(self._offers, None)

    def offered(self) -> None:
        """The offer that was ahead is on its way."""
        self.ahead = next(self._offers, None)
        self.unacknowledged += 1

    def acknowledged(self) -> None:
        """An offer was taken."""
        self.unacknowledged -= 1
        if not self.unacknowledged and self.ahead is None:
            self.ticket.ended()


class Arrival:
    """A message from the peer, as far as it has landed.

    Args:
        message: to receive.
    """

    ticket: Ticket

    def __init__(self, message: Message) -> None:
        self.message = message
        self.nbytes = self.left_bytes = message.nbytes
        self._segments = segments(message.parts, shortest_bytes=_SHORTEST_IN_BYTES, block_bytes=_SCRATCH_BYTES)
        self._runs: Runs | None = None
        self._block: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None
        self._ahead = next(self._segments, None)  # now, and not when the sender has made its offers

    def room(self) -> Runs:
        """Where the next bytes go."""
        if self._runs is None:
            found = next(self._segments) if self._ahead is None else self._ahead
            self._ahead = None
            if isinstance(found, Runs):
                self._runs = found
            else:
                if self._scratch is None:
                    self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
                self._block = found
                self._runs = one_run(self._scratch.data_ptr(), found.nbytes)
        return self._runs

    def advance(self, nbytes: int) -> None:
        """So many bytes have landed."""
        assert self._runs is not None
        self._runs.advance(nbytes)
        self.left_bytes -= nbytes
        if self._runs.left_bytes:
            return
        if self._block is not None and self._scratch is not None:
            spread(self._scratch[: self._block.nbytes], [self._block])
        self._runs = self._block = None


class Wire:
    """One end of a link. All methods are the worker's thread's.

    Args:
        device: this side's id.
        link: owned from now on.
        reader: reads the peer's memory.
        bounces: shared with the other wires of the transport.

    Attributes:
        link: see above.
        fault: why it can no longer be used; empty as long as it can.
    """

    def __init__(self, device: int, link: Link, reader: MemoryReader, bounces: Bounces) -> None:
        self.link, self.fault = link, ""
        self._device, self._reader, self._bounces = device, reader, bounces
        self._asked: deque[Arrival] = deque()
        self._landed: deque[Arrival] = deque()  # but for the acknowledgement, which may wait for room
        self._given: deque[Departure] = deque()
        self._open: deque[tuple[Departure, torch.Tensor | None]] = deque()  # offers that are not acknowledged yet
        self._inbox: deque[tuple[int, int, int, int, bytes]] = deque()
        self._out: deque[_Packet] = deque()
        self._acks = 0
        self._buffer = bytearray(INLINE_BYTES + _HEAD.size)
        self._alive = select.poll()
        self._alive.register(link.pidfd, select.POLLIN)

    @property
    def due(self) -> bool:
        """Whether ``step`` may find something to do."""
        takes = self._acks or (self._inbox and self._asked)
        return bool(takes or self._out or (self._given and len(self._open) < WINDOW))

    @property
    def blocked(self) -> bool:
        """Whether packets wait for room in the socket."""
        return bool(self._out)

    def give(self, departure: Departure, ticket: Ticket) -> None:
        """Send a message."""
        if self.fault:
            ticket.fail(self.fault)
            return
        departure.ticket = ticket
        self._given.append(departure)

    def ask(self, arrival: Arrival, ticket: Ticket) -> None:
        """Receive a message."""
        if self.fault:
            ticket.fail(self.fault)
            return
        arrival.ticket = ticket
        self._asked.append(arrival)

    def hear(self) -> None:
        """Take all packets that have come.

        Raises:
            TransportError: if the peer has closed its end, or given up.
            OSError: if the socket is broken.
        """
        while True:
            try:
                size = self.link.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it did not read all that came, which is said once, and before what it has sent
            if not size:
                raise TransportError("it has closed its end, or its process has ended")
            what, count, nbytes, whole = _HEAD.unpack_from(self._buffer)
            if what == _FAULT:
                why = self._buffer[_HEAD.size : size].decode(errors="replace")
                raise TransportError(f"it has given up: {why}")
            if what != _ACK:
                self._inbox.append((what, count, nbytes, whole, bytes(self._buffer[_HEAD.size : size])))
                continue
            for _ in range(count):
                departure, bounce = self._open.popleft()
                if bounce is not None:
                    self._bounces.give(bounce)
                departure.acknowledged()

    def step(self) -> bool:
        """Take one offer and make what may be made.

        Returns:
            Whether there is more to do at once.

        Raises:
            TransportError: if the peer's memory cannot be read, or the two ends do not agree.
            OSError: if the socket is broken.
        """
        while self._out:
            if not self._try_send(self._out[0]):
                break
            self._out.popleft()
        while self._given and len(self._open) < WINDOW and not self._out:
            if not self._offer(self._given[0]):
                break  # other wires have all bounce buffers, and this one has some
            if self._given[0].ahead is None:
                self._given.popleft()
        if self._inbox and self._asked:
            self._take(self._asked[0], *self._inbox.popleft())
        more = bool(self._inbox and self._asked)
        if self._acks and (self._acks >= _ACKS_TOGETHER or not more):
            self._acknowledge()
        if self._landed and not self._out:
            if self._alive.poll(0):
                raise TransportError("its process has ended")
            while self._landed:
                self._landed.popleft().ticket.ended()
        return more

    def fail(self, fault: str, *, tell: bool = True) -> None:
        """Give up: every open message fails, descriptors are closed.

        Args:
            fault: why; it does not name the peer, who may be told.
            tell: whether the peer is told.
        """
        if self.fault:
            return
        if tell:
            with suppress(OSError):  # it may be gone, or its socket full
                self.link.socket.sendmsg([_HEAD.pack(_FAULT, 0, 0, 0), fault.encode()[:_FAULT_BYTES]])
        self.fault = f"device {self._device} with device {self.link.peer}: {fault}"
        for ticket in self._tickets():
            ticket.fail(self.fault)
        for _, bounce in self._open:
            if bounce is not None:
                self._bounces.give(bounce)
        for queue in (self._asked, self._landed, self._given, self._open, self._inbox, self._out):
            queue.clear()
        self.link.close()

    def has(self, ticket: Ticket) -> bool:
        """Whether a message of this round is open here."""
        return any(one is ticket for one in self._tickets())

    def _tickets(self) -> list[Ticket]:
        leaving = (*self._given, *(departure for departure, _ in self._open))
        return [one.ticket for one in (*self._asked, *self._landed)] + [one.ticket for one in leaving]

    def _offer(self, departure: Departure) -> bool:
        """Offer what is ahead of a message; whether there was room for it."""
        offer, bounce = departure.ahead, None
        assert offer is not None
        if isinstance(offer, Read) and offer.packs:
            bounce = self._bounces.take(only=all(held is None for _, held in self._open))
            if bounce is None:
                return False
        rows = prepared(offer, bounce)
        if rows is None:
            assert isinstance(offer, Say)
            payload = offer.payload()
            self._send([_HEAD.pack(_INLINE, 0, payload.nbytes, departure.nbytes), payload.numpy()])
        else:
            self._send([_HEAD.pack(_RUNS, len(rows), int(rows[:, 1].sum()), departure.nbytes), rows])
        self._open.append((departure, bounce))
        departure.offered()
        return True

    def _take(self, arrival: Arrival, what: int, count: int, nbytes: int, whole: int, content: bytes) -> None:
        if whole != arrival.nbytes:
            raise TransportError(
                f"device {self._device} expected {arrival.nbytes} bytes from device {self.link.peer}, got {whole}"
            )
        if what == _INLINE:
            pid, source = os.getpid(), one_run(np.frombuffer(content, np.uint8).ctypes.data if nbytes else 0, nbytes)
        else:
            pid, source = self.link.pid, Runs(np.frombuffer(content, np.int64).reshape(count, 2))
        while source.left_bytes:
            room = arrival.room()
            step = min(room.reach(_CALL_BYTES, IOV_MAX), source.reach(_CALL_BYTES, IOV_MAX))
            try:
                got = self._reader.read(pid, room.peek(step), source.peek(step))
            except OSError as error:
                raise TransportError(f"{self._unreadable}: {error.strerror}") from error
            if not got:
                raise TransportError(f"{self._unreadable}: nothing came")
            arrival.advance(got)
            source.advance(got)
        self._acks += 1
        if not arrival.left_bytes:
            self._acknowledge()
            self._landed.append(self._asked.popleft())

    @property
    def _unreadable(self) -> str:
        return f"the memory of device {self.link.peer} cannot be read"

    def _acknowledge(self) -> None:
        acks, self._acks = self._acks, 0
        self._send([_HEAD.pack(_ACK, acks, 0, 0)])

    def _send(self, packet: _Packet) -> None:
        if self._out or not self._try_send(packet):
            self._out.append(packet)

    def _try_send(self, packet: _Packet) -> bool:
        try:
            self.link.socket.sendmsg(packet)
        except BlockingIOError:
            return False
        return True
