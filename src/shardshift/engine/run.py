"""The run loop: carries out one device's program on live tensors.

Rounds are this device's own (``schedule.compile``): the peers of one round may be in rounds of other numbers, and
nobody waits for a device that it has no message with. How pieces become messages is in ``pieces``, where they are
staged in ``staging``. Per epoch:

1. Its new shards get memory.
2. Two rounds are in flight. While a round is on the wire, the receives of the next are posted, its messages are packed
   and posted one by one, and its copies run; then the former is completed and unpacked, message by message. A message
   that forwards what the former round receives waits for that, and later ones to the same peer wait with it, since
   their order is all that says which is which.
3. When all rounds are complete, digests are compared (``verify``), if asked for.
4. ``fence``: all devices have come this far. Only then are old shards released.

Messages go out in the program's order, each device completes its rounds in their order, and the receives of a round
are posted no later than the round before is complete: so whatever can be run one round after the other can be run so.

On GPUs a batch waits, in the order of a stream, for the one before, so receives that are posted apart from the sends of
their round could wait for each other in a circle. There a round is one batch, posted when all of it can be sent.

Whatever fails, old shards that are not released are whole, and the journal says what else is. Handing strided views to
a flat transport was rejected, since gloo sends the wrong bytes of them without a word.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

from ..schedule import Forward, Round
from ..transport import Pending, Transport
from ..values import Region, Shard
from .events import FencePassed, LinkBytes, RoundEnded, Sink, nowhere
from .journal import Journal, Live, check_live
from .pages import Pages
from .pieces import Bound, Moved, Parcel, copy_all, parcels_of
from .staging import Arena
from .verify import Ledger

__all__ = ["check_live", "no_fence", "run_program"]


def no_fence(epoch: int) -> None:
    """The fence of a device that has nobody to wait for."""


def run_program(
    journal: Journal,
    transport: Transport,
    *,
    staging_bytes: int,
    allocate: Callable[[Shard], torch.Tensor],
    timeout_s: float,
    fence: Callable[[int], None] = no_fence,
    verify: bool = False,
    pages: Pages | None = None,
    sink: Sink = nowhere,
) -> dict[Shard, torch.Tensor]:
    """Carry out a device's program and return its tensors in the new layout.

    Args:
        journal: a fresh one, with the program and the shards that this device holds now. They are only read, and taken
            out when they are released. After an error it says what the device holds.
        transport: connects the devices of the plan.
        staging_bytes: the most that staging takes, per torch device; what the program was compiled for.
        allocate: gives the tensor that a new shard is written to, of the region's shape and the shard's dtype. It must
            share no memory with any other.
        timeout_s: the longest that one round may take; in it, a device may wait for peers that are behind.
        fence: called with the number of each epoch when this device has finished it; returns when all devices have.
        verify: whether digests of all that is moved are compared. On all devices, or on none.
        pages: where ``allocate`` gets memory, if released memory is to be used again.
        sink: hears of rounds and fences.

    Returns:
        Per new shard its tensor. A referred shard's tensor is the very one in ``sources``.

    Raises:
        Mismatch: if a live tensor is not what its shard says, and nothing has moved; or if something was damaged on the
            way, and nothing of its epoch was released.
        TransportError: if a peer is gone or too slow.
    """
    move = _Move(journal, transport, staging_bytes, timeout_s, verify, sink)
    epochs, device = journal.program.epochs, journal.program.device
    with torch.no_grad():
        with _collector_off():
            journal.begin()
        for index in range(len(epochs)):
            with _collector_off():
                journal.allocate(index, allocate)
                if pages is not None:
                    pages.clear()
                move.run(index)
            journal.finished = index + 1
            fence(index)
            journal.fences = index + 1
            if pages is not None and index + 1 < len(epochs):
                pages.expect(shard.nbytes for shard in epochs[index + 1].allocate)
            released_bytes = journal.release(index, pages)
            sink(FencePassed(device, index, len(epochs), released_bytes, time.perf_counter()))
    return journal.targets


@contextmanager
def _collector_off() -> Iterator[None]:
    """Hold Python's cyclic garbage collector off: thousands of pieces would set it off again and again.

    They make no cycles. It took 10 of 35 ms for 4,096 pieces of 4 KiB, and now and then 100 ms more.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(slots=True)
class _Leg:
    """Messages that were posted together."""

    pending: Pending
    arriving: list[Bound]


@dataclass(slots=True, eq=False)
class _Flight:
    """A round that has begun.

    Attributes:
        number: the round's, over all epochs.
        step: the round.
        began_s: when.
        arriving: messages to receive that are not posted.
        leaving: messages to send that are not posted.
        legs: what is on the wire.
        links: per peer the bytes that go there, and that come from there.
        copied_bytes: bytes copied locally.
    """

    number: int
    step: Round
    began_s: float
    arriving: list[Bound]
    leaving: list[Bound]
    legs: list[_Leg] = field(default_factory=list)
    links: dict[int, list[int]] = field(default_factory=dict)
    copied_bytes: int = 0


class _Move:
    """A move under way on one device."""

    def __init__(
        self, journal: Journal, transport: Transport, staging_bytes: int, timeout_s: float, verify: bool, sink: Sink
    ) -> None:
        self._journal, self._program = journal, journal.program
        self._transport, self._timeout_s, self._verify, self._sink = transport, timeout_s, verify, sink
        self._arena = Arena(staging_bytes)
        self._devices: set[torch.device] = set()
        self._rounds = sum(len(epoch.rounds) for epoch in self._program.epochs)
        self._begun = 0

    def run(self, index: int) -> None:
        """Carry out the rounds of an epoch. When it returns, all of them are complete."""
        epoch, live = self._program.epochs[index], self._journal.live[index]
        self._devices = live.devices
        ledger = Ledger() if self._verify else None
        before: _Flight | None = None
        for step in epoch.rounds:
            flight = self._bind(step, live)
            self._journal.under_way.append(flight)
            with record_function(f"shardshift round {flight.number}: pack and post"):
                self._post(flight, self._held_back(flight, before), ledger)
            live.settle()  # under the wire, too: thousands of shards take milliseconds
            with record_function(f"shardshift round {flight.number}: copy"):
                flight.copied_bytes = copy_all(step.copies, live)
            if before is not None:
                self._finish(index, before, ledger)
            self._post(flight, set(), ledger)
            before = flight
        live.settle()
        if before is not None:
            self._finish(index, before, ledger)
        for device in self._devices:
            if device.type == "cuda":  # what was unpacked and copied is there, and not only ordered
                torch.cuda.current_stream(device).synchronize()
        if ledger is not None:
            ledger.settle(self._transport, self._home, self._timeout_s)

    @property
    def _one_device(self) -> torch.device | None:
        """Where all tensors are; None if they are in several places."""
        if len(self._devices) < 2:
            return next(iter(self._devices), torch.device("cpu"))
        return None

    @property
    def _home(self) -> torch.device:
        """Where the transport takes payloads that belong to no tensor."""
        return self._one_device or next(device for device in self._devices if device.type != "cpu")

    @property
    def _in_batches(self) -> bool:
        return any(device.type == "cuda" for device in self._devices)

    def _bind(self, step: Round, live: Live) -> _Flight:
        """Make the messages of a round, and give those memory that need it."""
        number, self._begun = self._begun, self._begun + 1
        began_s = time.perf_counter()
        arriving, leaving = (
            [Bound(parcel, live) for parcel in parcels]
            for parcels in (self._parcels(step.recvs), self._parcels(step.sends))
        )
        flight = _Flight(number, step, began_s, arriving, leaving)
        for place, bounds in ((0, leaving), (1, arriving)):
            for bound in bounds:
                flight.links.setdefault(bound.parcel.peer, [0, 0])[place] += bound.parcel.nbytes
        by_views = {peer: self._transport.takes_views(peer) for peer in flight.links}
        staged: dict[torch.device, list[Bound]] = {}
        for bound in (*arriving, *leaving):
            if not bound.is_direct and not by_views[bound.parcel.peer]:
                staged.setdefault(self._one_device or bound.device, []).append(bound)
        for device, bounds in staged.items():
            payloads = self._arena.place(number, device, [bound.parcel.nbytes for bound in bounds])
            for bound, payload in zip(bounds, payloads, strict=True):
                bound.stage(payload)
        return flight

    def _parcels(self, instructions: Sequence[Moved]) -> list[Parcel]:
        return parcels_of(instructions, self._transport.takes_views)

    def _held_back(self, flight: _Flight, before: _Flight | None) -> set[int]:
        """The peers to whom something goes that the round before receives."""
        fresh: dict[Shard, list[Region]] = {}
        forwards = [send for send in flight.step.sends if isinstance(send, Forward)]
        if before is not None and forwards:
            for recv in before.step.recvs:
                fresh.setdefault(recv.target, []).append(recv.piece.region)
        return {
            forward.peer
            for forward in forwards
            if any(region.intersect(forward.piece.region) for region in fresh.get(forward.source, ()))
        }

    def _post(self, flight: _Flight, held_back: Collection[int], ledger: Ledger | None) -> None:
        """Post what is not posted, except messages to the peers that are held back."""
        if self._in_batches:
            if not held_back and (flight.arriving or flight.leaving):
                self._post_together(flight, flight.arriving, flight.leaving, ledger)
                flight.arriving, flight.leaving = [], []
            return
        for bound in flight.arriving:
            self._post_together(flight, [bound], [], ledger)
        flight.arriving = []
        for bound in flight.leaving:
            if bound.parcel.peer not in held_back:
                self._post_together(flight, [], [bound], ledger)
        flight.leaving = [bound for bound in flight.leaving if bound.parcel.peer in held_back]

    def _post_together(
        self, flight: _Flight, arriving: list[Bound], leaving: list[Bound], ledger: Ledger | None
    ) -> None:
        for bound in leaving:
            bound.pack(mixed=self._one_device is None)
        pending = self._transport.post(
            [bound.message_sent() for bound in leaving], [bound.message_received() for bound in arriving]
        )
        flight.legs.append(_Leg(pending, arriving))
        if ledger is not None:
            for bound in leaving:
                ledger.sent(bound)

    def _finish(self, epoch: int, flight: _Flight, ledger: Ledger | None) -> None:
        """Wait for a round and put what has arrived in its place."""
        deadline_s = time.monotonic() + self._timeout_s
        with record_function(f"shardshift round {flight.number}: complete and unpack"):
            for leg in flight.legs:
                leg.pending.complete(max(deadline_s - time.monotonic(), 0.001))
                for bound in leg.arriving:
                    bound.unpack()
                    if ledger is not None:
                        ledger.received(bound)
        self._journal.under_way.remove(flight)
        links = tuple(LinkBytes(peer, *both) for peer, both in flight.links.items())
        self._sink(
            RoundEnded(
                self._program.device,
                epoch,
                flight.number,
                self._rounds,
                links,
                flight.copied_bytes,
                flight.began_s,
                time.perf_counter(),
            )
        )
