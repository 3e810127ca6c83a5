"""Which records of survivors count where some of them were not done with the step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardshift import Mismatch, ParallelConfig
from shardshift.adapters.groups import GroupRecord
from shardshift.adapters.megatron.records import Companions, JobRecord, RankRecord, alone

TP2 = ParallelConfig(tp=2)
DP2 = ParallelConfig(dp=2)


def given(rank: int, *, tokens: int, seed: int, settled: bool, names: tuple[str, ...] = ("a",)) -> dict[str, bytes]:
    streams: dict[str, Any] = {
        "python": random.Random(seed).getstate(),
        "tracker:tensor": random.Random(rank).getstate(),
    }
    job = JobRecord(3, 24, 0, None, {"tokens": tokens})
    groups = [GroupRecord({"lr": 0.5}, None, [(3.0, list(names))], list(names))]
    return alone(job, RankRecord(rank, groups, streams, {}, {}), settled=settled)


def test_whoever_was_done_with_the_step_knows_better_what_the_loop_made_of_it() -> None:
    """Rank 1 is lost; its buddy has its records from before the loop counted and drew."""
    early = given(1, tokens=16, seed=1, settled=False, names=("a", "b"))
    read = Companions.read(given(0, tokens=24, seed=2, settled=True) | early, TP2)
    assert read.job.counters == {"tokens": 24}
    assert read.streams.individual == frozenset()
    for rank in range(2):
        streams = read.streams.at(TP2, rank, 1)
        assert streams["python"] == random.Random(2).getstate()
        assert streams["tracker:tensor"] == random.Random(rank).getstate(), "the lost rank's own"
    assert read.groups.tells("b")
    assert read.streams.lost == ()


def test_where_nobody_was_done_with_it_all_records_count() -> None:
    records = given(0, tokens=16, seed=1, settled=False) | given(1, tokens=16, seed=1, settled=False)
    assert Companions.read(records, DP2).job.counters == {"tokens": 16}
    with pytest.raises(Mismatch, match="counter tokens"):
        Companions.read(given(0, tokens=16, seed=1, settled=False) | given(1, tokens=8, seed=1, settled=False), DP2)
