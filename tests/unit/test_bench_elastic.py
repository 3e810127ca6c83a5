"""The benchmark of changes of layout, losses and restarts: its smallest form, and how its times are put together."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from shardshift.elastic import ResizeReport
from shardshift.report.bench import Benchmark
from shardshift.values import ParallelConfig

FOLDER = Path(__file__).parents[2] / "benchmarks"
PHASES = ("plan", "quiesce", "agree", "move", "commit", "rebuild", "resume")


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("elastic")


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_restart")


def test_a_process_joins_a_running_job_and_another_job_loses_one(elastic: Any) -> None:
    scale = elastic.Scale(
        configs=("pp1", "pp2"),
        rounds=1,
        steps=2,
        founders=1,
        devices=2,
        per_node=1,
        slow=0,
        lossy="dp2",
        losses=1,
        restarted=(),
        turns=2,
    )
    described, rows = elastic.run(lambda line: None, scale)
    benchmark = Benchmark("elastic", "a machine", described, tuple(rows))
    assert Benchmark.from_json(benchmark.to_json()) == benchmark
    found = {row.case: row for row in rows}
    for case in ("pp1tp1dp1 → pp2tp1dp1, joiners", "pp2tp1dp1 → pp1tp1dp1"):
        pause = found[f"{case}: pause"]
        assert pause.goal == "ratio <= 1"
        assert pause.theirs == pytest.approx(found[f"{case}: move"].ours + 150, rel=1e-4)
        parts = [found[f"{case}: {phase}"].ours for phase in PHASES]
        assert sum(parts) == pytest.approx(pause.ours, rel=1e-4)
    assert found["1 joiners: from start to standing by"].ours > 0
    case = "a rank of dp2 is killed → pp1tp1dp1"
    whole = found.pop(f"{case}: from the kill to the next step")
    del found[f"{case}: the first step takes longer by"]
    assert sum(row.ours for what, row in found.items() if what.startswith(f"{case}: ")) == pytest.approx(
        whole.ours, rel=1e-4
    )
    assert found["a step of dp2 with gate and undo copy"].baseline == "without"


def test_a_pause_is_from_the_last_end_to_the_last_beginning(elastic: Any) -> None:
    """Two ranks; steps end at 1, 2, 3; after the change at 5.5, 6.5, 7.5, and the first one lasts from 4 on."""
    prev, curr = ParallelConfig.parse("pp2"), ParallelConfig.parse("tp2")
    reports = [
        ResizeReport(prev, curr, 3, (0, 1), "", 0, 0, 0, 0, 0, {"quiesce": 0.1, "move": move_s})
        for move_s in (0.6, 0.8)
    ]
    seen = elastic.Seen()
    for generation, first, ends in ((0, 1, (1.0, 2.0, 3.0)), (1, 4, (5.5, 6.5, 7.5))):
        for iteration, end in enumerate(ends, first):
            seen.steps[generation, iteration] = [(end - 1.6, end - 0.01), (end - 1.5, end)]
    seen.changes[1] = [(device, report, 1.0) for device, report in enumerate(reports)]
    (found,) = elastic.pauses(seen).of_case.values()
    (pause,) = found
    assert (pause.case, pause.pause_s, pause.step_s, pause.first_s) == ("pp2tp1dp1 → pp1tp2dp1", 1.0, 1.0, 0.5)
    assert pause.phases_s == {"quiesce": 0.1, "move": 0.8, "resume": pytest.approx(0.1)}


def test_the_parts_of_a_restart_are_one_after_the_other_and_leave_nothing_out(restart: Any) -> None:
    old = [{"steps": [1.0, 2.0], "saved": 3.0}, {"steps": [1.0, 2.5], "saved": 3.5}]
    ranks: list[dict[str, Any]] = [
        {"began": 6.0, "imported": 8.0, "helpers_s": 0.5, "built": 10.0, "loaded": 11.0, "steps": [13.0, 14.0, 15.0]},
        {"began": 7.0, "imported": 9.0, "helpers_s": 0.4, "built": 10.0, "loaded": 11.5, "steps": [13.0, 14.0, 15.0]},
    ]
    found = restart._restart((0.0, 4.0, old), (4.5, 16.0, ranks))
    assert found.parts_s == {
        "save": 1.0,
        "processes end": 0.5,
        "torchrun": 2.5,
        "imports": 2.0,
        "build": 0.5,
        "load": 1.5,
    }
    assert (found.pause_s, found.first_s) == (8.0, 0.5)
