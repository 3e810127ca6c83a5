"""Tables for people, with rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from .demo import Transition


def transitions_table(transitions: Iterable[Transition]) -> Table:
    """One row for each change of layout."""
    table = Table(box=box.SIMPLE_HEAD, title="Changes of layout, live", title_justify="left", pad_edge=False)
    table.add_column("change", no_wrap=True)
    for heading in ("state", "referred", "copied", "moved", "least", "move", "pause", "checkpoint", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bit-exact", justify="center")
    table.add_column("same losses", justify="center")
    for t in transitions:
        table.add_row(
            f"{t.prev} → {t.curr}",
            *map(_mebibytes, (t.state_bytes, t.referred_bytes, t.copied_bytes, t.moved_bytes, t.least_moved_bytes)),
            f"{t.move_s * 1e3:.0f} ms",
            f"{t.pause_s * 1e3:.0f} ms",
            f"{t.checkpoint_s * 1e3:.0f} ms",
            f"{t.speedup:.1f} ×",
            _yes(t.bit_exact),
            _yes(t.same_losses_as_checkpoint),
        )
    return table


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _yes(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[bold red]NO[/]"
