"""Events travel as JSON and as pickles, and reach every sink."""

from __future__ import annotations

import json
import pickle

import pytest
from tests.unit.made_events import MIB, scale_out

from shardshift.engine.events import Event, all_of, from_record, nowhere, to_record


def test_an_event_comes_back_from_json_and_from_a_pickle_as_it_was() -> None:
    for event in scale_out():
        assert from_record(json.loads(json.dumps(to_record(event)))) == event
        assert pickle.loads(pickle.dumps(event)) == event


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(KeyError, match="Rumour"):
        from_record({"event": "Rumour", "device": 0})


def test_every_sink_hears_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    tell = all_of([first.append, nowhere, second.append])
    for event in scale_out():
        tell(event)
    assert first == second == scale_out()


def test_a_round_adds_up_its_links() -> None:
    sent = [event.sent_bytes for event in scale_out() if hasattr(event, "sent_bytes")]
    assert sent == [2 * MIB, MIB, 0, 0]
