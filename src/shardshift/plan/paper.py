"""The paper's view of a change: workloads, cost matrices, their merge, the sketch, DP replicas kept apart.

This is the reference that plans are explained by and compared with (arXiv 2607.04749v1, III-B and III-C,
Algorithm 1, Figs. 4 and 5). It counts whole layers and TP slices, never bytes, and knows only pp, tp and dp.

1. A workload is a set of (layer, slice); a layer has LCM(prev TP, curr TP) slices (``plan/workload.py``).
2. Cost matrices of PP and of TP by themselves: cost = |curr| - |curr n prev|.
3. Merge: max - (max - pp)(1 - tp / max_tp). The rule as the paper words it does not give its Fig. 5; this does,
   and with max = |curr| it is exactly |curr| - |curr n prev| over (layer, slice). So max is |curr| here, row by
   row, not the largest entry of a matrix: where every prev stage overlaps every curr stage (PP1 -> PP2) the
   largest entry does not mean "no intersection", and where stages are uneven each row has its own.
4. Sketch: pad with zeros to a square, solve, drop the padding. With uneven stages zeros miss the least, because
   leaving a large rank unpaired looks free; kept, since that is the paper.
5. Isolation: one sketch for one DP group, the same in all. Replica d stays d; those beyond are dropped and their
   devices become free ones, which the paper takes to hold nothing.

Rejected: fractions in the matrices. Entries are integers in a stated unit, so the solver compares them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..values import Infeasible, Mismatch, ParallelConfig
from .workload import require_paper_axes, stages

Layers: TypeAlias = int | tuple[Sequence[int], Sequence[int]]
"""Layers in all, split evenly (the first stages take what is left over); or layers per stage of (prev, curr)."""


@dataclass(frozen=True, slots=True, eq=False)
class CostMatrix:
    """What curr rank i lacks if it becomes prev rank j.

    Attributes:
        cost: int64, shape (curr, prev), in 1/``unit`` of what the paper prints.
        whole: int64, shape (curr,): |curr_i|, the cost where nothing is shared; same unit.
        unit: entries that make 1 in the paper's figure.
    """

    cost: NDArray[np.int64]
    whole: NDArray[np.int64]
    unit: int = 1

    def printed(self) -> tuple[tuple[Fraction, ...], ...]:
        """The entries as the paper's figures print them."""
        return tuple(tuple(Fraction(entry, self.unit) for entry in row) for row in self.cost.tolist())


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A migration operator of the sketch: prev rank ``prev`` becomes curr rank ``curr``."""

    curr: int
    prev: int

    def __str__(self) -> str:
        return f"<C:{self.curr},P:{self.prev}>"


def pp_matrix(prev_pp: int, curr_pp: int, layers: Layers) -> CostMatrix:
    """The cost matrix of the pipeline axis, in layers (Fig. 4; left of Fig. 5). Shape (curr_pp, prev_pp).

    Raises:
        Infeasible: if a stage has no layer, or a negative number.
        Mismatch: if a split has another number of stages or, over both sides, of layers.
    """
    before, after = (layers, layers) if isinstance(layers, int) else layers
    prev, curr = stages(prev_pp, before), stages(curr_pp, after)
    if prev[-1].stop != curr[-1].stop:
        raise Mismatch(f"prev has {prev[-1].stop} layers, curr {curr[-1].stop}; what to do: split the same layers")
    return _interval_matrix(prev, curr)


def tp_matrix(prev_tp: int, curr_tp: int) -> CostMatrix:
    """The cost matrix of the tensor axis, in slices of LCM(prev, curr) (middle of Fig. 5). Shape (curr_tp, prev_tp)."""
    slices = lcm(prev_tp, curr_tp)
    prev, curr = (stages(tp, slices) for tp in (prev_tp, curr_tp))
    return _interval_matrix(prev, curr)


def _interval_matrix(prev: Sequence[range], curr: Sequence[range]) -> CostMatrix:
    (prev_low, prev_high), (curr_low, curr_high) = (
        np.array([(part.start, part.stop) for part in parts], dtype=np.int64).T for parts in (prev, curr)
    )
    shared = np.minimum(curr_high[:, None], prev_high) - np.maximum(curr_low[:, None], prev_low)
    whole = curr_high - curr_low
    return CostMatrix(whole[:, None] - shared.clip(min=0), whole)


def merge(pp: CostMatrix, tp: CostMatrix) -> CostMatrix:
    """Merge the matrices of PP and TP into that of both (Fig. 5): max - (max - pp)(1 - tp / max_tp).

    ``max`` is |curr_i| of the row, see the head of this module. An entry is then the number of layer slices that
    the rank lacks; ``unit`` turns it into the figure's layers of the rank's own width (TP rows are all of one size).

    Returns:
        Rows P0T0, P0T1, ..., P1T0, ...; columns likewise. Shape (curr pp * curr tp, prev pp * prev tp).
    """
    whole = np.kron(pp.whole, tp.whole)
    shared = np.kron(pp.whole[:, None] - pp.cost, tp.whole[:, None] - tp.cost)
    return CostMatrix(whole[:, None] - shared, whole, pp.unit * int(tp.whole[0]))


def merge_as_worded(pp: CostMatrix, tp: CostMatrix) -> CostMatrix:
    """Merge by the words of III-C: a PP cost that is the matrix's largest stays; others times tp / largest tp.

    Only to show what is wrong with it: where PP cost is 0 it gives 0 whatever TP lacks (Fig. 5 prints the
    maximum), and where TP cost is 0 it gives 0 although half the layers may be missing. (The box in Fig. 5 divides
    by LCM in place of the largest TP cost, with the same two faults.) Where TP has no cost at all, it counts as 0.
    """
    most = max(int(tp.cost.max()), 1)
    coefficient = np.kron(np.ones_like(pp.cost), tp.cost)
    none_shared = np.kron(pp.cost == pp.cost.max(), np.ones_like(tp.cost, dtype=bool))
    pp_cost = np.kron(pp.cost, np.ones_like(tp.cost))
    whole = np.repeat(pp.whole, len(tp.whole)) * most
    return CostMatrix(np.where(none_shared, pp_cost * most, pp_cost * coefficient), whole, pp.unit * most)


def sketch(cost: NDArray[np.int64]) -> tuple[Pair, ...]:
    """Algorithm 1: pad with zeros to a square, solve the assignment, drop pairs that touch the padding.

    Among sketches of equal cost it is SciPy's choice.

    Args:
        cost: shape (curr, prev).

    Returns:
        min(curr, prev) pairs, by ascending curr rank.
    """
    rows, columns = cost.shape
    square = np.zeros((max(cost.shape),) * 2)
    square[:rows, :columns] = cost
    pairs = zip(*(side.tolist() for side in linear_sum_assignment(square)), strict=True)
    return tuple(Pair(curr, prev) for curr, prev in pairs if curr < rows and prev < columns)


def group_matrix(prev: ParallelConfig, curr: ParallelConfig, layers: Layers) -> CostMatrix:
    """The merged cost matrix of one DP group; row and column numbers are pp * TP + tp.

    Raises:
        Infeasible: if a configuration uses an axis that the paper does not know, or a stage has no layer.
        Mismatch: if splits do not fit.
    """
    require_paper_axes(prev)
    require_paper_axes(curr)
    return merge(pp_matrix(prev.pp, curr.pp, layers), tp_matrix(prev.tp, curr.tp))


def replica_sources(prev_dp: int, curr_dp: int) -> tuple[int, ...]:
    """Per DP group of curr the prev group whose state it has: itself, or for a new one round-robin (III-C)."""
    return tuple(replica if replica < prev_dp else (replica - prev_dp) % prev_dp for replica in range(curr_dp))


def paper_placement(
    prev_config: ParallelConfig,
    curr_config: ParallelConfig,
    layers: Layers,
    prev_devices: Sequence[int],
    devices: Sequence[int],
) -> tuple[int, ...]:
    """Place every curr rank by the paper's sketch with DP replicas isolated (III-C).

    1. One sketch for a DP group; replica d of prev becomes replica d of curr by it.
    2. Ranks that pair with nothing (TP or PP grew, a new replica, the device leaves) take the free devices, both in
       ascending order. Devices of dropped replicas are free.

    Args:
        prev_config: the configuration now.
        curr_config: the configuration to come.
        layers: layers in all, or per stage of both.
        prev_devices: per virtual rank of prev its device.
        devices: the devices that may run a rank.

    Returns:
        Per virtual rank of curr its device.

    Raises:
        Infeasible: if there are too few devices, or the configurations use other axes than pp, tp and dp.
        Mismatch: if ``prev_devices`` is not one device of its own for each rank, or splits do not fit.
    """
    matrix = group_matrix(prev_config, curr_config, layers)
    _check_devices(prev_config, prev_devices)
    allowed = set(devices)
    if len(allowed) < curr_config.world_size:
        raise Infeasible(
            f"{curr_config} needs {curr_config.world_size} devices, {len(allowed)} are available; "
            "what to do: add devices or choose a smaller configuration"
        )
    placed: dict[int, int] = {}
    for pair in sketch(matrix.cost):
        for replica in range(min(prev_config.dp, curr_config.dp)):
            device = prev_devices[_rank(prev_config, pair.prev, replica)]
            if device in allowed:
                placed[_rank(curr_config, pair.curr, replica)] = device
    free = iter(sorted(allowed - set(placed.values())))
    return tuple(placed[rank] if rank in placed else next(free) for rank in range(curr_config.world_size))


def lacking_layers(
    prev_config: ParallelConfig,
    curr_config: ParallelConfig,
    layers: Layers,
    prev_devices: Sequence[int],
    placement: Sequence[int],
    *,
    isolated: bool = False,
) -> tuple[Fraction, ...]:
    """What the device of each curr rank lacks, in layers of the whole model's width ("layer-equivalents").

    Args:
        prev_config: the configuration now.
        curr_config: the configuration to come.
        layers: layers in all, or per stage of both.
        prev_devices: per virtual rank of prev its device.
        placement: per virtual rank of curr its device.
        isolated: count as the paper does: a device whose DP group changes holds nothing ("infinite difference").

    Returns:
        Per virtual rank of curr. The sum is what a change moves.

    Raises:
        Infeasible: if the configurations use other axes than pp, tp and dp.
        Mismatch: if either map is not one device of its own for each rank, or splits do not fit.
    """
    matrix = group_matrix(prev_config, curr_config, layers)
    _check_devices(prev_config, prev_devices)
    _check_devices(curr_config, placement)
    held = {device: prev_config.coordinate(rank) for rank, device in enumerate(prev_devices)}
    slices = lcm(prev_config.tp, curr_config.tp)
    lacking = []
    for rank, device in enumerate(placement):
        new, old = curr_config.coordinate(rank), held.get(device)
        row = new.pp * curr_config.tp + new.tp
        if old is None or (isolated and old.dp != new.dp):
            lacking.append(Fraction(int(matrix.whole[row]), slices))
        else:
            lacking.append(Fraction(int(matrix.cost[row, old.pp * prev_config.tp + old.tp]), slices))
    return tuple(lacking)


def _rank(config: ParallelConfig, number: int, replica: int) -> int:
    """The virtual rank that has this row or column number in a DP group."""
    pp, tp = divmod(number, config.tp)
    return config.rank(pp=pp, tp=tp, dp=replica)


def _check_devices(config: ParallelConfig, devices: Sequence[int]) -> None:
    if len(devices) != config.world_size or len(set(devices)) != len(devices):
        raise Mismatch(
            f"{config} has {config.world_size} ranks; got {len(devices)} devices, {len(set(devices))} distinct; "
            "what to do: give each rank a device of its own"
        )
