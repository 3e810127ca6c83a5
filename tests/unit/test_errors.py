"""Errors travel between ranks as text."""

from __future__ import annotations

import json

import pytest

from shardshift.values import Infeasible, Mismatch, PeerLost, ShardshiftError, StateLost, Unaccounted


@pytest.mark.parametrize(
    "error",
    [
        Infeasible("too few"),
        Mismatch("not equal"),
        Unaccounted("who?", ["param:a", "param:b"]),
        StateLost("gone", ["param:c"]),
        PeerLost([3, 1], "move", "connection reset"),
    ],
)
def test_an_error_arrives_as_the_same_class_with_the_same_words(error: ShardshiftError) -> None:
    arrived = ShardshiftError.from_wire(error.to_wire())
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.to_wire() == error.to_wire()


def test_an_error_of_an_unknown_class_keeps_its_words() -> None:
    arrived = ShardshiftError.from_wire(json.dumps({"error": "FromTheFuture", "text": "boo"}))
    assert type(arrived) is ShardshiftError
    assert str(arrived) == "FromTheFuture: boo"


def test_a_lost_peer_says_who_when_and_what_to_do() -> None:
    error = PeerLost([3, 1], "move", "connection reset")
    assert error.ranks == (1, 3)
    assert "rank 1, 3 in phase 'move': connection reset" in str(error)
    assert "restart" in str(error)


def test_lost_state_is_unaccounted_state() -> None:
    assert issubclass(StateLost, Unaccounted)
