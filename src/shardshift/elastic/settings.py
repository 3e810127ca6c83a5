"""How a session carries out changes of layout, and whether it outlives losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.events import Sink
from ..values import Infeasible
from .present import Policy
from .survivors import check_copies


@dataclass(frozen=True, slots=True)
class Settings:
    """How changes of layout are carried out.

    Attributes:
        policy: ``"auto"`` or ``"keep"``; see ``session``.
        prefer: ``"nodes"`` or ``"bytes"``; see ``session``.
        timeout_s: the longest that a collective, an agreement or a round may take.
        staging_bytes: the most that one device stages at any time.
        transport: see ``session``.
        verify: whether each piece is held to a digest of what was sent.
        survive: whether the job outlives losses.
        layouts: chooses a configuration for the devices that there are.
        sink: takes events.
        shard_copies: how many copies are kept of what only one rank holds.
        address: of this host, in the network that state is to go over; None for gloo's choice.
        checkpoint: loads the last checkpoint into a job that was started afresh; None if there is none.

    Raises:
        Infeasible: if so many copies cannot be kept.
    """

    policy: str
    prefer: str
    timeout_s: float
    staging_bytes: int
    transport: str
    verify: bool
    survive: bool
    layouts: Policy
    sink: Sink
    shard_copies: int = 0
    checkpoint: Callable[[Any], None] | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("auto", "keep"):
            raise Infeasible(f"unknown policy {self.policy!r}; what to do: use 'auto' or 'keep'")
        if self.prefer not in ("nodes", "bytes"):
            raise Infeasible(f"unknown preference {self.prefer!r}; what to do: use 'nodes' or 'bytes'")
        check_copies(self.shard_copies, survive=self.survive, transport=self.transport)
