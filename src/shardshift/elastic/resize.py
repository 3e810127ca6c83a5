"""Where resizes come from. A source says which configuration is due at which iteration; all ranks ask alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..values import ParallelConfig


class ResizeSource(Protocol):
    """Announces changes of layout.

    Every rank of the job must get the same answer for the same iteration, so a source that learns of changes
    from outside announces them for an iteration that no rank has reached yet.
    """

    def due(self, iteration: int) -> ParallelConfig | None:
        """The configuration to change to once ``iteration`` steps are finished; None to go on as before."""


class Script:
    """A source that is known from the start: per iteration a configuration.

    Args:
        changes: e.g. ``{10: "pp4tp2", 20: "pp2tp4"}``.
    """

    def __init__(self, changes: Mapping[int, ParallelConfig | str]) -> None:
        self._changes = {
            iteration: ParallelConfig.parse(config) if isinstance(config, str) else config
            for iteration, config in changes.items()
        }

    def due(self, iteration: int) -> ParallelConfig | None:
        """The scripted configuration of this iteration."""
        return self._changes.get(iteration)
