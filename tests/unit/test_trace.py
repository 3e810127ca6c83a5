"""Traces of made events, read back; ``test_seen`` has those of real moves."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.made_events import MIB, at, phase, round_of, rounds_of_devices, scale_out
from tests.unit.read_trace import Slice, named, read

from shardshift.engine.events import Event, PhaseBegan, PhaseEnded, RoundEnded, from_record, to_record
from shardshift.report.trace import trace_bytes, tracing, write_trace
from shardshift.values import Infeasible, PeerLost

pytest.importorskip("perfetto")


def ns(time_ms: int) -> int:
    return time_ms * 10**6


def test_a_device_is_a_track_with_its_phases_in_order_and_its_fences() -> None:
    tracks = read(trace_bytes(scale_out()))
    assert [track.name for track in tracks.values() if not track.parent] == ["device 0", "device 1"]
    (giver,), (taker,) = named(tracks, 0), named(tracks, 1)
    assert giver.slices == [
        (ns(0), ns(10), "plan"),
        (ns(10), ns(20), "agree"),
        (ns(20), ns(70), "move"),
        (ns(70), ns(75), "commit"),
    ]
    assert [name for *_, name in taker.slices] == ["agree", "move", "commit"]
    assert giver.instants == [
        (ns(21), "device 1 is not on this host: same-host copies are off"),
        (ns(70), "fence 1 of 1"),
    ]
    assert giver.arguments["fence 1 of 1"] == {"released_bytes": 512}


def test_rounds_that_overlap_lie_in_two_lanes_and_tell_their_bytes_by_peer() -> None:
    tracks = read(trace_bytes(scale_out()))
    first, second = named(tracks, 0, "rounds")
    assert first.slices == [(ns(25), ns(45), "round 0")]
    assert second.slices == [(ns(35), ns(65), "round 1")]
    assert first.arguments["round 0"] == {
        "epoch": 0,
        "rounds": 2,
        "sent_bytes": 2 * MIB,
        "received_bytes": 0,
        "copied_bytes": MIB,
        "sent_bytes_to": {"device 1": 2 * MIB},
        "received_bytes_from": {},
        "bytes_per_s": pytest.approx(100 * MIB),
    }


def test_two_rounds_in_flight_need_two_lanes_however_many_there_are() -> None:
    rounds = [round_of(0, index, 50, index, index + 2, (1, 1, 0)) for index in range(50)]
    assert [len(lane.slices) for lane in named(read(trace_bytes(rounds)), 0, "rounds")] == [25, 25]


def test_the_counter_rises_and_falls_with_the_rounds_under_way() -> None:
    (counter,) = named(read(trace_bytes(scale_out())), 1, "bytes in flight")
    assert counter.counts == [(ns(22), 2 * MIB), (ns(30), 3 * MIB), (ns(46), MIB), (ns(66), 0)]


@given(rounds_of_devices())
def test_every_round_is_there_once_in_lanes_without_overlap_and_the_counter_is_their_sum(
    rounds: list[RoundEnded],
) -> None:
    tracks = read(trace_bytes(rounds))
    for device in {one.device for one in rounds}:
        ours = [one for one in rounds if one.device == device]
        lanes = named(tracks, device, "rounds")
        as_told: Counter[Slice] = Counter(
            (round(one.began_s * 1e9), round(one.ended_s * 1e9), f"round {one.index}") for one in ours
        )
        assert Counter(one for lane in lanes for one in lane.slices) == as_told
        assert all(lane.deepest == 1 for lane in lanes)
        most = max(sum(one.began_s <= tick / 1000 < one.ended_s for one in ours) for tick in range(50))
        empty = sum(one.began_s == one.ended_s for one in ours)
        assert most <= len(lanes) <= most + empty
        arguments = [told for lane in lanes for told in lane.arguments.values()]
        for key in ("sent_bytes", "received_bytes", "copied_bytes"):
            assert sum(told[key] for told in arguments) == sum(getattr(one, key) for one in ours)
        (counter,) = named(tracks, device, "bytes in flight")
        for tick in range(50):
            flying = sum(
                one.sent_bytes + one.received_bytes for one in ours if one.began_s <= tick / 1000 < one.ended_s
            )
            before = [value for when, value in counter.counts if when <= ns(tick)]
            assert (before or [0])[-1] == flying


def test_a_phase_in_which_the_process_was_killed_stays_open_and_one_that_failed_names_its_error() -> None:
    events: list[Event] = [*phase(0, "agree", 0, 10), *phase(0, "move", 10, 20, error="PeerLost")]
    events += [*phase(0, "move", 30, 40), PhaseBegan(0, "commit", at(40))]
    (track,) = named(read(trace_bytes(events)), 0)
    assert track.slices == [
        (ns(0), ns(10), "agree"),
        (ns(10), ns(20), "move"),
        (ns(30), ns(40), "move"),
        (ns(40), None, "commit"),
    ]
    (failed,) = named(read(trace_bytes(events[:4])), 0)
    assert failed.arguments["move"] == {"error": "PeerLost"}


def test_a_phase_inside_another_is_below_it_on_the_devices_own_track() -> None:
    tracks = read(trace_bytes([*phase(0, "resize", 0, 100), *phase(0, "plan", 0, 20), *phase(0, "move", 20, 100)]))
    (track,) = named(tracks, 0)
    assert sorted(track.slices) == [(ns(0), ns(20), "plan"), (ns(0), ns(100), "resize"), (ns(20), ns(100), "move")]
    assert track.deepest == 2
    assert not named(tracks, 0, "phases")


def test_a_process_that_was_killed_inside_two_phases_leaves_both_open() -> None:
    events: list[Event] = [PhaseBegan(0, "move", at(0)), *phase(0, "fence", 5, 6), PhaseBegan(0, "commit", at(7))]
    (track,) = named(read(trace_bytes(events)), 0)
    assert sorted(track.slices) == [(ns(0), None, "move"), (ns(5), ns(6), "fence"), (ns(7), None, "commit")]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_phases_that_cross_are_there_all_the_same(times: list[tuple[int, int]]) -> None:
    events = [PhaseEnded(0, f"{number}", at(began), at(began + took)) for number, (began, took) in enumerate(times)]
    tracks = read(trace_bytes(events))
    found = [one for track in (named(tracks, 0) + named(tracks, 0, "phases") if times else []) for one in track.slices]
    told = [(ns(began), ns(began + took), f"{number}") for number, (began, took) in enumerate(times)]
    assert sorted(found) == sorted(told)


def test_events_of_several_processes_come_together_in_one_file(tmp_path: Path) -> None:
    lines = [json.dumps(to_record(event)) for event in reversed(scale_out())]
    write_trace(tmp_path / "move.pftrace", (from_record(json.loads(line)) for line in lines))
    merged, direct = read((tmp_path / "move.pftrace").read_bytes()), read(trace_bytes(scale_out()))
    assert merged == direct


def test_no_events_are_an_empty_trace() -> None:
    assert read(trace_bytes([])) == {}


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shardshift\[trace\]'"):
        trace_bytes(scale_out())


def test_a_trace_is_written_when_what_it_follows_has_failed_too(tmp_path: Path) -> None:
    def fail() -> None:
        with tracing(tmp_path / "failed.pftrace") as sink:
            for event in phase(0, "move", 10, 20, error="PeerLost"):
                sink(event)
            raise PeerLost([1], "move", "silent")

    with pytest.raises(PeerLost):
        fail()
    (track,) = named(read((tmp_path / "failed.pftrace").read_bytes()), 0)
    assert track.slices == [(ns(10), ns(20), "move")]


def test_a_file_that_cannot_be_written_or_a_missing_package_is_refused_before_anything_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Infeasible, match=r"cannot write the trace .*No such file"), tracing(tmp_path / "no" / "file"):
        pytest.fail("it has begun")
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(Infeasible, match=r"pip install 'shardshift\[trace\]'"), tracing(tmp_path / "file"):
        pytest.fail("it has begun")
    assert not (tmp_path / "file").exists()
