"""Growth: when nodes have joined and their devices stand by, the job takes them in without being asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..values import Infeasible, Mismatch, ParallelConfig, ShardshiftError
from .agent.roster import Roster
from .resize import AHEAD, Resize


class Growth:
    """A ``ResizeSource`` that looks who is there each time that something has changed among the nodes.

    A device is offered once: what was asked to shrink stays small, though devices stand by then. Which were is in the
    store, for the next lead.

    Args:
        roster: of the nodes; its version is asked at each step.
        founders: the devices that the job began with, which are no news.
        usable: gives the devices that may run ranks now.
        gone: gives those that were lost; their node's record may not say so yet.
        present: gives the configuration that runs.
        choose: gives the configuration for some devices.
    """

    alike = False

    def __init__(
        self,
        roster: Roster,
        founders: Collection[int],
        *,
        usable: Callable[[], Sequence[int]],
        gone: Callable[[], Collection[int]],
        present: Callable[[], ParallelConfig],
        choose: Callable[[Sequence[int]], ParallelConfig],
    ) -> None:
        self._roster, self._founders, self._usable, self._gone = roster, {*founders}, usable, gone
        self._present, self._choose = present, choose
        self._looked_at: int | None = None
        self._announced: Resize | None = None

    def upcoming(self, iteration: int) -> Resize | None:
        """A change to more devices, if some have come that the job would use."""
        if self._announced is not None and self._announced.iteration >= iteration:
            return self._announced
        self._announced = None
        version = self._roster.version()
        if version == self._looked_at:
            return None
        self._looked_at = version
        here = {*self._roster.devices_here()}.difference(self._gone())
        usable = tuple(self._usable())
        if here <= self._founders | self._roster.offered() or not here <= {*usable}:
            return None  # a node comes as a whole: the version grows once more when its last device stands by
        try:
            config = self._choose(usable)
        except (Infeasible, Mismatch):
            return None  # the job runs as it is
        if config.world_size > self._present().world_size:
            self._announced = Resize(iteration + AHEAD, config, usable)
        return self._announced

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Offer these devices no more."""
        if resize == self._announced:
            self._announced = None
            self._roster.offer(resize.usable or ())
