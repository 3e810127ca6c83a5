"""A Perfetto trace of a move, for https://ui.perfetto.dev or any other reader of the format.

1. A device is a track: its phases are slices on it, one inside the other where they are so in time (the commit of a
   ``Mover`` is the end of its move), fences and notices instants.
2. Below it lie its rounds, whose arguments tell the bytes by peer, and a counter of the bytes in flight.
3. Slices of one track must not cross, and rounds do, since several are under way at a time. So slices go to *lanes*,
   each to the first that has room. Lanes of one name below one parent are shown as one track.
4. A phase that began and did not end, as in a process that was killed, stays open.

Times are those of the events, in nanoseconds of ``perf_counter``: one clock for all processes of a Linux host. Devices
of several hosts can be in one file, but their tracks are apart by the difference of the hosts' clocks.

Written as protobuf, by the package ``perfetto``: the old JSON format has no tracks below tracks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..engine.events import Event, FencePassed, Notice, PhaseBegan, PhaseEnded, RoundEnded, Sink
from ..values import Infeasible

_ONE_WRITER: Final = 1
"""Trusted packet sequence: all packets come from one writer."""

Arguments: TypeAlias = Mapping[str, "int | float | str | Mapping[str, int]"]


@contextmanager
def tracing(path: Path) -> Iterator[Sink]:
    """Trace what happens inside, and write it when that is over, also if it ends by an error.

    Args:
        path: the file; what was in it is gone from the beginning.

    Yields:
        The sink to trace with.

    Raises:
        Infeasible: before anything happens, if the package ``perfetto`` is missing or the file cannot be written.
    """
    try:
        _Writer()
    except ModuleNotFoundError as missing:
        raise Infeasible(str(missing)) from missing
    try:
        file = path.open("wb")
    except OSError as error:
        raise Infeasible(
            f"cannot write the trace {path}: {error.strerror}; what to do: give a file in a folder that is there"
        ) from error
    events: list[Event] = []
    with file:
        try:
            yield events.append
        finally:
            file.write(trace_bytes(events))


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

    @property
    def until_ns(self) -> float:
        """When it ended, or never."""
        return float("inf") if self.ended_ns is None else self.ended_ns


def _write_device(writer: _Writer, device: int, events: list[Event]) -> None:
    root = writer.track(f"device {device}", rank=device)
    for number, lane in enumerate(_lanes(_phases(events), nest=True)):
        writer.slices(root if number == 0 else writer.track("phases", parent=root, rank=0), lane)
    rounds = [event for event in events if isinstance(event, RoundEnded)]
    for lane in _lanes([_round_slice(event) for event in rounds], nest=False):
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


def _lanes(slices: list[_Slice], *, nest: bool) -> list[list[_Slice]]:
    """The slices in lanes, in order of beginning. None holds two that cross; or that overlap, unless they may nest."""
    lanes: list[list[_Slice]] = []
    under_way: list[list[_Slice]] = []  # per lane the slices that are open, each inside the one before
    for one in sorted(slices, key=lambda one: (one.began_ns, -one.until_ns)):
        for stack in under_way:
            while stack and stack[-1].until_ns <= one.began_ns:
                stack.pop()
        has_room = [not stack or (nest and one.until_ns <= stack[-1].until_ns) for stack in under_way]
        if not any(has_room):
            lanes.append([])
            under_way.append([])
        number = has_room.index(True) if any(has_room) else -1
        lanes[number].append(one)
        under_way[number].append(one)
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
        """Slices in order of beginning, none of which cross. Of packets of one time, readers keep the file's order."""
        under_way: list[_Slice] = []

        def close_until(now_ns: float) -> None:
            while under_way and under_way[-1].until_ns <= now_ns:
                if (ended_ns := under_way.pop().ended_ns) is not None:
                    self._event(track, ended_ns, "TYPE_SLICE_END")

        for one in lane:
            close_until(one.began_ns)
            self._named(track, one.began_ns, "TYPE_SLICE_BEGIN", one.name, one.arguments)
            under_way.append(one)
        close_until(float("inf"))

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
