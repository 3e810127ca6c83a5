"""The life of a node in its job: from the start of its workers until the last of them has ended.

In a loop, some 20 times a second:

1. A worker that has ended with 0 has left. One that died is recorded as lost in the present era, so that survivors
   need not wait for its silence. Either way the node's record names only workers that run.
2. A beat shows that this agent lives. The agent that hosts the store looks at the beats of all others: a node whose
   agent is silent has left (its workers are watched by their own peers; the kernel has ended them with their agent).
   It also sees to it that another agent can take the store over (``presiding``).
3. Who asked this node to leave (SIGTERM) set a flag, and the leave begins (``leaving``).

Where the store does not answer any more the agents that are left agree on another one (``succession``), this one tells
its workers where that is, and the loop goes on.

When all have ended the node says that it has left. The one that hosts the store stays until all others have, too, or
until they can do without it because it was asked to leave.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from ...coordination import tell_loss
from ...coordination.signs import INTERVAL_S, Beats, any_beats, show
from ...values import ShardshiftError
from .joining import Place
from .leaving import Leaving, Say
from .presiding import Presiding
from .roster import NodeRecord, Roster, State, Stores
from .succession import WITNESS, Reign, Succession
from .workers import Ended, Workers

_LOOK_S: Final = 0.05
_GOODBYE_S: Final = 5.0
_BY_SIGNAL: Final = 128  # the exit status of what a signal has ended, as shells have it, is this and the signal


class EndAtOnce(Exception):
    """This agent was asked to end without delay."""

    def __init__(self, status: int) -> None:
        self.status = status


class Asked:
    """What an agent was asked from outside: a signal handler writes, the agent's loop reads."""

    def __init__(self) -> None:
        self.to_leave = False
        self._status: int | None = None

    def leave(self) -> None:
        """Leave within the grace; asked again: end at once."""
        if self.to_leave:
            self.end(signal.SIGTERM)
        self.to_leave = True

    def end(self, number: int) -> None:
        """End at once, because of a signal."""
        self._status = _BY_SIGNAL + number

    def pause(self, *, while_waiting: bool = True) -> None:
        """Wait a little.

        Args:
            while_waiting: there is nothing yet that could be left, so being asked to leave is being asked to end.

        Raises:
            EndAtOnce: if that was asked.
        """
        if self._status is None:
            time.sleep(_LOOK_S)
        if self._status is None and self.to_leave and while_waiting:
            self.end(signal.SIGTERM)
        if self._status is not None:
            raise EndAtOnce(self._status)


class NodeLife:
    """One node, whose agent this process is.

    Args:
        place: of the node.
        stores: of the job.
        asked: what is asked of this agent.
        hosts: whether this process hosts the store.
        grace_s: how long a leave may take.
        silence_s: an agent is lost once its beat stands still for so long.
        say: takes lines for whoever has started this agent.
        succession: this agent's part in finding another store; None where no other node can come.
        moved: told of each reign that begins.
    """

    def __init__(
        self,
        place: Place,
        stores: Stores,
        asked: Asked,
        *,
        hosts: bool,
        grace_s: float,
        silence_s: float,
        say: Say,
        succession: Succession | None = None,
        moved: Callable[[Reign], None] = lambda reign: None,
    ) -> None:
        self._place, self._stores, self._asked, self._hosts = place, stores, asked, hosts
        self._silence_s, self._say = silence_s, say
        self._succession, self._moved = succession, moved
        self._attach()
        self._record = NodeRecord(place.slot, socket.gethostname(), (), {}, "here")
        self._beat, self._next_beat_s = 0, 0.0
        self._leaving = Leaving(place.slot, stores, grace_s=grace_s, say=say)
        self._failed: list[Ended] = []

    def _attach(self) -> None:
        """Use the store that there is now."""
        self._roster, self._beats = Roster(self._stores.job), Beats(self._stores.nodes)
        self._presiding: Presiding | None = None
        if self._hosts and self._succession is not None:
            self._presiding = Presiding(self._place.slot, self._stores.job, self._silence_s)
        self._alive: set[int] = set()
        self._noticed_s: dict[int, float] = {}

    def begin(self) -> None:
        """Show life, before there are workers."""
        self._show_life()

    def never_began(self, reason: str) -> None:
        """The workers could not be started: nobody need wait for them."""
        for device in self._place.devices:
            self._lost(device, reason)
        self._write("left", {})

    def live(self, workers: Workers) -> int:
        """Watch over the workers until all have ended, and say goodbye.

        Returns:
            The exit status of this agent: 0, or 128 + a signal that it was told to end by.

        Raises:
            ShardshiftError: if workers failed, or too few agents are left to go on without the store's host.
            dist.DistError: if the store does not answer, and there can be no other; the workers run on until the caller
                ends them.
        """
        try:
            moves = False
            while True:
                try:
                    if moves and self._succession is not None:
                        self._move(workers, self._succession)
                        moves = False
                    self._watch(workers)
                    break
                except dist.DistError:
                    if self._succession is None:
                        raise
                    moves = True  # the next one may be lost in the middle of that
        except EndAtOnce as end:
            self._say(f"node {self._place.slot} ends at once, as it was told")
            with suppress(dist.DistError):  # without a store nobody can be told
                self._kill(workers, "its node was told to end at once")
                self._write("left", {})
            return end.status
        return self._status()

    def _watch(self, workers: Workers) -> None:
        """Until all workers have ended, and the others need this agent no more."""
        if workers.pids:
            self._write(self._record.state, workers.pids)
        while workers.pids:
            self._asked.pause(while_waiting=False)
            self._note(workers, workers.ended())
            self._show_life()
            if self._asked.to_leave:
                self._go(workers)
        self._write("left", {})
        if self._hosts:
            self._stay_for_the_others()

    def _move(self, workers: Workers, succession: Succession) -> None:
        """Find another store, with those who are left."""
        reign = succession.succeed(workers.pids, lambda: self._asked.pause(while_waiting=False))
        self._hosts = reign.host == self._place.slot
        self._attach()
        self._next_beat_s = 0.0
        self._moved(reign)

    def _note(self, workers: Workers, ended: Sequence[Ended], why: str | None = None) -> None:
        """Make known who has ended and how."""
        for one in ended:
            if one.exitcode or why:
                self._failed.append(one)
                self._lost(one.device, why or str(one))
        if ended:
            self._write(self._record.state, workers.pids)

    def _kill(self, workers: Workers, why: str) -> None:
        self._note(workers, workers.ended())
        self._note(workers, workers.kill(), why)

    def _lost(self, device: int, reason: str) -> None:
        if self._matters(device):
            tell_loss(self._stores.current, self._stores.era, device, reason)

    def _matters(self, device: int) -> bool:
        """Whether anybody can depend on a device: a joiner that never entered a session is no loss."""
        if device < self._place.terms.world_size:
            return True
        return any(any_beats(self._stores.era(era), [device]) for era in range(self._stores.current() + 1))

    def _show_life(self) -> None:
        if self._succession is not None:
            self._succession.assent()
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._beat, self._next_beat_s = self._beat + 1, now_s + INTERVAL_S
        show(self._stores.nodes, self._place.slot, self._beat)
        if self._record.devices and self._roster.node(self._place.slot) != self._record:
            self._roster.write(self._record)  # this agent was stopped, and taken for lost
        if self._succession is not None:
            self._succession.look()
        if self._hosts:
            self._look_at_others()

    def _others(self) -> list[NodeRecord]:
        """The nodes that have not left, apart from this one, also those that have only just come."""
        slots = (slot for slot in range(self._roster.count()) if slot != self._place.slot)
        nodes = [
            self._roster.node(slot) or NodeRecord(slot, "a host that is not known", (), {}, "here") for slot in slots
        ]
        return [node for node in nodes if node.state != "left"]

    def _look_at_others(self) -> None:
        others = self._others()
        now_s = self._beats.look([WITNESS, *(node.slot for node in others)])
        still_s = self._beats.still_s()
        for node in others:
            since_s = self._noticed_s.setdefault(node.slot, now_s)
            if still_s.get(node.slot, now_s - since_s) > self._silence_s:
                self._say(f"node {node.slot} on {node.host} has shown no life for {self._silence_s:.0f} s: it has left")
                self._roster.write(NodeRecord(node.slot, node.host, (), {}, "left"))
        if self._presiding is not None:
            self._alive = {self._place.slot, *(one for one, stood_s in still_s.items() if stood_s <= self._silence_s)}
            staying = [node.slot for node in (self._record, *others) if node.state == "here"]
            recent_s = max(self._silence_s / 2, 3 * INTERVAL_S)  # a beat may be late
            lately = {one for one, stood_s in still_s.items() if stood_s <= recent_s}
            self._presiding.look(staying, self._alive, lately | {self._place.slot})

    def _go(self, workers: Workers) -> None:
        """One look at this node's leave, from its beginning to the end of its grace."""
        if not self._leaving.begun:
            self._leaving.begin(workers, others=bool(self._others()))
            self._write("leaving", workers.pids)
        why = self._leaving.look(workers)
        if why is not None:
            self._kill(workers, why)

    def _stay_for_the_others(self) -> None:
        told = False
        while others := self._others():
            if self._asked.to_leave and self._presiding is not None and self._presiding.is_free():
                self._say(f"node {self._place.slot} has left: the others find another host for the store")
                return
            if not told:
                told = True
                self._say(
                    f"node {self._place.slot} is done, and stays for {len(others)} more, since it hosts the store "
                    "(SIGINT ends it, and them)"
                )
            self._show_life()
            self._asked.pause(while_waiting=False)
        if self._presiding is not None:
            self._presiding.say_over()
            until_s = time.monotonic() + _GOODBYE_S
            while self._presiding.witness_stays(self._alive) and time.monotonic() < until_s:
                self._show_life()
                self._asked.pause(while_waiting=False)

    def _write(self, state: State, pids: dict[int, int]) -> None:
        slot, host = self._place.slot, self._record.host
        self._record = NodeRecord(slot, host, tuple(sorted(pids)), dict(pids), state)
        self._roster.write(self._record)

    def _status(self) -> int:
        if self._leaving.at_once:
            return 0
        by_us = (-signal.SIGTERM, _BY_SIGNAL + signal.SIGTERM) if self._leaving.told else ()
        failed = [one for one in self._failed if one.exitcode not in by_us]
        if failed:
            many = f"{len(failed)} of {len(self._place.devices)} workers of node {self._place.slot} ended badly: "
            first = f"node {self._place.slot}: " if len(failed) == 1 else many
            raise ShardshiftError(
                f"{first}{'; '.join(map(str, failed))}; what to do: see what {'it' if len(failed) == 1 else 'they'} "
                "wrote before"
            )
        return _BY_SIGNAL + signal.SIGTERM if self._failed else 0


def store_lost(where: str, error: dist.DistError) -> ShardshiftError:
    """What an agent says when the job's store is gone."""
    reason = str(error).partition("\n")[0]
    return ShardshiftError(
        f"the job's store at {where} does not answer, so the node that hosts it is gone ({reason}); the workers of "
        "this node were ended; what to do: start the job again, from its last checkpoint"
    )
