from __future__ import annotations

import pytest
import torch.distributed as dist

from shardshift.coordination import begin_era, present_store, record_loss
from shardshift.coordination.failure import recorded_failure
from shardshift.coordination.signs import show
from shardshift.elastic.agent.joining import join
from shardshift.elastic.agent.roster import NodeRecord, Roster, Stores, Terms
from shardshift.values import Infeasible, Mismatch, ShardshiftError

TERMS = Terms("job", devices_per_node=2, min_nodes=1, max_nodes=2)
HERE = NodeRecord(0, "a", (0, 1), {0: 10, 1: 11}, "here")
LEAVING = NodeRecord(1, "b", (2, 3), {2: 12, 3: 13}, "leaving")
LEFT = NodeRecord(2, "c", (), {}, "left")


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def roster(store: dist.Store) -> Roster:
    roster = Roster(store)
    roster.begin(2)
    return roster


def test_before_any_agent_there_is_nobody(store: dist.Store) -> None:
    roster = Roster(store)
    assert (roster.terms(), roster.count(), roster.nodes(), roster.devices_here()) == (None, 0, (), ())


def test_what_an_agent_writes_others_read(roster: Roster) -> None:
    for node in (LEAVING, HERE):
        roster.write(node)
    assert roster.nodes() == (HERE, LEAVING)
    assert (roster.devices_here(), roster.leaving()) == ((0, 1), (2, 3))


def test_a_node_that_left_has_no_devices(roster: Roster) -> None:
    assert roster.next_slot() == 2
    for node in (HERE, LEFT):
        roster.write(node)
    assert (roster.devices_here(), roster.leaving()) == ((0, 1), ())


def test_every_change_is_seen_in_the_version(roster: Roster) -> None:
    versions = [roster.version()]
    for node in (HERE, LEAVING, NodeRecord(0, "a", (0,), {0: 10}, "here")):
        roster.write(node)
        versions.append(roster.version())
    assert versions == sorted({*versions})


def test_slots_are_never_given_twice(store: dist.Store) -> None:
    roster = Roster(store)
    roster.begin(2)
    first = roster.next_slot()
    roster.begin(2)  # each agent says so
    assert (first, roster.next_slot(), roster.count()) == (2, 3, 4)


def test_a_node_with_another_number_of_devices_is_refused(roster: Roster) -> None:
    assert roster.agree(TERMS) == roster.terms() == TERMS
    with pytest.raises(Mismatch, match="--nproc-per-node 2"):
        roster.agree(Terms("job", 4, 1, 2))


def test_a_node_of_another_job_is_refused(roster: Roster) -> None:
    roster.agree(TERMS)
    with pytest.raises(Mismatch, match="that of job 'job', not of 'other'"):
        roster.agree(Terms("other", 2, 1, 2))


def test_the_first_node_says_how_many_there_may_be(roster: Roster) -> None:
    roster.agree(TERMS)
    assert roster.agree(Terms("job", 2, 3, 5)) == TERMS


def test_a_loss_is_recorded_in_the_era_that_the_job_is_in(store: dist.Store) -> None:
    begin_era(store, 0, [7])
    record_loss(present_store(store), 3, "run", "ordered by the test")
    failure = recorded_failure(dist.PrefixStore("era/1", store))
    assert failure is not None
    assert failure.ranks == (3,)


class Joining:
    """Several agents in one thread: while one waits, the others show life."""

    def __init__(self, terms: Terms, alive: tuple[int, ...] = (), dead: tuple[int, ...] = ()) -> None:
        self.stores = Stores(dist.HashStore(), 5.0)
        self.terms, self.alive, self.beat = terms, alive, 0
        Roster(self.stores.job).agree(terms)
        for ticket in sorted((*alive, *dead)):
            assert self.stores.job.add("tickets", 1) - 1 == ticket
            show(self.stores.waiting, ticket, 0)

    def go_on(self) -> None:
        self.beat += 1
        for ticket in self.alive:
            show(self.stores.waiting, ticket, self.beat)

    def slot(self, timeout_s: float = 10.0) -> int:
        return join(self.stores, self.terms, timeout_s=timeout_s, pause=self.go_on).slot


def test_the_first_node_of_one_begins_at_once() -> None:
    assert Joining(TERMS).slot() == 0


def test_the_nodes_that_a_job_begins_with_have_the_first_slots_in_order_of_coming() -> None:
    joining = Joining(Terms("job", 2, 3, 3), alive=(0, 1))
    assert joining.slot() == 2
    assert joining.stores.job.get("founders") == b"[0, 1, 2]"


def test_an_agent_that_died_while_it_waited_leaves_no_gap() -> None:
    joining = Joining(Terms("job", 2, 2, 2), alive=(1,), dead=(0,))
    assert joining.slot() == 1
    assert joining.stores.job.get("founders") == b"[1, 2]"


def test_an_agent_that_waited_in_vain_is_no_founder_for_those_who_come_later() -> None:
    joining = Joining(Terms("job", 2, 2, 2))
    with pytest.raises(ShardshiftError, match=r"begins with 2 nodes, and 1 came within 0 s.*on 1 more"):
        joining.slot(timeout_s=0.0)
    joining.alive = (0,)  # what it had shown last may look like life
    with pytest.raises(ShardshiftError, match="1 came within 0 s"):
        joining.slot(timeout_s=0.0)


def test_whoever_comes_later_gets_the_next_slot() -> None:
    joining = Joining(TERMS)
    assert [joining.slot(), joining.slot()] == [0, 1]


def test_no_more_nodes_than_there_may_be() -> None:
    joining = Joining(TERMS)
    assert [joining.slot(), joining.slot()] == [0, 1]
    beats = iter(range(1, 10**6))

    def agents_live() -> None:
        beat = next(beats)
        for slot in (0, 1):
            show(joining.stores.nodes, slot, beat)

    agents_live()
    with pytest.raises(Infeasible, match="may have 2 nodes at a time, and 0, 1 are there"):
        join(joining.stores, TERMS, timeout_s=5.0, pause=agents_live)
    refused = Roster(joining.stores.job).node(2)
    assert refused is not None
    assert refused.state == "left"


def test_a_node_that_has_left_makes_room() -> None:
    joining = Joining(TERMS)
    assert [joining.slot(), joining.slot()] == [0, 1]
    Roster(joining.stores.job).write(NodeRecord(1, "b", (), {}, "left"))
    assert joining.slot() == 2
