"""A Perfetto trace of a move, for https://ui.perfetto.dev or any other reader of the format.

1. A device is a track: its phases are slices on it, fences and notices instants.
2. Below it lie its rounds, whose arguments tell the bytes by peer, and a counter of the bytes in flight.
3. Slices of one track must not cross, and rounds do, since two are under way at a time. So slices go to *lanes*, each
   to the first that is free. Lanes of one name below one parent are shown as one track.
4. A phase that began and did not end, as in a process that was killed, stays open.

Times are those of the events, in nanoseconds of ``perf_counter``: one clock for all processes of a Linux host. Devices
of several hosts can be in one file, but their tracks are apart by the difference of the hosts' clocks.

Written as protobuf, by the package ``perfetto``: the old JSON format has no tracks below tracks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..engine.events import Event, FencePassed, Notice, PhaseBegan, PhaseEnded, RoundEnded

_ONE_WRITER: Final = 1
"""Trusted packet sequence: all packets come from one writer."""

Arguments: TypeAlias = Mapping[str, "int | float | str | Mapping[str, int]"]


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Write the events of any devices, in any order, as one trace.

    Raises:
        ModuleNotFoundError: if the package ``perfetto`` is missing.
    """
    path.write_bytes(trace_bytes(events))


def trace_bytes(events: Iterable[Event]) -> bytes:
    """What ``write_trace`` writes: a serialised ``perfetto.protos.Trace``.

    Raises:
        ModuleNotFoundError: if the package ``perfetto`` is missing.
    """
    writer = _Writer()
    by_device: dict[int, list[Event]] = {}
    for event in events:
        by_device.setdefault(event.device, []).append(event)
    for device, ours in sorted(by_device.items()):
        _write_device(writer, device, ours)
    return writer.serialize()


@dataclass(frozen=True, slots=True)
class _Slice:
    began_ns: int
    ended_ns: int | None
    name: str
    arguments: Arguments


def _write_device(writer: _Writer, device: int, events: list[Event]) -> None:
    root = writer.track(f"device {device}", rank=device)
    for number, lane in enumerate(_lanes(_phases(events))):
        writer.slices(root if number == 0 else writer.track("phases", parent=root, rank=0), lane)
    rounds = [event for event in events if isinstance(event, RoundEnded)]
    for lane in _lanes([_round_slice(event) for event in rounds]):
        writer.slices(writer.track("rounds", parent=root, rank=1), lane)
    for event in events:
        if isinstance(event, FencePassed):
            name = f"fence {event.epoch + 1} of {event.epochs}"
            writer.instant(root, _ns(event.at_s), name, {"released_bytes": event.released_bytes})
        elif isinstance(event, Notice):
            writer.instant(root, _ns(event.at_s), event.text, {})
    if rounds:
        counter = writer.track("bytes in flight", parent=root, rank=2, counts_bytes=True)
        for at_ns, value in _in_flight(rounds):
            writer.count(counter, at_ns, value)


def _phases(events: list[Event]) -> list[_Slice]:
    slices = []
    closed: dict[str, float] = {}  # until when a phase is known to have ended
    for event in events:
        if isinstance(event, PhaseEnded):
            closed[event.phase] = max(event.ended_s, closed.get(event.phase, event.ended_s))
    for event in events:
        match event:
            case PhaseEnded():
                arguments = {"error": event.error} if event.error else {}
                slices.append(_Slice(_ns(event.began_s), _ns(event.ended_s), event.phase, arguments))
            case PhaseBegan() if event.at_s > closed.get(event.phase, float("-inf")):
                slices.append(_Slice(_ns(event.at_s), None, event.phase, {}))
            case _:
                pass
    return slices


def _round_slice(event: RoundEnded) -> _Slice:
    took_s = event.ended_s - event.began_s
    arguments: dict[str, int | float | str | Mapping[str, int]] = {
        "epoch": event.epoch,
        "rounds": event.rounds,
        "sent_bytes": event.sent_bytes,
        "received_bytes": event.received_bytes,
        "copied_bytes": event.copied_bytes,
        "sent_bytes_to": {f"device {link.peer}": link.sent_bytes for link in event.links if link.sent_bytes},
        "received_bytes_from": {
            f"device {link.peer}": link.received_bytes for link in event.links if link.received_bytes
        },
    }
    if took_s > 0:
        arguments["bytes_per_s"] = (event.sent_bytes + event.received_bytes) / took_s
    return _Slice(_ns(event.began_s), _ns(event.ended_s), f"round {event.index}", arguments)


def _lanes(slices: list[_Slice]) -> list[list[_Slice]]:
    """The slices in as few lanes as they need, none of which holds two that overlap."""
    lanes: list[list[_Slice]] = []
    for one in sorted(slices, key=lambda one: (one.began_ns, one.ended_ns is None, one.ended_ns or 0)):
        for lane in lanes:
            free_ns = lane[-1].ended_ns
            if free_ns is not None and free_ns <= one.began_ns:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _in_flight(rounds: list[RoundEnded]) -> list[tuple[int, int]]:
    """Where the bytes of the rounds under way change: (time, bytes from then on), each time once."""
    changes: dict[int, int] = {}
    for event in rounds:
        moved_bytes = event.sent_bytes + event.received_bytes
        for at_s, change in ((event.began_s, moved_bytes), (event.ended_s, -moved_bytes)):
            changes[_ns(at_s)] = changes.get(_ns(at_s), 0) + change
    values, now = [], 0
    for at_ns, change in sorted(changes.items()):
        now += change
        values.append((at_ns, now))
    return values


def _ns(at_s: float) -> int:
    return round(at_s * 1e9)


class _Writer:
    """The few packets of the format that a move needs. The package has no types, so packets are ``Any`` here."""

    def __init__(self) -> None:
        try:
            building = importlib.import_module("perfetto.trace_builder.proto_builder")
            messages = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"a Perfetto trace needs the package perfetto ({missing}). What to do: pip install 'shardshift[trace]'",
                name=missing.name,
            ) from missing
        self._builder: Any = building.TraceProtoBuilder()
        self._messages: Any = messages
        self._tracks = 0

    def serialize(self) -> bytes:
        return bytes(self._builder.serialize())

    def track(self, name: str, *, rank: int, parent: int = 0, counts_bytes: bool = False) -> int:
        """A new track; those below one parent stand in the order of their ranks."""
        self._tracks += 1
        track = self._builder.add_packet().track_descriptor
        track.uuid, track.name, track.sibling_order_rank = self._tracks, name, rank
        if parent:
            track.parent_uuid = parent
        else:
            track.child_ordering = self._messages.TrackDescriptor.EXPLICIT
        if counts_bytes:
            track.counter.unit = self._messages.CounterDescriptor.UNIT_SIZE_BYTES
        return self._tracks

    def slices(self, track: int, lane: list[_Slice]) -> None:
        """Slices that do not overlap, in order. Of packets of one time, readers keep the order in the file."""
        for one in lane:
            self._named(track, one.began_ns, "TYPE_SLICE_BEGIN", one.name, one.arguments)
            if one.ended_ns is not None:
                self._event(track, one.ended_ns, "TYPE_SLICE_END")

    def instant(self, track: int, at_ns: int, name: str, arguments: Arguments) -> None:
        self._named(track, at_ns, "TYPE_INSTANT", name, arguments)

    def count(self, track: int, at_ns: int, value: int) -> None:
        self._event(track, at_ns, "TYPE_COUNTER").counter_value = value

    def _named(self, track: int, at_ns: int, kind: str, name: str, arguments: Arguments) -> None:
        event = self._event(track, at_ns, kind)
        event.name = name
        for key, value in arguments.items():
            _annotate(event.debug_annotations.add, key, value)

    def _event(self, track: int, at_ns: int, kind: str) -> Any:
        packet = self._builder.add_packet()
        packet.timestamp = at_ns
        packet.trusted_packet_sequence_id = _ONE_WRITER
        packet.track_event.type = getattr(self._messages.TrackEvent, kind)
        packet.track_event.track_uuid = track
        return packet.track_event


def _annotate(add: Callable[[], Any], name: str, value: int | float | str | Mapping[str, int]) -> None:
    note = add()
    note.name = name
    match value:
        case int():
            note.int_value = value
        case float():
            note.double_value = value
        case str():
            note.string_value = value
        case _:
            for key, number in value.items():
                _annotate(note.dict_entries.add, key, number)
