"""A job outlives lost ranks: whatever rank is lost, wherever in the step or in a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.elastic.toy import Fault, Outcome, Recipe, play, running

from shardshift.values import PeerLost, StateLost

TIMEOUT_S, SHORT_S = 20.0, 4.0
STEPS = 4
WAITED_FOR = pytest.mark.alone
"""Whoever stops is missed after the limit; so is one that others wait for in the making of a world. The limit is short
then, and nothing may run beside."""


REPLICAS: dict[str, Any] = {"sharded": False}
"""Everything has two holders; or moments have one, and a buddy's copy."""
COPIES: dict[str, Any] = {"sharded": True, "shard_copies": 1}


def survive(
    devices: int,
    start: str,
    *faults: Fault,
    changes: dict[int, str] | None = None,
    sharded: bool = False,
    shard_copies: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Outcome:
    recipe = Recipe(start, changes or {}, STEPS, faults, timeout_s, survive=True, sharded=sharded)
    return play(devices, replace(recipe, shard_copies=shard_copies))


def assert_went_on(outcome: Outcome, lost: set[int], survivors: set[int], iteration: set[int]) -> None:
    assert outcome.error is None, outcome
    told = outcome.told("recovered")
    assert told.keys() == survivors, outcome
    for (gone, at, _, exact), *_ in told.values():
        assert set(gone) <= lost
        assert at in iteration
        assert exact
    done = outcome.told("done")
    assert done, outcome
    assert all(steps == STEPS and exact for ((steps, _, exact),) in done.values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("lost", "where", "at", "how"),
    [
        (0, "forward", 2, REPLICAS),
        (3, "gate passed", 2, REPLICAS),
        (0, "half", 2, REPLICAS),
        (1, "norm", 2, REPLICAS),
        (3, "stepped", 2, REPLICAS),
        (1, "committed", 3, REPLICAS),
        (0, "forward", 0, COPIES),
        (3, "gate passed", 2, COPIES),
        (0, "norm", 2, COPIES),
        (1, "committed", 3, COPIES),
    ],
)
def test_the_rest_goes_on_from_the_last_whole_step(lost: int, where: str, at: int, how: dict[str, Any]) -> None:
    outcome = survive(4, "pp2dp2", Fault(lost, where, "kill", at), **how)
    assert_went_on(outcome, {lost}, {0, 1, 2, 3} - {lost}, {at})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("lost", "where", "how"),
    [
        *((lost, where, REPLICAS) for lost, where in ((0, "plan"), (3, "quiesce"), (0, "agree"), (3, "accept"))),
        *((lost, where, REPLICAS) for lost, where in ((0, "move"), (3, "commit"))),
        *((lost, where, COPIES) for lost, where in ((0, "move"), (3, "moved"), (0, "commit"))),
        *(pytest.param(lost, "rebuild", how, marks=WAITED_FOR) for lost, how in ((0, REPLICAS), (3, COPIES))),
    ],
)
def test_a_loss_in_a_change_leaves_the_old_state_or_the_new_one(lost: int, where: str, how: dict[str, Any]) -> None:
    """After "moved" copies of the new layout are made; after "commit" they are what counts."""
    at = 1 if where == "plan" else 2  # it is planned ahead
    timeout_s = SHORT_S if where == "rebuild" else TIMEOUT_S
    fault = Fault(lost, where, "kill", at)
    outcome = survive(4, "pp2dp2", fault, changes={2: "dp4"}, timeout_s=timeout_s, **how)
    assert_went_on(outcome, {lost}, {0, 1, 2, 3} - {lost}, {at})


@WAITED_FOR
@pytest.mark.timeout(90)
@pytest.mark.parametrize("where", ["half", "move"])
def test_a_rank_that_hangs_is_given_up(where: str) -> None:
    recipe = Recipe("pp2dp2", {2: "dp4"}, STEPS, (Fault(1, where, "stop", 2),), SHORT_S, survive=True, sharded=False)
    outcome = Outcome({device: [] for device in range(4)}, None)
    with running(4, recipe) as job:
        for device, message in job.messages():
            outcome.messages[device].append(message)
            if len(outcome.told("end")) == 3:
                break
    assert_went_on(outcome, {1}, {0, 2, 3}, {2})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [REPLICAS, COPIES])
def test_a_standby_takes_the_place(how: dict[str, Any]) -> None:
    outcome = survive(5, "pp2dp2", Fault(1, "half", "kill", 2), **how)
    assert_went_on(outcome, {1}, {0, 2, 3}, {2})
    assert {layout for ((_, layout, _),) in outcome.told("done").values()} == {"pp2tp1dp2"}
    assert outcome.told("done").keys() == {0, 2, 3, 4}


@pytest.mark.timeout(60)
def test_a_node_that_is_lost_takes_several_ranks_along() -> None:
    outcome = survive(6, "pp2dp3", Fault(1, "half", "kill", 2), Fault(4, "half", "kill", 2))
    assert_went_on(outcome, {1, 4}, {0, 2, 3, 5}, {2})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("second", "where", "how"),
    [
        *((5, where, REPLICAS) for where in ("move", "commit")),
        *(pytest.param(5, where, REPLICAS, marks=WAITED_FOR) for where in ("alone", "rebuild")),
        (4, "move", COPIES),  # in the first layout no buddy of device 1
        pytest.param(4, "rebuild", COPIES, marks=WAITED_FOR),
    ],
)
def test_another_loss_while_the_job_recovers(second: int, where: str, how: dict[str, Any]) -> None:
    """It is lost in the recovery from the loss of device 1: there the phases come at iteration 2 again."""
    timeout_s = SHORT_S if where in ("alone", "rebuild") else TIMEOUT_S
    faults = Fault(1, "half", "kill", 2), Fault(second, where, "kill", 2)
    outcome = survive(6, "pp2dp3", *faults, timeout_s=timeout_s, **how)
    assert_went_on(outcome, {1, second}, {*range(6)} - {1, second}, {2})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [REPLICAS, COPIES])
def test_losses_one_after_the_other_until_one_is_left(how: dict[str, Any]) -> None:
    faults = [Fault(0, "forward", "kill", 1), Fault(3, "norm", "kill", 2), Fault(1, "gate passed", "kill", 3)]
    outcome = survive(4, "dp4", *faults, **how)
    assert outcome.error is None
    assert outcome.told("done") == {2: [(STEPS, "pp1tp1dp1", True)]}
    assert [told[0] for told in outcome.told("recovered")[2]] == [(0,), (3,), (1,)]


@pytest.mark.timeout(60)
def test_state_that_nobody_holds_any_more_is_named_on_all_survivors() -> None:
    outcome = survive(4, "pp2dp2", Fault(1, "half", "kill", 2), sharded=True)
    assert isinstance(outcome.error, StateLost)
    assert "exp_avg" in str(outcome.error)
    assert outcome.told("done") == {}


@pytest.mark.timeout(60)
def test_a_job_that_was_not_opened_to_survive_ends_with_the_loss() -> None:
    recipe = Recipe("pp2dp2", {}, STEPS, (Fault(1, "step", "kill", 2),), TIMEOUT_S)
    assert isinstance(play(4, recipe).error, PeerLost)


@pytest.mark.timeout(60)
def test_state_that_nobody_holds_any_more_comes_from_the_last_checkpoint() -> None:
    """A standby takes part: it holds nothing either."""
    fault = Fault(1, "half", "kill", 2)
    outcome = play(5, Recipe("pp2dp2", {}, STEPS, (fault,), TIMEOUT_S, survive=True, checkpoint=True))
    assert outcome.error is None, outcome
    assert outcome.told("recovered") == {device: [((1,), 1, "pp2tp1dp2", True)] for device in (0, 2, 3)}
    assert outcome.told("done") == {device: [(STEPS, "pp2tp1dp2", True)] for device in (0, 2, 3, 4)}
