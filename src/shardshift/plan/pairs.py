"""Who becomes what: per new rank its device, and the rank that this device was. In runs, where there are many.

A job of a hundred thousand ranks is a hundred thousand pairs. Ranks that differ in their replica alone mostly sit at
equal distances on both sides, so pairs in the order (pp, tp, cp, dp) are long runs of equal steps, and nothing is
lost by saying only where a run starts, its steps and its length. Counts by class were rejected: they do not say
which device runs which rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..values import ParallelConfig, PlacedLayout

MOST_WRITTEN_OUT: Final = 4096
"""Ranks up to which pairs are written out one by one."""


@dataclass(frozen=True, slots=True)
class PairRun:
    """``count`` pairs; pair i is (curr + i * curr_step, prev + i * prev_step, device + i * device_step).

    Attributes:
        curr: the first new rank.
        prev: the old rank of its device, or None if it is fresh; then all of the run are.
        device: the device.
        count: pairs in the run.
        curr_step: from one new rank to the next; 0 in a run of one.
        prev_step: likewise of old ranks; 0 where they are None.
        device_step: likewise of devices.
    """

    curr: int
    prev: int | None
    device: int
    count: int = 1
    curr_step: int = 0
    prev_step: int = 0
    device_step: int = 0

    def to_json(self, curr: ParallelConfig, prev: ParallelConfig) -> dict[str, Any]:
        """Plain JSON values; the steps only in a run of several."""
        record: dict[str, Any] = {
            "curr": self.curr,
            "curr_at": str(curr.coordinate(self.curr)),
            "prev": self.prev,
            "prev_at": None if self.prev is None else str(prev.coordinate(self.prev)),
            "device": self.device,
        }
        if self.count > 1:
            record |= {
                "count": self.count,
                "curr_step": self.curr_step,
                "prev_step": self.prev_step,
                "device_step": self.device_step,
            }
        return record


def pair_runs(
    prev: PlacedLayout, curr: PlacedLayout, config: ParallelConfig, *, most: int = MOST_WRITTEN_OUT
) -> tuple[PairRun, ...]:
    """Every pair of a change.

    Args:
        prev: who holds what now.
        curr: who will.
        config: the configuration of ``curr``.
        most: above so many ranks of ``curr``, pairs are joined into runs in the order (pp, tp, cp, dp); up to it,
            they are one by one in the order of ranks.
    """
    devices = curr.device_ids
    old = prev.ranks_of(devices)
    ranks = np.arange(len(devices))
    if len(devices) <= most:
        return tuple(
            PairRun(rank, was if was >= 0 else None, device)
            for rank, was, device in zip(ranks.tolist(), old.tolist(), devices.tolist(), strict=True)
        )
    inner, tp = np.divmod(ranks, config.tp)
    inner, cp = np.divmod(inner, config.cp)
    pp, dp = np.divmod(inner, config.dp)
    by = np.lexsort((dp, cp, tp, pp))
    table = np.column_stack([ranks, old, devices])[by]
    steps, last = np.diff(table, axis=0), len(table) - 1
    # A step into or out of what is fresh joins nothing; nor does one from a stage or slice to the next.
    joins = ((table[1:, 1] < 0) == (table[:-1, 1] < 0)) & (np.diff(pp[by] * config.tp + tp[by]) == 0)
    goes_on = joins[1:] & (steps[1:] == steps[:-1]).all(axis=1)  # from row i + 1 to i + 2, as from i to i + 1
    ends = np.append(np.flatnonzero(~goes_on) + 1, last)
    runs: list[PairRun] = []
    start = 0
    while start <= last:
        several = start < last and bool(joins[start])
        stop = int(ends[np.searchsorted(ends, start + 1)]) + 1 if several else start + 1
        rank, was, device = table[start].tolist()
        step = steps[start].tolist() if several else (0, 0, 0)
        runs.append(PairRun(rank, was if was >= 0 else None, device, stop - start, *step))
        start = stop
    return tuple(runs)
