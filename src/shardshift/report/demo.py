"""What the demo found out, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # the other reports are of plans, and need no torch
    from ..elastic import ResizeReport


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of layout, live and through a checkpoint.

    Attributes:
        prev: configuration before.
        curr: configuration after.
        iteration: optimizer steps finished before it.
        state_bytes: the logical state, each tensor once.
        referred_bytes: left in place, over all devices.
        copied_bytes: copied within a device, over all devices.
        moved_bytes: sent between devices.
        least_moved_bytes: the least that any pairing of ranks with devices has to move.
        move_s: seconds that moving the state took, on the slowest rank.
        pause_s: seconds without training, on the slowest rank: plan, agree, move, commit, rebuild.
        checkpoint_s: seconds of the same change through ``dist_checkpointing``: save, build groups and model in
            fresh processes, load. Without starting processes and helpers.
        speedup: ``checkpoint_s`` over ``pause_s``.
        bit_exact: every logical tensor is after the change what it was before, bit for bit.
        same_losses_as_checkpoint: from the change on, the losses are bit for bit those of fresh processes that were
            started in the new layout from the saved state.
        pids_kept: processes that train before and after it.
        joined: processes that train after it alone; started while the others trained.
        left: processes that train before it alone; they end.
        phases_s: the pause by phase, on the slowest rank.
        checkpoint_save_s: part of ``checkpoint_s``.
        checkpoint_build_s: part of ``checkpoint_s``.
        checkpoint_load_s: part of ``checkpoint_s``.
        checkpoint_helpers_s: start-up of the helper processes that saving needs; not in ``checkpoint_s``.
        checkpoint_params_exact: whether ``dist_checkpointing`` itself gave the parameters back bit for bit.
    """

    prev: str
    curr: str
    iteration: int
    state_bytes: int
    referred_bytes: int
    copied_bytes: int
    moved_bytes: int
    least_moved_bytes: int
    move_s: float
    pause_s: float
    checkpoint_s: float
    speedup: float
    bit_exact: bool
    same_losses_as_checkpoint: bool
    pids_kept: int
    joined: int
    left: int
    phases_s: dict[str, float]
    checkpoint_save_s: float
    checkpoint_build_s: float
    checkpoint_load_s: float
    checkpoint_helpers_s: float
    checkpoint_params_exact: bool

    @classmethod
    def of(
        cls,
        reports: Sequence[ResizeReport],
        *,
        checkpoint_save_s: float,
        checkpoint_build_s: float,
        checkpoint_load_s: float,
        checkpoint_helpers_s: float,
        checkpoint_params_exact: bool,
        bit_exact: bool,
        same_losses_as_checkpoint: bool,
        pids_kept: int,
        joined: int,
        left: int,
    ) -> Self:
        """From what every rank reported of the live change, and what was found of it afterwards."""
        slowest = max(reports, key=lambda report: report.pause_s)
        checkpoint_s = checkpoint_save_s + checkpoint_build_s + checkpoint_load_s
        return cls(
            prev=str(slowest.prev),
            curr=str(slowest.curr),
            iteration=slowest.iteration,
            state_bytes=slowest.state_bytes,
            referred_bytes=slowest.referred_bytes,
            copied_bytes=slowest.copied_bytes,
            moved_bytes=slowest.moved_bytes,
            least_moved_bytes=slowest.least_moved_bytes,
            move_s=max(report.move_s for report in reports),
            pause_s=slowest.pause_s,
            checkpoint_s=checkpoint_s,
            speedup=checkpoint_s / slowest.pause_s,
            bit_exact=bit_exact,
            same_losses_as_checkpoint=same_losses_as_checkpoint,
            pids_kept=pids_kept,
            joined=joined,
            left=left,
            phases_s=dict(slowest.phases_s),
            checkpoint_save_s=checkpoint_save_s,
            checkpoint_build_s=checkpoint_build_s,
            checkpoint_load_s=checkpoint_load_s,
            checkpoint_helpers_s=checkpoint_helpers_s,
            checkpoint_params_exact=checkpoint_params_exact,
        )


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demo found out.

    Attributes:
        transitions: one for each change.
        elastic: loss of each step of the run that changes layout.
        fixed: loss of each step of a run in the first layout throughout.
    """

    transitions: tuple[Transition, ...]
    elastic: tuple[float, ...]
    fixed: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether every change was exact, and moved no more than it had to."""
        return all(
            t.bit_exact and t.same_losses_as_checkpoint and t.moved_bytes == t.least_moved_bytes
            for t in self.transitions
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``report.json``."""
        return {
            "transitions": [asdict(transition) for transition in self.transitions],
            "loss": {"elastic": list(self.elastic), "fixed": list(self.fixed)},
        }
