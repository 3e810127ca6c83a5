"""The benchmarks of the paper's figures at a tiny scale, the names that they go by, and their pictures."""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardshift.cli.bench import run_bench
from shardshift.report.bench import Benchmark, Curve, Row
from shardshift.report.charts import save_chart
from shardshift.values import Infeasible, Mismatch

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("benchmarks")]
FIGURES = ("coalescing", "defragmentation", "breakdown", "memory-profile", "loss", "topology")


def load(name: str) -> ModuleType:
    return importlib.import_module(name.replace("-", "_"))


def tiny(name: str) -> Benchmark:
    """A benchmark at a tiny scale, through its JSON and back."""
    module = load(name)
    scale, rows, *curves = module.run(lambda line: None, module.TINY)
    benchmark = Benchmark(name, "a machine", scale, tuple(rows), tuple(curves[0]) if curves else ())
    assert Benchmark.from_json(json.loads(json.dumps(benchmark.to_json()))) == benchmark
    cases = [(row.case, row.baseline) for row in rows]
    assert len(set(cases)) == len(cases), "two rows of one name"
    return benchmark


def rows_of(benchmark: Benchmark) -> dict[tuple[str, str | None], Row]:
    return {(row.case, row.baseline): row for row in benchmark.rows}


def test_all_figures_are_listed_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    run_bench("list", as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert set(FIGURES) <= set(listed)
    assert all(listed.values())


def test_coalescing_moves_no_more_than_two_moves_and_joint_placement_no_more_than_that() -> None:
    benchmark = tiny("coalescing")
    moved = {row.case.rsplit(", ", 1)[1]: row for row in benchmark.rows if ": moved" in row.case}
    assert moved["joint"].ours <= moved["coalesced"].ours <= (moved["joint"].theirs or 0.0)


def test_defragmentation_frees_a_node_that_migration_alone_leaves_half_empty() -> None:
    benchmark = tiny("defragmentation")
    freed = next(row for row in benchmark.rows if row.case.endswith("whole nodes freed"))
    assert (freed.ours, freed.theirs) == (1, 0)
    before, alone, joint = (dict(curve.points) for curve in benchmark.curves)
    assert len(before) == len(alone) == len(joint) == 8


def test_the_breakdown_has_every_part_of_the_change() -> None:
    cases = {row.case.rsplit(": ", 1)[-1] for row in tiny("breakdown").rows}
    assert {"pairing", "placement", "sources", "proof", "one device's program"} <= cases
    assert {"all", "plan", "agree", "move", "commit", "line between the devices", "megatron-core's groups"} <= cases


def test_tensors_are_whole_before_the_move_and_fewer_after_it() -> None:
    benchmark = tiny("memory-profile")
    for curve in benchmark.curves:
        if curve.name.endswith("tensors"):
            assert curve.points[0][1] == pytest.approx(1, abs=1e-4)
            assert curve.points[-1][1] < 1


def test_memory_of_a_tensor_counts_once_until_it_goes() -> None:
    import torch

    tally = load("_memory").Tally()
    tensor: Any = tally.add(torch.empty(1000))
    tally.add(tensor.view(10, 100))
    assert tally.nbytes == 4000
    del tensor
    assert tally.nbytes == 0


def test_the_losses_of_a_live_change_are_those_of_the_checkpoint() -> None:
    benchmark = tiny("loss")
    exact, same, spike, *_ = benchmark.rows
    assert (exact.ours, same.ours) == (0, 0)
    assert spike.met
    assert [curve.name for curve in benchmark.curves] == ["fixed", "the other layout", "through a checkpoint", "live"]


def test_what_moves_between_namespaces_arrives_and_nothing_of_them_stays() -> None:
    if why := load("_netns").obstacle():
        pytest.skip(why)
    cases = {row.case for row in tiny("topology").rows}
    assert any(case.endswith("between nodes") for case in cases)
    assert any(case.endswith("chains") for case in cases)


def test_without_root_or_tools_the_topology_is_left_out_with_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = load("topology")
    monkeypatch.setattr(topology, "obstacle", lambda: "network namespaces need root")
    said: list[str] = []
    assert topology.run(said.append) == ("skipped, since network namespaces need root", [])
    assert said == ["skipped: network namespaces need root"]


def test_a_tiny_plan_table_has_every_part_and_stays_at_the_proven_least() -> None:
    benchmark = tiny("planner")
    cases = {row.case for row in benchmark.rows}
    parts = ("plan", "peak memory of the process", "digest", "one device's program", "moved", "nodes in use", "proof")
    assert all(any(case.endswith(part) for case in cases) for part in parts)
    assert all(row.met for row in benchmark.rows if row.unit in ("GiB", "nodes") and row.theirs)
    assert benchmark.scale.startswith("16 to 64 devices")


def test_of_a_cluster_that_is_parted_one_side_goes_on_and_the_other_makes_no_step() -> None:
    if why := load("_netns").obstacle():
        pytest.skip(why)
    rows = {row.case.rsplit(": ", 1)[1]: row for row in tiny("partition").rows}
    assert len(rows) == 4
    assert rows["steps that it made afterwards"].ours == 0
    assert rows["until the others' next step"].ours > 0


def test_without_root_or_tools_partitions_are_refused_with_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = load("partition")
    monkeypatch.setattr(partition, "obstacle", lambda: "network namespaces need root")
    with pytest.raises(Infeasible, match="partitions cannot be made here: network namespaces need root; what to do"):
        partition.run(lambda line: None)


def test_a_cluster_has_a_lane_for_each_device_and_a_link_for_each_node() -> None:
    """The kernel's own words, not ours."""
    netns = load("_netns")
    if why := netns.obstacle():
        pytest.skip(why)

    def words(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with netns.shaped_cluster(2, 2, 50, 100) as hosts:
        assert len(hosts.names) == 4
        assert all("rate 50Mbit" in words("tc", "-n", name, "qdisc", "show", "dev", "wire0") for name in hosts.names)
        for node in range(2):
            for end in "uc":
                assert "rate 100Mbit" in words("tc", "qdisc", "show", "dev", f"ss{os.getpid()}{end}{node}")
        with socket.create_server((hosts.gateway, 0)) as server:
            call = f"import socket; socket.create_connection({server.getsockname()}, 10)"
            words("ip", "netns", "exec", hosts.names[-1], sys.executable, "-c", call)
    assert f"ss{os.getpid()}" not in words("ip", "-o", "link")
    assert str(os.getpid()) not in words("ip", "netns", "list")


def png_size(path: Path) -> tuple[int, int]:
    """Width and height by the file's own header."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_picture_grows_with_rows_and_curves(tmp_path: Path) -> None:
    few = (Row.of("a", 1, "ms", baseline="b", theirs=2, most_ratio=1), Row.of("c", 0, "MiB"))
    many = tuple(Row.of(f"row {i}", i, "ms") for i in range(200))
    line = Curve.of("panel", "one", "s", "MiB", [(0, 1), (1, 2)])
    sizes = []
    for number, (rows, curves) in enumerate([(few, ()), (few, (line,)), (many, ()), ((), ())]):
        save_chart(Benchmark("toy", "a machine", "small", rows, curves), tmp_path / f"{number}.png")
        sizes.append(png_size(tmp_path / f"{number}.png"))
    assert sizes[0][1] < sizes[1][1] < sizes[2][1] < 4000
    assert {width for width, _ in sizes} == {1000}


def test_curves_are_kept_in_the_json_only_where_there_are_some() -> None:
    plain = Benchmark("toy", "a machine", "small", ())
    drawn = Benchmark("toy", "a machine", "small", (), (Curve.of("p", "n", "x", "y", [(0, 1)]),))
    assert "curves" not in plain.to_json()
    record = json.loads(json.dumps(drawn.to_json()))
    assert Benchmark.from_json(record) == drawn
    del record["curves"][0]["points"]
    with pytest.raises(Mismatch, match="curve 0"):
        Benchmark.from_json(record)
