"""The engine's benchmark at a tiny scale, and what it stands on: forked ranks, coded state, network namespaces."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardshift.report.bench import Benchmark
from shardshift.values import Kind, Region, Shard, Tensor

WHAT = (["netns", "list"], ["-o", "link"])


@pytest.fixture
def engine(benchmarks: None) -> ModuleType:
    return importlib.import_module("engine")


@pytest.fixture
def processes(benchmarks: None) -> ModuleType:
    return importlib.import_module("_processes")


@pytest.fixture
def state(benchmarks: None) -> ModuleType:
    return importlib.import_module("_state")


@pytest.fixture
def netns(benchmarks: None) -> ModuleType:
    return importlib.import_module("_netns")


def test_a_tiny_run_has_every_sort_of_row(engine: ModuleType, state: ModuleType) -> None:
    scale = engine.Scale(
        cases=(engine.Case("PP", "pp1", "pp2", contiguous=True, more=True), engine.Case("TP", "tp1", "tp2")),
        size=state.Size(layers=2, hidden=64, vocab=256),
        runs=1,
        small=16,
        chain_mbit=0,
        idle=(8, 2),
    )
    said: list[str] = []
    described, rows = engine.run(said.append, scale)
    benchmark = Benchmark("engine", "a machine", described, tuple(rows))
    assert Benchmark.from_json(benchmark.to_json()) == benchmark
    cases = [row.case for row in rows]
    assert len(said) == len(scale.cases), f"something was left out: {said}"
    assert all(row.ours > 0 for row in rows)
    for case, path, how in (
        ("PP pp1 → pp2", "gloo", ("warm", "fresh", "engine's memory", "warm, verified")),
        ("PP pp1 → pp2", "same host", ("warm", "fresh", "engine's memory", "warm, verified")),
        ("TP tp1 → tp2", "gloo", ("warm", "fresh")),
        ("TP tp1 → tp2", "same host", ("warm", "fresh")),
    ):
        assert {f"{case}, {path}, {one}" for one in how} <= set(cases)
    goals = {row.case: row.goal for row in rows if row.goal}
    assert goals["PP pp1 → pp2, gloo, warm"] == "ratio <= 1.25"
    assert goals["PP pp1 → pp2, gloo, warm, verified"] == "ratio <= 1.2"
    assert goals["PP pp1 → pp2, same host, fresh"] == "ratio <= 1.5"
    assert goals["16 tensors of 4 KiB, gloo, warm"] == "ratio <= 2"
    assert goals["nothing to move: 8 tensors, 2 processes"] == "<= 20 ms"


def test_the_bytes_of_pairs_add_up_to_what_moves(state: ModuleType) -> None:
    plan = state.change(state.Size(layers=2, hidden=64, vocab=256), "pp2tp2", "tp2dp2")
    by_transfers: dict[tuple[int, int], int] = {}
    for move in plan.transfers:
        pair = move.source_device, move.target_device
        by_transfers[pair] = by_transfers.get(pair, 0) + move.piece.nbytes
    assert state.pair_bytes(plan) == by_transfers


def test_codes_say_where_an_element_belongs(state: ModuleType) -> None:
    tensor = Tensor(Kind.PARAM, "weight", (6, 4), "float32", 4)
    whole = state.coded(Shard(tensor, Region.whole(tensor.shape)), torch.empty(6, 4))
    part = state.coded(Shard(tensor, Region((2, 1), (3, 2))), torch.empty(3, 2))
    assert torch.equal(part.view(torch.int32), whole[2:5, 1:3].contiguous().view(torch.int32))
    assert len(set(whole.view(torch.int32).flatten().tolist())) == 24
    other = Tensor(Kind.EXP_AVG, "weight", (6, 4), "float32", 4)
    apart = state.coded(Shard(other, Region.whole(tensor.shape)), torch.empty(6, 4))
    assert not (apart.view(torch.int32) == whole.view(torch.int32)).any()


def test_a_device_that_lacks_a_right_value_is_told(state: ModuleType) -> None:
    plan = state.copies(3, 4096, 1, 2)
    found = {shard: state.coded(shard, state.warm(shard)) for shard in plan.curr.shards_on(1)}
    state.check(plan, 1, found)
    list(found.values())[2][17] += 1
    with pytest.raises(AssertionError, match=r"tensor\.2"):
        state.check(plan, 1, found)


def test_ranks_give_what_their_bodies_return(processes: ModuleType) -> None:
    spans = processes.run_ranks(3, lambda rank: rank.measure({"idle": lambda: lambda: None}, 2))
    assert [len(one["idle"]) for one in spans] == [2, 2, 2]
    assert 0 <= processes.median_s(spans, "idle") < 10


def test_a_time_is_from_the_first_start_to_the_last_end(processes: ModuleType) -> None:
    spans = [{"a": [(1.0, 2.0), (10.0, 11.0), (20.0, 21.0)]}, {"a": [(1.5, 4.0), (9.0, 10.5), (20.0, 21.0)]}]
    assert processes.median_s(spans, "a") == 2.0


def children() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_rank_that_fails_ends_all_at_once(processes: ModuleType, how: str) -> None:
    before = children()

    def body(rank: object) -> None:
        if getattr(rank, "index", None) == 1:
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("of its own")
        rank.barrier()  # type: ignore[attr-defined]  # the others wait for one that never comes

    with pytest.raises(RuntimeError, match="of its own" if how == "raises" else "rank 1 died"):
        processes.run_ranks(3, body)
    assert children() == before


def test_hosts_are_shaped_and_nothing_of_them_stays(netns: ModuleType) -> None:
    if why := netns.obstacle():
        pytest.skip(why)

    def made() -> list[str]:
        listed = [subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout for what in WHAT]
        return [line for one in listed for line in one.splitlines() if str(os.getpid()) in line]

    def shape_of(host: str) -> str:
        command = ["tc", "-n", host, "qdisc", "show", "dev", "wire0"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with contextlib.suppress(InterruptedError), netns.shaped_hosts(2, 100) as two:
        assert all("rate 100Mbit" in shape_of(name) for name in two.names)
        assert len(made()) >= 4
        raise InterruptedError
    assert made() == []


def test_what_the_parent_left_to_its_collector_does_not_end_a_rank(processes: ModuleType) -> None:
    """A group in a cycle joins threads when it goes: a rank that collected it would end, or wait for ever."""

    def leave_a_cycle() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        cycle: list[Any] = [dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=20)), store]
        cycle.append(cycle)

    gc.disable()
    try:
        for _ in range(3):
            leave_a_cycle()

        def body(rank: Any) -> float:
            group = processes.bare_group(rank)
            gc.collect()
            ones = torch.ones(1)
            group.allreduce([ones]).wait()
            return ones.item()

        assert processes.run_ranks(3, body, timeout_s=20.0) == [3.0] * 3
    finally:
        gc.enable()
        gc.collect()
