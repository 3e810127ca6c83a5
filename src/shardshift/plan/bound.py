"""The lower bound: no plan for these needs can take less time, whatever it chooses as sources.

A *cell* is a set of bytes that has one set of holders. The bound knows which devices lack which cells, which living
devices held them before the move, and the rates; it knows nothing of the plan's transfers. Relays (a device that
receives what it does not need, to pass it on) are allowed to the imagined best plan too, so it bounds every plan:

1. *Device in*: what a device lacks over its inbound rate.
2. *Node in*: the distinct cells that devices of a node lack and none of its devices holds must cross the node's link
   once; over its inbound rate.
3. *Device out*: every wanted cell must leave its first holders at least once (receivers may forward, so once is all
   that is sure). The least, over all splits of cells among their holders, of the busiest holder's time.
4. *Node out*: likewise for links: a cell that some node wants and does not hold must leave a node that holds it.
5. *All out*: whatever is received was sent by someone: all that is lacking over the outbound rates of all devices,
   and what must enter nodes over the outbound rates of all links.

The bound is the largest of these plus one latency, since the last byte arrives that much after it was sent.

Parts 3 and 4 are one linear programme (LP) over cells and holders. By its dual, every set S of devices gives a valid
bound: the bytes of cells held only within S over the rates of S. So:

1. Cells of one holder set become one group; holders that serve the same groups become one with the sum of their
   rates (a split in proportion to the rates loses nothing). Some hundred of each are left of 131,072 replicas.
2. Take the bound of every group's holder set, and of all holders together. Where any two sets are nested or apart,
   as those of replicas, slices and optimizer ranges are, this is the optimum of the LP: the tight set is then a union
   of disjoint holder sets, and a union is never busier than its busiest member.
3. Otherwise, if it is small, solve the LP, and evaluate the bound at its dual, so that the result holds whatever the
   solver's tolerance is.

Rejected: the LP at once (seconds at 131,072 devices); a max-flow with bisection (as exact as the LP where it matters,
and slower in Python).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from ..values import Topology
from ..values.boxes import Ints
from .lists import distinct, is_in

Floats = NDArray[np.float64]

LP_ENTRIES = 4_000
"""Most (group, holder) pairs for which the LP is solved; it then takes about 0.1 s (18,000 took 4 s)."""

NESTING_ENTRIES = 20_000_000
"""Most pairs of holder sets, counted once per common holder, that are compared with one another."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds that every plan needs at least, and where they come from.

    Attributes:
        seconds: the largest part plus one latency; 0 if nothing is lacking.
        device_in_s: the device that lacks the most for its inbound rate.
        node_in_s: the node whose link must bring in the most for its rate.
        device_out_s: the busiest holder under the best split of cells among holders.
        node_out_s: the busiest outbound link under the best split among nodes that hold the cells.
        all_out_s: all that is received over all outbound rates, of devices or of links.
        exact: whether the two outbound parts are the optima of their LPs, not only bounds on them.
    """

    seconds: float
    device_in_s: float
    node_in_s: float
    device_out_s: float
    node_out_s: float
    all_out_s: float
    exact: bool

    @property
    def limited_by(self) -> str:
        """The name of the largest part, without its unit, e.g. ``device_in``."""
        parts = ("device_in", "node_in", "device_out", "node_out", "all_out")
        return max(parts, key=lambda part: float(getattr(self, f"{part}_s")))


def lower_bound(
    topology: Topology,
    cell_bytes: Ints,
    want_cell: Ints,
    want_device: Ints,
    hold_cell: Ints,
    hold_device: Ints,
) -> LowerBound:
    """Bound the time of every plan that brings the wanted cells to the devices that lack them.

    Args:
        topology: the rates.
        cell_bytes: bytes of each cell, shape (cells,).
        want_cell: cell of each need, shape (needs,): ``want_device[i]`` lacks cell ``want_cell[i]``.
        want_device: device of each need.
        hold_cell: cell of each holding, shape (holdings,). Cells that nobody wants are passed over.
        hold_device: the living device that holds it before the move.

    Raises:
        ValueError: if a wanted cell has no holder, a device wants a cell that it holds, a need or holding is stated
            twice, or an index is out of range.
    """
    if not len(want_cell):
        return LowerBound(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)
    per_node = topology.devices_per_node
    topology.nodes_of(want_device)  # refuses devices outside
    topology.nodes_of(hold_device)
    wanted = np.zeros(len(cell_bytes), dtype=bool)
    wanted[want_cell] = True
    relevant = wanted[hold_cell]

    # (cell, device) as one number, sorted; then (cell, node) is sorted too, as devices count node by node.
    want = _sorted_pairs(want_cell, want_device, topology.devices, "need")
    hold = _sorted_pairs(hold_cell[relevant], hold_device[relevant], topology.devices, "holding")
    cell, device = np.divmod(want, topology.devices)
    holding_cell, holder = np.divmod(hold, topology.devices)
    held = np.zeros(len(cell_bytes), dtype=bool)
    held[holding_cell] = True
    if len(missing := np.flatnonzero(wanted & ~held)):
        raise ValueError(f"{len(missing)} wanted cells have no holder, the first is cell {missing[0]}")
    if (both := is_in(want, hold)).any():
        raise ValueError(f"device {device[both][0]} wants cell {cell[both][0]}, which it holds")

    lacking_bytes = _sums(device, cell_bytes[cell], topology.devices)
    device_out = topology.device_out_bytes_per_s()
    device_in_s = float((lacking_bytes / topology.device_in_bytes_per_s()).max())
    device_out_s, device_exact = least_busiest(cell_bytes, holding_cell, holder, device_out)
    all_out_s = float(lacking_bytes.sum() / device_out.sum())

    want_node = distinct(cell * topology.nodes + device // per_node)
    hold_node = distinct(holding_cell * topology.nodes + holder // per_node)
    entering_cell, entered = np.divmod(want_node[~is_in(want_node, hold_node)], topology.nodes)
    node_in_s = node_out_s = 0.0
    node_exact = True
    if len(entering_cell):
        entering_bytes = _sums(entered, cell_bytes[entering_cell], topology.nodes)
        node_out = topology.node_out_bytes_per_s()
        node_in_s = float((entering_bytes / topology.node_in_bytes_per_s()).max())
        crossing = np.zeros(len(cell_bytes), dtype=bool)
        crossing[entering_cell] = True
        left_cell, left = np.divmod(hold_node, topology.nodes)
        keep = crossing[left_cell]
        node_out_s, node_exact = least_busiest(cell_bytes, left_cell[keep], left[keep], node_out)
        all_out_s = max(all_out_s, float(entering_bytes.sum() / node_out.sum()))

    seconds = max(device_in_s, node_in_s, device_out_s, node_out_s, all_out_s) + topology.latency_s
    return LowerBound(seconds, device_in_s, node_in_s, device_out_s, node_out_s, all_out_s, device_exact and node_exact)


def least_busiest(cell_bytes: Ints, cell: Ints, holder: Ints, bytes_per_s: Floats) -> tuple[float, bool]:
    """The least time of the busiest holder when every cell leaves one of its holders, in any split.

    Args:
        cell_bytes: bytes of each cell.
        cell: cell of each holding, ascending; each cell named here must leave once.
        holder: its holder (a device or a node), ascending within a cell.
        bytes_per_s: outbound rate by holder.

    Returns:
        Seconds, and whether they are the optimum; otherwise they are a bound on it from below.
    """
    # Holders of one cell -> groups of cells with equal holders -> classes of holders that serve equal groups.
    starts = _starts(cell)
    group_of_cell, first = _alike(starts, holder)
    groups = len(first)
    group_bytes = _sums(group_of_cell, cell_bytes[cell[starts[:-1]]], groups)
    sizes = np.diff(starts)
    entry_group = np.repeat(np.arange(groups), sizes[first])
    entry_holder = np.concatenate([holder[starts[one] : starts[one + 1]] for one in first.tolist()])

    order = np.lexsort((entry_group, entry_holder))
    entry_group, entry_holder = entry_group[order], entry_holder[order]
    holder_starts = _starts(entry_holder)
    class_of_holder, first_holder = _alike(holder_starts, entry_group)
    serving = entry_holder[holder_starts[:-1]]
    classes = len(first_holder)
    class_rate = _sums(class_of_holder, bytes_per_s[serving], classes)
    served = [entry_group[holder_starts[one] : holder_starts[one + 1]] for one in first_holder.tolist()]
    serves = np.array([len(one) for one in served])
    incidence = sparse.csr_array(
        (np.ones(serves.sum()), (np.concatenate(served), np.repeat(np.arange(classes), serves))), (groups, classes)
    )

    set_rate = incidence @ class_rate
    within_bytes, laminar = group_bytes, groups == 1
    if groups > 1 and int((serves.astype(np.int64) ** 2).sum()) <= NESTING_ENTRIES:
        common = (incidence @ incidence.T).tocoo()
        count = np.asarray(incidence.sum(axis=1)).ravel()
        inside = common.data == count[common.row]  # the row's set lies within the column's
        within_bytes = _sums(common.col[inside], group_bytes[common.row[inside]], groups)
        laminar = bool((inside | (common.data == count[common.col])).all())
    bound_s = max(float((within_bytes / set_rate).max()), float(group_bytes.sum() / class_rate.sum()))
    if laminar or bound_s == 0:
        return bound_s, True
    if incidence.nnz > LP_ENTRIES:
        return bound_s, False
    optimum_s = _lp_bound(incidence, group_bytes, class_rate)
    return (bound_s, False) if optimum_s is None else (max(bound_s, optimum_s), True)


def _lp_bound(incidence: sparse.csr_array, group_bytes: Floats, class_rate: Floats) -> float | None:
    """The optimum of: minimise T, each group's bytes split over its classes, each class below T times its rate.

    None if the solver fails.
    """
    groups, classes = incidence.shape
    entries = incidence.tocoo()
    bytes_, rate = group_bytes / group_bytes.sum(), class_rate / class_rate.sum()
    columns = np.arange(entries.nnz)
    # Any, because the stubs of linprog know dense matrices only.
    split: Any = sparse.csr_array((np.ones(entries.nnz), (entries.row, columns)), (groups, entries.nnz + 1))
    load: Any = sparse.csr_array(
        (
            np.concatenate([np.ones(entries.nnz), -rate]),
            (
                np.concatenate([entries.col, np.arange(classes)]),
                np.concatenate([columns, np.full(classes, entries.nnz)]),
            ),
        ),
        (classes, entries.nnz + 1),
    )
    cost = np.zeros(entries.nnz + 1)
    cost[-1] = 1.0
    solved = linprog(cost, A_ub=load, b_ub=np.zeros(classes), A_eq=split, b_eq=bytes_, method="highs")
    if solved.status != 0:
        return None
    # Any weights of holders give a bound: each byte costs at least its cheapest holder's weight.
    weight = np.maximum(-solved.ineqlin.marginals, 0.0)
    cheapest = np.minimum.reduceat(weight[incidence.indices], incidence.indptr[:-1])
    total = float(weight @ rate)
    scale = float(group_bytes.sum() / class_rate.sum())
    return float(bytes_ @ cheapest) / total * scale if total > 0 else None


def _sums(index: Ints, weights: Ints | Floats, count: int) -> Floats:
    """The sum of the weights by index, shape (count,); exact for integers whose sums stay below 2**53."""
    return np.bincount(index, weights, count).astype(np.float64, copy=False)


def _sorted_pairs(first: Ints, second: Ints, count: int, what: str) -> Ints:
    pairs = np.sort(first.astype(np.int64) * count + second)
    if len(twice := np.flatnonzero(pairs[1:] == pairs[:-1])):
        cell, device = divmod(int(pairs[twice[0]]), count)
        raise ValueError(f"the {what} of device {device} and cell {cell} is stated twice")
    return pairs


def _starts(sorted_values: Ints) -> Ints:
    """Where each run of equal values starts, and the length of all."""
    changes = np.flatnonzero(sorted_values[1:] != sorted_values[:-1]) + 1
    return np.concatenate([[0], changes, [len(sorted_values)]])


def _alike(starts: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Number the runs of ``values`` so that equal runs have one number.

    Returns:
        The number of each run, and per number the first run that has it.
    """
    numbers = np.empty(len(starts) - 1, dtype=np.int64)
    single = np.diff(starts) == 1  # nearly all, where every optimizer range has one holder
    known, numbers[single] = np.unique(values[starts[:-1][single]], return_inverse=True)
    # Bytes as dictionary keys: exact, where a sum of hashes is not, and faster than np.unique over rows.
    raw, width, seen = np.ascontiguousarray(values).tobytes(), values.itemsize, dict[bytes, int]()
    rest = np.flatnonzero(~single)
    ends = zip((starts[rest] * width).tolist(), (starts[rest + 1] * width).tolist(), strict=True)
    numbers[rest] = [seen.setdefault(raw[a:b], len(known) + len(seen)) for a, b in ends]
    return numbers, np.unique(numbers, return_index=True)[1].astype(np.int64)
