"""How a node leaves its job, once its agent was asked to: announced, if its grace is long enough; else at once.

1. *Announced*: the devices are posted on the job's board as leaving, with the grace. The job moves their state off at a
   step that is announced, and says "done"; then their scripts, which stand by, are dismissed.
2. *At once*: each look estimates when that would be: what is left of the step in flight, the steps until the change
   that is announced (none yet: the job may take it at the end of this step), and the pause of a change. If that is
   later than the end of the grace, waiting would lose the step all the same, and the time until then. So if every byte
   of the node has a holder or a buddy's copy elsewhere, or else there is a checkpoint, and a layout for who is left,
   the workers are ended, told as lost with the reason, and the others recover while the grace still runs.
3. Where nobody can take over (no other node, or the job has refused) the workers get the SIGTERM themselves, as under
   torchrun.
4. What still runs when the grace is over is killed, which for the others is a loss like any.

The estimate is the lead's status record (``Desk``, ``Status``) and its age by both hosts' clocks; where those differ it
is wrong by as much, at most by a step. The time of a step is that of the last ones; one that takes longer is taken to
need as long again as it is late. A pause that was not measured yet is taken as the time of the node's state over its
link and ``UNMEASURED_S``. Going on from copies costs one step, so ``SPARE`` pauses are counted for the pause; going on
from a checkpoint costs more, so one is.

What was rejected: to let a node go while the record is of another era or layout than the job, or while another node
goes: two that hold each other's copies would both rely on them. One may go in an era; the next one waits until the
others have recovered. To cut short a change that is announced and may have begun was rejected, too: it would have moved
the state.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch.distributed as dist

from ...coordination import dismiss
from ...coordination.failure import recorded_failure
from ..course import Course
from ..operating.board import Board
from ..operating.request import Request
from ..status import EVERY_S
from .roster import Stores
from .workers import Workers

Say = Callable[[str], None]
Way: TypeAlias = Literal["announced", "at once"]

UNMEASURED_S: Final = 2.0
"""Of a pause beside the move, as long as none was measured: agreeing and building anew, 0.2 to 0.7 s in the demo."""
SPARE: Final = 1.5
"""A pause may take so many times the last one."""

_GOES: Final = "goes"
"""Key in an era's store: the node that goes at once in it."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the job stands for a node that is to leave.

    Attributes:
        iteration: finished steps by the status record.
        since_s: age of the record.
        step_s: time of a step.
        pause_s: time of a change.
        state: who has the node's state if it goes: "held" elsewhere, in the last "checkpoint", or it is "lost".
        goes_on: whether there is a layout without the node.
    """

    iteration: int
    since_s: float
    step_s: float
    pause_s: float
    state: Literal["held", "checkpoint", "lost"]
    goes_on: bool

    @classmethod
    def read(cls, status: Mapping[str, Any], slot: int, now_s: float) -> Outlook | None:
        """What a status record says for a node; None if it says nothing (no state of the job is there, or it is old).

        Args:
            status: the record.
            slot: of the node.
            now_s: by this host's clock, since 1970.
        """
        without, step_s = status.get("without", {}).get(str(slot)), status.get("step_s")
        if without is None or step_s is None:
            return None
        pause_s = status.get("pause_s")
        return cls(
            status["iteration"],
            max(now_s - status["at_s"], 0.0),
            step_s,
            without["move_s"] + UNMEASURED_S if pause_s is None else pause_s,
            without["state"],
            bool(without["config"]),
        )

    @property
    def in_flight_s(self) -> float:
        """What is left of the step in flight."""
        late_s = self.since_s - self.step_s - EVERY_S  # the record may be so old while all goes well
        return late_s if late_s > 0 else max(self.step_s - self.since_s, 0.0)

    @property
    def change_s(self) -> float:
        """What is to be reckoned for a change."""
        return self.pause_s * (SPARE if self.state == "held" else 1.0)

    def done_in_s(self, due: int | None) -> float:
        """Until the job has done without the node, if that is announced.

        Args:
            due: the iteration that the change is announced for; None if it is not yet.
        """
        steps_s = 0.0 if due is None else (due - self.iteration) * self.step_s - self.since_s
        return max(steps_s, self.in_flight_s) + self.change_s

    def may_have_begun(self, due: int | None) -> bool:
        """Whether the change may be under way by now."""
        return due is not None and (due - self.iteration) * self.step_s <= self.since_s


def way_to_leave(outlook: Outlook | None, due: int | None, left_s: float) -> Way:
    """How a node leaves.

    Args:
        outlook: how the job stands; None if nobody knows.
        due: the iteration that its leave is announced for; None if it is not yet.
        left_s: of its grace.
    """
    if outlook is None or outlook.state == "lost" or not outlook.goes_on or outlook.may_have_begun(due):
        return "announced"
    return "at once" if outlook.done_in_s(due) > left_s else "announced"


class Leaving:
    """One node's leave.

    Args:
        slot: of the node.
        stores: of the job.
        grace_s: how long it may take, from ``begin`` on.
        say: takes lines for whoever has started the agent.

    Attributes:
        begun: whether ``begin`` was called.
        told: whether the workers have got SIGTERM.
        at_once: whether the node has gone at once, which is no failure of its workers.
    """

    def __init__(self, slot: int, stores: Stores, *, grace_s: float, say: Say) -> None:
        self._slot, self._stores, self._grace_s, self._say = slot, stores, grace_s, say
        self._until_s = 0.0
        self._request: int | None = None
        self.begun = self.told = self.at_once = False

    @property
    def _board(self) -> Board:
        return Board(self._stores.job)  # of the store that there is now

    def begin(self, workers: Workers, *, others: bool) -> None:
        """The grace begins.

        Args:
            workers: of the node.
            others: whether the job has other nodes.
        """
        self.begun, self._until_s = True, time.monotonic() + self._grace_s
        if others:
            devices = tuple(sorted(workers.pids))
            self._request = self._board.post(Request(leave=devices, within_s=self._grace_s))
            self._say(f"node {self._slot} leaves within {self._grace_s:.0f} s")

    def look(self, workers: Workers) -> str | None:
        """One look at how the leave goes, some 20 times a second.

        Returns:
            Why the workers that still run are to be killed now; None if they are not.
        """
        if self._request is not None:
            answer = self._board.answer(self._request)
            if answer is not None and answer.state == "done":
                for device in workers.pids:  # in each era anew
                    dismiss(self._stores.era(self._stores.current()), device)
            elif answer is not None and answer.state == "refused":
                self._say(f"the job cannot do without node {self._slot}: {answer.reason}")
                self._request = None
            elif not self.at_once:
                due = answer.iteration if answer is not None and answer.state == "announced" else None
                if (why := self._too_late(due)) is not None:
                    return why
        if self._request is None and not self.told:
            self.told = True
            self._say(f"the workers of node {self._slot} have {self._grace_s:.0f} s to end by themselves (SIGTERM)")
            workers.tell(signal.SIGTERM)
        if time.monotonic() > self._until_s:
            return f"its node was told to leave, and its grace of {self._grace_s:.0f} s was over"
        return None

    def _too_late(self, due: int | None) -> str | None:
        """Why the node goes at once, if it is to, and may."""
        left_s = self._until_s - time.monotonic()
        outlook = self._outlook()
        if way_to_leave(outlook, due, left_s) == "announced":
            return None
        assert outlook is not None  # nobody goes at once without knowing
        mine = str(self._slot)
        if self._stores.era(self._stores.current()).compare_set(_GOES, "", mine) != mine.encode():
            return None  # another node goes in this era
        self.at_once = True
        needs = (
            f"leaving after the step in flight takes about {outlook.done_in_s(due):.1f} s "
            f"({outlook.change_s:.1f} s of it the change), {max(left_s, 0.0):.1f} s are left"
        )
        source = "what they hold of its state" if outlook.state == "held" else "the last checkpoint"
        self._say(f"node {self._slot} goes at once: {needs}; the others go on from {source}")
        return f"its node was told to leave within {self._grace_s:.0f} s and went at once: {needs}"

    def _outlook(self) -> Outlook | None:
        """How the job stands, if the record is of what the job is now: of this era, whole, and of this layout."""
        status = self._board.status()
        number = self._stores.current()
        if status is None or status["era"] != number:
            return None
        era: dist.Store = self._stores.era(number)
        course = Course.read(era)
        if recorded_failure(era) is not None or (course is not None and course.generation != status["generation"]):
            return None
        return Outlook.read(status, self._slot, time.time())
