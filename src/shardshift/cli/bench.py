"""``shardshift bench NAME``: run a benchmark of this checkout, print it, save it.

Benchmarks are modules in the folder ``benchmarks`` of the checkout, which a wheel does not hold; a dash in a name is an
underscore in the module's. Each has a docstring, whose first line says what it measures, and ``run(say)``, which gives
(scale, rows), or (scale, rows, curves).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.markup import escape

from ..report.bench import Benchmark, Curve, Row, count_met, machine, with_table
from ..report.charts import save_chart
from ..report.console import print_whole
from ..values import Infeasible, Mismatch, ShardshiftError

_PAGE: Final = Path("docs") / "performance.md"


class Run(Protocol):
    """A benchmark's function."""

    def __call__(
        self, say: Callable[[str], None]
    ) -> tuple[str, Sequence[Row]] | tuple[str, Sequence[Row], Sequence[Curve]]:
        """Run it all.

        Args:
            say: takes a line about what is being done.

        Returns:
            How large the cases are and how they were measured; the rows; and curves for the picture, if it has any.
        """
        ...


def run_bench(name: str, *, as_json: bool = False, docs: bool = False, folder: Path | None = None) -> None:
    """Run a benchmark, print its table, and save it as ``results/NAME.json`` and ``NAME.png`` in its folder.

    Without matplotlib there is no picture, and a line that says so.

    Args:
        name: of the benchmark, or ``list``.
        as_json: print the result as JSON on stdout, and words on stderr.
        docs: run nothing; write the saved result into ``docs/performance.md``.
        folder: where the benchmarks are; None: beside the package, or in the working directory.

    Raises:
        Infeasible: if there are no benchmarks, or none of that name, or no saved result.
        ShardshiftError: if a goal was missed.
    """
    folder = folder or find_folder()
    known = {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    console = Console(stderr=as_json, highlight=False)
    if name == "list":
        what = {stem: _first_line(path) for stem, path in known.items()}
        for stem, line in what.items():
            console.print(f"{stem}: {escape(line)}")
        if as_json:
            print(json.dumps(what))
        return
    if name not in known:
        raise Infeasible(f"no benchmark is called {name!r}; what to do: give one of {', '.join(known) or 'none'}")
    saved = folder / "results" / f"{name}.json"
    if docs:
        write_docs(saved, folder.parent / _PAGE)
        console.print(f"wrote {folder.parent / _PAGE}", markup=False)
        return
    scale, rows, *curves = _load(known[name])(lambda line: console.print(escape(line), style="dim"))
    benchmark = Benchmark(name, machine(), scale, tuple(rows), tuple(curves[0]) if curves else ())
    print_whole(console, benchmark.table())
    saved.parent.mkdir(exist_ok=True)
    saved.write_text(json.dumps(benchmark.to_json(), indent=2) + "\n")
    try:
        save_chart(benchmark, saved.with_suffix(".png"))
    except ImportError as error:
        console.print(f"no picture, since {error}; what to do: pip install 'shardshift[bench]'", markup=False)
    wrote = f"{count_met(rows)}; wrote {saved}; 'shardshift bench {name} --docs' puts it into {_PAGE}"
    console.print(wrote, markup=False)
    if as_json:
        print(json.dumps(benchmark.to_json()))
    if not benchmark.passed:
        missed = [row.case for row in rows if row.met is False]
        raise ShardshiftError(f"{len(missed)} goals of {name} are missed: {'; '.join(missed)}")


def find_folder() -> Path:
    """The folder of benchmarks: beside an editable checkout's package, else in the working directory.

    Raises:
        Infeasible: if it is in neither.
    """
    places = [Path(__file__).parents[3] / "benchmarks", Path.cwd() / "benchmarks"]
    for place in places:
        if place.is_dir():
            return place
    raise Infeasible(
        f"there are no benchmarks in {' or '.join(map(str, places))}: they are part of a checkout, not of the "
        "installed package; what to do: clone the repository, and run this in it"
    )


def write_docs(saved: Path, page: Path) -> None:
    """Put a saved result into a page of the documentation.

    Raises:
        Infeasible: if there is no such result, or the page has no place for it.
        Mismatch: if the file holds something else.
    """
    if not saved.exists():
        raise Infeasible(f"{saved} is not there; what to do: run 'shardshift bench {saved.stem}' first")
    try:
        record = json.loads(saved.read_text())
    except (ValueError, RecursionError) as error:
        raise Mismatch(f"{saved} is not the result of a benchmark: {error}; what to do: run it again") from error
    benchmark = Benchmark.from_json(record)
    page.write_text(with_table(page.read_text(), benchmark))


def _load(path: Path) -> Run:
    # Under a name of its own, and known to sys.modules, as dataclasses and pickles of the module need.
    key = f"shardshift_benchmarks_{path.stem}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    # Benchmarks share modules of their folder, whose names start with an underscore.
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    run: Run = module.run
    return run


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
