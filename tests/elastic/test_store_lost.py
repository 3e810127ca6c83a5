"""The rank that hosts the job's store is lost; where the others meet then is told by whoever has started them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.elastic.test_recovery import STEPS, TIMEOUT_S, assert_went_on
from tests.elastic.toy import Fault, Recipe, ToyChange, play

from shardshift import Member
from shardshift.coordination import Control, first_era
from shardshift.elastic import job_store
from shardshift.values import ParallelConfig, ShardshiftError

HOSTS = (0, 1)
"""Device 0 hosts the first store; device 1 the one that takes its place."""
_KEPT: list[dist.Store] = []


def own_stores(timeout_s: float) -> Member:
    """Each process's membership, as a caller would make it who keeps stores on two ranks."""
    launched = Member.from_launcher(timeout_s=timeout_s)
    meeting, timeout = launched.store, timedelta(seconds=timeout_s)
    if launched.device in HOSTS:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        _KEPT.append(store)
        if launched.device == 1:
            first_era(job_store(store), 1, [0])
        meeting.set(f"port/{launched.device}", str(store.port))

    def store_of(host: int) -> dist.Store:
        port = int(meeting.get(f"port/{host}"))
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)

    def next_store(reign: int) -> tuple[int, dist.Store]:
        if reign == 1:
            raise ShardshiftError("there are two stores only")
        return 1, store_of(1)

    return Member(job_store(store_of(0)), launched.device, launched.topology, 0, next_store)


def some_know_of_the_commit(timeout_s: float) -> Member:
    """As above; device 1 hears that a change is committed, device 2 does not, and then device 0 is lost."""
    member = own_stores(timeout_s)
    meeting = Member.from_launcher(timeout_s=timeout_s).store
    gather, rebuild = Control.gather, ToyChange.rebuild
    deaf: list[str] = []

    def hears_nothing(self: Control, topic: str, members: Any, content: bytes, phase: str) -> dict[int, bytes]:
        if phase != "commit" or deaf:
            return gather(self, topic, members, content, phase)
        deaf.append(topic)  # once
        self.publish(f"{topic}/{self.device}", content)
        while True:
            self.store.check(["until it is lost"])

    def known(self: ToyChange, *args: Any) -> Any:
        if member.device == 0:
            meeting.wait(["known"])
            os.kill(os.getpid(), signal.SIGKILL)
        meeting.set("known", "")
        return rebuild(self, *args)

    if member.device == 2:
        Control.gather = hears_nothing  # type: ignore[method-assign]
    if member.device in (0, 1):
        ToyChange.rebuild = known  # type: ignore[method-assign, assignment]
    return member


def recipe(*faults: Fault, changes: dict[int, str] | None = None, **how: Any) -> Recipe:
    return Recipe("pp2dp2", changes or {}, STEPS, faults, TIMEOUT_S, survive=True, **{"sharded": False, **how})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["forward", "gate passed", "half", "stepped"])
def test_the_others_go_on_in_the_store_that_they_are_told(where: str) -> None:
    outcome = play(4, recipe(Fault(0, where, "kill", 2)), join=own_stores)
    assert_went_on(outcome, {0}, {1, 2, 3}, {2})


@pytest.mark.timeout(60)
def test_after_the_host_another_rank_may_be_lost_too() -> None:
    outcome = play(4, recipe(Fault(0, "forward", "kill", 1), Fault(3, "half", "kill", 2)), join=own_stores)
    told = outcome.told("recovered")
    assert {device: len(losses) for device, losses in told.items() if device != 3} == {1: 2, 2: 2}
    assert all(exact for losses in told.values() for *_, exact in losses)
    assert outcome.told("done").keys() == {1, 2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["plan", "agree", "move", "commit", "rebuild"])
def test_in_a_change_all_are_left_with_the_old_layout_or_all_with_the_new_one(where: str) -> None:
    at = 1 if where == "plan" else 2
    outcome = play(4, recipe(Fault(0, where, "kill", at), changes={2: "dp4"}), join=own_stores)
    assert_went_on(outcome, {0}, {1, 2, 3}, {at})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [{}, {"sharded": True, "shard_copies": 1}])
def test_a_commit_that_some_have_heard_of_holds_for_all(how: dict[str, Any]) -> None:
    outcome = play(4, recipe(changes={2: "dp4"}, **how), join=some_know_of_the_commit)
    assert_went_on(outcome, {0}, {1, 2, 3}, {2})
    (layouts,) = {tuple(config for *_, config, _ in losses) for losses in outcome.told("recovered").values()}
    assert ParallelConfig.parse(layouts[0]).world_size <= 3


def nowhere(timeout_s: float) -> Member:
    member = own_stores(timeout_s)
    return Member(member.store, member.device, member.topology)


@pytest.mark.timeout(60)
def test_where_the_caller_knows_of_no_other_store_the_job_ends_and_says_so() -> None:
    outcome = play(4, recipe(Fault(0, "forward", "kill", 2)), join=nowhere)
    assert "its launcher knows of no other" in str(outcome.error)
    assert not outcome.told("done")
