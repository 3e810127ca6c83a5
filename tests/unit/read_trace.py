"""Reads a trace as readers of the format do: by time, then by place in the file, with a stack a track."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Slice = tuple[int, int | None, str]
"""Nanoseconds of begin and end (None: never), name."""


@dataclass
class Track:
    """What is on a track: ``arguments`` by a slice's or instant's name, ``told`` for each slice in order."""

    name: str
    parent: int
    rank: int
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[int, str]] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    deepest: int = 0


def read(content: bytes) -> dict[int, Track]:
    """The tracks by their ids, with what is on them."""
    messages: Any = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    kinds = messages.TrackEvent
    packets = messages.Trace.FromString(content).packet
    tracks: dict[int, Track] = {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            assert one.uuid not in tracks
            assert not one.parent_uuid or one.parent_uuid in tracks, "a track stands after its parent"
            tracks[one.uuid] = Track(one.name, one.parent_uuid, one.sibling_order_rank)
    open_on: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for packet in sorted((one for one in packets if one.HasField("track_event")), key=lambda one: one.timestamp):
        assert packet.trusted_packet_sequence_id != 0
        event, now = packet.track_event, packet.timestamp
        track = tracks[event.track_uuid]
        if event.type == kinds.TYPE_SLICE_BEGIN:
            open_on[event.track_uuid].append((now, event.name))
            track.deepest = max(track.deepest, len(open_on[event.track_uuid]))
            track.arguments[event.name] = plain(event.debug_annotations)
            track.told.append(track.arguments[event.name])
        elif event.type == kinds.TYPE_SLICE_END:
            began, name = open_on[event.track_uuid].pop()
            track.slices.append((began, now, name))
        elif event.type == kinds.TYPE_INSTANT:
            track.instants.append((now, event.name))
            track.arguments[event.name] = plain(event.debug_annotations)
        else:
            assert event.type == kinds.TYPE_COUNTER
            track.counts.append((now, event.counter_value))
    for uuid, left in open_on.items():
        tracks[uuid].slices += [(began, None, name) for began, name in left]
    return tracks


def plain(annotations: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in annotations:
        kind = one.WhichOneof("value")
        found[one.name] = getattr(one, kind) if kind else plain(one.dict_entries)
    return found


def named(tracks: dict[int, Track], device: int, name: str = "") -> list[Track]:
    """A device's own track, or those of a name below it."""
    (root,) = (uuid for uuid, track in tracks.items() if track.name == f"device {device}" and not track.parent)
    return (
        [track for track in tracks.values() if track.parent == root and track.name == name] if name else [tracks[root]]
    )
