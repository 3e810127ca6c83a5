"""The benchmark of losses, on a trial or two; what it judges with; and that many moves leave nothing behind."""

from __future__ import annotations

import importlib
import os
import signal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardshift.report.bench import Benchmark
from shardshift.values import Region


@pytest.fixture(scope="module")
def faults(benchmarks: None) -> ModuleType:
    return importlib.import_module("faults")


def children() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def test_a_killed_and_a_stopped_device_cost_nothing_and_no_process_stays(faults: ModuleType) -> None:
    case = faults.CASES[1]
    assert (case.policy, case.redundant) == ("release", True)
    before = children()
    tried = [faults.Fault(1, "round", 1), faults.Fault(2, "fence", 0, stops=True, transport="same-host")]
    verdicts = faults._apart([partial(faults.trial, case, fault) for fault in tried], 2)
    assert children() == before
    assert [verdict.wrong for verdict in verdicts] == [(), ()]
    assert all(verdict.way in ("back", "forward") for verdict in verdicts)
    assert all(0 < verdict.raised_s < faults.BOUND_S for verdict in verdicts)
    rows = tuple(faults.rows_of(case, verdicts))
    assert all(row.met in (True, None) for row in rows)
    benchmark = Benchmark("faults", "a machine", "two trials", rows)
    assert Benchmark.from_json(benchmark.to_json()) == benchmark


def test_what_single_holders_lose_is_named_exactly(faults: ModuleType) -> None:
    case = faults.CASES[4]
    assert (case.policy, case.redundant) == ("release", False)
    (verdict,) = faults._apart([partial(faults.trial, case, faults.Fault(3, "post", 2, transport="same-host"))], 1)
    assert (verdict.wrong, verdict.way) == ((), "named")


def test_every_round_and_fence_of_every_device_is_a_place(faults: ModuleType) -> None:
    seen = {0: {"round": 3, "post": 7, "passed": 2, "fence": 2}, 1: {"round": 1, "post": 0, "passed": 2, "fence": 2}}
    places = list(faults._places(seen))
    assert len({*places}) == len(places)
    for device, rounds in ((0, 3), (1, 1)):
        for stops in (False, True):
            assert {
                place.number for place in places if (place.victim, place.place, place.stops) == (device, "round", stops)
            } == {*range(rounds)}
            assert {
                place.number for place in places if (place.victim, place.place, place.stops) == (device, "fence", stops)
            } == {0, 1}
    assert [place.number for place in places if (place.victim, place.place) == (0, "post")] == [0, 2, 4]


def test_masks_say_what_is_gone(faults: ModuleType) -> None:
    class Case:
        layouts = faults.CASES[0].layouts

    tensors = Case.layouts[0].layout.tensors
    accounts = [type("One", (), {"held": [(str(tensor), Region.whole(tensor.shape)) for tensor in tensors[1:]]})()]
    assert faults._gone(Case, accounts) == (str(tensors[0]),)
    rows, *rest = tensors[0].shape
    halves: Any = [Region((at, *(0,) * len(rest)), (rows // 2, *rest)) for at in (0, rows // 2)]
    for half in halves:
        accounts.append(type("One", (), {"held": [(str(tensors[0]), half)]})())
    assert faults._gone(Case, accounts) == ()


def test_works_are_done_apart_and_one_that_fails_or_dies_ends_all(faults: ModuleType) -> None:
    before = children()
    assert faults._apart([partial(pow, 2, power) for power in range(5)], 2) == [1, 2, 4, 8, 16]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        faults._apart([signal.pause, partial(divmod, 1, 0)], 2)
    with pytest.raises(RuntimeError, match="it died"):
        faults._apart([signal.pause, lambda: os.kill(os.getpid(), signal.SIGKILL)], 2)
    assert children() == before


@pytest.mark.parametrize("one_shot", [False, True], ids=["one mover", "a call of reshard each"])
def test_fifty_moves_leave_no_descriptor_thread_group_or_memory_behind(faults: ModuleType, one_shot: bool) -> None:
    work = partial(faults.repeated, "same-host", one_shot=one_shot)
    (found,) = faults._apart([work], 1)
    assert [len(one) for one in found] == [50] * 4
    rows = list(faults.repeat_rows("same-host", one_shot, found))
    assert [row.met for row in rows] == [True, True], (rows, [(one[7:10], one[-3:]) for one in found])
