"""Rounds that have met live memory: all that can be made before a round begins, is.

A round of small pieces is thousands of views, and making them takes longer than the wire. So the rounds of an epoch
are bound together, before the first one begins; under the policy ``keep``, whose only epoch needs nothing that another
gives back, that can be before the devices agree to move.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ..schedule import Forward, Round
from ..transport import Foresees, Pending, Transport
from ..values import Region, Shard
from .journal import Live
from .pieces import MESSAGE_BYTES, WHOLE_BYTES, Bound, Copies, parcels_of
from .staging import MOST_IN_FLIGHT, Arena

_LEAST_WAIT_S: Final = 0.001


@dataclass(slots=True, eq=False)
class Leg:
    """Messages that are posted together: one that is staged, or that its peer may have to wait for, is by itself.

    Attributes:
        bounds: the messages; all of one direction.
        pending: None until they are posted.
    """

    bounds: list[Bound]
    pending: Pending | None = None

    @property
    def peer(self) -> int:
        """Of the first message."""
        return self.bounds[0].parcel.peer

    def complete(self, deadline_s: float) -> None:
        """Wait until the messages have landed, or may be overwritten.

        Args:
            deadline_s: until when, by ``time.monotonic``.

        Raises:
            TransportError: if a peer is gone or too slow.
        """
        assert self.pending is not None
        self.pending.complete(max(deadline_s - time.monotonic(), _LEAST_WAIT_S))


@dataclass(slots=True, eq=False)
class Flight:
    """A round, from when it is bound until it is complete.

    Attributes:
        number: the round's, over all epochs.
        copies: its local copies.
        arriving: messages to receive.
        leaving: messages to send.
        forwards: per peer the number of the latest round that receives what this one sends on; only rounds that may
            be in flight with it count.
        after: the number of the round that has to be complete before this one is posted, as it lies where that lay; -1
            if there is none.
        links: per peer the bytes that go there, and that come from there.
        began_s: when it was posted.
    """

    number: int
    copies: Copies
    arriving: list[Leg]
    leaving: list[Leg]
    forwards: dict[int, int]
    after: int = -1
    links: dict[int, list[int]] = field(default_factory=dict)
    began_s: float = 0.0

    def waits_for(self, earlier: Iterable[Flight]) -> set[int]:
        """The peers to whom something goes that rounds in flight receive."""
        numbers = {flight.number for flight in earlier}
        return {peer for peer, number in self.forwards.items() if number in numbers}


def bind(
    rounds: Sequence[Round], first: int, live: Live, transport: Transport, arena: Arena, *, verify: bool
) -> list[Flight]:
    """Make the messages of the rounds of an epoch, and give those memory that need it.

    Args:
        rounds: of the epoch.
        first: the number of the first.
        live: its tensors; new ones have memory.
        transport: that the messages will go over.
        arena: where messages are staged.
        verify: whether digests are taken of all messages: they are small enough to be in the cache, and posted alone.

    Raises:
        Mismatch: if a round stages more than it may.
    """
    whole_bytes = MESSAGE_BYTES if verify else WHOLE_BYTES
    bound = [
        [
            [Bound(parcel, live) for parcel in parcels_of(one_way, transport.takes_views, whole_bytes)]
            for one_way in (step.recvs, step.sends)
        ]
        for step in rounds
    ]
    after = _stage(first, bound, live.devices, transport, arena)
    flights: list[Flight] = []
    recent: deque[tuple[int, Round]] = deque(maxlen=MOST_IN_FLIGHT)
    for number, (step, (arriving, leaving)) in enumerate(zip(rounds, bound, strict=True), first):
        forwards = [send for send in step.sends if isinstance(send, Forward)]
        latest = _latest(forwards, recent)
        recent.append((number, step))
        come, go = list(_legs(arriving, alone=verify)), list(_legs(leaving, alone=verify or bool(forwards)))
        flight = Flight(number, Copies.of(step.copies, live), come, go, latest, after.get(number, -1))
        for place, bounds in ((0, leaving), (1, arriving)):
            for one in bounds:
                flight.links.setdefault(one.parcel.peer, [0, 0])[place] += one.parcel.nbytes
        flights.append(flight)
    if isinstance(transport, Foresees):
        # Of rounds that may be in flight together, whose tables there would be at one time in any case. The transport
        # has the time for later ones while these are on the wire.
        for both in bound[:MOST_IN_FLIGHT]:
            for one in (one for one_way in both for one in one_way):
                one.foresee(transport)
    return flights


def _latest(forwards: Sequence[Forward], recent: Iterable[tuple[int, Round]]) -> dict[int, int]:
    """See ``Flight.forwards``; ``recent`` are rounds before theirs, with their numbers."""
    if not forwards:
        return {}
    sources = {forward.source for forward in forwards}
    fresh: dict[Shard, list[tuple[int, Region]]] = {}
    for number, earlier in recent:
        for recv in earlier.recvs:
            if recv.target in sources:
                fresh.setdefault(recv.target, []).append((number, recv.piece.region))
    found: dict[int, int] = {}
    for forward in forwards:
        for number, region in fresh.get(forward.source, ()):
            if number > found.get(forward.peer, -1) and region.intersect(forward.piece.region):
                found[forward.peer] = number
    return found


def _stage(
    first: int, rounds: list[list[list[Bound]]], devices: set[torch.device], transport: Transport, arena: Arena
) -> dict[int, int]:
    """Give messages memory that need it; per round that has such ones, which one has to be complete before."""
    mixed = len(devices) > 1
    staged: dict[torch.device, dict[int, list[Bound]]] = {}
    for number, both in enumerate(rounds, first):
        for bound in (bound for one_way in both for bound in one_way):
            if not bound.is_direct and not transport.takes_views(bound.parcel.peer):
                device = bound.device if mixed else next(iter(devices))
                staged.setdefault(device, {}).setdefault(number, []).append(bound)
    after: dict[int, int] = {}
    for device, by_number in staged.items():
        needs = [(number, [bound.parcel.nbytes for bound in bounds]) for number, bounds in by_number.items()]
        for (number, bounds), stretch in zip(by_number.items(), arena.lay_out(device, needs), strict=True):
            after[number] = max(after.get(number, -1), stretch.after)
            for bound, payload in zip(bounds, stretch.payloads, strict=True):
                bound.stage(payload, mixed=mixed)
    return after


def _legs(bounds: Sequence[Bound], *, alone: bool) -> Iterator[Leg]:
    together: list[Bound] = []
    for bound in bounds:
        if alone or bound.is_staged:
            if together:
                yield Leg(together)
                together = []
            yield Leg([bound])
        else:
            together.append(bound)
    if together:
        yield Leg(together)
