"""Growth: when nodes have joined and their devices stand by, the job takes them in without being asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..values import Infeasible, ParallelConfig, ShardshiftError
from .resize import Resize

AHEAD: Final = 2
"""Steps between the announcement of a change and the change: one to tell everyone, one to plan it."""


class Growth:
    """A ``ResizeSource`` that looks who is there each time that something has changed among the nodes.

    It keeps nothing that matters: another lead looks for itself.

    Args:
        version: a number that grows with each change among the nodes; asked at each step.
        here: the devices of nodes that are there and stay, whether or not they are ready.
        usable: those that may run ranks now.
        present: the configuration that runs.
        choose: the configuration for some devices.
    """

    alike = False

    def __init__(
        self,
        version: Callable[[], int],
        here: Callable[[], Sequence[int]],
        usable: Callable[[], Sequence[int]],
        present: Callable[[], ParallelConfig],
        choose: Callable[[Sequence[int]], ParallelConfig],
    ) -> None:
        self._version, self._here, self._usable = version, here, usable
        self._present, self._choose = present, choose
        self._looked_at: int | None = None
        self._announced: Resize | None = None

    def upcoming(self, iteration: int) -> Resize | None:
        """A change to more devices, if there are more than the job uses and it would use them."""
        if self._announced is not None and self._announced.iteration >= iteration:
            return self._announced
        self._announced = None
        version = self._version()
        if version == self._looked_at:
            return None
        self._looked_at = version
        usable = tuple(self._usable())
        if not {*self._here()} <= {*usable}:
            return None  # a node comes as a whole: the version grows once more when its last device stands by
        try:
            config = self._choose(usable)
        except Infeasible:
            return None  # the job runs as it is
        if config.world_size > self._present().world_size:
            self._announced = Resize(iteration + AHEAD, config, usable)
        return self._announced

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Look again when the nodes have changed again."""
        if resize == self._announced:
            self._announced = None
