"""Printing tables whole: rich cuts words and figures that a narrow console has no room for, and a cut figure is wrong.

1. No column is narrower than its longest word; one of figures (``no_wrap``) no narrower than its widest cell.
2. A console narrower than that is written to as if it were wide enough: a terminal goes on in the next line, and a
   file or pipe has no width.

Folding figures too was rejected: half a number under another one reads as two.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table

_UNBOUNDED: Final = 10_000
"""Columns that no table has."""


def print_whole(console: Console, *renderables: RenderableType) -> None:
    """Print tables and texts without cutting anything; the console keeps its width for what follows."""
    for renderable in renderables:
        parts = renderable.renderables if isinstance(renderable, Group) else [renderable]
        for part in parts:
            _print(console, part)


def _print(console: Console, renderable: RenderableType) -> None:
    if not isinstance(renderable, Table):
        console.print(renderable, overflow="fold")
        return
    unbounded = console.options.update(width=_UNBOUNDED)
    for column in renderable.columns:
        sizes = [console.measure(cell, options=unbounded) for cell in (column.header, *column.cells)]
        column.min_width = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    width = console.width
    console.width = max(width, console.measure(renderable, options=unbounded).minimum)
    console.print(renderable, soft_wrap=False, crop=False)
    console.width = width
