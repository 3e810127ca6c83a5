"""Ballots: at most one value is ever decided, whatever is lost or late; and one is, where a quorum is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.coordination.ballot import Ballot, Electorate, Reply, Value, Voter, stand

Draw = Callable[[int], int]


class Network:
    """Voters who hear some questions, hear some of them late, and between whose answers others may stand, too.

    Args:
        electorates: what each voter knows.
        draw: decides what happens next: a number below a bound.

    Attributes:
        decided: every value that a candidate found decided, in order.
    """

    def __init__(self, electorates: Mapping[int, Electorate], draw: Draw) -> None:
        self.voters = {number: Voter(electorate) for number, electorate in electorates.items()}
        self.draw = draw
        self._late: list[Any] = []
        self._deep = 0
        self.decided: list[Value] = []

    def stand(self, candidate: int) -> None:
        self._deep += 1
        value = stand(
            self.voters[candidate],
            candidate,
            lambda ballot, electorate: self._ask(
                electorate, lambda voter: voter.promise(ballot, electorate, {"of": ballot})
            ),
            lambda ballot, proposed, electorate: self._ask(electorate, lambda voter: voter.accept(ballot, proposed)),
            lambda promised: {"host": candidate, "attempt": self.draw(1000)},
        )
        self._deep -= 1
        if value is not None:
            self.decided.append(value)

    def _ask(self, electorate: Electorate, question: Any) -> dict[int, Reply]:
        replies = {}
        for number in electorate.everyone:
            self._meanwhile()
            fate = self.draw(4)
            if fate == 0:
                continue  # it never hears of it
            if fate == 1:
                self._late.append((number, question))  # it hears of it after the candidate has given up
                continue
            reply = Reply.from_json(question(self.voters[number]).to_json())
            if fate == 2:
                continue  # its answer is lost
            replies[number] = reply
        return replies

    def _meanwhile(self) -> None:
        if self._late and self.draw(3) == 0:
            number, question = self._late.pop(self.draw(len(self._late)))
            question(self.voters[number])
        if self._deep < 3 and self.draw(8) == 0:
            self.stand(sorted(self.voters)[self.draw(len(self.voters))])


def history(random: Random) -> dict[int, Electorate]:
    """What voters know of an electorate that has changed, each change known to a quorum before the next one began."""
    newest = Electorate(1, tuple(range(random.randint(1, 4))), 0)
    known = dict.fromkeys(range(6), Electorate(0, (), 0))  # whoever has not heard of any
    while True:
        hearing: set[int] = set()
        order = random.sample(newest.everyone, len(newest.everyone))
        while not newest.passes(hearing):
            hearing.add(order.pop())
        stops = random.random() < 0.3
        if stops and random.random() < 0.5:
            hearing.pop()  # the host was lost before a quorum knew
        known |= dict.fromkeys(hearing, newest)
        if stops:
            return known
        if newest.before is not None:
            newest = newest.settled()
        else:
            newest = newest.changed(random.sample(range(6), random.randint(1, 6)))


@settings(max_examples=500)
@given(st.integers(0, 1 << 32))
def test_no_two_values_are_decided_whatever_is_lost_or_late(seed: int) -> None:
    random = Random(seed)
    network = Network(history(random), random.randrange)
    for _ in range(5):
        network.stand(random.choice(sorted(network.voters)))
    network.draw = lambda bound: bound - 1  # from here on all hear all, at once
    for candidate in [*sorted(network.voters)] * 3:
        network.stand(candidate)
    if any(voter.electorate.voters for voter in network.voters.values()):
        assert network.decided, "with all there, something is decided"
    assert all(value == network.decided[0] for value in network.decided)


@pytest.mark.parametrize(
    ("voters", "host", "present", "passes"),
    [
        ((0,), 0, {0}, True),
        ((0, 1), 0, {0}, True),  # of two, the one with the host
        ((0, 1), 0, {1}, False),
        ((0, 1, -1), 0, {1, -1}, True),  # the witness breaks the tie
        ((0, 1, -1), 0, {0}, False),
        ((0, 1, 2), 0, {0}, False),
        ((0, 1, 2), 0, {1, 2}, True),
        ((0, 1, 2, 3), 0, {0, 3}, True),
        ((0, 1, 2, 3), 0, {1, 2}, False),
        ((1, 2), 0, {1}, False),  # the host has announced its leaving
        ((1,), 0, {1}, True),
        ((0, 1), 0, set(), False),
    ],
)
def test_a_quorum_is_a_majority_or_half_with_the_host(
    voters: tuple[int, ...], host: int, present: set[int], passes: bool
) -> None:
    assert Electorate(1, voters, host).passes(present) is passes


def test_no_two_quorums_of_an_electorate_are_without_a_common_voter() -> None:
    for count in range(1, 7):
        for host in range(count + 1):
            electorate = Electorate(1, tuple(range(count)), host)
            quorums = [one for one in subsets(count) if electorate.passes(one)]
            assert all(one & other for one in quorums for other in quorums)


def subsets(count: int) -> Iterator[set[int]]:
    for number in range(1 << count):
        yield {one for one in range(count) if number >> one & 1}


def test_an_older_ballot_is_refused() -> None:
    voter, electorate = Voter(Electorate(1, (0, 1), 0)), Electorate(1, (0, 1), 0)
    newer: Ballot = (2, 0)
    assert voter.promise(newer, electorate).yes
    assert voter.promise(newer, electorate).yes, "the same candidate may ask again"
    assert not voter.promise((1, 1), electorate).yes
    assert not voter.accept((1, 1), {"host": 1}).yes
    assert voter.accept(newer, {"host": 0}).yes
    assert voter.promise((3, 1), electorate).accepted == (newer, {"host": 0})
