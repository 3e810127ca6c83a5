"""Benchmarks: the one form that all have, its table for people, and its table in the documentation.

A benchmark is rows. A row is a figure of ours; beside it, where there is one, the same figure of something else, the
``baseline``; and a goal, where there is one. ``ratio`` is always ours over theirs, so below 1 ours is the smaller.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy
import scipy
from rich import box
from rich.table import Table

from ..values import Infeasible, Mismatch

_BEGIN: Final = "[//]: # (bench {})"
_END: Final = "[//]: # (end {})"
"""Lines that Markdown does not show: references without a use."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        case: what was measured.
        ours: our figure.
        baseline: what it is compared with; None: nothing.
        theirs: its figure, in the same unit.
        unit: of both.
        ratio: ours over theirs.
        goal: what is asked, e.g. ``<= 50 ms`` or ``ratio <= 1.25``.
        met: whether it is so.
    """

    case: str
    ours: float
    baseline: str | None
    theirs: float | None
    unit: str
    ratio: float | None
    goal: str | None
    met: bool | None

    @classmethod
    def of(
        cls,
        case: str,
        ours: float,
        unit: str,
        *,
        baseline: str | None = None,
        theirs: float | None = None,
        most: float | None = None,
        most_ratio: float | None = None,
    ) -> Row:
        """A row; figures are kept to six digits, and judged before.

        Args:
            case: what was measured.
            ours: our figure.
            unit: of both figures.
            baseline: what it is compared with.
            theirs: its figure. Where it is 0 there is no ratio, and ours has to be 0 too.
            most: the goal, in the unit.
            most_ratio: the goal as a ratio to the baseline; takes the place of ``most``.

        Raises:
            ValueError: if a ratio is asked for without a figure to compare with.
        """
        ratio = ours / theirs if theirs else None
        goal: str | None = None
        met: bool | None = None
        if most_ratio is not None:
            if theirs is None:
                raise ValueError(f"{case}: a goal for the ratio, but nothing to compare with")
            goal, met = f"ratio <= {most_ratio:g}", bool(ours <= most_ratio * theirs)
        elif most is not None:
            goal, met = f"<= {most:g} {unit}".rstrip(), bool(ours <= most)
        rounded = (None if figure is None else float(f"{figure:.6g}") for figure in (ours, theirs, ratio))
        own, other, quotient = rounded
        assert own is not None
        return cls(case, own, baseline, other, unit, quotient, goal, met)


@dataclass(frozen=True, slots=True)
class Curve:
    """How one figure goes over another, for the picture.

    Attributes:
        panel: the curves of one panel are drawn together.
        name: of the curve, in the legend.
        x: what is along the horizontal axis, with its unit.
        y: likewise the vertical one.
        points: (x, y), in order of x.
    """

    panel: str
    name: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, panel: str, name: str, x: str, y: str, points: Iterable[tuple[float, float]]) -> Curve:
        """A curve; figures are kept to six digits."""
        return cls(panel, name, x, y, tuple((float(f"{a:.6g}"), float(f"{b:.6g}")) for a, b in points))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What a benchmark found out.

    Attributes:
        name: of the benchmark, as in ``shardshift bench NAME``.
        machine: what it ran on.
        scale: how large the cases are, and how they were measured.
        rows: in the order of the table.
        curves: of the picture, beside the rows; the JSON has the key only if there are any.
    """

    name: str
    machine: str
    scale: str
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no goal was missed."""
        return all(row.met is not False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The content of ``benchmarks/results/NAME.json``."""
        record = asdict(self) | {"rows": [asdict(row) for row in self.rows]}
        del record["curves"]
        return record | ({"curves": [asdict(curve) for curve in self.curves]} if self.curves else {})

    @classmethod
    def from_json(cls, record: Any) -> Benchmark:
        """What ``to_json`` described.

        Raises:
            Mismatch: if it is of another form, or keys are missing or unknown.
        """
        lists = {key: record.get(key, ()) if isinstance(record, Mapping) else None for key in ("rows", "curves")}
        for key, found in lists.items():
            if not isinstance(found, list | tuple) or not all(isinstance(one, Mapping) for one in found):
                raise Mismatch(f"a benchmark is an object with a list of {key}; what to do: run it again")
        _require_keys("a benchmark", {"curves", *record}, cls)
        for i, row in enumerate(record["rows"]):
            _require_keys(f"row {i} of a benchmark", row, Row)
        curves = []
        for i, one in enumerate(record.get("curves", ())):
            _require_keys(f"curve {i} of a benchmark", one, Curve)
            curves.append(Curve(**{**one, "points": tuple((x, y) for x, y in one["points"])}))
        rows = tuple(Row(**row) for row in record["rows"])
        return cls(record["name"], record["machine"], record["scale"], rows, tuple(curves))

    def table(self) -> Table:
        """For the console."""
        table = Table(box=box.SIMPLE_HEAD, title=f"{self.name}: {self.scale}", title_justify="left", pad_edge=False)
        table.add_column("case")
        for heading in ("ours", "theirs", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("goal")
        table.add_column("met", justify="center")
        for row in self.rows:
            theirs = "" if row.theirs is None else f"{number(row.theirs)}, {row.baseline}"
            met = "" if row.met is None else "[green]yes[/]" if row.met else "[bold red]NO[/]"
            table.add_row(row.case, f"{number(row.ours)} {row.unit}", theirs, _ratio(row), row.goal or "", met)
        table.caption = self.machine
        return table

    def markdown(self) -> str:
        """For the documentation: lines of a table, and what it was measured on."""
        lines = [
            f"Measured on {self.machine}. {self.scale}.",
            "",
            "| case | ours | theirs | ratio | goal | met |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            theirs = "" if row.theirs is None else f"{number(row.theirs)} {row.unit}, {row.baseline}"
            met = "" if row.met is None else "yes" if row.met else "**no**"
            cells = (row.case, f"{number(row.ours)} {row.unit}", theirs, _ratio(row), row.goal or "", met)
            lines.append(f"| {' | '.join(cell.strip().replace('|', '/') for cell in cells)} |")
        return "\n".join(line.replace("<=", "≤") for line in lines)


def number(figure: float) -> str:
    """A figure in three digits, without an exponent; whole from 100 on."""
    if figure == 0 or abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{float(f'{figure:.3g}'):,.10g}"


def machine() -> str:
    """What this runs on, in words: processor, cores, Python, numpy, SciPy."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({model or platform.machine()}), Python {platform.python_version()}, numpy "
        f"{numpy.__version__}, SciPy {scipy.__version__}"
    )


def with_table(page: str, benchmark: Benchmark) -> str:
    """A page of the documentation with a benchmark's table between its marks.

    Args:
        page: Markdown with the lines ``[//]: # (bench NAME)`` and ``[//]: # (end NAME)``.
        benchmark: whose table goes between them.

    Raises:
        Infeasible: if the page does not have both marks, once and in that order.
    """
    begin, end = _BEGIN.format(benchmark.name), _END.format(benchmark.name)
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or begin in rest or end in after:
        raise Infeasible(
            f"the page has no place for the table of {benchmark.name!r}; what to do: give it the lines {begin!r} and "
            f"{end!r}, each once"
        )
    return f"{before}{begin}\n\n{benchmark.markdown()}\n\n{end}{after}"


def _require_keys(what: str, actual: Iterable[str], of: type[Benchmark] | type[Row] | type[Curve]) -> None:
    expected = {field.name for field in fields(of)}
    if expected != set(actual):
        raise Mismatch(f"{what} has keys {sorted(actual)}, expected {sorted(expected)}; what to do: run it again")


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{number(row.ratio)} x"


def count_met(rows: Sequence[Row]) -> str:
    """How many goals there are, and are met."""
    goals = [row for row in rows if row.met is not None]
    return f"{sum(bool(row.met) for row in goals)} of {len(goals)} goals met"
