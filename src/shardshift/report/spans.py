"""OpenTelemetry spans of a move: one a phase, with its rounds and fences as events, where OpenTelemetry is installed.

1. ``PhaseBegan`` starts a span, a child of the caller's span if there is one; ``PhaseEnded`` ends it.
2. Rounds, fences and notices are events of the span of the device's phase. An SDK keeps the last 128 of a span
   (``OTEL_SPAN_EVENT_COUNT_LIMIT``), so totals are attributes of the span.
3. An error sets the span's status and ``error.type``; its text is not in the stream.

Times are the events' own, set on the wall clock by the difference that the two clocks had when the sink was made.
OpenTelemetry is looked for when ``spans`` is called, never on import; without it the sink keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..engine.events import Event, FencePassed, Notice, PhaseBegan, PhaseEnded, RoundEnded, Sink, nowhere

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider


def spans(provider: TracerProvider | None = None) -> Sink:
    """A sink that makes spans of the events of this process.

    Args:
        provider: where they go; None: to the provider that the application has set.
    """
    try:
        # Only here: OpenTelemetry belongs to the extra [trace], and is no business of whoever does not ask for it.
        from opentelemetry.trace import get_tracer
    except ModuleNotFoundError:
        return nowhere
    return _Spans(get_tracer("shardshift", tracer_provider=provider))


class _Open:
    """A phase under way and what it has handled so far."""

    def __init__(self, phase: str, span: Span) -> None:
        self.phase = phase
        self.span = span
        self.totals = {"rounds": 0, "sent_bytes": 0, "received_bytes": 0, "copied_bytes": 0}


class _Spans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._wall_ns = time.time_ns() - time.perf_counter_ns()
        self._open: dict[int, list[_Open]] = {}  # per device; a phase inside another is last

    def __call__(self, event: Event) -> None:
        match event:
            case PhaseBegan():
                self._begin(event.device, event.phase, event.at_s)
            case PhaseEnded():
                self._end(event)
            case RoundEnded():
                bytes_of = {
                    "sent_bytes": event.sent_bytes,
                    "received_bytes": event.received_bytes,
                    "copied_bytes": event.copied_bytes,
                }
                for phase in self._open.get(event.device, []):
                    for name, count in {"rounds": 1, **bytes_of}.items():
                        phase.totals[name] += count
                number = {"epoch": event.epoch, "round": event.index, "elapsed_s": event.ended_s - event.began_s}
                self._note(event.device, "round", event.ended_s, {**number, **bytes_of})
            case FencePassed():
                facts = {"epoch": event.epoch, "epochs": event.epochs, "released_bytes": event.released_bytes}
                self._note(event.device, "fence", event.at_s, facts)
            case Notice():
                self._note(event.device, "notice", event.at_s, {"text": event.text})

    def _begin(self, device: int, phase: str, at_s: float) -> _Open:
        attributes: dict[str, int | str] = {"shardshift.device": device, "shardshift.phase": phase}
        span = self._tracer.start_span(f"shardshift {phase}", attributes=attributes, start_time=self._ns(at_s))
        begun = _Open(phase, span)
        self._open.setdefault(device, []).append(begun)
        return begun

    def _end(self, event: PhaseEnded) -> None:
        from opentelemetry.trace import StatusCode

        under_way = self._open.get(event.device, [])
        phase = next((one for one in reversed(under_way) if one.phase == event.phase), None)
        phase = phase or self._begin(event.device, event.phase, event.began_s)
        self._open[event.device].remove(phase)
        if phase.totals["rounds"]:
            phase.span.set_attributes({f"shardshift.{name}": count for name, count in phase.totals.items()})
        if event.error:
            phase.span.set_attribute("error.type", event.error)
            phase.span.set_status(StatusCode.ERROR, event.error)
        phase.span.end(self._ns(event.ended_s))

    def _note(self, device: int, name: str, at_s: float, facts: Mapping[str, int | float | str]) -> None:
        for phase in self._open.get(device, [])[-1:]:
            named = {f"shardshift.{key}": value for key, value in facts.items()}
            phase.span.add_event(name, named, timestamp=self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._wall_ns + round(at_s * 1e9)
