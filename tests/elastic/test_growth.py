from __future__ import annotations

from collections.abc import Sequence

from shardshift.elastic.growth import AHEAD, Growth
from shardshift.elastic.resize import Resize
from shardshift.values import Infeasible, ParallelConfig


class Nodes:
    """What a lead sees of the nodes."""

    def __init__(self) -> None:
        self.version, self.here, self.ready = 0, [0, 1], [0, 1]
        self.present = ParallelConfig(dp=2)
        self.source = Growth(
            lambda: self.version, lambda: self.here, lambda: self.ready, lambda: self.present, self.choose
        )

    def choose(self, devices: Sequence[int]) -> ParallelConfig:
        if len(devices) == 5:
            raise Infeasible("nothing fits 5")
        return ParallelConfig(dp=len(devices))


def test_a_node_is_taken_in_once_all_of_its_devices_stand_by() -> None:
    nodes = Nodes()
    assert nodes.source.upcoming(10) is None
    nodes.version, nodes.here = 1, [0, 1, 2, 3]
    assert nodes.source.upcoming(11) is None
    nodes.version, nodes.ready = 2, [0, 1, 2]
    assert nodes.source.upcoming(12) is None
    nodes.version, nodes.ready = 3, [0, 1, 2, 3]
    resize = Resize(13 + AHEAD, ParallelConfig(dp=4), (0, 1, 2, 3))
    assert nodes.source.upcoming(13) == resize
    assert nodes.source.upcoming(14) == resize, "the same until it is settled"
    nodes.source.settled(resize, None)
    nodes.present = ParallelConfig(dp=4)
    assert nodes.source.upcoming(16) is None


def test_what_was_refused_is_not_asked_for_again_before_the_nodes_change() -> None:
    nodes = Nodes()
    nodes.version, nodes.here, nodes.ready = 1, [0, 1, 2], [0, 1, 2]
    resize = nodes.source.upcoming(3)
    assert resize is not None
    nodes.source.settled(resize, Infeasible("no"))
    assert nodes.source.upcoming(4) is None
    nodes.version = 2
    assert nodes.source.upcoming(5) == Resize(5 + AHEAD, ParallelConfig(dp=3), (0, 1, 2))


def test_an_announcement_whose_time_has_passed_is_made_anew() -> None:
    """A loss came between, say; the nodes have changed with it."""
    nodes = Nodes()
    nodes.version, nodes.here, nodes.ready = 1, [0, 1, 2], [0, 1, 2]
    assert nodes.source.upcoming(3) is not None
    nodes.version = 2
    assert nodes.source.upcoming(9) == Resize(9 + AHEAD, ParallelConfig(dp=3), (0, 1, 2))


def test_a_job_never_shrinks_and_never_fails_by_it() -> None:
    nodes = Nodes()
    nodes.present, nodes.version = ParallelConfig(dp=4), 1
    assert nodes.source.upcoming(1) is None
    nodes.version, nodes.here, nodes.ready = 2, [*range(5)], [*range(5)]
    assert nodes.source.upcoming(2) is None
