"""Benchmarks: goals, the JSON form, the tables, and that the documentation shows what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shardshift.cli import bench
from shardshift.report.bench import Benchmark, Row, machine, number, with_table
from shardshift.values import Infeasible, Mismatch, ShardshiftError

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
KEYS = ["case", "ours", "baseline", "theirs", "unit", "ratio", "goal", "met"]


def test_a_goal_is_judged_before_rounding() -> None:
    row = Row.of("plan", 1.0000004, "s", most=1)
    assert (row.ours, row.goal, row.met) == (1.0, "<= 1 s", False)
    assert Row.of("plan", 0.5, "s").met is None


def test_a_ratio_is_ours_over_theirs() -> None:
    row = Row.of("move", 5, "ms", baseline="bound", theirs=4, most_ratio=1.25)
    assert (row.ratio, row.goal, row.met) == (1.25, "ratio <= 1.25", True)
    assert Row.of("move", 5.1, "ms", baseline="bound", theirs=4, most_ratio=1.25).met is False


def test_where_theirs_is_nothing_ours_must_be_nothing() -> None:
    assert Row.of("move", 0, "ms", baseline="bound", theirs=0, most_ratio=1.25).met is True
    assert Row.of("move", 1, "ms", baseline="bound", theirs=0, most_ratio=1.25).met is False
    with pytest.raises(ValueError, match="nothing to compare"):
        Row.of("move", 1, "ms", most_ratio=1.25)


def benchmark(name: str = "toy") -> Benchmark:
    rows = (
        Row.of("fast", 1, "ms", most=2),
        Row.of("near | far", 1234.5, "ms", baseline="bound", theirs=1000, most_ratio=1.25),
        Row.of("slow", 3, "ms", most=2),
    )
    return Benchmark(name, "a machine", "three cases", rows)


def test_json_has_the_agreed_form_and_gives_an_equal_benchmark() -> None:
    record = json.loads(json.dumps(benchmark().to_json()))
    assert list(record) == ["name", "machine", "scale", "rows"]
    assert [list(row) for row in record["rows"]] == [KEYS] * 3
    assert Benchmark.from_json(record) == benchmark()
    del record["rows"][1]["goal"]
    with pytest.raises(Mismatch, match="row 1"):
        Benchmark.from_json(record)


def test_markdown_marks_what_is_missed() -> None:
    lines = benchmark().markdown().splitlines()
    assert lines[-3] == "| fast | 1 ms |  |  | ≤ 2 ms | yes |"
    assert lines[-2] == "| near / far | 1,234 ms | 1,000 ms, bound | 1.23 x | ratio ≤ 1.25 | yes |"
    assert lines[-1].endswith("| **no** |")


def test_figures_have_three_digits_and_no_exponent() -> None:
    assert [number(x) for x in (0, 0.012345, 1.0, 12.345, 123.45, 1234567)] == [
        "0", "0.0123", "1", "12.3", "123", "1,234,567",
    ]  # fmt: skip


def test_a_table_goes_between_its_marks_and_leaves_the_rest() -> None:
    page = "before\n[//]: # (bench toy)\nold\n[//]: # (end toy)\nafter\n"
    new = with_table(page, benchmark())
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert with_table(new, benchmark()) == new
    for broken in ("no marks", page + page, page.replace("end", "END")):
        with pytest.raises(Infeasible, match="no place"):
            with_table(broken, benchmark())


@pytest.mark.parametrize("saved", RESULTS, ids=lambda path: path.stem)
def test_the_documentation_shows_the_saved_result(saved: Path) -> None:
    record = json.loads(saved.read_text())
    assert record["name"] == saved.stem
    page = (ROOT / "docs" / "performance.md").read_text()
    assert with_table(page, Benchmark.from_json(record)) == page, f"run: shardshift bench {saved.stem} --docs"


def test_the_machine_is_said() -> None:
    assert "cores" in machine()


TOY = '''"""What a toy takes.

More.
"""
from shardshift.report.bench import Row


def run(say):
    say("at [work]")
    return "one case", [Row.of("toy", 1, "ms", most=MOST)]
'''


def folder(root: Path, most: float = 2) -> Path:
    made = root / "benchmarks"
    made.mkdir()
    (made / "toy.py").write_text(TOY.replace("MOST", str(most)))
    (made / "_shared.py").write_text("")
    (root / "docs").mkdir()
    (root / "docs" / "performance.md").write_text("[//]: # (bench toy)\n[//]: # (end toy)\n")
    return made


def test_a_benchmark_is_run_saved_and_put_into_the_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folder(tmp_path)
    bench.run_bench("toy", as_json=True, folder=made)
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((made / "results" / "toy.json").read_text())
    assert "at [work]" in err
    assert "1 of 1 goals met" in err
    bench.run_bench("toy", docs=True, folder=made)
    assert "| toy | 1 ms |" in (tmp_path / "docs" / "performance.md").read_text()


def test_a_missed_goal_is_an_error_after_all_is_saved(tmp_path: Path) -> None:
    made = folder(tmp_path, most=0.5)
    with pytest.raises(ShardshiftError, match="1 goals of toy are missed: toy"):
        bench.run_bench("toy", folder=made)
    assert (made / "results" / "toy.json").exists()


def test_benchmarks_are_listed_with_what_they_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run_bench("list", folder=folder(tmp_path))
    assert capsys.readouterr().out == "toy: What a toy takes.\n"


def test_what_is_not_there_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Infeasible, match="give one of toy"):
        bench.run_bench("other", folder=folder(tmp_path))
    with pytest.raises(Infeasible, match="bench toy' first"):
        bench.run_bench("toy", docs=True, folder=tmp_path / "benchmarks")
    for text in ("{", "[]", '{"rows": 3}', "[" * 100_000):
        saved = tmp_path / "benchmarks" / "results" / "toy.json"
        saved.parent.mkdir(exist_ok=True)
        saved.write_text(text)
        with pytest.raises(Mismatch, match="what to do: run it again"):
            bench.run_bench("toy", docs=True, folder=tmp_path / "benchmarks")
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "e.py"))
    monkeypatch.chdir(tmp_path / "docs")
    with pytest.raises(Infeasible, match="clone the repository"):
        bench.find_folder()


def test_the_console_table_has_every_row() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(benchmark().table())
    assert all(row.case in captured.get() for row in benchmark().rows)
