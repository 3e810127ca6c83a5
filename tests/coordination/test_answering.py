from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from shardshift.coordination import Control
from shardshift.coordination.answering import AnsweringStore


class Stopped(dist.Store):
    """A store whose host is stopped: a request blocks until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def check(self, keys: Any) -> bool:
        self.go.wait()
        return True


def test_requests_and_errors_come_through() -> None:
    before = {*threading.enumerate()}  # others may have some that wait for a host that is stopped
    store = AnsweringStore(dist.HashStore(), 10.0)
    other = store.clone()
    control: Any = Control
    control(store, 0, 1.0).publish("key", b"\x00\xff")
    assert control(other, 1, 1.0).fetch("key", 0, "agree") == b"\x00\xff"
    with pytest.raises(TypeError):
        store.set("key")
    store.close()
    other.close()
    assert not [one for one in {*threading.enumerate()} - before if one.name == "shardshift-store"]


def test_a_store_that_does_not_answer_is_asked_once() -> None:
    stopped = Stopped()
    store = AnsweringStore(stopped, 0.2)
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match="did not answer"):
            store.check(["key"])
    store.close()  # does not wait
    stopped.go.set()
