"""Where resizes come from. A source announces the next change of layout; all ranks ask alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..values import ParallelConfig


@dataclass(frozen=True, slots=True)
class Resize:
    """One announced change of layout.

    Attributes:
        iteration: it is due once so many optimizer steps are finished.
        config: the configuration to change to.
    """

    iteration: int
    config: ParallelConfig


class ResizeSource(Protocol):
    """Announces changes of layout.

    Every rank of the job must get the same answer for the same iteration. So a source that learns of changes from
    outside announces them for an iteration that no rank has reached yet; the earlier it does, the more of the
    change is prepared while training goes on.
    """

    def upcoming(self, iteration: int) -> Resize | None:
        """The next change that is due at ``iteration`` or later, if one is announced."""


class Script:
    """A source that is known from the start: per iteration a configuration.

    Args:
        changes: e.g. ``{10: "pp4tp2", 20: "pp2tp4"}``.
    """

    def __init__(self, changes: Mapping[int, ParallelConfig | str]) -> None:
        self._resizes = [
            Resize(iteration, ParallelConfig.parse(config) if isinstance(config, str) else config)
            for iteration, config in sorted(changes.items())
        ]

    def upcoming(self, iteration: int) -> Resize | None:
        """The first scripted change at this iteration or later."""
        return next((resize for resize in self._resizes if resize.iteration >= iteration), None)
