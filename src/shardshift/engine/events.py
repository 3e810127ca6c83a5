"""What a move says of itself while it runs: one stream of typed events, for bars, traces and tables.

Times are ``time.perf_counter`` of the process that the event comes from. Sinks are functions of one event; the ones
that come with shardshift are in ``report``. To carry events to another process, write what ``to_record`` gives as JSON:
``perf_counter`` is one clock for all processes of a Linux host, so a parent can merge what they saw.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A phase begins: plan, agree, move, commit.

    Attributes:
        device: where.
        phase: which.
        at_s: when.
        total_bytes: all that this device will send, receive and copy in the phase; 0 if that is not known.
    """

    device: int
    phase: str
    at_s: float
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A phase has ended, well or by an error.

    Attributes:
        device: where.
        phase: which.
        began_s: when it began.
        ended_s: when it ended.
        error: the name of the error's class; empty if all went well.
    """

    device: int
    phase: str
    began_s: float
    ended_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What one device exchanged with another in a round.

    Attributes:
        peer: the other device.
        sent_bytes: to it, forwarded ones included.
        received_bytes: from it.
    """

    peer: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round is complete on this device: its bytes have landed and are in their place.

    Attributes:
        device: where.
        epoch: the epoch, from 0.
        index: this device's round, from 0 over all epochs; other devices count their own.
        rounds: this device's rounds in all.
        links: per peer what went to it and came from it.
        copied_bytes: bytes copied locally.
        began_s: when the round was posted; rounds overlap.
        ended_s: when it was complete.
    """

    device: int
    epoch: int
    index: int
    rounds: int
    links: tuple[LinkBytes, ...]
    copied_bytes: int
    began_s: float
    ended_s: float

    @property
    def sent_bytes(self) -> int:
        """Bytes that left this device, forwarded ones included."""
        return sum(link.sent_bytes for link in self.links)

    @property
    def received_bytes(self) -> int:
        """Bytes that arrived."""
        return sum(link.received_bytes for link in self.links)


@dataclass(frozen=True, slots=True)
class FencePassed:
    """All devices have come to the end of an epoch; what was released gave memory back.

    Attributes:
        device: where.
        epoch: which, from 0.
        epochs: how many there are.
        released_bytes: bytes of the old shards that this device let go.
        at_s: when.
    """

    device: int
    epoch: int
    epochs: int
    released_bytes: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should know, such as a path that was not taken.

    Attributes:
        device: where.
        text: one line.
        at_s: when.
    """

    device: int
    text: str
    at_s: float


Event: TypeAlias = PhaseBegan | PhaseEnded | RoundEnded | FencePassed | Notice
Sink: TypeAlias = Callable[[Event], None]

_KINDS: Final = {kind.__name__: kind for kind in (PhaseBegan, PhaseEnded, RoundEnded, FencePassed, Notice)}


def to_record(event: Event) -> dict[str, Any]:
    """Plain JSON values; ``from_record`` gives an equal event."""
    return {"event": type(event).__name__, **asdict(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """The event that ``to_record`` described.

    Raises:
        KeyError: if there is no such event.
    """
    fields = {name: value for name, value in record.items() if name != "event"}
    if "links" in fields:
        fields["links"] = tuple(LinkBytes(**link) for link in fields["links"])
    return _KINDS[record["event"]](**fields)


def nowhere(event: Event) -> None:
    """The sink that keeps nothing."""


@contextmanager
def phase(sink: Sink, device: int, name: str, total_bytes: int = 0) -> Iterator[None]:
    """Tell of a phase that is what runs inside.

    Args:
        sink: who is told.
        device: where.
        name: of the phase.
        total_bytes: see ``PhaseBegan``.
    """
    began_s, error = time.perf_counter(), ""
    sink(PhaseBegan(device, name, began_s, total_bytes))
    try:
        yield
    except BaseException as failed:
        error = type(failed).__name__
        raise
    finally:
        sink(PhaseEnded(device, name, began_s, time.perf_counter(), error))


def guarded(sink: Sink) -> Sink:
    """A sink that cannot break a move: one that raises is told nothing any more, and a warning says why."""
    broken = False

    def tell(event: Event) -> None:
        nonlocal broken
        if broken:
            return
        try:
            sink(event)
        except Exception as error:
            broken = True
            warnings.warn(f"a sink of events is not told any more: {type(error).__name__}: {error}", stacklevel=2)

    return tell


def all_of(sinks: Iterable[Sink]) -> Sink:
    """One sink that hands each event to several, in their order."""
    each = tuple(sinks)

    def tell(event: Event) -> None:
        for sink in each:
            sink(event)

    return tell
