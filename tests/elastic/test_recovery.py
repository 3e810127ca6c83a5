"""A job outlives lost ranks: whatever rank is lost, wherever in the step or in a change."""

from __future__ import annotations

import pytest
from tests.elastic.toy import Fault, Outcome, Recipe, play

from shardshift.values import PeerLost, StateLost

TIMEOUT_S = 4.0
STEPS = 4


def survive(
    devices: int, start: str, *faults: Fault, changes: dict[int, str] | None = None, sharded: bool = False
) -> Outcome:
    recipe = Recipe(
        start, changes or {}, steps=STEPS, faults=faults, timeout_s=TIMEOUT_S, survive=True, sharded=sharded
    )
    return play(devices, recipe)


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
@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize(
    ("where", "iterations"),
    [("forward", {2}), ("gate passed", {2}), ("half", {2}), ("norm", {2}), ("stepped", {2}), ("committed", {3})],
)
def test_the_rest_goes_on_from_the_last_whole_step(lost: int, where: str, iterations: set[int]) -> None:
    at = 3 if where == "committed" else 2
    outcome = survive(4, "pp2dp2", Fault(lost, where, "kill", at))
    assert_went_on(outcome, {lost}, {0, 1, 2, 3} - {lost}, iterations)
