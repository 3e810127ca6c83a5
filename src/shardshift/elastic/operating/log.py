"""What happens to a job as log lines, and as scalars beside the loss.

Lines go through the standard ``logging`` module, so where they end, and which of them, is set where an application sets
that for everything else. ``EventLog`` puts what a line says into fields of the record; ``JsonLines`` writes a record as
one JSON object a line, also one of another library. structlog was rejected: a dependency for one formatter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from ...engine.events import Event, FencePassed, Notice, PhaseBegan, PhaseEnded, RoundEnded, to_record
from ..report import ResizeReport

_FIELDS: Final = "shardshift"
"""Attribute of a log record that holds the fields."""


class JsonLines(logging.Formatter):
    """Writes a log record as a line of JSON: time (UTC), level, logger, message, then the fields of an ``EventLog``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without an end; whatever JSON does not know becomes its text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class EventLog:
    """Logs what happens to one job; each line has ``job``, ``generation``, ``iteration`` and ``event``.

    It is a ``Sink`` too, so it can be given to ``session(sink=...)``: the end of a phase is INFO, of one that failed
    WARNING, as notices are; all else is DEBUG.

    Args:
        job: the job's name.
        logger: where lines go; None: the logger ``shardshift.job``.
    """

    def __init__(self, job: str, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("shardshift.job")
        self._job = job
        self._generation: int | None = None
        self._iteration: int | None = None

    def at(self, *, generation: int | None = None, iteration: int | None = None) -> None:
        """Where the job is from now on; what is not given stays. Cheap: nothing is written."""
        self._generation = self._generation if generation is None else generation
        self._iteration = self._iteration if iteration is None else iteration

    def tell(self, event: str, level: int = logging.INFO, **fields: Any) -> None:
        """Log an event.

        Args:
            event: a word, such as "announced", "done", "refused", "lost", "joined".
            level: of ``logging``.
            fields: what else there is to say, JSON values.
        """
        if not self._logger.isEnabledFor(level):
            return
        line = {"job": self._job, "generation": self._generation, "iteration": self._iteration, "event": event}
        shown = "".join(f" {name}={value}" for name, value in fields.items())
        self._logger.log(level, "%s%s", event, shown, extra={_FIELDS: fields | line})

    def __call__(self, event: Event) -> None:
        """Log an event of a move."""
        fields = to_record(event)
        del fields["event"]
        match event:
            case PhaseBegan():
                self.tell("phase_began", logging.DEBUG, **fields)
            case PhaseEnded():
                level = logging.WARNING if event.error else logging.INFO
                self.tell("phase_ended", level, **fields, seconds=event.ended_s - event.began_s)
            case RoundEnded():
                self.tell("round_ended", logging.DEBUG, **fields)
            case FencePassed():
                self.tell("fence_passed", logging.DEBUG, **fields)
            case Notice():
                self.tell("notice", logging.WARNING, **fields)

    def changed(self, report: ResizeReport) -> None:
        """Log a change of layout that was done."""
        self.at(iteration=report.iteration)
        self.tell(
            "changed",
            prev=str(report.prev),
            curr=str(report.curr),
            devices=list(report.devices),
            moved_bytes=report.moved_bytes,
            pause_s=report.pause_s,
            phases_s=report.phases_s,
        )


class Writer(Protocol):
    """What ``Scalars`` writes to, such as a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Keep a value of a series at a step."""


class Scalars:
    """Writes changes of layout into the user's own writer, beside the loss, at the step that they came after.

    ``shardshift/pause_s``, ``shardshift/moved_bytes`` and ``shardshift/devices``, and each phase of the pause as
    ``shardshift/pause/PHASE_s``. Call it in the process that has the writer:

        job = session.resize(job)
        scalars(session.reports)

    Args:
        writer: has ``add_scalar(tag, value, step)``.
        prefix: of all tags.
    """

    def __init__(self, writer: Writer, prefix: str = "shardshift") -> None:
        self._writer, self._prefix = writer, prefix
        self._written = 0

    def __call__(self, reports: Iterable[ResizeReport]) -> None:
        """Write those of a session's reports that are not written yet."""
        reports = list(reports)
        for report in reports[self._written :]:
            values = {
                "pause_s": report.pause_s,
                "moved_bytes": report.moved_bytes,
                "devices": len(report.devices),
                **{f"pause/{phase}_s": seconds for phase, seconds in report.phases_s.items()},
            }
            for name, value in values.items():
                self._writer.add_scalar(f"{self._prefix}/{name}", float(value), report.iteration)
        self._written = len(reports)
