"""What went over each link of a move, from source device to target device, and how fast.

1. A round tells its device's bytes to and from each peer, and when it began and ended.
2. A link's time is that in which a round that used it was under way: rounds overlap, so intervals are joined, not
   added up.
3. Both ends tell of a link. Where both were heard, the receiver's account holds: bytes count when they have landed.

A round's time covers all its links and its local copies, so a rate is what the link gave to this move; what the wire
could give is more. Timing each message by itself was rejected: on NCCL only the round completes.

``log_links`` says it in the log, so that state which travels over the wrong network is seen at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from ..engine.events import Event, PhaseBegan, PhaseEnded, RoundEnded, Sink
from .plan import amount, seconds


@dataclass(frozen=True, slots=True)
class Link:
    """What a link carried.

    Attributes:
        source: the device that sent.
        target: the device that received.
        moved_bytes: how much.
        busy_s: the time in which a round that used the link was under way.
    """

    source: int
    target: int
    moved_bytes: int
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes over time; 0 where no time passed."""
        return self.moved_bytes / self.busy_s if self.busy_s > 0 else 0.0

    def __str__(self) -> str:
        rate = amount(round(self.bytes_per_s))
        return (
            f"device {self.source} -> device {self.target}: {amount(self.moved_bytes)} in {seconds(self.busy_s)}, "
            f"{rate}/s"
        )


@dataclass(slots=True)
class _Account:
    moved_bytes: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, moved_bytes: int, event: RoundEnded) -> None:
        self.moved_bytes += moved_bytes
        self.spans.append((event.began_s, event.ended_s))


class LinkMeter:
    """A sink that adds up links, of one device or of many; devices of other processes by their events."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Account] = {}
        self._received: dict[tuple[int, int], _Account] = {}

    def __call__(self, event: Event) -> None:
        """Take in an event; only rounds say anything."""
        if not isinstance(event, RoundEnded):
            return
        for link in event.links:
            if link.sent_bytes:
                self._sent.setdefault((event.device, link.peer), _Account()).add(link.sent_bytes, event)
            if link.received_bytes:
                self._received.setdefault((link.peer, event.device), _Account()).add(link.received_bytes, event)

    def links(self) -> tuple[Link, ...]:
        """The links that carried anything, by source and target."""
        accounts = sorted((self._sent | self._received).items())
        return tuple(Link(*ends, one.moved_bytes, _joined_s(one.spans)) for ends, one in accounts)


def links_of(events: Iterable[Event]) -> tuple[Link, ...]:
    """The links of a move that is over, of whichever devices the events are."""
    meter = LinkMeter()
    for event in events:
        meter(event)
    return meter.links()


def links_table(links: Sequence[Link]) -> Table:
    """One row a link, and the bytes of all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("from", "to"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bytes", "time", "rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in links:
        figures = (amount(link.moved_bytes), seconds(link.busy_s), f"{amount(round(link.bytes_per_s))}/s")
        table.add_row(f"device {link.source}", f"device {link.target}", *figures)
    if len(links) != 1:
        table.add_row("all", "", amount(sum(link.moved_bytes for link in links)), "", "")
    return table


def log_links(logger: logging.Logger) -> Sink:
    """A sink that logs one line a link (level INFO) when a device's move ends, also by an error."""
    meters: dict[int, LinkMeter] = {}

    def tell(event: Event) -> None:
        match event:
            case PhaseBegan(phase="move"):
                meters[event.device] = LinkMeter()
            case RoundEnded():
                meters.setdefault(event.device, LinkMeter())(event)
            case PhaseEnded(phase="move"):
                for link in meters.pop(event.device, LinkMeter()).links():
                    logger.info("%s", link)
            case _:
                pass

    return tell


def _joined_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    total_s, reached_s = 0.0, float("-inf")
    for began_s, ended_s in sorted(spans):
        total_s += max(0.0, ended_s - max(began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    return total_s
