"""Memory of a move: the peak over the steady state against the bound and against what the plan predicts.

Each process holds at least 512 MiB of state. Its peak is the kernel's (``VmHWM``, which ``clear_refs`` sets back), less
what the process had beside its state before the move; so whatever the engine, the transport or the allocator take is in
it. The bound of ``release`` is staging plus the largest storage, over the larger of old and new state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from _processes import Rank, run_ranks
from _state import Size, change, check, coded, dtype_of

from shardshift.engine import Mover, names_of
from shardshift.plan import Plan
from shardshift.report.bench import Row
from shardshift.schedule import Schedule

Say = Callable[[str], None]
MiB: Final = 1 << 20

STAGING_BYTES: Final = 64 * MiB
SIZE: Final = Size(layers=16, hidden=1024, vocab=8192)
CASES: Final = (
    ("pp4", "tp4", "release"),
    ("tp4", "pp4", "release"),
    ("pp2tp2", "pp4", "release"),
    ("pp2", "pp4", "release"),
    ("pp4", "pp2", "release"),
    ("dp2", "dp4", "release"),
    ("dp4", "dp2", "release"),
    ("pp4", "tp4", "keep"),
    ("pp2", "pp4", "keep"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """One device's figures, in bytes.

    Attributes:
        prev_bytes: its old state.
        curr_bytes: its new state.
        largest_bytes: its largest storage, old or new.
        live_bytes: the most that it took, state, staging and all.
        predicted_bytes: what the schedule says of that.
    """

    prev_bytes: int
    curr_bytes: int
    largest_bytes: int
    live_bytes: int
    predicted_bytes: int

    @property
    def over_bytes(self) -> int:
        """The peak over the larger of both states."""
        return self.live_bytes - max(self.prev_bytes, self.curr_bytes)


def run(
    say: Say, *, size: Size = SIZE, staging_bytes: int = STAGING_BYTES, cases: Sequence[tuple[str, str, Any]] = CASES
) -> tuple[str, list[Row]]:
    """All cases.

    Args:
        say: takes a line about what is being done.
        size: of the model.
        staging_bytes: the staging bound.
        cases: configurations before and after, and the policy.
    """
    rows: list[Row] = []
    least_bytes = 1 << 62
    for prev, curr, policy in cases:
        plan = change(size, prev, curr)
        body = partial(_measure, plan=plan, policy=policy, staging_bytes=staging_bytes)
        found = run_ranks(len(plan.devices), body)
        rows += _rows(f"{prev} to {curr}, {policy}", policy, found, staging_bytes)
        least_bytes = min([least_bytes, *(one.prev_bytes for one in found if one.prev_bytes)])
        say(f"{prev} to {curr}, {policy}: {[f'{one.over_bytes / MiB:.0f} MiB over' for one in found]}")
    scale = (
        f"GPT of {size.layers} layers, hidden {size.hidden}, with masters and moments: at least "
        f"{least_bytes // MiB} MiB of state a process; staging {staging_bytes // MiB} MiB; 4 processes over gloo; the "
        "process with the largest figure"
    )
    return scale, rows


def _rows(case: str, policy: str, found: Sequence[Found], staging_bytes: int) -> list[Row]:
    worst = max(found, key=lambda one: one.over_bytes - one.largest_bytes)
    off = max((abs(one.live_bytes / one.predicted_bytes - 1) for one in found if one.predicted_bytes), default=0.0)
    over = Row.of(
        f"{case}: peak over the larger state",
        worst.over_bytes / MiB,
        "MiB",
        baseline="staging + largest storage" if policy == "release" else "the smaller state + staging",
        theirs=(
            (staging_bytes + worst.largest_bytes)
            if policy == "release"
            else (min(worst.prev_bytes, worst.curr_bytes) + staging_bytes)
        )
        / MiB,
        most_ratio=1.0 if policy == "release" else None,
    )
    return [over, Row.of(f"{case}: measured peak off the predicted one", 100 * off, "%", most=5)]


def _measure(rank: Rank, plan: Plan, policy: Any, staging_bytes: int) -> Found:
    device = rank.index
    schedule = Schedule.of(plan, staging_bytes, policy=policy)
    peak = schedule.peak(device)
    old, new = (names_of(layout.shards_on(device)) for layout in (plan.prev, plan.curr))
    state = {name: coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard))) for name, shard in old.items()}
    largest_bytes = max(shard.nbytes for shard in (*old.values(), *new.values()))
    prev_bytes = sum(shard.nbytes for shard in old.values())
    curr_bytes = sum(shard.nbytes for shard in new.values())
    with Mover(rank.store("memory"), device, range(rank.count), transport="gloo", staging_bytes=staging_bytes) as mover:
        # A move in small brings in whatever code and threads the first move needs.
        gc.collect()
        rank.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        beside_bytes = _status_bytes("VmRSS") - prev_bytes
        found = mover.move(plan.prev, plan.curr, state, policy=policy, compare_copies=False)
        live_bytes = _status_bytes("VmHWM") - beside_bytes
    check(plan, device, {shard: found[name] for name, shard in new.items()})
    return Found(prev_bytes, curr_bytes, largest_bytes, live_bytes, peak.live_bytes)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/self/status does not say {key}")
