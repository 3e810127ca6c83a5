"""Why a plan is as it is, as values: the paper's cost matrices, the exact one, pairs, who sits where.

The paper's matrices are in layers, as its Fig. 5 prints them; the exact one is in bytes, between *classes*: ranks that
hold the same are one row, devices that held the same are one column. What is large is cut to a corner, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, Final

import numpy as np

from ..plan.lists import number_rows
from ..plan.methods import Change
from ..plan.pairs import PairRun, pair_runs
from ..plan.paper import CostMatrix, merge, pp_matrix, tp_matrix
from ..plan.plan import Plan
from ..plan.workload import Workload, require_paper_axes, stages, workload
from ..values import Infeasible, Layout, ParallelConfig

MOST_ENTRIES: Final = 128
"""Rows, and columns, of a matrix that an explanation holds."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A cost matrix with names.

    Attributes:
        rows: names of the new ranks, or classes of them.
        columns: names of the old ones.
        entries: shape (rows, columns), what row lacks if it becomes column; bytes, or layers as a fraction.
        all_rows: rows that there are; more than ``rows`` if this is a corner.
        all_columns: likewise.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: tuple[tuple[int | Fraction, ...], ...]
    all_rows: int
    all_columns: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a fraction is a float."""
        cost = [[entry if isinstance(entry, int) else float(entry) for entry in row] for row in self.entries]
        return {
            "rows": list(self.rows),
            "columns": list(self.columns),
            "cost": cost,
            "all_rows": self.all_rows,
            "all_columns": self.all_columns,
        }


@dataclass(frozen=True, slots=True)
class PaperView:
    """The change as the paper sees it: one DP group, layers and slices.

    Attributes:
        pp: the matrix of pipeline stages.
        tp: the matrix of tensor slices.
        merged: the matrix of both.
        prev: workload of each column of ``merged``.
        curr: workload of each row.
    """

    pp: Matrix
    tp: Matrix
    merged: Matrix
    prev: tuple[str, ...]
    curr: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that ``shardshift explain`` shows, but for programs.

    Attributes:
        change: what was asked.
        paper: the paper's view, or None if the change uses what the paper does not know.
        no_paper: why there is none; empty if there is.
        exact: bytes that a rank lacks, by classes.
        pairs: who becomes what.
        before: old rank by device, of devices that have one: a topology may have many more.
        after: new rank by device, likewise.
    """

    change: Change
    paper: PaperView | None
    no_paper: str
    exact: Matrix
    pairs: tuple[PairRun, ...]
    before: dict[int, int]
    after: dict[int, int]

    @property
    def nodes(self) -> dict[int, tuple[int, ...]]:
        """Devices that have a rank before or after, or are lost, by node; both ascending."""
        found: dict[int, list[int]] = {}
        for device in sorted({*self.before, *self.after, *self.change.lost}):
            found.setdefault(self.change.topology.node_of(device), []).append(device)
        return {node: tuple(devices) for node, devices in found.items()}

    def to_json(self) -> dict[str, Any]:
        """What ``shardshift explain --json`` prints."""
        change, per_node = self.change, self.change.topology.devices_per_node
        paper: dict[str, Any] | None = None
        if self.paper:
            paper = {name: getattr(self.paper, name).to_json() for name in ("pp", "tp", "merged")}
            paper |= {"prev_workloads": list(self.paper.prev), "curr_workloads": list(self.paper.curr)}
        used = self.nodes
        nodes = [
            {
                "node": node,
                "devices": [node * per_node, (node + 1) * per_node - 1],
                "ranks": [
                    {"device": device, "before": self.before.get(device), "after": self.after.get(device)}
                    for device in devices
                ],
            }
            for node, devices in used.items()
        ]
        return {
            "prev": str(change.prev),
            "curr": str(change.curr),
            "lost": list(change.lost),
            "paper": paper,
            "no_paper": self.no_paper or None,
            "exact_bytes": self.exact.to_json(),
            "pairs": [pair.to_json(change.curr, change.prev) for pair in self.pairs],
            "nodes": nodes,
            "unused_nodes": change.topology.nodes - len(used),
        }


def explain(change: Change, plans: tuple[Plan, ...]) -> Explanation:
    """Explain the plans that ``solve`` made of a change."""
    paper, why = None, ""
    try:
        paper = _paper_view(change)
    except Infeasible as none:
        why = str(none).partition("; what to do")[0]  # whoever asks for an explanation need not do anything
    first, last = plans[0], plans[-1]
    return Explanation(
        change=change,
        paper=paper,
        no_paper=why,
        exact=exact_matrix(first, change),
        pairs=pair_runs(first.prev, last.curr, change.curr),
        before={device: rank for rank, device in enumerate(first.prev.devices)},
        after={device: rank for rank, device in enumerate(last.curr.devices)},
    )


def exact_matrix(plan: Plan, change: Change, most: int = MOST_ENTRIES) -> Matrix:
    """Bytes that a new rank lacks on a device, by classes of both; the last column is a fresh device."""
    cells, prev, curr = plan.cells, plan.prev.layout, plan.curr.layout
    (rows, row_ranks), (columns, column_ranks) = _classes(curr), _classes(prev)
    shown_rows, shown_columns = rows[:most], columns[:most]
    lacking = np.repeat(plan.curr.layout.rank_bytes[shown_rows][:, None], len(shown_columns) + 1, axis=1)
    for wanted in curr.roles_of_rank[shown_rows].T.astype(np.int64):
        for held in prev.roles_of_rank[shown_columns].T.astype(np.int64):
            lacking[:, :-1] -= cells.overlap_bytes[wanted][:, held].toarray()
    names = [_names(config, shown, counts) for config, shown, counts in (
        (change.curr, shown_rows.tolist(), row_ranks),
        (change.prev, shown_columns.tolist(), column_ranks),
    )]  # fmt: skip
    entries = tuple(tuple(row) for row in lacking.tolist())
    return Matrix(names[0], (*names[1], "fresh"), entries, len(rows), len(columns) + 1)


def short(config: ParallelConfig, rank: int, *, replica: bool = True) -> str:
    """A coordinate in few letters: ``p0t1d0``; without its DP index on demand."""
    at = config.coordinate(rank)
    return f"p{at.pp}t{at.tp}" + (f"d{at.dp}" if replica else "") + (f"c{at.cp}" if config.cp > 1 else "")


def span(held: Workload) -> str:
    """A workload of consecutive layers in short: ``6-11.ab`` for ``6.ab, ..., 11.ab``."""
    labels = held.labels
    if len(labels) < 2:
        return "".join(labels) or "nothing"
    (first, _, slices), (last, _, _) = labels[0].partition("."), labels[-1].partition(".")
    return f"{first}-{last}" + (f".{slices}" if slices else "")


def _paper_view(change: Change) -> PaperView:
    prev, curr, layers = change.prev, change.curr, change.layers
    for config in (prev, curr):
        require_paper_axes(config)
        stages(config.pp, layers)
    pp, tp = pp_matrix(prev.pp, curr.pp, layers), tp_matrix(prev.tp, curr.tp)
    merged, slices = merge(pp, tp), lcm(prev.tp, curr.tp)

    def ranks(config: ParallelConfig) -> list[int]:
        return [config.rank(pp=pp, tp=tp) for pp in range(config.pp) for tp in range(config.tp)][:MOST_ENTRIES]

    def workloads(config: ParallelConfig) -> tuple[str, ...]:
        return tuple(span(workload(config, layers, rank, slices=slices)) for rank in ranks(config))

    def names(config: ParallelConfig) -> list[str]:
        return [short(config, rank, replica=False) for rank in ranks(config)]

    return PaperView(
        _matrix(pp, [f"p{i}" for i in range(curr.pp)], [f"p{i}" for i in range(prev.pp)]),
        _matrix(tp, [f"t{i}" for i in range(curr.tp)], [f"t{i}" for i in range(prev.tp)]),
        _matrix(merged, names(curr), names(prev)),
        workloads(prev),
        workloads(curr),
    )


def _matrix(cost: CostMatrix, rows: list[str], columns: list[str]) -> Matrix:
    shown = cost.cost[:MOST_ENTRIES, :MOST_ENTRIES].tolist()
    entries = tuple(tuple(Fraction(entry, cost.unit) for entry in row) for row in shown)
    return Matrix(tuple(rows[:MOST_ENTRIES]), tuple(columns[:MOST_ENTRIES]), entries, *cost.cost.shape)


def _classes(layout: Layout) -> tuple[Any, Any]:
    """The first rank of each class of ranks that hold the same, and how many ranks each has."""
    first, number = number_rows(layout.roles_of_rank.astype(np.int64))
    return first, np.bincount(number)


def _names(config: ParallelConfig, ranks: list[int], counts: Any) -> tuple[str, ...]:
    """Of classes: the coordinate, without the replica where the class has several."""
    return tuple(short(config, rank, replica=counts[i] == 1 and config.dp > 1) for i, rank in enumerate(ranks))
