"""Succession: what agents do when the host of the job's store is gone, so that the job goes on without it.

As long as there is a store, each agent keeps what a successor would need: who votes (the electorate, which the host
writes) and the job's records. When the store does not answer any more,

1. those who find that open their vote; nobody who still has the store promises anything to anybody, so one agent whose
   own link is broken cannot take the store from the others;
2. in the order of their slots they stand as candidates (``coordination.ballot``): with a quorum of promises one opens
   a store, writes into it the newest records that those who promised have, the next era, and as lost every device of
   which none of them says that it runs; and proposes that store;
3. once a quorum has accepted, all who promised connect to it, tell their workers where it is (``StoreFile``), and go
   on. The workers recover as after any loss.

Who finds no quorum, or was decided upon without having taken part, ends: a minority stops. The host itself does so if
a quorum has not shown life for as long as others would wait for it (``presiding``); and as nobody who has opened the
vote assents to an era of the old store any more, survivors cannot go on there either.

A *reign* is the time of one store, numbered from 0. A store that all agents replicate at all times was rejected: every
request of every rank would wait for a majority, for what is needed once in a job's life.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from ...coordination import assent, current_era, era_store, first_era, lost_before
from ...coordination.ballot import Ballot, Electorate, Reply, Value, Voter, stand
from ...coordination.quorum import electorate_of, say_known, write_electorate
from ...values import ShardshiftError
from ..member import job_store
from ..operating.board import Board
from .ask import Address, Answering, Heard, Record, ask_all
from .joining import closed_founding
from .roster import NodeRecord, Roster, Stores, Terms
from .store import connected_store, own_address, succeeding_store

WITNESS: Final = -1
"""The number of a witness; nodes have their slots."""
_REIGN: Final = "reign"
_RETRY_S: Final = 0.3
_LINGER_S: Final = 2.0
"""How long a candidate with a quorum waits for others who may only be slow to notice."""


class MinorityStops(ShardshiftError):
    """This agent has no quorum behind it, so others may go on without it, and it must not."""


@dataclass(frozen=True, slots=True)
class Reign:
    """A store that was decided on.

    Attributes:
        number: of the reign.
        host: the voter that hosts it.
        address: of the store.
        electorate: who decides on the next one.
    """

    number: int
    host: int
    address: Address
    electorate: Electorate

    def to_json(self) -> dict[str, Any]:
        """As it is decided on."""
        return {
            "number": self.number,
            "host": self.host,
            "address": list(self.address),
            "electorate": self.electorate.to_json(),
        }

    @classmethod
    def from_json(cls, record: Record) -> Reign:
        """The inverse of ``to_json``."""
        address, port = record["address"]
        return cls(record["number"], record["host"], (address, port), Electorate.from_json(record["electorate"]))


class Succession:
    """One agent's part. All but the answers to others is called from one thread.

    Args:
        number: this voter's: its node's slot, or ``WITNESS``.
        terms: of the job.
        store: the present one.
        stores: its parts.
        silence_s: a store or an agent that shows no life for so long is lost.
        say: takes lines for whoever has started this agent.

    Attributes:
        patience_s: how long finding another store may take: who is last to notice that the host is silent does so
            ``silence_s`` after the first.
    """

    def __init__(
        self,
        number: int,
        terms: Terms,
        store: dist.TCPStore,
        stores: Stores,
        *,
        silence_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._number, self._terms, self._store, self._stores = number, terms, store, stores
        self._silence_s, self._say = silence_s, say
        self._lock = threading.Lock()
        self._reign = int(stores.job.get(_REIGN)) if stores.job.check([_REIGN]) else 0
        self._voter = Voter(Electorate(0, (), number))
        self._open = False
        self._decided: dict[int, Reign] = {}
        self._addresses: dict[int, Address] = {}
        self._records: dict[str, str] = {}
        self._lost: tuple[int, ...] = ()
        self._age = (-1, -1)
        self._moved = False
        self._said = self._assented = -1
        self._running: tuple[int, ...] = ()
        self._mine: dict[int, dist.TCPStore] = {}
        self._dead: set[int] = set()
        self._board = Board(stores.job)
        self._answering = Answering(own_address(store), self._answer)
        self._register()
        self.patience_s = 2 * silence_s + 10.0

    @property
    def reign(self) -> int:
        """The number of the present one."""
        return self._reign

    def close(self) -> None:
        """Answer nobody any more."""
        self._answering.close()

    def look(self) -> None:
        """While there is a store: keep what a successor needs, and say that this voter knows the electorate.

        Raises:
            dist.DistError: if the store does not answer, or others have decided on another one.
        """
        job = self._stores.job
        if self._reign + 1 in self._decided:
            raise dist.DistStoreError("the others have gone on with another store")
        self._keep()
        known = electorate_of(job)
        if known is not None and known[0].version > self._said:  # said in each store anew
            with self._lock:
                self._addresses.update(known[1])
            self._voter.hear(known[0])
            say_known(job, self._number, known[0].version)
            self._said = known[0].version

    def assent(self) -> None:
        """Let the present era be, if it is a new one: without a quorum that does, its survivors do not go on."""
        if (era := self._stores.current()) == self._assented:
            return
        self._keep()  # before: of those who promise, one has let the last era be, and must know who was lost before it
        assent(self._stores.era(era), self._number)
        self._assented = era

    def _keep(self) -> None:
        """Keep what a successor needs."""
        job = self._stores.job
        roster = Roster(job)
        age = current_era(job), roster.version()
        if age != self._age or self._moved:
            lost = tuple(sorted(lost_before(era_store(job, age[0]))))
            records = roster.records() | self._board.records()
            self._records, self._lost, self._age, self._moved = records, lost, age, False
        else:
            self._records = self._records | self._board.records()

    def withdraw(self) -> None:
        """Be no voter any more; of a job that has ended."""
        self._stores.job.delete_key(_voter(self._number))

    def succeed(self, running: Collection[int], pause: Callable[[], None]) -> Reign:
        """The store does not answer: agree with the others on the next one, and move to it.

        Args:
            running: the devices of this node whose workers run.
            pause: called between two looks; may raise.

        Returns:
            The reign that begins; the parts of the store are those of the new one.

        Raises:
            MinorityStops: if there is no quorum, or the others go on without this node.
        """
        with self._lock:
            self._running, self._open = tuple(sorted(running)), True
        if not self._voter.electorate.voters:
            raise MinorityStops("it was lost before it was known who decides on another one")
        self._say(f"the job's store does not answer; {len(self._voter.electorate.everyone)} decide who hosts the next")
        while True:
            reign = self._elected(pause)
            if self._number not in (*reign.electorate.voters, WITNESS):
                raise MinorityStops("the others have gone on without this node")
            with self._lock:
                self._reign, self._voter = reign.number, Voter(reign.electorate)
                mine, self._mine = self._mine, {}
            host, port = reign.address
            if reign.host == self._number:
                store: dist.TCPStore | None = mine[port]
            else:
                store = connected_store(host, port, self._silence_s, self._silence_s, pause)
            if store is not None:
                self._say(f"{_called(reign.host)} hosts the job's store from now on, at {host}:{port}")
                self._store = store
                self._stores.move(job_store(store))
                self._board = Board(self._stores.job)
                self._moved, self._said, self._assented = True, -1, -1
                self._register()
                with self._lock:
                    self._open = False
                return reign
            self._say(f"the store that {_called(reign.host)} was to host does not answer either")

    def _elected(self, pause: Callable[[], None]) -> Reign:
        """The next reign, once it is decided on."""
        number, order, began_s = self._reign + 1, self._voter.electorate.everyone, time.monotonic()
        place = order.index(self._number) if self._number in order else len(order)
        next_s = began_s + place * _RETRY_S
        while (reign := self._decided.get(number)) is None:
            now_s = time.monotonic()
            electorate = self._voter.electorate  # others may have told of a newer one
            order = electorate.everyone
            if now_s > began_s + self.patience_s:
                raise MinorityStops(
                    f"no quorum of {len(order)} ({', '.join(map(_called, order))}) came together within "
                    f"{self.patience_s:.0f} s"
                )
            if self._number != WITNESS and now_s >= next_s:
                self._stand(number)
                electorate = self._voter.electorate
                order = electorate.everyone
                late = now_s > began_s + _LINGER_S  # whoever has missed a change is told by then of those who came
                if late and not electorate.passes({*order} - self._dead) and number not in self._decided:
                    gone = ", ".join(map(_called, sorted(self._dead)))
                    raise MinorityStops(f"of {len(order)} that decide on another store, too many have ended: {gone}")
                next_s = time.monotonic() + (1 + place) * _RETRY_S
            pause()
        return reign

    def _stand(self, number: int) -> None:
        """Stand as a candidate for hosting reign ``number`` once."""
        question = {"job": self._terms.name, "reign": number, "from": self._number}
        if self._number not in self._voter.electorate.everyone:  # it could not host what it is no part of
            self._all(question | {"ask": "decided"}, self._voter.electorate.everyone)
            return
        value = stand(
            self._voter,
            self._number,
            lambda ballot, electorate: self._promises(question, ballot, electorate),
            lambda ballot, proposed, electorate: self._replies(
                self._all(question | {"ask": "accept", "ballot": ballot, "value": dict(proposed)}, electorate.everyone)
            ),
            lambda promised: self._form(number, promised),
        )
        if value is not None:
            self._learn(Reign.from_json(value))
            # The witness as well, which may not have had a vote this time.
            told = {*self._voter.electorate.everyone, WITNESS}
            self._all(question | {"ask": "learn", "value": dict(value)}, told)

    def _promises(self, question: Record, ballot: Ballot, electorate: Electorate) -> dict[int, Reply]:
        """Ask for promises until a quorum has given one, and all others have answered, are dead, or have had time."""
        question = {**question, "ask": "promise", "ballot": ballot, "electorate": electorate.to_json()}
        until_s = time.monotonic() + _LINGER_S
        replies: dict[int, Reply] = {}
        asked: Collection[int] = electorate.everyone
        while True:
            heard = self._all(question, asked)
            replies |= self._replies(heard)
            asked = [one for one in asked if one not in replies and one not in heard.dead]
            passes = electorate.passes([one for one, reply in replies.items() if reply.yes])
            if not asked or not passes or time.monotonic() > until_s:
                return replies
            time.sleep(_RETRY_S / 3)

    def _all(self, question: Record, voters: Collection[int]) -> Heard:
        """Ask voters, this one included; what was decided long since is learned, and told who is behind."""
        with self._lock:
            addresses = {one: self._addresses[one] for one in voters if one in self._addresses}
        heard = ask_all(addresses, question)
        self._dead |= {*heard.dead}
        behind = {one: addresses[one] for one, answer in heard.answers.items() if "behind" in answer}
        if behind and (reign := self._decided.get(self._reign)) is not None:
            ask_all(behind, {"job": self._terms.name, "reign": reign.number, "ask": "learn", "value": reign.to_json()})
        for answer in heard.answers.values():
            if "decided" in answer:
                self._learn(Reign.from_json(answer["decided"]))
        return heard

    @staticmethod
    def _replies(heard: Heard) -> dict[int, Reply]:
        return {one: Reply.from_json(answer) for one, answer in heard.answers.items() if "yes" in answer}

    def _form(self, number: int, promised: Mapping[int, Reply]) -> Value:
        """Host a store, with what the job's next era has to know; as a value to decide on."""
        # A store for each attempt: what another attempt has proposed, and others may accept yet, stays as it is.
        store = succeeding_store(self._answering.address[0], self._store.port, self._silence_s)
        self._mine[store.port] = store
        newest = max((reply.told for reply in promised.values()), key=lambda told: told["age"])
        job = job_store(store)
        for key, content in newest["records"].items():
            job.set(key, content)
        closed_founding(job)
        running = {device for reply in promised.values() for device in reply.told["running"]}
        roster = Roster(job)
        while roster.count() <= max(promised):  # one whose slot was not heard of in time: it must not be given twice
            roster.next_slot()
        slots = range(roster.count())
        for slot in slots:
            if slot not in promised:
                roster.write(NodeRecord(slot, "", (), {}, "left"))
        # Whom an era has gone on without is lost, though it may run: it trains from an older step.
        lost = {device for slot in slots for device in self._terms.devices_of(slot) if device not in running}
        first_era(job, newest["age"][0] + 1, lost.union(newest["lost"]))
        job.set(_REIGN, str(number))
        known = self._voter.electorate
        electorate = Electorate(known.version + 1, tuple(sorted(promised)), self._number)
        with self._lock:
            told = {one: address for one, address in self._addresses.items() if one in promised or one == WITNESS}
        write_electorate(job, electorate, told)
        for one, address in told.items():  # or who is slow to come here would not be counted as one who stays
            job.set(_voter(one), json.dumps(address))
        return Reign(number, self._number, (self._answering.address[0], store.port), electorate).to_json()

    def _register(self) -> None:
        """Say where this voter is asked."""
        self._stores.job.set(_voter(self._number), json.dumps(self._answering.address))
        with self._lock:
            self._addresses[self._number] = self._answering.address

    def _learn(self, reign: Reign) -> None:
        with self._lock:
            self._decided.setdefault(reign.number, reign)

    def _answer(self, asked: Record) -> Record | None:
        """The answer to another voter's question; in another thread."""
        if asked.get("job") != self._terms.name:
            return None
        number = asked["reign"]
        if asked["ask"] == "learn":
            self._learn(Reign.from_json(asked["value"]))
            return {}
        with self._lock:
            if number in self._decided:
                return {"decided": self._decided[number].to_json()}
            if number != self._reign + 1:
                return {"behind": self._reign} if number > self._reign else None
            if not self._open:
                return {"has_store": True}
            if asked["ask"] == "decided":
                return {}
            ballot: Ballot = tuple(asked["ballot"])
            if asked["ask"] == "accept":
                return self._voter.accept(ballot, asked["value"]).to_json()
            told = {"running": self._running, "records": self._records, "age": self._age, "lost": self._lost}
            return self._voter.promise(ballot, Electorate.from_json(asked["electorate"]), told).to_json()


def minority_stops(why: MinorityStops) -> ShardshiftError:
    """What an agent says that has no quorum."""
    return ShardshiftError(
        f"this node stops: {why}; others may go on without it. Its workers were ended; what to do: if no node goes on, "
        "start the job again from its last checkpoint (of two nodes, the one that does not host the store can go on if "
        "a 'shardshift witness' runs on a third machine)"
    )


def address_of(job: dist.Store, number: int) -> Address | None:
    """Where a voter is asked; None if there is none of that number."""
    if not job.check([_voter(number)]):
        return None
    host, port = json.loads(job.get(_voter(number)))
    return host, port


def _voter(number: int) -> str:
    return f"voter/{number}"


def _called(number: int) -> str:
    return "the witness" if number == WITNESS else f"node {number}"
