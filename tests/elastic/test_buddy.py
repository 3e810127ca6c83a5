"""A job whose optimizer state has one holder each outlives the loss of any rank, by the copies that buddies keep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.elastic.test_recovery import COPIES, TIMEOUT_S, assert_went_on, survive
from tests.elastic.toy import Fault, ToyAdapter, ToyJob, layout_of, logical

from shardshift.elastic.buddy import Buddies
from shardshift.elastic.course import Course
from shardshift.elastic.state import Kept
from shardshift.elastic.survivors import Offer, check_copies, choose, fitted
from shardshift.transport import MemoryHub
from shardshift.values import Infeasible, Kind, Mismatch, ParallelConfig, Region, Shard, StateLost, Tensor

DP2 = ParallelConfig.parse("pp2dp2")


# Losses wherever one can be lost: test_recovery, with copies as with replicas.


@pytest.mark.timeout(60)
def test_a_rank_that_is_lost_before_its_copy_arrived_sets_the_job_back_by_one_step() -> None:
    """The toy gives its companions as it sends its copy; the step is done on all ranks then."""
    outcome = survive(4, "pp2dp2", Fault(0, "alone", "kill", 2), **COPIES)
    assert_went_on(outcome, {0}, {1, 2, 3}, {1})


@pytest.mark.timeout(60)
def test_a_rank_that_is_lost_with_its_buddy_takes_what_it_held_alone_along() -> None:
    outcome = survive(4, "pp2dp2", Fault(1, "half", "kill", 2), Fault(2, "half", "kill", 2), **COPIES)
    assert isinstance(outcome.error, StateLost)
    assert "exp_avg" in str(outcome.error)
    assert "devices [1] are lost" in str(outcome.error)
    assert outcome.told("done") == {}


@pytest.mark.timeout(60)
def test_ranks_that_are_no_buddies_may_be_lost_together() -> None:
    outcome = survive(4, "pp2dp2", Fault(0, "half", "kill", 2), Fault(2, "half", "kill", 2), **COPIES)
    assert_went_on(outcome, {0, 2}, {1, 3}, {2})


@pytest.mark.parametrize(
    ("copies", "survives", "transport"), [(2, True, "auto"), (-1, True, "auto"), (1, False, "auto"), (1, True, "nccl")]
)
def test_copies_that_cannot_be_are_refused(copies: int, survives: bool, transport: str) -> None:
    with pytest.raises(Infeasible, match="what to do"):
        check_copies(copies, survive=survives, transport=transport)


# One step's exchange, four devices as threads of one process.


@dataclass
class Crew:
    """The buddies of a toy job without processes."""

    devices: tuple[int, ...]
    hub: MemoryHub

    def __post_init__(self) -> None:
        self.course = Course(DP2, self.devices)
        self.adapters = {device: ToyAdapter(device, lambda message: None) for device in self.devices}
        self.buddies = {
            device: Buddies(adapter, device, 2, TIMEOUT_S, copies=True) for device, adapter in self.adapters.items()
        }
        self.wires = {device: self.hub.transport(device) for device in self.devices}
        self.jobs = {
            device: ToyJob(DP2, rank, {shard: logical(shard) for shard in layout_of(DP2).shards(rank)})
            for rank, device in enumerate(self.devices)
        }

    def step(self, *late: int) -> dict[int, Any]:
        """All finish a step and exchange copies; those who are late are a step behind."""

        def one(device: int) -> Any:
            job = self.jobs[device]
            if device not in late:
                for tensor in job.tensors.values():
                    tensor += 1
                job.iteration += 1
            try:
                return self.buddies[device].stepped(job, self.course, self.wires[device])
            except Mismatch as error:
                return error

        with ThreadPoolExecutor(len(self.devices)) as pool:
            return dict(zip(self.devices, pool.map(one, self.devices), strict=True))


@pytest.mark.parametrize("views", [False, True])
def test_a_buddy_has_the_last_two_steps_of_its_ward_and_no_more(views: bool) -> None:
    crew = Crew((4, 5, 6, 7), MemoryHub((4, 5, 6, 7), views=views))
    sent = [crew.step() for _ in range(3)]
    lonely_bytes = sum(shard.nbytes for shard in layout_of(DP2).shards(0) if shard.tensor.kind is Kind.EXP_AVG)
    assert all(lonely_bytes < nbytes < lonely_bytes + 200 for of_step in sent for nbytes in of_step.values())
    assert {device: one.offers(0) for device, one in crew.buddies.items()} == {
        4: {6: [2, 3]}, 5: {7: [2, 3]}, 6: {4: [2, 3]}, 7: {5: [2, 3]},
    }  # fmt: skip
    for iteration in (2, 3):
        own: Kept[ToyJob] = Kept(DP2, iteration, (), {}, {"own": b""})
        kept = crew.buddies[6].beside(own, 0, [(4, 6), (5, 7)])
        moments = {shard for shard in layout_of(DP2).shards(0) if shard.tensor.kind is Kind.EXP_AVG}
        assert kept.tensors.keys() == moments
        assert all(torch.equal(tensor, logical(shard) + iteration) for shard, tensor in kept.tensors.items())
        assert kept.records == {"own": b"", "alone/0": str(iteration).encode()}


def test_memory_is_used_again_at_each_step() -> None:
    crew = Crew((0, 1, 2, 3), MemoryHub(4))
    crew.step()
    crew.step()
    held = {version.shards[ward].data_ptr() for version in crew.buddies[0]._versions for ward in version.shards}
    crew.step()
    assert held == {version.shards[ward].data_ptr() for version in crew.buddies[0]._versions for ward in version.shards}
    nbytes = sum(shard.nbytes for shard in layout_of(DP2).shards(2) if shard.tensor.kind is Kind.EXP_AVG)
    assert crew.buddies[0].nbytes == 2 * nbytes


def test_a_ward_at_another_step_is_refused_and_its_copy_does_not_count() -> None:
    crew = Crew((0, 1, 2, 3), MemoryHub(4))
    crew.step()
    told = crew.step(2)
    assert {device for device, one in told.items() if isinstance(one, Mismatch)} == {0, 2}
    assert crew.buddies[0].offers(0) == {2: [1]}
    assert crew.buddies[1].offers(0) == {3: [1, 2]}


def test_copies_tell_what_the_job_outlives() -> None:
    crew = Crew((0, 1, 2, 3), MemoryHub(4))
    kept = crew.buddies[0]
    assert kept.tolerates(DP2, crew.devices, ("exp_avg",)) == {"param": 1, "exp_avg": 1}
    # Replicas are neighbours, so on one node: copies do not help against the loss of what has two holders there.
    assert kept.tolerates(DP2, crew.devices, ("exp_avg",), of_nodes=True) == {"param": 0, "exp_avg": 1}
    without = Buddies(crew.adapters[0], 0, 2, TIMEOUT_S, copies=False)
    assert without.tolerates(DP2, crew.devices, ("exp_avg",)) == {"param": 1, "exp_avg": 0}


# Which step is gone on from.


NAMES = {1: ("exp_avg:w",)}


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ({0: Offer([4, 5]), 2: Offer([4, 5], {1: [4, 5]})}, (5, ((1, 2),))),
        ({0: Offer([4, 5]), 2: Offer([4, 5], {1: [4]})}, (4, ((1, 2),))),
        ({0: Offer([4]), 2: Offer([4, 5], {1: [4, 5]})}, (4, ((1, 2),))),
        ({0: Offer([4, 5], {2: [4, 5]}), 2: Offer([5], {1: [3, 5]})}, (5, ((1, 2),))),
    ],
)
def test_the_newest_step_that_survivors_and_buddies_have(offers: dict[int, Offer], expected: Any) -> None:
    sent = {device: Offer.of(offer.fields()) for device, offer in offers.items()}
    assert choose(sent, [1], lambda iteration: NAMES) == expected


def test_who_held_nothing_alone_needs_no_buddy() -> None:
    assert choose({0: Offer([0, 1])}, [1], lambda iteration: NAMES if iteration else {}) == (0, ())


@pytest.mark.parametrize("offers", [{0: Offer([4, 5])}, {0: Offer([4], {1: [5]})}])
def test_what_no_buddy_has_is_named(offers: dict[int, Offer]) -> None:
    with pytest.raises(StateLost, match=r"devices \[1\].*exp_avg:w") as caught:
        choose(offers, [1], lambda iteration: NAMES)
    assert caught.value.names == ("exp_avg:w",)


def test_survivors_without_a_common_step_have_lost_the_state() -> None:
    with pytest.raises(StateLost, match="no common step"):
        choose({0: Offer([4]), 2: Offer([5])}, [1], lambda iteration: {})


def test_a_copy_of_which_the_buddy_holds_a_part_itself_is_given_as_the_rest() -> None:
    tensor = Tensor(Kind.PARAM, "w", (4, 3), "float32", 4)
    whole = torch.arange(12.0).reshape(4, 3)
    outer, inner = Shard(tensor, Region((0, 0), (4, 3))), Shard(tensor, Region((1, 1), (2, 2)))
    own = Shard(tensor, Region((0, 0), (1, 3)))
    found = fitted((own, inner), {own: whole[:1] + 0, outer: whole})
    assert found.keys() == {own, inner}
    assert torch.equal(found[inner], whole[1:3, 1:3])
