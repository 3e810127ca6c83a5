"""Pairs: all of them, whether written out or in runs."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shardshift.plan.pairs import PairRun, pair_runs
from shardshift.values import Layout, ParallelConfig, PlacedLayout

Pair = tuple[int, int | None, int]


def placed(config: ParallelConfig, devices: tuple[int, ...]) -> PlacedLayout:
    """A layout that holds nothing."""
    return PlacedLayout(Layout(((),), [0] * config.world_size), devices)


def written_out(runs: tuple[PairRun, ...]) -> list[Pair]:
    """What a reader of the JSON does."""
    return [
        (
            run.curr + i * run.curr_step,
            None if run.prev is None else run.prev + i * run.prev_step,
            run.device + i * run.device_step,
        )
        for run in runs
        for i in range(run.count)
    ]


def one_by_one(prev: PlacedLayout, curr: PlacedLayout) -> list[Pair]:
    return [(rank, prev.rank_of(device), device) for rank, device in enumerate(curr.devices)]


CONFIGS = st.builds(
    ParallelConfig, pp=st.integers(1, 3), tp=st.integers(1, 3), dp=st.integers(1, 5), cp=st.integers(1, 2)
)


@given(prev=CONFIGS, curr=CONFIGS, seed=st.integers(0, 2**32), spare=st.integers(0, 9), orderly=st.booleans())
def test_runs_say_no_less_than_pairs_one_by_one(
    prev: ParallelConfig, curr: ParallelConfig, seed: int, spare: int, orderly: bool
) -> None:
    slots = list(range(max(prev.world_size, curr.world_size) + spare))
    before = placed(prev, tuple(slots[: prev.world_size]))
    if not orderly:
        random.Random(seed).shuffle(slots)
    after = placed(curr, tuple(slots[: curr.world_size]))
    expected = one_by_one(before, after)
    assert written_out(pair_runs(before, after, curr)) == expected
    assert sorted(written_out(pair_runs(before, after, curr, most=0))) == expected


def test_a_job_of_thousands_of_replicas_is_a_run_for_each_stage_and_slice() -> None:
    config = ParallelConfig(pp=4, tp=2, dp=2000)
    layout = placed(config, tuple(range(config.world_size)))
    runs = pair_runs(layout, layout, config)
    assert len(runs) == 8
    assert all((run.count, run.curr_step, run.prev_step, run.device_step) == (2000, 2, 2, 2) for run in runs)


def test_what_is_fresh_joins_no_run_of_old_ranks() -> None:
    prev, curr = ParallelConfig(dp=3), ParallelConfig(dp=6)
    before, after = placed(prev, (0, 1, 2)), placed(curr, tuple(range(6)))
    assert [(run.prev, run.count) for run in pair_runs(before, after, curr, most=0)] == [(0, 3), (None, 3)]


def test_json_names_coordinates_and_gives_steps_only_in_a_run() -> None:
    prev, curr = ParallelConfig(pp=2), ParallelConfig(tp=2, dp=2)
    one = PairRun(3, 1, 7).to_json(curr, prev)
    assert one == {"curr": 3, "curr_at": "pp0 tp1 dp1", "prev": 1, "prev_at": "pp1 tp0 dp0", "device": 7}
    fresh = PairRun(0, None, 4, 2, 2, 0, 2).to_json(curr, prev)
    assert fresh["prev"] is None
    assert fresh["prev_at"] is None
    assert (fresh["count"], fresh["curr_step"], fresh["device_step"]) == (2, 2, 2)
