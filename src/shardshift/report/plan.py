"""A plan's figures for people: one short table, or one row for each of several plans."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..plan.methods import Method
from ..plan.summary import Summary
from ..values import Topology
from ..values.topology import GBIT_BYTES, Rates

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


def model_title(name: str, parameters: int) -> str:
    """A model's name and size, e.g. ``gpt3-32b (4.24 B parameters)``: a name may promise another."""
    for unit, scale in ((" B", 1e9), (" M", 1e6)):
        if parameters >= scale:
            return f"{name} ({float(f'{parameters / scale:.3g}'):,g}{unit} parameters)"
    return f"{name} ({parameters:,} parameters)"


def cluster_line(topology: Topology, called: str) -> str:
    """Nodes and rates that the times rest on, e.g. ``4 nodes x 8, 25 GB/s a device, 800 Gb/s a node (cluster-b)``."""
    link = topology.link_rates
    parts = [
        f"{topology.nodes:,} node{'s' * (topology.nodes > 1)} x {topology.devices_per_node:,}",
        f"{_rate(topology.device_rates, 1e9, 'GB/s')} a device",
    ]
    if topology.nodes > 1 and link:
        parts.append(f"{_rate(link, GBIT_BYTES, 'Gb/s')} a node")
    exceptions = (("device", len(topology.device_exceptions)), ("link", len(topology.link_exceptions)))
    parts += [f"{count:,} {what}s have their own" for what, count in exceptions if count]
    return f"{', '.join(parts)} ({called})"


def summary_table(
    summary: Summary, topology: Topology, model: str, *, called: str = "default rates", hint: str = ""
) -> RenderableType:
    """What the change moves, how long it takes, and how far both are from the least; fits 80 columns.

    Args:
        summary: the figures.
        topology: what they were planned for.
        model: its name, and what else to say of it.
        called: where the topology's rates are from.
        hint: what else to say of the topology.
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    moved, phases = summary.moved_bytes, len(summary.prediction)
    both = "; sum of two phases" if phases > 1 else ""
    table.add_row("state", amount(summary.state_bytes), "each tensor once")
    table.add_row("stays in place", amount(summary.referred_bytes), f"over all devices{both}")
    table.add_row("copied", amount(summary.copied_bytes), f"within a device{both}")
    least = _times(moved, summary.least_moved_bytes, f"the least, {amount(summary.least_moved_bytes)}")
    table.add_row("moved", amount(moved), f"{least}{both}")
    if why := why_more(summary):
        table.add_row("", "", why)
    if topology.nodes > 1:
        table.add_row("between nodes", amount(summary.cross_node_bytes), f"of the moved bytes{both}")
    if moved:
        bound = summary.lower_bound
        table.add_row("predicted", seconds(summary.predicted_s), f"the move alone, not the pause of training{both}")
        what = f"the lower bound of this placement, {seconds(bound.seconds)}"
        table.add_row("", "", _times(summary.predicted_s, bound.seconds, what))
        lane = max(summary.prediction, key=lambda one: one.seconds).busiest
        table.add_row("", "", f"busiest: {lane}; the bound is set by {bound.limited_by.replace('_', ' ')}")
    old = f"at most on any device, beside at most {amount(summary.old_state_bytes)} of old state"
    table.add_row("memory", amount(summary.peak_extra_bytes), f"{old}{'; in either phase' if phases > 1 else ''}")
    groups = summary.cross_node_tp_groups
    table.add_row("free nodes", f"{summary.free_nodes:,}", f"{groups:,} TP groups on more nodes than they must be")
    counts = ", ".join(f"{count:,} {name}" for name, count in summary.instructions.items() if count)
    table.add_row("planned in", seconds(summary.plan_s), f"digest {summary.digest}")
    table.add_row("instructions", "", f"{counts or 'none'}{both}")
    lines = [f"{summary.prev} → {summary.curr}, {model}, {summary.method}", f"on {cluster_line(topology, called)}"]
    return Group(*(Text(line) for line in (*lines, hint) if line), table)


def why_more(summary: Summary) -> str:
    """Why a plan moves more than the least; empty if it does not."""
    more = summary.moved_bytes - summary.least_moved_bytes
    if more <= 0:
        return ""
    if summary.method is not Method.EXACT:
        method = "its two phases" if summary.method is Method.PHASES else "the paper's sketch"
        return f"{amount(more)} more than the least, by {method}; compare --method exact"
    bought = []
    if alone := summary.bytes_alone:
        if (nodes := summary.free_nodes - alone.free_nodes) > 0:
            bought.append(f"{nodes:,} more free node{'s' * (nodes > 1)}")
        if (groups := alone.cross_node_tp_groups - summary.cross_node_tp_groups) > 0:
            bought.append(f"{groups:,} fewer TP group{'s' * (groups > 1)} across nodes")
    what = " and ".join(bought) or "TP groups kept together and nodes kept free"
    return f"{amount(more)} more than the least, for {what} (--node-worth 0: the least)"


def comparison_table(
    prev: str,
    found: Sequence[tuple[str, Summary | None]],
    topology: Topology,
    model: str,
    *,
    called: str = "default rates",
    hint: str = "",
) -> RenderableType:
    """Several layouts to go to, one row each; one without a summary cannot be. Fits 80 columns.

    Args:
        prev: the layout now.
        found: per layout to come its name and figures.
        topology: what they were planned for.
        model: its name, and what else to say of it.
        called: where the topology's rates are from.
        hint: what else to say of the topology.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("to", no_wrap=True)
    for heading in ("moved", "least", "predicted", "memory", "free nodes", "split TP"):
        table.add_column(heading, justify="right")
    for name, one in found:
        if one is None:
            table.add_row(name, "cannot be")
            continue
        sizes = (amount(one.moved_bytes), amount(one.least_moved_bytes))
        counts = (f"{one.free_nodes:,}", f"{one.cross_node_tp_groups:,}")
        table.add_row(name, *sizes, seconds(one.predicted_s), amount(one.peak_extra_bytes), *counts)
    method = next((f", {one.method}" for _, one in found if one), "")
    legend = (
        "predicted: the move alone; memory: at most on any device, beside the old state; split TP: TP groups on more "
        "nodes than they must be"
    )
    lines = (f"{prev} →, {model}{method}", f"on {cluster_line(topology, called)}", hint)
    return Group(*(Text(line) for line in lines if line), table, Text(legend))


def _rate(rates: Rates, unit: float, name: str) -> str:
    into, out = rates.in_bytes_per_s / unit, rates.out_bytes_per_s / unit
    return f"{into:,g} {name}" if into == out else f"{into:,g} {name} in and {out:,g} out"


def _times(ours: float, least: float, what: str) -> str:
    if least <= 0:
        return "nothing has to move" if ours <= 0 else f"more than {what}"
    return f"{ours / least:.3f} x {what}"
