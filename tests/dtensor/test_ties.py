"""Names that stages of a pipeline tie, as far as each can, are one tensor of the whole job; on one they must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.dtensor.worlds import entry

from shardshift.adapters.dtensor.described import Text
from shardshift.adapters.dtensor.ties import one_name_each, renamed
from shardshift.values import Kind, Mismatch

Tie = tuple[str, ...]


def stage(*names: str, ties: tuple[Tie, ...] = ()) -> Text:
    """The text of a stage whose tensors go by these names, and have those of their ties."""
    return Text(tuple(entry(name, torch.zeros(3), None, Kind.BUFFER) for name in names), ties)


WHOLE = [stage("0", "own", ties=(("0", "1", "2", "3"),))]
HALVES = [stage("0", ties=(("0", "1"),)), stage("2", "own", ties=(("2", "3"),))]
QUARTERS = [stage("0"), stage("1"), stage("2"), stage("3", "own")]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (HALVES, WHOLE, {"1": "0", "2": "0", "3": "0"}),
        (WHOLE, HALVES, {"1": "0", "2": "0", "3": "0"}),
        (QUARTERS, WHOLE, {"1": "0", "2": "0", "3": "0"}),
        (QUARTERS, HALVES, {"1": "0", "3": "2"}),
        (HALVES, QUARTERS, {"1": "0", "3": "2"}),
        (HALVES, HALVES, {"1": "0", "3": "2"}),
        (QUARTERS, QUARTERS, {}),
        # Where the new job meets the names in another order, each tensor keeps the name of the old job's entry.
        ([stage("b", ties=(("b", "a"),))], [stage("a", ties=(("a", "b"),))], {"a": "b"}),
        # One of the names, and the other on no stage.
        ([stage("a", ties=(("a", "b"),))], [stage("b")], {"b": "a"}),
    ],
)
def test_each_stage_finds_the_entry_of_a_tensor_by_any_of_its_names(
    old: list[Text], new: list[Text], names: dict[str, str]
) -> None:
    assert one_name_each(old, new) == names
    before = {part.name for text in old for each in renamed(text, names).entries for part in each.parts}
    after = {part.name for text in new for each in renamed(text, names).entries for part in each.parts}
    assert after <= before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            [stage("a", ties=(("a", "b"),))],
            [stage("a", "b")],
            "a and b are one tensor in the old job and two in the new",
        ),
        (
            [stage("a", "b")],
            [stage("a", ties=(("a", "b"),))],
            "a and b are one tensor in the new job and two in the old",
        ),
        (
            [stage("c"), *HALVES],
            [stage("0"), stage("3", "2")],
            "3 and 2 are one tensor in the old job and two in the new",
        ),
    ],
)
def test_what_is_one_tensor_in_a_job_and_two_on_a_stage_of_the_other_is_refused(
    old: list[Text], new: list[Text], said: str
) -> None:
    with pytest.raises(Mismatch, match=f"{said} one; nothing was moved. What to do: tie them in both, or in neither"):
        one_name_each(old, new)


def test_a_tensor_that_the_user_calls_otherwise_keeps_that_name() -> None:
    plain = stage("a").entries[0]
    called = replace(plain, parts=(replace(plain.parts[0], name="weight"),))
    assert renamed(Text((called, plain), ()), {"a": "b"}).entries[0] == called
