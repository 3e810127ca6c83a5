"""How a node finds its place in a job.

1. The first agent lays down the terms of the job; whoever comes with others is refused.
2. An agent that comes before the job has begun takes a *ticket* and shows a beat.
3. Who sees ``min_nodes`` tickets alive proposes them, lowest first, as the *founders*; the first proposal holds. So the
   slots of the founders are 0, 1, ... without a gap, even if an agent that came early has died while it waited.
4. Everybody else takes the next slot, unless ``max_nodes`` others are alive.

Taking slots at once, in order of arrival, was rejected: ranks must be 0 ... WORLD_SIZE - 1 when training begins, and a
node that is started again after it died in the wait would get a number beyond them, for ever.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from ...coordination.signs import INTERVAL_S, Beats, show
from ...values import Infeasible, ShardshiftError
from .roster import NodeRecord, Roster, Stores, Terms

_FOUNDERS: Final = "founders"
_TICKETS: Final = "tickets"
_STILL_S: Final = 6 * INTERVAL_S  # a beat that stands still for so long is not that of an agent which waits


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is in its job.

    Attributes:
        slot: the node's number.
        terms: of the job.
    """

    slot: int
    terms: Terms

    @property
    def devices(self) -> tuple[int, ...]:
        """The node's devices."""
        return self.terms.devices_of(self.slot)

    @property
    def founds(self) -> bool:
        """Whether it is one of the nodes that the job begins with."""
        return self.slot < self.terms.min_nodes


def join(stores: Stores, terms: Terms, *, timeout_s: float, pause: Callable[[], None]) -> Place:
    """Find this node's place; the first ones wait for one another.

    Args:
        stores: of the job.
        terms: as this node has them; ``min_nodes`` and ``max_nodes`` of the first node hold for all.
        timeout_s: how long to wait for the other first nodes.
        pause: called between two looks; takes some milliseconds, and may raise, which ends the wait.

    Raises:
        Mismatch: if the node does not fit into the job.
        Infeasible: if the job has all the nodes that it may have.
        ShardshiftError: if too few nodes have come in time.
    """
    roster = Roster(stores.job)
    terms = roster.agree(terms)
    ticket = stores.job.add(_TICKETS, 1) - 1
    try:
        founders = _founders(stores, terms, ticket, timeout_s, pause)
    except BaseException:
        _give_up(stores, ticket)
        raise
    roster.begin(terms.min_nodes)
    if ticket in founders:
        return Place(founders.index(ticket), terms)
    place = Place(roster.next_slot(), terms)
    alive = _alive(stores.nodes, _before(roster, place.slot), terms.max_nodes, pause)
    if len(alive) >= terms.max_nodes:
        roster.write(NodeRecord(place.slot, socket.gethostname(), (), {}, "left"))
        raise Infeasible(
            f"job '{terms.name}' may have {terms.max_nodes} nodes at a time, and "
            f"{', '.join(map(str, sorted(alive)))} are there; what to do: let one leave (SIGTERM to its "
            "shardshift run), or start the job with a greater MAX in --nnodes MIN:MAX"
        )
    return place


def closed_founding(job: dist.Store) -> None:
    """In a store that takes the place of another one: the first nodes were there, so whoever comes is one more."""
    job.set(_FOUNDERS, "[]")


def _founders(stores: Stores, terms: Terms, ticket: int, timeout_s: float, pause: Callable[[], None]) -> list[int]:
    """The tickets of the nodes that the job begins with, once they are there."""
    job, lives, beat = stores.job, _Lives(stores.waiting), 0
    until_s = time.monotonic() + timeout_s
    beat_s = 0.0
    while not job.check([_FOUNDERS]):
        if (now_s := time.monotonic()) >= beat_s:
            show(stores.waiting, ticket, beat)
            beat, beat_s = beat + 1, now_s + INTERVAL_S
        others = [one for one in range(job.add(_TICKETS, 0)) if one != ticket and not job.check([_gone(one)])]
        alive = sorted([ticket, *lives.moving(others)]) if terms.min_nodes > 1 else [ticket]
        if len(alive) >= terms.min_nodes:
            job.compare_set(_FOUNDERS, "", json.dumps(alive[: terms.min_nodes]))
            continue
        if now_s > until_s:
            raise ShardshiftError(
                f"job '{terms.name}' begins with {terms.min_nodes} nodes, and {len(alive)} came within "
                f"{timeout_s:.0f} s; what to do: start shardshift run with the same --rdzv-endpoint and --rdzv-id on "
                f"{terms.min_nodes - len(alive)} more, or give a smaller MIN in --nnodes MIN:MAX"
            )
        pause()
    founders: list[int] = json.loads(job.get(_FOUNDERS))
    return founders


def _before(roster: Roster, slot: int) -> list[int]:
    """The slots before one that have not said that they left."""
    return [one for one in range(slot) if (node := roster.node(one)) is None or node.state != "left"]


def _alive(nodes: dist.Store, slots: list[int], enough: int, pause: Callable[[], None]) -> set[int]:
    """Which agents show life, looked at until there are ``enough`` or those that do not have had time to."""
    lives = _Lives(nodes)
    until_s = time.monotonic() + _STILL_S
    alive: set[int] = set()
    while len(slots) >= enough > len(alive) and time.monotonic() < until_s:
        alive |= lives.moving(slots)
        pause()
    return alive


class _Lives:
    """Whose beats have moved since this process looked first, and lately."""

    def __init__(self, store: dist.Store) -> None:
        self._beats = Beats(store)
        self._first_s: dict[int, float] = {}

    def moving(self, numbers: Iterable[int]) -> set[int]:
        now_s = self._beats.look(list(numbers))
        still_s = self._beats.still_s()
        for number in still_s:
            self._first_s.setdefault(number, now_s)
        return {n for n, still in still_s.items() if still < _STILL_S and now_s - still > self._first_s[n]}


def _give_up(stores: Stores, ticket: int) -> None:
    """An agent that waits no longer is no founder from now on."""
    try:
        stores.job.set(_gone(ticket), "")
    except dist.DistError:
        return  # without a store there are no founders at all


def _gone(ticket: int) -> str:
    return f"{_TICKETS}/gone/{ticket}"
