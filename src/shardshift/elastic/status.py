"""The status record: what the lead says of the job, in the store, for the control endpoint and for requests.

It is written at each change of layout, after the first step in a layout and every few seconds of training. A new lead
goes on with what the last one had counted.

For a node that is to leave it also says when it was written (``at_s``, seconds since 1970 by the lead's clock), the
pause of the last change that made no loss good (``pause_s``), and what its going at once would mean (``without``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

from .course import Course
from .operating.board import STATUS_KEY
from .operating.metrics import Totals
from .report import ResizeReport

EVERY_S: Final = 2.0
"""While steps are finished the record is never older than this and a step."""

_WEIGHT: Final = 0.2
"""Of the newest step in the average of their times."""


class Status:
    """The lead's pen.

    Args:
        store: of the job.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._record: dict[str, Any] = {}
        self._written_s = 0.0
        self._stepped_s: float | None = None
        self._step_s: float | None = None

    def stepped(self) -> None:
        """A step is finished, on any rank: so the next lead knows how long one takes."""
        now_s = time.monotonic()
        if self._stepped_s is not None:
            last_s = now_s - self._stepped_s
            self._step_s = last_s if self._step_s is None else _WEIGHT * last_s + (1 - _WEIGHT) * self._step_s
        self._stepped_s = now_s

    def paused(self) -> None:
        """Training was interrupted: the time until the next step is no step's."""
        self._stepped_s = None

    def due(self) -> bool:
        """Whether it is time to write it again."""
        return time.monotonic() - self._written_s > EVERY_S

    def write(
        self,
        course: Course,
        iteration: int,
        *,
        era: int,
        standby: list[int],
        tolerates: Mapping[str, int],
        change: ResizeReport | None = None,
        refused: bool = False,
        without: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Say how the job stands.

        Args:
            course: where the job stands.
            iteration: optimizer steps finished.
            era: losses so far.
            standby: devices that stand by.
            tolerates: per kind of state how many losses it outlives.
            change: a change that was just done.
            refused: whether one was just refused.
            without: per node what would become of the job if that node were gone at once (``Desk``); None if that was
                not worked out for the present layout.
        """
        if not self._record and self._store.check([STATUS_KEY]):
            self._record = json.loads(self._store.get(STATUS_KEY))
        before = self._record
        counts = before.get("changes", {"done": 0, "refused": 0})
        record: dict[str, Any] = {
            "iteration": iteration,
            "config": str(course.config),
            "devices": list(course.devices),
            "generation": course.generation,
            "era": era,
            "losses": era,
            "standby": standby,
            "step_s": self._step_s if self._step_s is not None else before.get("step_s"),
            "at_s": time.time(),
            "pause_s": change.pause_s if change is not None and not change.lost else before.get("pause_s"),
            "without": without or {},
            "tolerates": dict(tolerates),
            "changes": {
                "done": counts["done"] + (change is not None),
                "refused": counts["refused"] + refused,
            },
            "last_change": before.get("last_change"),
            "totals": before.get("totals", Totals().to_json()),
        }
        if change is not None:
            record["last_change"] = {
                "prev": str(change.prev),
                "curr": str(change.curr),
                "iteration": change.iteration,
                "lost": list(change.lost),
                "phases_s": change.phases_s,
                "pause_s": change.pause_s,
                "moved_bytes": change.moved_bytes,
                "least_moved_bytes": change.least_moved_bytes,
            }
            totals = Totals.from_json(record["totals"])
            record["totals"] = totals.plus(change.phases_s, change.moved_bytes).to_json()
        self._record = record
        self._store.set(STATUS_KEY, json.dumps(record))
        self._written_s = time.monotonic()
