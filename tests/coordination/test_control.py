from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from shardshift.coordination import Control, record_failure, record_loss, stands_by
from shardshift.values import PeerLost

GRACE_S = 5.0


def test_what_one_publishes_another_fetches_byte_for_byte() -> None:
    store = dist.HashStore()
    content = bytes(range(256))
    Control(store, 0, 5.0).publish("key", content)
    assert Control(store, 1, 5.0).fetch("key", 0, "agree") == content


def test_a_record_that_does_not_come_names_who_should_have_given_it() -> None:
    control = Control(dist.HashStore(), 1, 0.2)
    with pytest.raises(PeerLost, match="did not give 'key'") as caught:
        control.fetch("key", 0, "plan")
    assert (caught.value.ranks, caught.value.phase) == ((0,), "plan")
    assert control.failure() is not None


def test_gather_gives_everyone_everything() -> None:
    store = dist.HashStore()
    members = (4, 1, 7)
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda m: Control(store, m, 20.0).gather("topic", members, f"of {m}".encode(), "agree"), members)
        )
    assert found == [{4: b"of 4", 1: b"of 1", 7: b"of 7"}] * 3


def test_gather_names_the_members_that_did_not_come() -> None:
    with pytest.raises(PeerLost, match="did not come to 'topic' within") as caught:
        Control(dist.HashStore(), 0, 0.2).gather("topic", (0, 2, 3), b"", "commit")
    assert (caught.value.ranks, caught.value.phase) == ((2, 3), "commit")


def test_a_wait_ends_as_soon_as_a_failure_is_recorded() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        waits: list[Future[Any]] = [
            pool.submit(Control(store, 0, 600.0).fetch, "never", 1, "plan"),
            pool.submit(Control(store, 1, 600.0).gather, "topic", (0, 1), b"", "agree"),
            pool.submit(Control(store, 2, 600.0).await_any, ["never", "ever"]),
        ]
        started_s = time.monotonic()
        record_failure(store, [5], "move", "it died")
        errors = [wait.exception(timeout=60) for wait in waits]
    assert time.monotonic() - started_s < GRACE_S
    assert all(isinstance(error, PeerLost) and error.ranks == (5,) for error in errors)
    assert len({str(error) for error in errors}) == 1


def test_the_first_failure_stands_whoever_comes_later() -> None:
    store = dist.HashStore()
    first = record_failure(store, [3], "move", "first")
    second = record_failure(store, [1], "agree", "second")
    assert str(first) == str(second) == str(Control(store, 0, 1.0).failure())


def test_what_was_there_before_the_job_failed_still_counts() -> None:
    """Otherwise one rank would read a refusal and another, a moment later, that the first has gone."""
    store = dist.HashStore()
    control = Control(store, 0, 1.0)
    control.publish("key", b"content")
    record_failure(store, [1], "agree", "later")
    assert control.fetch("key", 1, "agree") == b"content"
    assert control.await_any(["other", "key"]) == "key"


def test_the_loss_of_a_standby_is_noted_but_is_not_the_jobs_failure() -> None:
    store = dist.HashStore()
    control = Control(store, 2, 1.0)
    control.stand_by(True)
    assert stands_by(store, 2)
    assert record_loss(store, 2, "standby", "it died") is None
    assert control.failure() is None
    assert control.gone() == {2}


def test_the_loss_of_a_device_that_no_longer_stands_by_is_the_jobs_failure() -> None:
    store = dist.HashStore()
    control = Control(store, 2, 1.0)
    control.stand_by(True)
    control.stand_by(False)
    assert record_loss(store, 2, "move", "it died") is not None
    assert control.failure() is not None
    assert control.gone() == set()
