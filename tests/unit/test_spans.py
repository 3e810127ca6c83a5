"""Spans, as OpenTelemetry's own in-memory exporter receives them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.unit.made_events import MIB, at, phase, round_of, scale_out

from shardshift.engine.events import Event, PhaseEnded, nowhere
from shardshift.report.spans import spans


class Exported:
    """A provider, and what came out of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of(self, events: list[Event]) -> list[ReadableSpan]:
        tell = spans(self.provider)
        for event in events:
            tell(event)
        return self.spans()

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


def times_ms(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e6)


def test_a_phase_is_a_span_with_its_device_and_its_time() -> None:
    found = Exported().of([event for event in scale_out() if event.device == 0])
    assert [(span.name, times_ms(span)) for span in found] == [
        ("shardshift plan", 10),
        ("shardshift agree", 10),
        ("shardshift move", 50),
        ("shardshift commit", 5),
    ]
    assert found[0].attributes == {"shardshift.device": 0, "shardshift.phase": "plan"}


def test_rounds_fences_and_notices_are_events_of_the_move_and_it_has_their_totals() -> None:
    events = [event for event in scale_out() if event.device == 0]
    move = Exported().of(events)[2]
    assert [event.name for event in move.events] == ["notice", "round", "round", "fence"]
    assert dict(move.events[1].attributes or {}) == {
        "shardshift.epoch": 0,
        "shardshift.round": 0,
        "shardshift.elapsed_s": pytest.approx(0.020),
        "shardshift.sent_bytes": 2 * MIB,
        "shardshift.received_bytes": 0,
        "shardshift.copied_bytes": MIB,
    }
    assert move.start_time is not None
    assert [round((event.timestamp - move.start_time) / 1e6) for event in move.events] == [1, 25, 45, 50]
    totals = {"rounds": 2, "sent_bytes": 3 * MIB, "received_bytes": 0, "copied_bytes": MIB}
    assert (move.attributes or {}).items() >= {f"shardshift.{key}": value for key, value in totals.items()}.items()


def test_devices_that_share_a_process_do_not_mix() -> None:
    first, second = ([e for e in scale_out() if e.device == device] for device in (0, 1))
    mixed = [event for pair in zip(first, second, strict=False) for event in pair]
    mixed += [*first[len(second) :], *second[len(first) :]]
    moves = [span for span in Exported().of(mixed) if span.name == "shardshift move"]
    received = {
        (m.attributes or {})["shardshift.device"]: (m.attributes or {})["shardshift.received_bytes"] for m in moves
    }
    assert received == {0: 0, 1: 3 * MIB}


def test_an_error_is_the_status_of_its_phase() -> None:
    found = Exported().of([*phase(0, "agree", 0, 10), *phase(0, "move", 10, 20, error="PeerLost")])
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.ERROR]
    assert found[1].status.description == "PeerLost"
    assert (found[1].attributes or {})["error.type"] == "PeerLost"


def test_a_phase_whose_beginning_was_not_heard_is_a_span_too_and_a_round_outside_of_phases_is_none() -> None:
    events: list[Event] = [round_of(0, 0, 1, 0, 10, (1, 1, 1)), PhaseEnded(0, "move", at(5), at(25))]
    (span,) = Exported().of(events)
    assert times_ms(span) == 20
    assert not span.events


def test_spans_are_children_of_the_callers_span_and_on_the_wall_clock() -> None:
    exported = Exported()
    tell = spans(exported.provider)
    before = time.time_ns()
    with exported.provider.get_tracer("user").start_as_current_span("step"):
        now = round(time.perf_counter() * 1000)
        for event in phase(0, "move", now, now + 1):
            tell(event)
    move, step = exported.spans()
    assert step.context is not None
    assert move.parent is not None
    assert move.parent.span_id == step.context.span_id
    assert move.start_time is not None
    assert abs(move.start_time - before) < 60 * 10**9


def test_without_opentelemetry_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert spans() is nowhere


def test_importing_the_sinks_imports_neither_opentelemetry_nor_perfetto() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # torch looks for some of these itself
        "import shardshift, shardshift.report.spans, shardshift.report.trace\n"
        "found = {name.partition('.')[0] for name in set(sys.modules) - before} & {'opentelemetry', 'perfetto'}\n"
        "sys.exit(f'imports {sorted(found)}' if found else 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
