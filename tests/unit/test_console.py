"""Tables on narrow consoles: nothing is cut, and where there is room nothing is wider than it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from shardshift.report.console import print_whole


def printed(width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    table = Table(box=None)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    table.add_column("words")
    table.add_column("[bold]more[/] words")
    table.add_row("moved", "1,234.56 GiB", "a sentence that may go on in the next line", "digest cb4d4c370f54a28a")
    table.add_row("memory", "[green]12 B[/]", "unpronounceable", "and then some that follow")
    with console.capture() as captured:
        print_whole(console, "a line of words before it", table)
    assert console.width == width
    return captured.get()


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 79, 80, 200])
def test_no_word_and_no_figure_is_cut_at_any_width(width: int) -> None:
    shown = printed(width)
    for whole in ("how much", "1,234.56 GiB", "12 B", "cb4d4c370f54a28a", "unpronounceable", "sentence"):
        assert whole in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [62, 70, 80, 100])
def test_a_table_that_fits_is_no_wider_than_the_console(width: int) -> None:
    assert max(map(len, printed(width).splitlines())) <= width
