"""What is seen of real moves, by every sink: their events against the plan, which knows nothing of events."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.read_trace import Slice, Track, named, read
from tests.unit.strategies import equal_layers, even_grid
from tests.unit.together import coded, holds, state_on, together

from shardshift.engine import Event, Mover, Sink
from shardshift.engine.events import RoundEnded, all_of, from_record, to_record
from shardshift.plan import Plan, make_plan
from shardshift.report.links import links_of
from shardshift.report.progress import MoveProgress
from shardshift.report.spans import spans
from shardshift.report.trace import tracing
from shardshift.values import PlacedLayout

MODEL = equal_layers(8, width=24, numel=64)
STAGING_BYTES = 1024
POLICIES = ("keep", "release")


def placed(config: str, devices: Sequence[int]) -> PlacedLayout:
    return PlacedLayout(even_grid(MODEL, config), tuple(devices))


PREV, CURR = placed("pp2dp2", range(4)), placed("tp4", (1, 2, 3, 4))
DEVICES = range(5)


@dataclass(frozen=True)
class Seen:
    """A move that was made, and what should be seen of it."""

    plan: Plan
    events: list[Event]

    @property
    def bytes_by_link(self) -> Counter[tuple[int, int]]:
        """By the plan: bytes per (source, target)."""
        found: Counter[tuple[int, int]] = Counter()
        for transfer in self.plan.transfers:
            found[transfer.source_device, transfer.target_device] += transfer.piece.nbytes
        return found


def move(policy: str, *sinks: Sink) -> Seen:
    """Move for real, on threads, and tell the sinks."""
    heard, lock, values = [], threading.Lock(), coded(PREV)

    def tell(event: Event) -> None:
        with lock:
            heard.append(event)
            all_of(sinks)(event)

    def work(mover: Mover) -> bool:
        found = mover.move(PREV, CURR, state_on(mover.device, PREV, values), policy=policy)  # type: ignore[arg-type]
        return holds(mover.device, CURR, values, found)

    assert set(together(DEVICES, work, sink=tell, staging_bytes=STAGING_BYTES).values()) == {True}
    return Seen(make_plan(PREV, CURR.layout, devices=DEVICES, placement=CURR.devices), heard)


def traced(policy: str, path: Path) -> tuple[Seen, dict[int, Track]]:
    """The trace as a launcher writes it: from records that other processes have sent."""
    seen = move(policy)
    with tracing(path) as sink:
        for event in seen.events:
            sink(from_record(json.loads(json.dumps(to_record(event)))))
    return seen, read(path.read_bytes())


def inside(inner: Slice, outer: Slice) -> bool:
    assert inner[1] is not None
    assert outer[1] is not None
    return outer[0] <= inner[0] <= inner[1] <= outer[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_is_one_track_on_which_plan_agree_and_move_follow_and_fences_and_commit_are_in_the_move(
    policy: str, tmp_path: Path
) -> None:
    pytest.importorskip("perfetto")
    _, tracks = traced(policy, tmp_path / "move.pftrace")
    assert [track.name for track in tracks.values() if not track.parent] == [f"device {device}" for device in DEVICES]
    epochs = set()
    for device in DEVICES:
        (track,) = named(tracks, device)
        assert not named(tracks, device, "phases"), "all that a device does nests"
        whole = {name: one for one in track.slices if (name := one[2]) != "fence"}
        assert whole.keys() == {"plan", "agree", "move", "commit"}
        fences = [one for one in track.slices if one[2] == "fence"]
        assert all(whole[a][1] <= whole[b][0] for a, b in (("plan", "agree"), ("agree", "move")))  # type: ignore[operator]
        assert all(inside(one, whole["move"]) for one in (*fences, whole["commit"]))
        assert all(one[1] is not None and one[1] <= whole["commit"][0] for one in fences)
        passed = [name for _, name in sorted(track.instants)]
        assert passed == [f"fence {number + 1} of {len(passed)}" for number in range(len(fences) + 1)]
        assert all(inside((at, at, ""), whole["move"]) for at, _ in track.instants)
        rounds = [one for lane in named(tracks, device, "rounds") for one in lane.slices]
        assert all(inside(one, whole["move"]) for one in rounds)
        epochs.add(len(passed))
    (count,) = epochs
    assert count == 1 if policy == "keep" else count > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_in_the_trace_are_those_of_the_plan(policy: str, tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    seen, tracks = traced(policy, tmp_path / "move.pftrace")
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    copied_bytes = 0
    for device in DEVICES:
        rounds = [told for lane in named(tracks, device, "rounds") for told in lane.arguments.values()]
        assert [told["rounds"] for told in rounds] == [len(rounds)] * len(rounds)
        for told in rounds:
            sent.update({(device, int(peer.split()[1])): count for peer, count in told["sent_bytes_to"].items()})
            received.update(
                {(int(peer.split()[1]), device): count for peer, count in told["received_bytes_from"].items()}
            )
            copied_bytes += told["copied_bytes"]
        if rounds:
            (counter,) = named(tracks, device, "bytes in flight")
            assert counter.counts[-1][1] == 0
            assert max(count for _, count in counter.counts) > 0
    assert sent == received == seen.bytes_by_link
    assert sum(sent.values()) == seen.plan.moved_bytes > 0
    assert copied_bytes == seen.plan.copied_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_links_and_bar_come_to_what_the_plan_moves(policy: str) -> None:
    bar = MoveProgress()
    seen = move(policy, bar)
    links = links_of(seen.events)
    assert {(link.source, link.target): link.moved_bytes for link in links} == seen.bytes_by_link
    assert all(link.busy_s > 0 for link in links)
    assert bar.part == (bar.total_bytes, bar.total_bytes)
    assert bar.done_bytes == 2 * seen.plan.moved_bytes + seen.plan.copied_bytes
    assert bar.rounds[0] == bar.rounds[1] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_move_is_a_span_a_phase_on_each_device(policy: str) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    seen = move(policy, spans(provider))
    totals: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for span in exporter.get_finished_spans():
        assert span.status.is_unset
        names[span.name] += 1
        if span.name == "shardshift move":
            totals.update({key: value for key, value in (span.attributes or {}).items() if key.endswith("_bytes")})
            assert [event.name for event in span.events].count("fence") >= 1
    assert totals["shardshift.sent_bytes"] == totals["shardshift.received_bytes"] == seen.plan.moved_bytes
    fences = names.pop("shardshift fence", 0)
    assert names == {f"shardshift {phase}": len(DEVICES) for phase in ("plan", "agree", "move", "commit")}
    assert (fences > 0) == (policy == "release")


def test_rounds_are_ranges_in_torchs_profiler() -> None:
    values, profiled = coded(PREV), 1  # a device that sends, receives and copies
    heard: list[Event] = []

    def work(mover: Mover) -> set[str]:
        state = state_on(mover.device, PREV, values)
        if mover.device != profiled:
            mover.move(PREV, CURR, state)
            return set()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            mover.move(PREV, CURR, state)
        return {event.name for event in profiler.events() if event.name.startswith("shardshift ")}

    names = together(DEVICES, work, sink=heard.append, staging_bytes=STAGING_BYTES)[profiled]
    rounds = [event for event in heard if isinstance(event, RoundEnded) and event.device == profiled]
    assert len(rounds) > 1
    for what in ("pack and post", "complete and unpack"):
        assert {f"shardshift round {one.index}: {what}" for one in rounds} <= names
    copying = {f"shardshift round {one.index}: copy" for one in rounds if one.copied_bytes}
    assert copying
    assert copying <= names
