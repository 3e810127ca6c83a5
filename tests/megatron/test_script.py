"""A job that new processes join, old ones leave and some are killed in goes on as it would through checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.megatron.scripted import PLAYS, check


@pytest.mark.timeout(240)
def test_losses_samples_and_rates_through_joins_leaves_and_kills_are_those_through_checkpoints(tmp_path: Path) -> None:
    outcome = check(replace(PLAYS["bf16, ZeRO-1, overlaps"], forked=True), tmp_path)
    kinds = Counter(type(change.event).__name__ for change in outcome.changes)
    assert kinds == {"To": 3, "Join": 3, "Leave": 3, "Kill": 3}
    # At the gate and in the optimizer's step the step in flight is lost. Between two steps it is the one before: its
    # parameters would have been gathered in the next forward.
    assert outcome.taken_again == [0, 0, 1]
    assert max(len(change.devices) for change in outcome.changes) == 6
    assert {*outcome.left}.isdisjoint(outcome.killed)
    assert len(outcome.left) + len(outcome.killed) == 9
