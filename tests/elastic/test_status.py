from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from shardshift.elastic.course import Course
from shardshift.elastic.operating.board import STATUS_KEY
from shardshift.elastic.report import ResizeReport
from shardshift.elastic.status import Status
from shardshift.values import ParallelConfig

CHANGE = ResizeReport(
    ParallelConfig(pp=2), ParallelConfig(dp=2), 7, (0, 1), "digest", 100, 40, 0, 60, 60, {"move": 0.5, "plan": 0.25}
)


def written(store: dist.Store) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(store.get(STATUS_KEY))
    return record


def write(store: dist.Store, status: Status, iteration: int, **more: Any) -> dict[str, Any]:
    course = Course(ParallelConfig(dp=2), (0, 1), generation=3)
    status.write(course, iteration, era=1, standby=[4], tolerates={"param": 1}, **more)
    return written(store)


def test_what_a_job_is_doing_can_be_read() -> None:
    store = dist.HashStore()
    record = write(store, Status(store), 9, change=CHANGE)
    assert (record["config"], record["devices"], record["standby"]) == ("pp1tp1dp2", [0, 1], [4])
    assert (record["iteration"], record["generation"], record["era"], record["losses"]) == (9, 3, 1, 1)
    assert record["tolerates"] == {"param": 1}
    assert record["last_change"]["pause_s"] == 0.75
    assert record["last_change"]["moved_bytes"] == 60


def test_the_next_lead_goes_on_counting_where_the_last_one_stopped() -> None:
    store = dist.HashStore()
    first = Status(store)
    write(store, first, 9, change=CHANGE)
    write(store, first, 10, refused=True)
    record = write(store, Status(store), 11, change=CHANGE)
    assert record["changes"] == {"done": 2, "refused": 1}
    assert record["totals"] == {"pause_s": {"move": 1.0, "plan": 0.5}, "moved_bytes": 120}


def test_a_record_without_a_change_keeps_the_last_one() -> None:
    store = dist.HashStore()
    status = Status(store)
    before = write(store, status, 9, change=CHANGE)
    after = write(store, status, 12)
    assert after["last_change"] == before["last_change"]
    assert after["changes"] == {"done": 1, "refused": 0}
