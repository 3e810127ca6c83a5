"""What became of a request, in the words of the board and of whoever asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ...values import ParallelConfig
from ..resize import Resize

State: TypeAlias = Literal["queued", "announced", "done", "refused"]
_SETTLED: Final = ("done", "refused")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        state: "queued", "announced", "done" or "refused".
        reason: why it was refused, or why nothing had to change; else empty.
        iteration: the change is, or was, due once so many steps are finished; None while that is not known.
        config: the configuration that the request came to; empty while that is not known.
        usable: as in ``Resize``.
        there: the devices that were there when it was decided.
    """

    state: State
    reason: str = ""
    iteration: int | None = None
    config: str = ""
    usable: tuple[int, ...] | None = None
    there: tuple[int, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether it will not change any more."""
        return self.state in _SETTLED

    @property
    def resize(self) -> Resize | None:
        """The change that is announced for the request, if one is."""
        if self.state != "announced" or self.iteration is None:
            return None
        return Resize(self.iteration, ParallelConfig.parse(self.config), self.usable)

    def to_json(self) -> dict[str, Any]:
        """What whoever asked gets to see."""
        return {"state": self.state, "reason": self.reason, "iteration": self.iteration, "config": self.config}
