"""The board: what was asked of a job from outside, as numbered records in its store, and what became of each.

1. Whoever is asked (an agent, its HTTP endpoint, a watched file) posts a request; it gets the next number. A record is
   written before the count says that it is there, and whoever finds one that is not counted yet counts it. So a
   poster that dies leaves no gap for which the others would wait.
2. The lead reads one number a step. Of what is not settled it takes: the request that it has announced already; else
   the first that says that devices leave, since their time runs out; else the first in order. One at a time.
3. It makes a change of layout of that, for two steps ahead (fewer for a leave that has no time for that), and writes
   "announced" with all that another lead needs to go on. What cannot be is answered "refused" with the reason; the job
   trains on.
4. Once the change is done or refused, the answer says so, and the next request has its turn.

The rule for requests that meet: each is decided by what is true when its turn comes. The same twice is a change and
"done, nothing to change"; two different ones are two changes; one that needs devices which are to leave, or have gone,
is refused. So none has to be held against another when it is posted, and two agents may post at once. Refusing while
one runs was rejected: whoever asks would have to try again, and a node that has 30 s to leave has no time for that. A
new request in place of one that waits was rejected: whoever asked for that one would never learn why not.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from ...values import Infeasible, Mismatch, ParallelConfig, PeerLost, ShardshiftError
from ..resize import AHEAD, Resize
from .answer import Answer
from .request import Request

Policy: TypeAlias = Callable[[Sequence[int]], ParallelConfig]
"""Which configuration to run on these devices; raises ``Infeasible`` where there is none."""

STATUS_KEY: Final = "status"
"""Key of the record in which the lead says how the job stands."""

MOST_WAITING: Final = 32
"""Requests that may wait at a time; leaving devices are always heard."""

_COUNT: Final = "request/count"
_MARKS: Final = "request/marks"


class Board:
    """The requests of one job and their answers.

    Args:
        store: the job's (``Member.store``); also what a lost rank leaves behind stays in it. Nothing here waits for a
            key, but a request to a store whose host hangs blocks: give an ``AnsweringStore`` where that matters.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._all_settled_to = 0
        self._kept: dict[str, str] = {}
        self._kept_to = 0

    def post(self, request: Request) -> int:
        """Ask for something; its number, by which ``answer`` says what becomes of it.

        Raises:
            Infeasible: if too many requests wait.
        """
        if not request.leave and len(waiting := self.pending()) >= MOST_WAITING:
            raise Infeasible(
                f"{len(waiting)} requests wait, from number {min(waiting)}; what to do: wait until some are settled, "
                "or see whether the job still trains"
            )
        record = json.dumps(request.to_json() | {"id": uuid.uuid4().hex})
        while True:
            count = self.count()
            won = self._store.compare_set(_request(count + 1), "", record) == record.encode()
            self._store.compare_set(_COUNT, str(count), str(count + 1))
            if won:
                return count + 1

    def count(self) -> int:
        """How many requests there are; they are numbered from 1."""
        return self._store.add(_COUNT, 0)

    def request(self, number: int) -> Request:
        """What was asked.

        Raises:
            Infeasible: if the record is none that this version knows.
        """
        try:
            record = json.loads(self._store.get(_request(number)))
        except ValueError as error:
            raise Infeasible(f"request {number} is no JSON: {error}; what to do: post it with Board.post") from None
        if isinstance(record, dict):
            record.pop("id", None)
        return Request.from_json(record)

    def answer(self, number: int) -> Answer | None:
        """What became of a request so far; None if there is none of this number."""
        return self._written(number) or (Answer("queued") if 1 <= number <= self.count() else None)

    def write(self, number: int, answer: Answer) -> None:
        """Say what became of a request: the lead's part."""
        shown = {"usable": answer.usable, "there": answer.there}
        self._store.set(_answer(number), json.dumps(answer.to_json() | shown))

    def pending(self) -> dict[int, Answer]:
        """The requests that are not settled, in order, with what became of them so far."""
        found: dict[int, Answer] = {}
        for number in range(self._all_settled_to + 1, self.count() + 1):
            answer = self._written(number) or Answer("queued")
            if not answer.settled:
                found[number] = answer
            elif not found:
                self._all_settled_to = number
        return found

    def status(self) -> dict[str, Any] | None:
        """How the job stands, as its lead wrote it; None before it has."""
        if not self._store.check([STATUS_KEY]):
            return None
        record: dict[str, Any] = json.loads(self._store.get(STATUS_KEY))
        return record

    def mark_of(self, name: str) -> str | None:
        """What was noted under a name, such as which content of a file was posted."""
        return self._marks().get(name)

    def mark(self, name: str, text: str) -> None:
        """Note something under a name: the lead's part."""
        self._store.set(_MARKS, json.dumps(self._marks() | {name: text}))

    def _marks(self) -> dict[str, str]:
        return dict(json.loads(self._store.get(_MARKS))) if self._store.check([_MARKS]) else {}

    def records(self) -> dict[str, str]:
        """All that a store which takes the place of this one has to hold of requests, by key."""
        count = self.count()
        for number in range(self._kept_to + 1, count + 1):
            self._kept |= self._there(_request(number), _answer(number))
            answer = self._written(number)
            if answer is not None and answer.settled and number == self._kept_to + 1:
                self._kept_to = number  # it changes no more
        return self._kept | self._there(STATUS_KEY, _MARKS) | {_COUNT: str(count)}

    def _there(self, *keys: str) -> dict[str, str]:
        return {key: self._store.get(key).decode() for key in keys if self._store.check([key])}

    def _written(self, number: int) -> Answer | None:
        if not self._store.check([_answer(number)]):
            return None
        record = json.loads(self._store.get(_answer(number)))
        usable, there = record["usable"], tuple(record["there"])
        return Answer(**record | {"usable": None if usable is None else tuple(usable), "there": there})


@dataclass(frozen=True, slots=True)
class _Now:
    """How things stand when a request is decided; ``config`` and ``running`` are None and empty if not known."""

    config: ParallelConfig | None
    running: tuple[int, ...]
    step_s: float
    pause_s: float
    there: tuple[int, ...]
    leaving: frozenset[int]

    @property
    def staying(self) -> tuple[int, ...]:
        return tuple(device for device in self.there if device not in self.leaving)


class BoardSource:
    """A ``ResizeSource`` of what is asked on the board. Every rank has one; only the lead's is asked.

    It keeps nothing that the store does not hold, so any rank can go on where a lost lead has stopped.

    Args:
        board: of the job.
        devices: the devices that are there; called when a request is decided, not at each step.
        policy: chooses a configuration for devices; without one only requests that name theirs are served.
        ahead: steps between the announcement and the change.
    """

    alike = False

    def __init__(
        self, board: Board, devices: Callable[[], Sequence[int]], policy: Policy | None = None, *, ahead: int = AHEAD
    ) -> None:
        self._board, self._devices, self._policy, self._ahead = board, devices, policy, ahead
        self._leaves: dict[int, tuple[int, ...]] = {}
        self._read_to = 0

    def upcoming(self, iteration: int) -> Resize | None:
        """The change that the request whose turn it is comes to.

        The same until it is settled; but one whose iteration has passed (a loss came between) waits for its turn again.
        """
        while (turn := self._turn()) is not None:
            number, answer = turn
            announced = answer.resize
            if announced is not None:
                if announced.iteration >= iteration:
                    return announced
                self._board.write(number, Answer("queued"))
                continue  # whose turn is it now?
            decided = self._decide(number, iteration)
            self._board.write(number, decided)
            if not decided.settled:
                return decided.resize
        return None

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Answer the request that the change was announced for.

        If it was refused because a device that was counted on is gone, the request has another turn.
        """
        turn = self._turn()
        if turn is None or turn[1].resize != resize:
            return  # some other source's
        number, answer = turn
        if refusal is None:
            self._board.write(number, replace(answer, state="done"))
        elif isinstance(refusal, PeerLost) or not {*answer.there} <= {*self._devices()}:
            self._board.write(number, Answer("queued", str(refusal)))
        else:
            self._board.write(number, replace(answer, state="refused", reason=str(refusal)))

    def _turn(self) -> tuple[int, Answer] | None:
        """The request to serve now, and what became of it so far."""
        pending = self._board.pending()
        if not pending:
            return None
        announced = [number for number, answer in pending.items() if answer.state == "announced"]
        if not announced:
            self._read_leaves()
        leaves = [number for number in pending if number in self._leaves]
        first = (announced or leaves or list(pending))[0]
        return first, pending[first]

    def _decide(self, number: int, iteration: int) -> Answer:
        """What a request comes to as things stand."""
        there: tuple[int, ...] = ()
        try:
            now = self._now()
            there = now.there
            request = self._board.request(number)
            config = self._config(request, now)
            if now.config == config and {*now.running} <= {*now.staying}:
                return Answer("done", f"the job runs {config} already: nothing to change", config=str(config))
            if config.world_size > len(now.staying):
                raise _too_few(str(config), config.world_size, now)
        except ShardshiftError as error:
            return Answer("refused", str(error), there=there)
        usable = now.staying if len(now.staying) < len(there) else None
        return Answer("announced", "", iteration + self._steps(request, now), str(config), usable, there)

    def _config(self, request: Request, now: _Now) -> ParallelConfig:
        if request.to is not None:
            return request.to
        if request.devices is None:
            return self._without(now)
        if request.devices > len(now.staying):
            raise _too_few("what is asked for", request.devices, now)
        first = sorted(now.staying, key=lambda device: (device not in now.running, device))
        return self._chosen(sorted(first[: request.devices]))

    def _without(self, now: _Now) -> ParallelConfig:
        """The configuration once devices have left: as it is, where enough stay. A leave never makes a job larger."""
        if not now.staying:
            raise Infeasible(
                f"all devices that are there ({_list(now.there)}) are to leave; what to do: start a node that takes "
                "the job over, or write a checkpoint"
            )
        if now.config is not None and now.config.world_size <= len(now.staying):
            return now.config
        return self._chosen(now.staying)

    def _chosen(self, devices: Sequence[int]) -> ParallelConfig:
        if self._policy is None:
            raise Infeasible(
                "this job has no policy that chooses a layout for a number of devices; what to do: ask for a layout "
                "(--to pp4tp2dp1), or give the job a policy"
            )
        try:
            config = self._policy(devices)
        except ShardshiftError:
            raise
        except Exception as error:  # the user's own code: whatever it raises, the job trains on
            raise ShardshiftError(
                f"the policy failed for devices {_list(devices)}: {type(error).__name__}: {error}; what to do: mend "
                "it, or ask for a layout"
            ) from error
        if config.world_size > len(devices):
            raise Mismatch(
                f"the policy chose {config}, {config.world_size} ranks, for {len(devices)} devices; what to do: let it "
                "choose one that fits, or raise Infeasible"
            )
        return config

    def _steps(self, request: Request, now: _Now) -> int:
        """How far ahead to announce: where a leave has no time for that, one step, or the one that is ending.

        The request may have waited for a step already. The last saves a step and costs the pause the plan.
        """
        if request.within_s is None or request.within_s >= 2 * (self._ahead + 1) * now.step_s + now.pause_s:
            return self._ahead
        return 1 if request.within_s >= 2 * now.step_s + now.pause_s else 0

    def _now(self) -> _Now:
        status = self._board.status() or {}
        config = status.get("config")
        self._read_leaves()
        leaving = [
            device
            for number, devices in self._leaves.items()
            if (answer := self._board.answer(number)) is None or answer.state != "refused"
            for device in devices
        ]
        return _Now(
            ParallelConfig.parse(config) if config else None,
            tuple(status.get("devices", ())),
            float(status.get("step_s") or 0.0),
            float(status.get("pause_s") or 0.0),
            tuple(sorted(self._devices())),
            frozenset(leaving),
        )

    def _read_leaves(self) -> None:
        """Note who was ever asked to leave. Device ids are never given out again, so that holds for good."""
        for number in range(self._read_to + 1, self._board.count() + 1):
            try:
                leave = self._board.request(number).leave
            except Infeasible:  # refused for that when its turn comes
                leave = ()
            if leave:
                self._leaves[number] = leave
            self._read_to = number


def _too_few(what: str, needed: int, now: _Now) -> Infeasible:
    leaving = [device for device in now.there if device in now.leaving]
    without = f" without {_list(leaving)}, which are to leave" if leaving else ""
    return Infeasible(
        f"{what} needs {needed} devices, there are {len(now.staying)} ({_list(now.staying)}){without}; what to do: "
        "start more nodes, or ask for a layout of fewer"
    )


def _list(devices: Sequence[int]) -> str:
    """Device ids as ``0-3, 6``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"


def _request(number: int) -> str:
    return f"request/{number}"


def _answer(number: int) -> str:
    return f"request/{number}/answer"
