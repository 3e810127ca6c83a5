"""Tables for people, with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from .demo import Transition


def transitions_table(transitions: Sequence[Transition]) -> Table:
    """One row for each change of layout: sizes in MiB, times in milliseconds; fits 80 columns.

    ``pids`` is as in ``4+4-0``: so many processes stay, so many join, so many leave.
    """
    title = f"Changes of layout, from {transitions[0].prev} (MiB, ms)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=0, pad_edge=False)
    table.add_column("to", no_wrap=True)
    table.add_column("pids", no_wrap=True)
    for heading in ("state", "refer", "copy", "moved", "least", "move", "pause", "ckpt", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", justify="center")
    table.add_column("loss", justify="center")
    for t in transitions:
        sizes = (t.state_bytes, t.referred_bytes, t.copied_bytes, t.moved_bytes, t.least_moved_bytes)
        table.add_row(
            t.curr,
            f"{t.pids_kept}+{t.joined}-{t.left}",
            *(f"{size / 2**20:.1f}" for size in sizes),
            *(f"{seconds * 1e3:.0f}" for seconds in (t.move_s, t.pause_s, t.checkpoint_s)),
            f"{t.speedup:.1f}x",
            _yes(t.bit_exact, "yes"),
            _yes(t.same_losses_as_checkpoint, "same"),
        )
    return table


def _yes(holds: bool, word: str) -> str:
    return f"[green]{word}[/]" if holds else "[bold red]NO[/]"
