from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from shardshift.elastic.agent.roster import NodeRecord, Roster
from shardshift.elastic.growth import Growth
from shardshift.elastic.resize import AHEAD, Resize
from shardshift.values import Infeasible, Mismatch, ParallelConfig, ShardshiftError


class Nodes:
    """What leads see of nodes of two devices each, of which the first one founded the job."""

    def __init__(self, refusal: type[ShardshiftError] = Infeasible) -> None:
        self.refusal = refusal
        self.roster = Roster(dist.HashStore())
        self.roster.begin(1)
        self.come(0)
        self.ready: list[int] = [0, 1]
        self.gone: list[int] = []
        self.present = ParallelConfig(dp=2)
        self.source = self.lead()

    def lead(self) -> Growth:
        return Growth(
            self.roster,
            (0, 1),
            usable=lambda: self.ready,
            gone=lambda: self.gone,
            present=lambda: self.present,
            choose=self.choose,
        )

    def come(self, slot: int) -> None:
        if slot:
            assert self.roster.next_slot() == slot
        self.roster.write(NodeRecord(slot, "host", (2 * slot, 2 * slot + 1), {}, "here"))

    def choose(self, devices: Sequence[int]) -> ParallelConfig:
        if len(devices) == 6:
            raise self.refusal("nothing fits 6")
        return ParallelConfig(dp=len(devices))

    def stand_by(self, *devices: int) -> None:
        self.ready += devices
        self.roster.touch()


def test_a_node_is_taken_in_once_all_of_its_devices_stand_by() -> None:
    nodes = Nodes()
    assert nodes.source.upcoming(10) is None
    nodes.come(1)
    assert nodes.source.upcoming(11) is None
    nodes.stand_by(2)
    assert nodes.source.upcoming(12) is None
    nodes.stand_by(3)
    resize = Resize(13 + AHEAD, ParallelConfig(dp=4), (0, 1, 2, 3))
    assert nodes.source.upcoming(13) == resize
    assert nodes.source.upcoming(14) == resize, "the same until it is settled"
    nodes.source.settled(resize, None)
    nodes.present = ParallelConfig(dp=4)
    assert nodes.source.upcoming(16) is None


def test_a_job_that_was_asked_to_shrink_stays_small_whoever_leads() -> None:
    nodes = Nodes()
    nodes.come(1)
    nodes.stand_by(2, 3)
    resize = nodes.source.upcoming(3)
    assert resize is not None
    nodes.source.settled(resize, None)
    nodes.roster.touch()  # devices 2 and 3 stand by again
    assert nodes.source.upcoming(9) is None
    assert nodes.lead().upcoming(9) is None


def test_what_was_refused_is_not_asked_for_again_before_another_node_comes() -> None:
    nodes = Nodes()
    nodes.come(1)
    nodes.stand_by(2, 3)
    resize = nodes.source.upcoming(3)
    assert resize is not None
    nodes.source.settled(resize, Infeasible("no"))
    nodes.roster.touch()
    assert nodes.source.upcoming(4) is None


def test_an_announcement_whose_time_has_passed_is_made_anew() -> None:
    """A loss came between, say; the nodes have changed with it."""
    nodes = Nodes()
    nodes.come(1)
    nodes.stand_by(2, 3)
    assert nodes.source.upcoming(3) is not None
    nodes.roster.touch()
    assert nodes.source.upcoming(9) == Resize(9 + AHEAD, ParallelConfig(dp=4), (0, 1, 2, 3))


def test_a_node_that_was_killed_holds_nobody_up_before_its_record_says_so() -> None:
    nodes = Nodes()
    nodes.come(1)
    nodes.gone = [2, 3]
    nodes.come(2)
    nodes.stand_by(4, 5)
    assert nodes.source.upcoming(3) == Resize(3 + AHEAD, ParallelConfig(dp=4), (0, 1, 4, 5))


@pytest.mark.parametrize("refusal", [Infeasible, Mismatch])
def test_a_job_never_shrinks_and_never_fails_by_it(refusal: type[ShardshiftError]) -> None:
    nodes = Nodes(refusal)
    nodes.present = ParallelConfig(dp=8)
    nodes.come(1)
    nodes.stand_by(2, 3)
    assert nodes.source.upcoming(1) is None
    nodes.come(2)
    nodes.stand_by(4, 5)
    assert nodes.source.upcoming(2) is None
