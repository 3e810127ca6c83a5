"""The run loop: carries out one device's program on live tensors.

Rounds are this device's own (``schedule.compile``): the peers of one round may be in rounds of other numbers, and
nobody waits for a device that it has no message with. How pieces become messages is in ``pieces``, how rounds meet
memory in ``flight``, where pieces are staged in ``staging``. Per epoch:

1. Its new shards get memory, and its rounds are bound. For the first epoch that can be done beforehand (``prepare``).
2. Several rounds are in flight. To begin one, its receives are posted, its messages are packed and posted one by one,
   and its copies run. A round whose messages are staged where an earlier round's are waits until that is complete; at
   most ``MOST_IN_FLIGHT`` are under way. Rounds are completed in their order, and unpacked message by message. A
   message that forwards what a round in flight receives waits for that, and later ones to the same peer wait with it,
   since their order is all that says which is which.
3. When all rounds are complete, digests are compared (``verify``), if asked for.
4. ``fence``: all devices have come this far. Only then are old shards released.

Messages go out in the program's order, each device completes its rounds in their order, and the receives of a round
are posted no later than the round before is complete: so whatever can be run one round after the other can be run so.

On GPUs a batch waits, in the order of a stream, for the one before, so receives that are posted apart from the sends of
their round could wait for each other in a circle. There a round is one batch, posted when all of it can be sent, and
two are in flight.

Whatever fails, old shards that are not released are whole, and the journal says what else is. Handing strided views to
a flat transport was rejected, since gloo sends the wrong bytes of them without a word.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from ..transport import Message, Transport
from ..values import Shard
from .events import FencePassed, LinkBytes, RoundEnded, Sink, nowhere
from .flight import Flight, Leg, bind
from .journal import Journal
from .pages import Pages
from .pieces import Bound
from .staging import MOST_IN_FLIGHT, Arena
from .verify import Ledger

_Range = torch._C._profiler._RecordFunctionFast
"""A ``torch.profiler.record_function`` that costs 0.2 us while nobody profiles; that takes 6, 30 with a cold cache."""


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
    move = Move(
        journal,
        transport,
        staging_bytes=staging_bytes,
        allocate=allocate,
        timeout_s=timeout_s,
        verify=verify,
        pages=pages,
        sink=sink,
    )
    return move.run(fence)


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


@contextmanager
def _no_record() -> Iterator[None]:
    """Without autograd, and not in inference mode: what is made there could never train."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Move:
    """A move on one device, in two steps: ``prepare``, then ``run``. Arguments are those of ``run_program``.

    Attributes:
        journal: as given.
    """

    def __init__(
        self,
        journal: Journal,
        transport: Transport,
        *,
        staging_bytes: int,
        allocate: Callable[[Shard], torch.Tensor],
        timeout_s: float,
        verify: bool = False,
        pages: Pages | None = None,
        sink: Sink = nowhere,
    ) -> None:
        self.journal, self._program = journal, journal.program
        self._transport, self._timeout_s, self._verify, self._sink = transport, timeout_s, verify, sink
        self._allocate, self._pages = allocate, pages
        self._arena = Arena(staging_bytes)
        self._devices: set[torch.device] = set()
        self._rounds = sum(len(epoch.rounds) for epoch in self._program.epochs)
        self._bound = 0  # rounds
        self._ahead: deque[Flight] | None = None

    def prepare(self) -> None:
        """Do all of the move that tells nobody: check the old shards, make new ones and the rounds of the first epoch.

        It takes as long as the wire if pieces are many and small. Nothing is written but the new shards' memory and
        the journal's targets, so whoever does not want to go on drops the move. A second call does nothing.

        Raises:
            Mismatch: if a live tensor, or a new one, is not what its shard says.
        """
        if self._ahead is None:
            with _no_record(), _collector_off():
                self.journal.begin()
                self._ahead = self._bind(0) if self._program.epochs else deque()

    def run(self, fence: Callable[[int], None] = no_fence) -> dict[Shard, torch.Tensor]:
        """Carry out the program; see ``run_program``."""
        self.prepare()
        journal, epochs, device = self.journal, self._program.epochs, self._program.device
        try:
            with _no_record():
                for index in range(len(epochs)):
                    with _collector_off():
                        if index:
                            self._ahead = self._bind(index)
                        self._run(index)
                    journal.finished = index + 1
                    fence(index)
                    journal.fences = index + 1
                    if self._pages is not None and index + 1 < len(epochs):
                        self._pages.expect(shard.nbytes for shard in epochs[index + 1].allocate)
                    released_bytes = journal.release(index, self._pages)
                    self._sink(FencePassed(device, index, len(epochs), released_bytes, time.perf_counter()))
        finally:
            self._ahead = deque()  # after an error, rounds that did not begin would keep old shards' memory
        return journal.targets

    def _bind(self, index: int) -> deque[Flight]:
        """Make the new shards and the rounds of an epoch."""
        self.journal.allocate(index, self._allocate)
        if self._pages is not None:
            self._pages.clear()
        live, rounds = self.journal.live[index], self._program.epochs[index].rounds
        self._devices = live.devices
        flights = bind(rounds, self._bound, live, self._transport, self._arena, verify=self._verify)
        self._bound += len(flights)
        return deque(flights)

    def _run(self, index: int) -> None:
        """Carry out the rounds of an epoch. When it returns, all of them are complete and forgotten."""
        ledger = Ledger() if self._verify else None
        ahead, under_way = self._ahead or deque(), deque[Flight]()
        in_batches = any(device.type == "cuda" for device in self._devices)
        post, most = (self._post_batch, 2) if in_batches else (self._post, MOST_IN_FLIGHT)

        def finish_one() -> None:
            self._finish(index, under_way.popleft(), ledger)

        while ahead:
            flight = ahead.popleft()
            while under_way and (under_way[0].number <= flight.after or len(under_way) == most):
                finish_one()
            self.journal.under_way.append(flight)
            flight.began_s = time.perf_counter()
            held_back = flight.waits_for(under_way)
            with _Range(f"shardshift round {flight.number}: pack and post"):
                post(flight, held_back, ledger)
            if flight.copies.targets:
                with _Range(f"shardshift round {flight.number}: copy"):
                    flight.copies.carry_out()
            if held_back:
                while under_way:
                    finish_one()
                post(flight, (), ledger)
            under_way.append(flight)
        while under_way:
            finish_one()
        for device in self._devices:
            if device.type == "cuda":  # what was unpacked and copied is there, and not only ordered
                torch.cuda.current_stream(device).synchronize()
        if ledger is not None:
            ledger.settle(self._transport, self._home, self._timeout_s)

    @property
    def _home(self) -> torch.device:
        """Where the transport takes payloads that belong to no tensor."""
        gpus = (device for device in self._devices if device.type != "cpu")
        return next(gpus, torch.device("cpu"))

    def _post_batch(self, flight: Flight, held_back: Collection[int], ledger: Ledger | None) -> None:
        """Post all messages of a round as one batch, when none has to be held back."""
        arriving, leaving = ([b for leg in legs for b in leg.bounds] for legs in (flight.arriving, flight.leaving))
        if not held_back and (arriving or leaving):
            pending = self._transport.post(_packed(leaving, ledger), [bound.message() for bound in arriving])
            flight.arriving, flight.leaving = [Leg(arriving, pending)], []

    def _post(self, flight: Flight, held_back: Collection[int], ledger: Ledger | None) -> None:
        """Post what is not posted, except messages to the peers that are held back."""
        post = self._transport.post
        for leg in flight.arriving:
            if leg.pending is None:
                leg.pending = post([], [bound.message() for bound in leg.bounds])
        for leg in flight.leaving:
            if leg.pending is None and leg.peer not in held_back:
                leg.pending = post(_packed(leg.bounds, ledger), [])

    def _finish(self, epoch: int, flight: Flight, ledger: Ledger | None) -> None:
        """Wait for a round and put what has arrived in its place."""
        deadline_s = time.monotonic() + self._timeout_s
        with _Range(f"shardshift round {flight.number}: complete and unpack"):
            for leg in flight.arriving:
                leg.complete(deadline_s)
                for bound in leg.bounds:
                    bound.unpack()
                    if ledger is not None:
                        ledger.received(bound)
            for leg in flight.leaving:
                leg.complete(deadline_s)
        self.journal.under_way.remove(flight)
        links = tuple([LinkBytes(peer, *both) for peer, both in flight.links.items()])
        device, copied_bytes, ended_s = self._program.device, flight.copies.nbytes, time.perf_counter()
        self._sink(RoundEnded(device, epoch, flight.number, self._rounds, links, copied_bytes, flight.began_s, ended_s))


def _packed(bounds: list[Bound], ledger: Ledger | None) -> list[Message]:
    """Messages to post, their digests taken while they are in the cache."""
    for bound in bounds:
        bound.pack()
        if ledger is not None:
            ledger.sent(bound)
    return [bound.message() for bound in bounds]
