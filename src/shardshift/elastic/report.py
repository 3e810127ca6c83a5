"""What one change of layout did, and how long each part of it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..plan import Plan
from ..values import ParallelConfig
from .proposal import Proposal


class Phases:
    """Seconds by phase of a change, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside; the same name again adds up."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """One change of layout, as one rank saw it.

    Attributes:
        prev: configuration before.
        curr: configuration after.
        iteration: optimizer steps finished before it.
        devices: per virtual rank of ``curr`` its device.
        digest: of the plan that every rank proved.
        state_bytes: the logical state, each tensor once.
        referred_bytes: left in place, over all devices.
        copied_bytes: copied within a device, over all devices.
        moved_bytes: sent between devices, over all.
        least_moved_bytes: the least that any pairing of ranks with devices has to move.
        phases_s: seconds by phase of the pause on this rank: plan, quiesce, agree, move, copy (to buddies, if the
            session keeps copies), commit, rebuild.
        ahead_s: seconds for which this rank prepared the change beforehand, between two steps.
        lost: devices whose loss the change made good.
    """

    prev: ParallelConfig
    curr: ParallelConfig
    iteration: int
    devices: tuple[int, ...]
    digest: str
    state_bytes: int
    referred_bytes: int
    copied_bytes: int
    moved_bytes: int
    least_moved_bytes: int
    phases_s: dict[str, float] = field(default_factory=dict)
    ahead_s: float = 0.0
    lost: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan, proposal: Proposal, phases: Phases, ahead_s: float) -> ResizeReport:
        """The report of a plan that was carried out."""
        return cls(
            proposal.prev,
            proposal.curr,
            proposal.iteration,
            plan.curr.devices,
            plan.digest,
            plan.state_bytes,
            plan.referred_bytes,
            plan.copied_bytes,
            plan.moved_bytes,
            plan.least_moved_bytes,
            phases.seconds,
            ahead_s,
            proposal.lost,
        )

    @classmethod
    def afresh(cls, proposal: Proposal, iteration: int, phases: Phases) -> ResizeReport:
        """The report of a start from a checkpoint: nothing was moved.

        Args:
            proposal: that was carried out.
            iteration: optimizer steps that are finished in the checkpoint.
            phases: of this rank.
        """
        devices = proposal.curr_devices
        zeros = dict.fromkeys(("state_bytes", "referred_bytes", "copied_bytes", "moved_bytes", "least_moved_bytes"), 0)
        return cls(
            proposal.prev, proposal.curr, iteration, devices, "", **zeros, phases_s=phases.seconds, lost=proposal.lost
        )

    @property
    def move_s(self) -> float:
        """Seconds that the move of the state took on this rank."""
        return self.phases_s.get("move", 0.0)

    @property
    def pause_s(self) -> float:
        """Seconds for which this rank did not train."""
        return sum(self.phases_s.values())
