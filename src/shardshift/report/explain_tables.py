"""An explanation as tables, for 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from rich import box
from rich.table import Table

from .explain import Explanation, Matrix, short

_WIDTH: Final = 80
_FREE: Final = 16
_ROWS: Final = 24
_NODES: Final = 32
_PAIRS: Final = 64


def explanation_tables(explained: Explanation, width: int = _WIDTH) -> Iterator[tuple[str, Table | None]]:
    """What to print, one after the other: a title, and the table under it.

    Args:
        explained: what is shown.
        width: columns of the console; up to 80 are used, and matrices cut to fewer are said to be.
    """
    width = min(width, _WIDTH) - 2
    if explained.paper:
        paper = explained.paper
        yield _matrix("PP: layers that a new stage (row) lacks if it becomes an old one (column)", paper.pp, width)
        yield _matrix("TP: slices that a new slice lacks", paper.tp, width)
        yield _matrix("Both, merged: layers that a new rank lacks, in its own width", paper.merged, width)
        yield _workloads(explained)
    else:
        yield f"No matrices of the paper: {explained.no_paper}", None
    yield _matrix(_exact_title(explained), explained.exact, width)
    yield _pairs(explained)
    yield _nodes(explained, width)


def _exact_title(explained: Explanation) -> str:
    title = "Exact: MiB that a new rank (row) lacks on an old rank's device (column)"
    ranks = explained.change.curr.world_size, explained.change.prev.world_size + 1
    shared = (explained.exact.all_rows, explained.exact.all_columns) != ranks
    return f"{title}, where ranks that hold the same are one" if shared else title


def _matrix(title: str, matrix: Matrix, width: int) -> tuple[str, Table]:
    cells = [[_entry(entry) for entry in row] for row in matrix.entries[:_ROWS]]
    wide = max((len(text) for text in (*matrix.columns, *(cell for row in cells for cell in row))), default=1)
    label = max((len(name) for name in matrix.rows), default=0)
    columns = matrix.columns[: max(1, (width - label) // (wide + 1))]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in zip(matrix.rows, cells, strict=False):
        table.add_row(name, *row[: len(columns)])
    if len(cells) < matrix.all_rows or len(columns) < matrix.all_columns:
        title += f"; the first {len(cells)} x {len(columns)} of {matrix.all_rows} x {matrix.all_columns}"
    return title, table


def _entry(entry: int | Fraction) -> str:
    if isinstance(entry, int):
        return f"{entry / 2**20:,.0f}" if entry >= 100 * 2**20 or not entry else f"{entry / 2**20:.3g}"
    return str(entry)


def _workloads(explained: Explanation) -> tuple[str, Table]:
    paper = explained.paper
    assert paper is not None
    table = Table(box=None, pad_edge=False)
    for heading in ("old", "holds", "new", "shall hold"):
        table.add_column(heading, no_wrap=True)
    for index in range(min(_ROWS, max(len(paper.prev), len(paper.curr)))):
        old = (paper.merged.columns[index], paper.prev[index]) if index < len(paper.prev) else ("", "")
        new = (paper.merged.rows[index], paper.curr[index]) if index < len(paper.curr) else ("", "")
        table.add_row(*old, *new)
    if max(paper.merged.all_rows, paper.merged.all_columns) > _ROWS:
        table.add_row("...", "", "...", "")
    return "Workloads (layers.slices)", table


def _pairs(explained: Explanation) -> tuple[str, Table]:
    change, pairs = explained.change, explained.pairs
    title = "Pairs: new rank, the old rank of its device"
    if len(pairs) > _PAIRS:
        title += f"; the first {_PAIRS} of {len(pairs)}"
    table = Table(box=None, pad_edge=False)
    for heading in ("new", "at", "old", "was", "device"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("at", "was") else "right")
    runs = any(pair.count > 1 for pair in pairs)
    if runs:
        table.add_column("and so on", no_wrap=True)
    for pair in pairs[:_PAIRS]:
        old = ("-", "fresh") if pair.prev is None else (str(pair.prev), short(change.prev, pair.prev))
        row = [str(pair.curr), short(change.curr, pair.curr), *old, str(pair.device)]
        if runs:
            steps = f"{pair.curr_step:+} {'-' if pair.prev is None else f'{pair.prev_step:+}'} {pair.device_step:+}"
            row.append(f"{pair.count} in steps of {steps}" if pair.count > 1 else "")
        table.add_row(*row)
    return title, table


def _nodes(explained: Explanation, width: int) -> tuple[str, Table]:
    change, per_node, used = explained.change, explained.change.topology.devices_per_node, explained.nodes
    title = "Devices by node ('-' no rank, 'x' lost)"
    title += f"; the first {_NODES} of {len(used)} nodes in use" if len(used) > _NODES else ""
    if unused := change.topology.nodes - len(used):
        title += f"; {unused:,} more node{'s' * (unused > 1)}, all free"
    table = Table(box=None, pad_edge=False)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    lost = set(change.lost)
    for node, devices in list(used.items())[:_NODES]:
        for when, ranks, config in (
            ("before", explained.before, change.prev),
            ("after", explained.after, change.curr),
        ):
            names: list[str] = []
            following = node * per_node
            for device in devices:
                rank = ranks.get(device)
                name = "x" if device in lost else "-" if rank is None else short(config, rank)
                names += [*_free(device - following), name]
                following = device + 1
            names += _free((node + 1) * per_node - following)
            wide = max(map(len, names))
            each = max(1, (width - 14) // (wide + 1))
            lines = [
                " ".join(name.ljust(wide) for name in names[first : first + each])
                for first in range(0, len(names), each)
            ]
            table.add_row(str(node) if when == "before" else "", when, "\n".join(lines))
    return title, table


def _free(count: int) -> list[str]:
    """Devices that have no rank before or after, one by one; many as their number."""
    return ["-"] * count if count <= _FREE else [f"{count:,} x -"]
