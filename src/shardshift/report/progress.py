"""A bar that follows a move: bytes and rounds done, of how many, and how fast.

1. Events of the phase ``move`` are summed over the devices of this process: usually one.
2. The bar's length is bytes where every device has said how many it will handle (``PhaseBegan.total_bytes``), else
   rounds. Bytes are those sent, received and copied, so a device that only gives has a bar too.
3. Where the console is no terminal (a log file, a pipe, a dumb one) there is no bar, and one line at the end.

The rate is taken from the times in the events, not from when they reach the bar. The bar is drawn by the thread that
brings the event, ten times a second at most; rich's own refreshing was rejected, since its thread outlives the bar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..engine.events import Event, PhaseBegan, PhaseEnded, RoundEnded, Sink
from .plan import amount

_BETWEEN_PICTURES_S: Final = 0.1


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Sink]:
    """Show moves while they run; the next move takes over the bar.

    Args:
        console: where; None: standard error.

    Yields:
        The sink that the bar listens with, from any thread.

    A program that draws bars of its own gives one of them to a ``MoveProgress``: ``bars.update(task, **done.row)``.
    """
    console = console or Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}", markup=False),
        console=console,
        auto_refresh=False,
        disable=not console.is_interactive,
    )
    task = bar.add_task("move", total=None, figures="")
    done = MoveProgress()
    drawn_s = float("-inf")

    def tell(event: Event) -> None:
        nonlocal drawn_s
        done(event)
        now_s = time.monotonic()
        if draw := now_s - drawn_s >= _BETWEEN_PICTURES_S:
            drawn_s = now_s
        bar.update(task, **done.row, refresh=draw)

    try:
        with bar:  # draws the last picture when it closes
            yield tell
    finally:
        if not console.is_interactive and done.figures:
            console.print(Text(f"{done.title}: {done.figures}"), soft_wrap=True)


@dataclass(slots=True)
class _Share:
    """One device's part of a move."""

    began_s: float
    total_bytes: int
    done_bytes: int = 0
    rounds: int = 0
    done_rounds: int = 0


class MoveProgress:
    """How far a move is: a sink, and the figures that it has come to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: dict[int, _Share] = {}
        self._next = False  # whether the next move has been agreed on
        self._began_s = float("inf")
        self._ended_s = float("-inf")
        self.error = ""

    def __call__(self, event: Event) -> None:
        """Take in an event; those of other phases say nothing."""
        with self._lock:
            match event:
                case PhaseBegan(phase="agree"):
                    # All agree before any moves. By times: a device of another process may be heard late.
                    began_s = max((share.began_s for share in self._shares.values()), default=float("inf"))
                    self._next = self._next or event.at_s > began_s
                case PhaseBegan(phase="move"):
                    if self._next or event.device in self._shares:
                        self._shares.clear()
                        self._next = False
                        self._began_s, self._ended_s, self.error = float("inf"), float("-inf"), ""
                    self._shares[event.device] = _Share(event.at_s, event.total_bytes)
                case RoundEnded():
                    share = self._shares.setdefault(event.device, _Share(event.began_s, 0))
                    share.done_bytes += event.sent_bytes + event.received_bytes + event.copied_bytes
                    share.rounds = event.rounds
                    share.done_rounds = max(share.done_rounds, event.index + 1)  # a resumed move begins later
                    self._began_s = min(self._began_s, event.began_s)
                    self._ended_s = max(self._ended_s, event.ended_s)
                case PhaseEnded(phase="move"):
                    self.error = self.error or event.error
                case _:
                    pass

    @property
    def title(self) -> str:
        """What is under way, and the error that ended it."""
        return f"move: {self.error}" if self.error else "move"

    @property
    def done_bytes(self) -> int:
        """Bytes sent, received and copied in complete rounds."""
        return sum(share.done_bytes for share in self._shares.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole move, 0 where a device has not said."""
        totals = [share.total_bytes for share in self._shares.values()]
        return sum(totals) if all(totals) else 0

    @property
    def rounds(self) -> tuple[int, int]:
        """Rounds done, and in all; a device says how many it has with its first."""
        shares = self._shares.values()
        return sum(share.done_rounds for share in shares), sum(share.rounds for share in shares)

    @property
    def bytes_per_s(self) -> float:
        """Bytes done over the time from the first round's beginning to the last one's end; 0 before."""
        took_s = self._ended_s - self._began_s
        return self.done_bytes / took_s if took_s > 0 else 0.0

    @property
    def part(self) -> tuple[int, int]:
        """What is done, of how much: bytes, or rounds where the bytes are not known."""
        if whole := self.total_bytes:
            return min(self.done_bytes, whole), whole
        return self.rounds

    @property
    def figures(self) -> str:
        """The bar in words, e.g. ``1.50 GiB of 3.00 GiB, 4 of 8 rounds, 1.20 GiB/s``; empty before the first."""
        done, whole = self.rounds
        if not whole and not self.total_bytes:
            return ""
        parts = [f"{amount(self.done_bytes)} of {amount(self.total_bytes)}" if self.total_bytes else ""]
        parts[0] = parts[0] or amount(self.done_bytes)
        if whole:
            parts += [f"{done} of {whole} round{'s' * (whole > 1)}", f"{amount(round(self.bytes_per_s))}/s"]
        return ", ".join(parts)

    @property
    def row(self) -> dict[str, Any]:
        """The bar as ``rich.progress.Progress.update`` takes it; ``figures`` is a field for a column of text."""
        part, whole = self.part
        return {"description": self.title, "completed": part, "total": whole or None, "figures": self.figures}
