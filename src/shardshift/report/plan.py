"""A plan's figures for people: one short table."""

from __future__ import annotations

from rich.table import Table

from ..plan.summary import Summary
from ..values import Topology

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def amount(size_bytes: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit, scale in _UNITS:
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} B"


def seconds(time_s: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.1f} ms"


def summary_table(summary: Summary, topology: Topology, model: str) -> Table:
    """What the change moves, how long it takes, and how far both are from the least; fits 80 columns."""
    title = f"{summary.prev} → {summary.curr}, {model}, {summary.method}"
    table = Table(box=None, title=title, title_justify="left", show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    moved, least = summary.moved_bytes, summary.least_moved_bytes
    bound = summary.lower_bound
    table.add_row("state", amount(summary.state_bytes), "each tensor once")
    table.add_row("stays in place", amount(summary.referred_bytes), "over all devices")
    table.add_row("copied", amount(summary.copied_bytes), "within a device")
    table.add_row("moved", amount(moved), _times(moved, least, f"the least, {amount(least)}"))
    table.add_row("between nodes", amount(summary.cross_node_bytes), f"of {topology.nodes} nodes")
    predicted = _times(summary.predicted_s, bound.seconds, f"the lower bound, {seconds(bound.seconds)}")
    table.add_row("predicted", seconds(summary.predicted_s), predicted)
    lane = max(summary.prediction, key=lambda one: one.seconds).busiest
    table.add_row("", "", f"busiest: {lane}; the bound is set by {bound.limited_by.replace('_', ' ')}")
    table.add_row("memory", amount(summary.peak_extra_bytes), "more than the old state, at most, on any device")
    groups = summary.cross_node_tp_groups
    table.add_row("free nodes", str(summary.free_nodes), f"{groups} TP groups on more nodes than they must be")
    counts = ", ".join(f"{count:,} {name}" for name, count in summary.instructions.items() if count)
    table.add_row("planned in", seconds(summary.plan_s), f"digest {summary.digest}")
    table.add_row("instructions", "", counts or "none")
    return table


def _times(ours: float, least: float, what: str) -> str:
    if least <= 0:
        return "nothing has to move" if ours <= 0 else f"more than {what}"
    return f"{ours / least:.3f} x {what}"
