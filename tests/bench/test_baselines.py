"""The benchmarks against other ways to change a layout, at a tiny scale. What they move is checked as they run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardshift.report.bench import Benchmark, Row

PHASES = {
    "Megatron, /dev/shm": ("save", "reshard", "load"),
    "torch checkpoint, /dev/shm": ("save", "load"),
    "torch checkpoint, disk": ("save", "load"),
    "Megatron-Dist, /dev/shm": ("save", "load"),
    "torchrun restart, /dev/shm": ("save", "start", "import", "meet", "load"),
}


@pytest.fixture
def table2(benchmarks: None) -> ModuleType:
    return importlib.import_module("table2")


@pytest.fixture
def tenplex(benchmarks: None) -> ModuleType:
    return importlib.import_module("tenplex")


def rows_of(name: str, found: tuple[str, Any]) -> list[Row]:
    benchmark = Benchmark(name, "a machine", found[0], tuple(found[1]))
    assert Benchmark.from_json(benchmark.to_json()) == benchmark
    return list(benchmark.rows)


def test_a_tiny_table_2_has_every_baseline_by_phase(table2: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    where = (("/dev/shm", str(tmp_path)), ("disk", str(tmp_path)))
    changes = (("PP2TP1DP2", "PP1TP2DP1", 2),)
    rows = rows_of("table2", table2.run(said.append, table2.Scale(changes, hidden=64, vocab=256, runs=1, where=where)))
    assert not [line for line in said if line.startswith("left out")]
    assert not list(tmp_path.iterdir()), "checkpoints were left behind"
    baselines = [str(row.baseline) for row in rows]
    for name, phases in PHASES.items():
        (told,) = [baseline for baseline in baselines if baseline.startswith(f"{name}: ")]
        assert [part.split()[0] for part in told.split(": ")[1].split(" + ")] == list(phases)
    assert [one for one in baselines if "disk" in one and not one.startswith("torch checkpoint")] == []
    assert any(baseline.startswith("megatron-core resharding, weights only (") for baseline in baselines)
    for form in ("migrate", "migrate, then defragment", "coalesced"):
        assert f"ETC's plan: {form}" in baselines
    goals = [row.goal for row in rows if row.goal]
    assert goals == ["ratio <= 0.1", *["ratio <= 1.25"] * 2, "ratio <= 0.2", *["ratio <= 1.25"] * 2]
    assert {"ceiling", "ceiling with copies"} <= {baseline.split(",")[0] for baseline in baselines}
    assert [row.goal is None for row in rows] == sorted(row.goal is None for row in rows), "goals come first"


def test_resharding_needs_layouts_that_fill_one_world_with_replicas(table2: ModuleType) -> None:
    resharding, parse = importlib.import_module("baselines.resharding"), table2.ParallelConfig.parse
    assert [resharding.obstacle([parse(prev), parse(curr)]) for prev, curr, _ in table2.TABLE_2] == [None] * 6
    assert "cannot fill 4 ranks" in resharding.obstacle([parse("PP3"), parse("PP4")])


def test_the_fastest_baseline_is_the_least_save_and_the_least_of_what_follows(table2: ModuleType) -> None:
    phases = {
        "EasyCkpt": {"save": 1.0},
        "Megatron, disk": {"save": 9.0, "reshard": 5.0, "load": 6.0},
        "torch checkpoint, disk": {"save": 4.0, "load": 12.0},
        "torch checkpoint, /dev/shm": {"save": 2.0, "load": 3.0},
        "torchrun restart, /dev/shm": {"save": 0.5, "start": 0.1, "import": 0.1, "meet": 0.1, "load": 0.1},
    }
    times = table2.Times({}, phases, {}, ())
    assert times.fastest("disk")[0] == 1.0 + 11.0
    assert times.fastest("/dev/shm")[0] == 1.0 + 3.0


def test_a_tiny_fig_8_has_both_forms_of_tenplex(tenplex: ModuleType) -> None:
    said: list[str] = []
    scale = tenplex.Scale((("PP2TP4", "PP4TP2"),), models=(("2.7B", 4, 64),), vocab=256, runs=1)
    rows = rows_of("tenplex", tenplex.run(said.append, scale))
    assert [str(row.baseline).split(":")[0] for row in rows] == ["Tenplex", "Tenplex, central"] * 2
    assert all(row.theirs and row.ours > 0 for row in rows)


def test_wrong_state_is_told(table2: ModuleType) -> None:
    common = importlib.import_module("baselines.common")
    asked = table2.Asked.of(
        table2.Model.from_dimensions(layers=2, hidden=64, heads=16, vocab=256, positions=64),
        "PP2",
        "PP1TP2",
        table2.Topology.preset("cluster-a"),
    )
    rank = importlib.import_module("_processes").Rank(0, 2, "", memoryview(bytearray(8)))
    expected = common.digests(asked.ours.curr.layout)
    place = common.Place.of(rank, asked.configs, asked.ours, expected, 4)
    state = importlib.import_module("_state")
    found = {shard: state.coded(shard, state.warm(shard)) for shard in asked.ours.curr.shards_on(0)}
    place.check("ours", found)
    last = list(found.values())[-1]
    last.view(-1)[-1] += 1
    with pytest.raises(AssertionError, match="ours: device 0"):
        place.check("ours", found)
