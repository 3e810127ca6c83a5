"""Presiding: what the agent that hosts the job's store does so that the store can be succeeded, and only once.

It lays down who decides on a successor, the *electorate*: the nodes that are there and stay, and the witness where
those are an even number. Announced leavers are out of it. A change counts once a quorum of those before and of those
after know of it; the next one waits for that. And it counts who shows life: without a quorum that does, for as long as
the others wait for a silent store, this side of a partition is the minority, and stops.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Final

import torch.distributed as dist

from ...coordination.ballot import Electorate
from ...coordination.quorum import electorate_of, known_to_all, who_knows, write_electorate
from .ask import Address
from .succession import WITNESS, MinorityStops, address_of

_OVER: Final = "over"


class Presiding:
    """The host's part.

    Args:
        number: this agent's slot.
        job: the store that it hosts.
        silence_s: who shows no life for so long is lost.
    """

    def __init__(self, number: int, job: dist.Store, silence_s: float) -> None:
        self._number, self._job, self._silence_s = number, job, silence_s
        self._alive_s = time.monotonic()

    def look(self, staying: Iterable[int], alive: Collection[int], lately: Collection[int]) -> None:
        """One look, with each beat.

        Args:
            staying: the slots of the nodes that are there and have not announced their leaving.
            alive: the voters that have shown life within ``silence_s``, this one included.
            lately: those that have within half of it. Others find another store once this one has not answered for
                ``silence_s``: by then this side has stopped.

        Raises:
            MinorityStops: if too few have, for too long.
        """
        known = electorate_of(self._job)
        if known is None:
            write_electorate(self._job, Electorate(1, (self._number,), self._number), self._addresses([self._number]))
            return
        electorate = known[0]
        now_s = time.monotonic()
        if electorate.passes(lately):
            self._alive_s = now_s
        elif now_s - self._alive_s > self._silence_s / 2:
            raise MinorityStops(
                f"of {len(electorate.everyone)} that decide, {len({*alive} & {*electorate.everyone})} have shown life "
                f"in the last {self._silence_s:.0f} s"
            )
        if not electorate.passes(who_knows(self._job, electorate)):
            return
        addresses = self._addresses([*staying, WITNESS])
        nodes = addresses.keys() - {WITNESS}
        wanted = addresses.keys() if len(nodes) % 2 == 0 and WITNESS in alive else nodes
        if electorate.before is not None:
            self._write(electorate.settled())
        elif wanted and wanted != {*electorate.voters}:
            self._write(electorate.changed(wanted))

    def say_over(self) -> None:
        """The job has ended: nobody need look for another store."""
        self._job.set(_OVER, "")

    def witness_stays(self, alive: Collection[int]) -> bool:
        """Whether a witness has still to hear of it."""
        return WITNESS in alive and address_of(self._job, WITNESS) is not None

    def is_free(self) -> bool:
        """Whether the others can do without this agent: they decide by themselves on who is next."""
        electorate = known_to_all(self._job)
        return electorate is not None and self._number not in electorate.voters

    def _write(self, electorate: Electorate) -> None:
        write_electorate(self._job, electorate, self._addresses([*electorate.everyone, WITNESS]))

    def _addresses(self, voters: Iterable[int]) -> dict[int, Address]:
        """Where voters are asked; those that have not said so are left out."""
        found = {one: address_of(self._job, one) for one in voters}
        return {one: address for one, address in found.items() if address is not None}


def is_over(job: dist.Store) -> bool:
    """Whether the host has said that the job has ended."""
    return job.check([_OVER])
