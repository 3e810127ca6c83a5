"""Ballots: how voters agree on one value though any of them, and any link between them, may fail at any time.

Paxos for a single decision (Lamport, "Paxos made simple", 2001), with voters that can change between decisions:

1. A candidate asks all voters to promise that they follow no older ballot. Each tells what it has accepted before.
2. With promises of a quorum, the candidate proposes what the newest ballot among them has accepted, or else a value of
   its own, and asks all to accept it.
3. What a quorum has accepted is decided, for ever: two quorums have a voter in common, and each later candidate hears
   of it from that one.

A quorum is more than half of the electorate. Of an even number, half will do if the host is in it: so of two that lose
sight of one another one goes on, and never both. An electorate changes in two steps, as in Raft (Ongaro, 2014, 4.3): as
long as it is not *settled* it takes a quorum of the voters before as well. Voters that have missed a change learn of
it from the first that has not.

Voters remember in memory alone. A process that was started again is another voter, with a number of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = Mapping[str, Any]
"""What is decided on; JSON."""


@dataclass(frozen=True, slots=True)
class Electorate:
    """Who decides.

    Attributes:
        version: grows with each change.
        voters: their numbers.
        host: the one whose presence makes a quorum of half of them; it need not vote.
        before: the voters of the version before, until this one is settled; then None.
    """

    version: int
    voters: tuple[int, ...]
    host: int
    before: tuple[int, ...] | None = None

    @property
    def everyone(self) -> tuple[int, ...]:
        """All who are asked."""
        return tuple(sorted({*self.voters, *(self.before or ())}))

    def passes(self, voters: Collection[int]) -> bool:
        """Whether these voters are a quorum."""
        return all(_quorum(of, self.host, voters) for of in (self.voters, self.before) if of is not None)

    def settled(self) -> Electorate:
        """The same voters, by themselves."""
        return Electorate(self.version + 1, self.voters, self.host)

    def changed(self, voters: Collection[int]) -> Electorate:
        """Others, which count once they are settled; this one has to be settled itself."""
        assert self.before is None
        return Electorate(self.version + 1, tuple(sorted(voters)), self.host, self.voters)

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        before = None if self.before is None else list(self.before)
        return {"version": self.version, "voters": list(self.voters), "host": self.host, "before": before}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Electorate:
        """The inverse of ``to_json``."""
        before = None if record["before"] is None else tuple(record["before"])
        return cls(record["version"], tuple(record["voters"]), record["host"], before)


Ballot = tuple[int, int]
"""Round and candidate; later rounds are newer, and of one round the greater candidate's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a voter answers.

    Attributes:
        yes: whether it promises, or accepts.
        newest: the newest ballot that it knows of.
        accepted: what it has accepted, and in which ballot.
        electorate: the newest that it knows.
        told: whatever it has to tell the candidate beside (JSON).
    """

    yes: bool
    newest: Ballot
    accepted: tuple[Ballot, Value] | None
    electorate: Electorate
    told: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        accepted = None if self.accepted is None else [list(self.accepted[0]), dict(self.accepted[1])]
        return {
            "yes": self.yes,
            "newest": list(self.newest),
            "accepted": accepted,
            "electorate": self.electorate.to_json(),
            "told": dict(self.told),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Reply:
        """The inverse of ``to_json``."""
        accepted = record["accepted"]
        return cls(
            record["yes"],
            _ballot(record["newest"]),
            None if accepted is None else (_ballot(accepted[0]), accepted[1]),
            Electorate.from_json(record["electorate"]),
            record["told"],
        )


class Voter:
    """One voter's memory of one decision; used by the thread that stands as a candidate and by those that answer.

    Args:
        electorate: who decides, as far as it knows.

    Attributes:
        electorate: the newest that it has heard of.
        newest: the newest ballot that it has heard of; it follows no older one.
        accepted: what it has accepted last, and in which ballot.
    """

    def __init__(self, electorate: Electorate) -> None:
        self._lock = threading.Lock()
        self.electorate = electorate
        self.newest: Ballot = (0, -1)
        self.accepted: tuple[Ballot, Value] | None = None

    def hear(self, electorate: Electorate, newest: Ballot = (0, -1)) -> None:
        """Learn of an electorate and of a ballot, which may be no news."""
        with self._lock:
            self._hear(electorate)
            self.newest = max(self.newest, newest)

    def promise(self, ballot: Ballot, electorate: Electorate, told: Mapping[str, Any] | None = None) -> Reply:
        """Answer a candidate's first question; asked again by the same candidate, with the same answer."""
        with self._lock:
            self._hear(electorate)
            yes = ballot >= self.newest
            if yes:
                self.newest = ballot
            return self._reply(told or {}, yes=yes)

    def accept(self, ballot: Ballot, value: Value) -> Reply:
        """Answer a candidate's second question."""
        with self._lock:
            yes = ballot >= self.newest
            if yes:
                self.newest, self.accepted = ballot, (ballot, value)
            return self._reply({}, yes=yes)

    def _hear(self, electorate: Electorate) -> None:
        if electorate.version > self.electorate.version:
            self.electorate = electorate

    def _reply(self, told: Mapping[str, Any], *, yes: bool) -> Reply:
        return Reply(yes, self.newest, self.accepted, self.electorate, told)


AskPromise = Callable[[Ballot, Electorate], Mapping[int, Reply]]
AskAccept = Callable[[Ballot, Value, Electorate], Mapping[int, Reply]]


def stand(
    voter: Voter,
    number: int,
    promises: AskPromise,
    accepts: AskAccept,
    value: Callable[[Mapping[int, Reply]], Value],
) -> Value | None:
    """Stand as a candidate once.

    Args:
        voter: this process's own memory; it is asked by ``promises`` and ``accepts`` like all others.
        number: of this voter.
        promises: asks everyone of an electorate to promise; gives the replies that came.
        accepts: the same for the second question.
        value: makes a value, given the promises, where none of those who promised has accepted one.

    Returns:
        What is decided; None if this attempt failed.
    """
    ballot = voter.newest[0] + 1, number
    replies = promises(ballot, voter.electorate)
    _learn(voter, replies)
    promised = {one: reply for one, reply in replies.items() if reply.yes}
    # By the newest electorate that any of them knows: those who have missed a change must not decide by the old one.
    if not voter.electorate.passes(promised):
        return None
    accepted = [reply.accepted for reply in promised.values() if reply.accepted is not None]
    proposed = max(accepted, key=lambda one: one[0])[1] if accepted else value(promised)
    electorate = voter.electorate
    replies = accepts(ballot, proposed, electorate)
    _learn(voter, replies)
    # A newer electorate that came to light meanwhile counts: its voters may know nothing of this ballot.
    passed = voter.electorate == electorate and electorate.passes({one for one, reply in replies.items() if reply.yes})
    return proposed if passed else None


def _learn(voter: Voter, replies: Mapping[int, Reply]) -> None:
    for reply in replies.values():
        voter.hear(reply.electorate, reply.newest)


def _quorum(of: Collection[int], host: int, present: Collection[int]) -> bool:
    here = {*of}.intersection(present)
    return 2 * len(here) + (host in here) > len({*of})


def _ballot(record: Any) -> Ballot:
    number, candidate = record
    return number, candidate
