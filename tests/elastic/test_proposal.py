from __future__ import annotations

from dataclasses import replace

import pytest
from tests.elastic.toy import Unpicklable

from shardshift.coordination import refusal
from shardshift.elastic.proposal import Proposal
from shardshift.values import Infeasible, ParallelConfig, ShardshiftError, Unaccounted

PROPOSAL = Proposal(
    ParallelConfig(pp=2),
    ParallelConfig(tp=3),
    prev_devices=(4, 1),
    curr_devices=(0, 1, 2),
    usable=(0, 1, 2, 3),
    lost=(),
    wires=0,
    ends=(0, 1, 2, 3, 4),
    iteration=7,
    kinds=("exp_avg", "exp_avg_sq"),
    digest="abc",
)


def test_a_proposal_arrives_as_it_was_sent() -> None:
    assert Proposal.from_wire(PROPOSAL.to_wire()) == PROPOSAL


def test_everyone_of_either_layout_takes_part() -> None:
    assert PROPOSAL.participants == (0, 1, 2, 4)


def test_who_is_lost_takes_no_part() -> None:
    assert replace(PROPOSAL, lost=(4,)).participants == (0, 1, 2)


@pytest.mark.parametrize("error", [Infeasible("too large"), Unaccounted("unknown", ["a", "b"])])
def test_a_refusal_is_raised_as_what_the_lead_met(error: ShardshiftError) -> None:
    with pytest.raises(type(error)) as caught:
        Proposal.from_wire(refusal(error))
    assert caught.value.to_wire() == error.to_wire()


def test_an_error_that_cannot_be_pickled_travels_as_text() -> None:
    with pytest.raises(ShardshiftError, match="Unpicklable: went wrong"):
        Proposal.from_wire(refusal(Unpicklable("went wrong")))
