"""Where resizes come from. A source announces the next change of layout; all ranks ask alike."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, Protocol

from ..values import Infeasible, ParallelConfig, ShardshiftError

AHEAD: Final = 2
"""Steps between the announcement of a change and the change: one to tell everyone, one to plan it."""

_ADVICE: Final = "what to do: write it like ss.Script({10: 'pp4tp2', 20: 'pp2tp4'})"


@dataclass(frozen=True, slots=True)
class Resize:
    """One announced change of layout.

    Attributes:
        iteration: it is due once so many optimizer steps are finished.
        config: the configuration to change to.
        usable: the devices that may run ranks of it; None for all that are there.
    """

    iteration: int
    config: ParallelConfig
    usable: tuple[int, ...] | None = None

    def __str__(self) -> str:
        where = "" if self.usable is None else f" on devices {list(self.usable)}"
        return f"{self.config}{where} after step {self.iteration}"


class ResizeSource(Protocol):
    """Announces changes of layout. It is asked on the lead, which tells all others at the gate of the next step.

    Attributes:
        alike: whether every rank has such a source and gets the same answers: then each asks its own, at any time.

    A source that learns of changes from outside announces them for ``AHEAD`` steps after the present iteration: one
    step in which everyone hears of it, one in which it is planned and joiners make room, while training goes on.
    """

    alike: bool

    def upcoming(self, iteration: int) -> Resize | None:
        """The next change that is due at ``iteration`` or later, if one is announced; the same until it is settled.

        Args:
            iteration: optimizer steps finished.
        """

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Hear what came of an announced change: done, or refused and why. Told on the lead."""


class Script:
    """A source that is known from the start: per iteration a configuration. Every rank has the same and asks itself.

    Args:
        changes: e.g. ``{10: "pp4tp2", 20: "pp2tp4"}``: finished optimizer steps, and the configuration from there on.

    Raises:
        Infeasible: if it is not of that form.
    """

    alike = True

    def __init__(self, changes: Mapping[int, ParallelConfig | str]) -> None:
        given: Any = changes  # by a user whom no type checker has told
        if not isinstance(given, Mapping):
            raise Infeasible(f"a script is a mapping, not {reprlib.repr(given)}; {_ADVICE}")
        for iteration, config in given.items():
            if isinstance(iteration, bool) or not isinstance(iteration, Integral) or iteration < 0:
                raise Infeasible(
                    f"{reprlib.repr(iteration)}: {reprlib.repr(config)} has no iteration: a whole number of finished "
                    f"steps, 0 or more; {_ADVICE}"
                )
            if not isinstance(config, str | ParallelConfig):
                raise Infeasible(f"{iteration}: {reprlib.repr(config)} has no configuration; {_ADVICE}")
        self._resizes = [
            Resize(int(iteration), ParallelConfig.of(config))
            for iteration, config in sorted(changes.items(), key=lambda change: change[0])
        ]

    @classmethod
    def parse(cls, text: str) -> Script:
        """Read ``"4:pp2tp2dp1,8:pp1tp2dp2"``: per iteration a configuration; an empty text is no change.

        Raises:
            Infeasible: if the text is not of that form, or names an iteration twice.
        """
        changes: dict[int, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            iteration, _, config = part.partition(":")
            if not iteration.strip().isdecimal() or int(iteration) in changes:
                raise Infeasible(
                    f"{part!r} in {text!r} is no iteration and configuration, or names an iteration again; what to do: "
                    "write it like '4:pp2tp2dp1,8:pp1tp2dp2'"
                )
            changes[int(iteration)] = config
        return cls(changes)

    def upcoming(self, iteration: int) -> Resize | None:
        """The first scripted change at this iteration or later."""
        return next((resize for resize in self._resizes if resize.iteration >= iteration), None)

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """A script goes on whatever happens."""
