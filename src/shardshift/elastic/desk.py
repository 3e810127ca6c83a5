"""The desk: where a job under ``shardshift run`` hears of requests and of nodes, and says how it stands.

Under another launcher there is no board, no roster and nobody who reads a status record, hence no desk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from ..adapters.protocol import J
from ..values import ParallelConfig
from .growth import Growth
from .operating.board import Board, BoardSource
from .operating.sources import Sources
from .party import Party
from .report import ResizeReport
from .resize import ResizeSource
from .state import kinds_of
from .status import Status


class Desk(Generic[J]):
    """One rank's; only the lead's is asked and writes.

    Args:
        party: of the session, with a roster.
        others: the sources that the session was opened with.
        grow: whether the job takes in nodes that join by itself.

    Attributes:
        source: of changes: requests, growth, and the others.
    """

    def __init__(self, party: Party[J], others: ResizeSource, *, grow: bool) -> None:
        assert party.records is not None
        assert party.roster is not None
        self._party = party
        sources: list[ResizeSource] = [BoardSource(Board(party.records), party.usable, self._choose)]
        if grow:
            sources.append(
                Growth(
                    party.roster,
                    party.member.founders,
                    usable=party.usable,
                    gone=lambda: party.gone,
                    present=lambda: party.course.config,
                    choose=self._choose,
                )
            )
        self.source = Sources(*sources, others)
        self._status = Status(party.records)
        self._tolerates: tuple[tuple[int, tuple[str, ...]], dict[str, int]] | None = None

    def stepped(self, job: J) -> None:
        """A step is finished."""
        self._status.stepped()
        if self._party.leads and self._status.due():
            self._write(job)

    def changed(self, job: J | None, change: ResizeReport | None) -> None:
        """A change is done, or refused (None). Told on the rank that led it, before its source hears of it.

        Args:
            job: in the layout that the job is in now; None if this rank has left it.
            change: what was done.
        """
        self._status.paused()
        self._write(job, change, refused=change is None)

    def _write(self, job: J | None, change: ResizeReport | None = None, *, refused: bool = False) -> None:
        party = self._party
        iteration = job.iteration if job is not None else (change.iteration if change is not None else 0)
        self._status.write(
            party.course,
            iteration,
            era=party.era.number,
            standby=sorted({*party.usable()}.difference(party.course.devices)),
            tolerates=self._tolerated(job),
            change=change,
            refused=refused,
        )

    def _tolerated(self, job: J | None) -> dict[str, int]:
        """What the present layout outlives; worked out once a generation."""
        party = self._party
        if job is None:
            return {}
        now = party.course.generation, kinds_of(party.adapter, job)  # kinds come with the first step
        if self._tolerates is None or self._tolerates[0] != now:
            self._tolerates = now, party.buddies.tolerates(job.config, party.course.devices, now[1])
        return self._tolerates[1]

    def _choose(self, devices: Sequence[int]) -> ParallelConfig:
        return self._party.choose(devices)
