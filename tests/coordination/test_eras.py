from __future__ import annotations

import torch.distributed as dist

from shardshift.coordination import begin_era, current_era, era_store, known_dead, record_failure, record_loss
from shardshift.coordination.eras import lost_before
from shardshift.coordination.failure import recorded_failure


def test_a_failure_ends_its_era_and_no_other() -> None:
    store = dist.HashStore()
    assert current_era(store) == 0
    record_failure(era_store(store, 0), [3], "train", "it was killed")
    begun = begin_era(store, 0, [3])
    assert current_era(store) == 1
    assert recorded_failure(era_store(store, 0)) is not None
    assert recorded_failure(begun) is None


def test_all_survivors_begin_one_and_the_same_era() -> None:
    store = dist.HashStore()
    for _ in range(3):
        begin_era(store, 0, [3])
    assert current_era(store) == 1
    begin_era(store, 1, [1])
    begin_era(store, 0, [3])  # one that was slow
    assert current_era(store) == 2
    assert lost_before(era_store(store, 2)) == {1, 3}


def test_a_death_that_survivors_have_found_already_is_no_news() -> None:
    store = dist.HashStore()
    begun = begin_era(store, 0, [3])
    assert record_loss(begun, 3, "run", "its process was killed") is None
    assert recorded_failure(begun) is None
    assert record_loss(begun, 2, "run", "its process was killed") is not None


def test_who_is_lost_after_the_failure_of_an_era_is_known_to_the_next() -> None:
    store = era_store(dist.HashStore(), 0)
    for device in (3, 1):
        lost = record_loss(store, device, "run", "its process was killed")
        assert lost is not None
        assert lost.ranks == (3,)
    assert known_dead(store) == {1, 3}
