"""Which settings a param group of the new layout gets from the groups that held its parameters."""

from __future__ import annotations

import pytest

from shardshift import Mismatch
from shardshift.adapters.groups import GroupRecord, Groups


def of(lr: float, *names: str, step: float | None = None) -> GroupRecord:
    return GroupRecord({"lr": lr, "betas": (0.9, 0.95)}, step, [], list(names))


def test_groups_of_several_ranks_that_agree_give_their_settings() -> None:
    carried = Groups({rank: [of(0.5, "a", "b", "c", step=3.0)] for rank in range(4)})
    assert carried.settings(["a", "b", "c"]) == {"lr": 0.5, "betas": (0.9, 0.95), "step": 3.0}


def test_a_copy_that_differs_is_named_with_the_first_parameter_that_it_holds() -> None:
    """Rank 1 holds the last parameter alone, among many that others hold."""
    carried = Groups({0: [of(0.5, "a", "b", "c"), of(0.5, "d")], 1: [of(0.25, "e")]})
    with pytest.raises(Mismatch, match=r"puts a and e into one param group, but their settings differ in \['lr'\]"):
        carried.settings(["a", "b", "c", "d", "e"])
    assert carried.settings(["a", "b", "c", "d"]) == {"lr": 0.5, "betas": (0.9, 0.95)}


def test_two_copies_of_one_parameter_that_differ_are_refused() -> None:
    """Also where the first parameter's copies agree, and where the first rank to differ is not the first to tell."""
    said = r"ranks 3 and 5 have b in param groups that differ in lr \(0\.5 and 0\.25\); nothing was moved"
    for first in (["a", "b"], ["b", "a"]):
        with pytest.raises(Mismatch, match=said):
            Groups({0: [of(0.5, "a")], 3: [of(0.5, "b")], 4: [of(0.5, "b")], 5: [of(0.25, "b")]}).settings(first)
    with pytest.raises(Mismatch, match="two groups of a differ in lr"):
        Groups({0: [of(0.5, "a"), of(0.25, "a")]}).settings(["a"])
    with pytest.raises(Mismatch, match=r"one copy is at optimizer step 3\.0, another at 4\.0"):
        Groups({0: [of(0.5, "a", step=3.0)], 1: [of(0.5, "a", step=4.0)]}).settings(["a"])


def test_a_group_without_a_step_takes_that_of_one_that_has_it() -> None:
    carried = Groups({0: [of(0.5, "a")], 1: [of(0.5, "b", step=3.0)]})
    found = carried.settings(["a", "b"])
    assert found is not None
    assert found["step"] == 3.0
