"""The desk: where a job under ``shardshift run`` hears of requests and of nodes, and says how it stands.

What would become of the job if a node were gone at once is worked out in training, after the first step in a layout: a
node whose grace is short has no time to ask, and the lead could not answer in the middle of a step. Per node with
devices that train, by its number:

    {"state": "held", "config": "pp2tp1dp2", "reason": "", "move_s": 0.01}

``state`` is "held" if every byte of it has a holder or a copy elsewhere, "checkpoint" if not and the survivors would
start from the last checkpoint, else "lost". ``config`` is the layout for who is left, empty if there is none, for the
``reason``. It is asked once for each number of devices, since a policy may be slow and nodes are many and alike.
``move_s`` is the time that all state of the node takes over its link: no plan that moves it off needs longer there.

Under another launcher there is no board, no roster and nobody who reads a status record, hence no desk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from ..adapters.protocol import J
from ..plan.holders import Holders, buddies_of
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
        assert party.roster is not None
        self._party = party
        sources: list[ResizeSource] = [BoardSource(Board(party.store), party.usable, self._choose)]
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
        given = Sources(others)
        if party.member.reign:
            given.moved(party.store)
        self.source = Sources(*sources, given)
        self._status = Status(party.store)
        self._tolerates: tuple[tuple[int, tuple[str, ...]], dict[str, int]] | None = None
        self._without: tuple[tuple[Any, ...], dict[str, dict[str, Any]]] | None = None
        self._worked_out: tuple[int, int] | None = None

    def stepped(self, job: J) -> None:
        """A step is finished."""
        self._status.stepped()
        now = self._party.era.number, self._party.course.generation
        if self._party.leads and (self._status.due() or self._worked_out != now):
            self._worked_out = now
            self._write(job, trains=True)

    def changed(self, job: J | None, change: ResizeReport | None) -> None:
        """A change is done, or refused (None). Told on the rank that led it, before its source hears of it.

        Args:
            job: in the layout that the job is in now; None if this rank has left it.
            change: what was done.
        """
        self._status.paused()
        self._write(job, change, refused=change is None)

    def _write(
        self, job: J | None, change: ResizeReport | None = None, *, refused: bool = False, trains: bool = False
    ) -> None:
        party, usable = self._party, self._party.usable()
        iteration = job.iteration if job is not None else (change.iteration if change is not None else 0)
        self._status.write(
            party.course,
            iteration,
            era=party.era.number,
            standby=sorted({*usable}.difference(party.course.devices)),
            tolerates=self._tolerated(job),
            change=change,
            refused=refused,
            without=self._without_each(job, usable) if trains and job is not None else None,
        )

    def _without_each(self, job: J, usable: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Per node what would become of the job without it; see above. Nothing where the job outlives no loss."""
        party, settings = self._party, self._party.settings
        if not settings.survive:
            return {}
        devices, kinds = party.course.devices, kinds_of(party.adapter, job)
        now = party.course.generation, kinds, tuple(usable)
        if self._without is not None and self._without[0] == now:
            return self._without[1]
        topology = party.member.topology
        per_node = topology.devices_per_node
        layout = party.adapter.change(job.config, job.config, kinds=kinds).prev
        holders = Holders(layout)
        buddies = buddies_of(devices, per_node) if settings.shard_copies else None
        out = topology.with_nodes(max(topology.nodes, max(devices) // per_node + 1)).node_out_bytes_per_s()
        configs: dict[int, tuple[str, str]] = {}
        found: dict[str, dict[str, Any]] = {}
        for node in sorted({device // per_node for device in devices}):
            ranks = [rank for rank, device in enumerate(devices) if device // per_node == node]
            left = [device for device in usable if device // per_node != node]
            if len(left) not in configs:
                configs[len(left)] = self._config_for(left)
            config, reason = configs[len(left)]
            gone = holders.lost_with(ranks, buddies)
            found[str(node)] = {
                "state": "held" if not gone else "lost" if settings.checkpoint is None else "checkpoint",
                "config": config,
                "reason": reason,
                "move_s": float(layout.rank_bytes[ranks].sum() / out[node]),
            }
        self._without = now, found
        return found

    def _config_for(self, devices: Sequence[int]) -> tuple[str, str]:
        """The configuration for some devices, or why there is none."""
        try:
            return str(self._choose(devices)), ""
        except Exception as error:  # the user's own policy, too: whatever it raises, the job trains on
            return "", str(error)

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
