"""Pictures of benchmarks, with matplotlib: one PNG beside the JSON, made of nothing but what the JSON holds.

1. Rows are bars: one panel for each unit, one group for each row: ours, and what it is compared with, if there is that.
2. Curves are lines: one panel for each ``Curve.panel``.
3. A panel whose figures span more than two orders of magnitude has a logarithmic axis.

A picture of its own for each benchmark was rejected: what is drawn would be another thing than what is saved, and the
tables of the documentation could not be held against it. plotly was rejected, as its PNGs need a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .bench import Benchmark, Curve, Row, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES: Final = 10.0
_ROW_INCHES: Final = 0.3
_CURVE_INCHES: Final = 3.2
_MOST_ROWS: Final = 60
"""Rows of one panel at most; a picture of two hundred bars says nothing."""

_SPAN: Final = 100.0
_OURS, _THEIRS, _MISSED = "C0", "0.65", "C3"


def save_chart(benchmark: Benchmark, path: Path) -> None:
    """Draw a benchmark's rows and curves into a PNG.

    Args:
        benchmark: what is drawn; of units with more than 60 rows, those without a baseline or goal are left out, and
            what is still over that.
        path: of the PNG; its folder must be there.

    Raises:
        ImportError: if matplotlib, of the extra ``[bench]``, is not installed.
    """
    from matplotlib.figure import Figure  # only here: it takes half a second to import, and few need it

    curves = _by_panel(benchmark.curves)
    rows = _by_unit(benchmark.rows)
    heights = [_CURVE_INCHES] * len(curves) + [_ROW_INCHES * len(some) + 0.9 for some in rows.values()]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.6 if heights else 1.0), layout="constrained")
    figure.suptitle(benchmark.name, x=0.01, ha="left", weight="bold")
    if heights:
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for panel, (title, lines) in zip(panels, curves.items(), strict=False):
            _draw_curves(panel, title, lines)
        for panel, (unit, some) in zip(panels[len(curves) :], rows.items(), strict=True):
            _draw_rows(panel, unit, some)
    figure.savefig(path, dpi=100, format="png")


def _by_panel(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.panel, []).append(curve)
    return found


def _by_unit(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.unit, []).append(row)
    for unit, some in found.items():
        if len(some) > _MOST_ROWS:
            compared = [row for row in some if row.theirs is not None or row.goal is not None]
            found[unit] = (compared or some)[:_MOST_ROWS]
    return found


def _draw_curves(panel: Axes, title: str, curves: Sequence[Curve]) -> None:
    for index, curve in enumerate(curves):
        xs, ys = zip(*curve.points, strict=True) if curve.points else ((), ())
        # Wide and pale below, thin above: curves that lie on one another are all seen.
        panel.plot(xs, ys, label=curve.name, linewidth=1.2 + 1.6 * (len(curves) - 1 - index), alpha=0.8)
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_xlabel(curves[0].x, fontsize=8)
    panel.set_ylabel(curves[0].y, fontsize=8)
    panel.tick_params(labelsize=7)
    panel.legend(fontsize=7, loc="best")


def _draw_rows(panel: Axes, unit: str, rows: Sequence[Row]) -> None:
    places = [float(index) for index in range(len(rows))]
    paired = [row.theirs is not None for row in rows]
    ours = [(place - 0.2 if both else place) for place, both in zip(places, paired, strict=True)]
    heights = [0.4 if both else 0.6 for both in paired]
    colors = [_MISSED if row.met is False else _OURS for row in rows]
    panel.barh(ours, [row.ours for row in rows], heights, color=colors)
    theirs = [(place + 0.2, row) for place, row in zip(places, rows, strict=True) if row.theirs is not None]
    panel.barh([place for place, _ in theirs], [row.theirs or 0.0 for _, row in theirs], 0.4, color=_THEIRS)
    figures = [figure for row in rows for figure in (row.ours, row.theirs) if figure]
    if figures and min(figures) > 0 and max(figures) > _SPAN * min(figures):
        panel.set_xscale("log")
    for place, row in zip(ours, rows, strict=True):
        panel.annotate(f" {number(row.ours)}", (row.ours, place), fontsize=6, va="center")
    for place, row in theirs:
        panel.annotate(
            f" {number(row.theirs or 0.0)} {row.baseline}", (row.theirs or 0.0, place), fontsize=6, va="center"
        )
    panel.margins(x=0.25)
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_yticks(places, [row.case if len(row.case) <= 70 else row.case[:69] + "…" for row in rows], fontsize=6)
    panel.invert_yaxis()
    panel.tick_params(axis="x", labelsize=7)
    panel.set_xlabel(f"{unit}: ours in colour (red: goal missed), what it is compared with in grey", fontsize=7)
