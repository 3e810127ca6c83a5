"""Names and parts: a live tensor is a list of boxes of logical tensors, element by element in row-major order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dtensor.worlds import at, numbered

import shardshift as ss
from shardshift.adapters.dtensor.parts import Filled, Part, groups, joined, matches, parts_of, stacked
from shardshift.values import Mismatch, Region


@st.composite
def same_elements(draw: st.DrawFn) -> tuple[list[int], list[int], Region]:
    """A live and a logical shape of as many elements, and a box of the live one."""
    logical = draw(st.lists(st.integers(1, 4), max_size=4))
    left, live = math.prod(logical), []
    while left > 1 and draw(st.booleans()):
        live.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= live[-1]
    live = draw(st.permutations([*live, left]))
    offsets = [draw(st.integers(0, size - 1)) for size in live]
    return live, logical, Region(tuple(offsets), tuple(draw(st.integers(1, n - o)) for n, o in zip(live, offsets)))  # noqa: B905


@settings(max_examples=300)
@given(same_elements())
def test_a_box_of_a_live_tensor_is_these_boxes_of_the_logical_one(case: tuple[list[int], list[int], Region]) -> None:
    live, logical, box = case
    assert groups(live, logical)
    ours, theirs = numbered(live), numbered(logical)
    count = torch.zeros(live)
    part = Filled("x", tuple(logical), Region.whole(logical), Region.whole(live))
    for match in matches(part, box):
        assert torch.equal(ours[at(match.live)].flatten(), theirs[at(match.logical)].flatten())
        count[at(match.live)] += 1
    expected = torch.zeros(live)
    expected[at(box)] = 1
    assert torch.equal(count, expected)


@given(st.lists(st.integers(0, 4), max_size=4), st.lists(st.integers(0, 4), max_size=4))
def test_dims_in_groups_are_of_equal_size_and_all_there_are(live: list[int], logical: list[int]) -> None:
    found = groups(live, logical)
    if not found:
        assert live != logical
        assert math.prod(live) != math.prod(logical) or not math.prod(live)
        return
    assert [dim for ours, _ in found for dim in ours] == list(range(len(live)))
    assert [dim for _, theirs in found for dim in theirs] == list(range(len(logical)))
    for ours, theirs in found:
        assert math.prod(live[dim] for dim in ours) == math.prod(logical[dim] for dim in theirs)


def test_a_live_tensor_is_by_default_the_logical_one_of_its_name() -> None:
    assert parts_of("w", (3, 4), None) == (Filled("w", (3, 4), Region.whole((3, 4)), Region.whole((3, 4))),)
    assert parts_of("w", (3, 4), lambda name, shape: f"model.{name}")[0].name == "model.w"
    assert parts_of("w", (), None) == (Filled("w", (), Region((), ()), Region((), ())),)


def test_joined_parts_are_what_torch_cat_joins() -> None:
    whole = numbered((2, 9))
    parts = parts_of("qkv", (2, 9), lambda name, shape: joined({"q": 4, "k": 0, "v": 5}, shape, dim=1))
    found = [whole[at(part.at)] for part in parts]
    assert [part.shape for part in parts] == [(2, 4), (2, 0), (2, 5)]
    assert torch.equal(torch.cat(found, dim=1), whole)


def test_stacked_parts_are_what_torch_stack_stacks() -> None:
    whole = numbered((3, 2, 5))
    parts = parts_of("experts", (3, 2, 5), lambda name, shape: stacked(["e.0", "e.1", "e.2"], shape))
    assert [(part.name, part.shape) for part in parts] == [(f"e.{number}", (2, 5)) for number in range(3)]
    found = {part.name: torch.full(part.shape, -1.0, dtype=torch.float64) for part in parts}
    for part in parts:
        for match in matches(part, Region((0, 1, 2), (3, 1, 2))):
            found[part.name][at(match.logical)] = whole[at(match.live)].reshape(match.logical.shape)
    for number in range(3):
        assert torch.equal(found[f"e.{number}"][1, 2:4], whole[number, 1, 2:4])
        assert (found[f"e.{number}"] == -1).sum() == 8


def test_a_stack_of_numbers_is_of_logical_tensors_of_one_element() -> None:
    assert [part.shape for part in parts_of("b", (2,), lambda name, shape: stacked(["b.0", "b.1"], shape))] == [
        (1,),
        (1,),
    ]


def test_parts_in_any_order_fill_a_tensor() -> None:
    """Interleaved rows, as some fuse gate and up: row 2i is of the one, row 2i + 1 of the other."""

    def interleaved(name: str, shape: tuple[int, ...]) -> list[Part]:
        boxes = [(index % 2, index // 2, Region((index, 0), (1, shape[1]))) for index in range(shape[0])]
        half = (shape[0] // 2, shape[1])
        return [Part(("gate", "up")[odd], half, Region((row, 0), (1, shape[1])), box) for odd, row, box in boxes]

    whole = numbered((6, 2))
    found = {name: torch.full((3, 2), -1.0, dtype=torch.float64) for name in ("gate", "up")}
    for part in parts_of("w", (6, 2), interleaved):
        for match in matches(part, Region((1, 0), (4, 2))):
            found[part.name][at(match.logical)] = whole[at(match.live)]
    assert found["gate"].tolist() == [[-1, -1], [4, 5], [8, 9]]
    assert found["up"].tolist() == [[2, 3], [6, 7], [-1, -1]]


@pytest.mark.parametrize(
    ("shape", "given", "says"),
    [
        ((4, 4), [Part("a", at=Region((0, 0), (2, 4)))], "do not fill it exactly once"),
        ((4, 4), [Part("a", at=Region((0, 0), (3, 4))), Part("b", at=Region((2, 0), (1, 4)))], "exactly once"),
        ((4, 4), [], "do not fill it exactly once"),
        ((0, 4), [], "do not fill it exactly once"),
        ((4, 4), [Part("a", at=Region((0, 0), (5, 4)))], "boxes inside their tensors"),
        ((4, 4), [Part("a", at=Region((0,), (16,)))], "boxes inside their tensors"),
        ((4, 4), [Part("a", shape=(4, 3))], "boxes inside their tensors"),
        ((4, 4), [Part("a", shape=(2, 2), box=Region((1, 0), (2, 2)))], "boxes inside their tensors"),
        ((4, 4), [Part("a", shape=(16,), box=Region((0, 0), (4, 4)))], "boxes inside their tensors"),
        ((1,), [Part("a", box=Region((), ()))], r"the shape \(1,\)"),
        ((4,), None, "names= gives None for w"),
        ((4,), ["a", 3], "names= gives 3 for w"),
    ],
)
def test_parts_that_do_not_fit_are_refused(shape: tuple[int, ...], given: Any, says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        parts_of("w", shape, lambda name, shape: given)


def test_joined_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"q 4, k 4 add up to 8, dim 0 .* has 9"):
        ss.fsdp.joined({"q": 4, "k": 4}, (9, 2))


def test_a_stack_with_too_few_names_is_refused() -> None:
    with pytest.raises(Mismatch, match="2 names for a stack of 3"):
        ss.fsdp.stacked(["a", "b"], (3, 2))


def test_a_thousand_parts_are_held_against_one_another_in_one_sweep() -> None:
    """256 experts in each of four matrices: comparing all pairs would be half a million intersections."""
    names = [f"expert.{number}" for number in range(1024)]
    parts = parts_of("experts", (1024, 4, 4), lambda name, shape: stacked(names, shape))
    assert [part.name for part in parts] == names
    twice = [*parts[:-1], parts[0]]
    with pytest.raises(Mismatch, match="exactly once"):
        parts_of("e", (1024, 4, 4), lambda name, shape: [Part(one.name, one.shape, None, one.at) for one in twice])


def test_megatron_query_groups_are_the_rows_of_q_k_and_v() -> None:
    """Megatron keeps per group (q, q, k, v) together; two groups of head size 2 over hidden 3."""
    groups_, heads, size, hidden = 2, 2, 2, 3
    rows = (heads + 2) * size

    def fused(name: str, shape: tuple[int, ...]) -> list[Part]:
        found = []
        for group in range(groups_):
            start = group * rows
            for part, count in (("q", heads), ("k", 1), ("v", 1)):
                box = Region((group * count * size, 0), (count * size, hidden))
                found.append(Part(part, (groups_ * count * size, hidden), box, Region((start, 0), box.shape)))
                start += count * size
        return found

    q, k, v = (numbered((groups_ * count * size, hidden), number) for number, count in enumerate((heads, 1, 1)))
    per_group = [torch.cat([q[4 * g : 4 * g + 4], k[2 * g : 2 * g + 2], v[2 * g : 2 * g + 2]]) for g in range(groups_)]
    whole = torch.cat(per_group)
    values = {"q": q, "k": k, "v": v}
    for start, stop in itertools.combinations(range(groups_ * rows + 1), 2):
        box = Region((start, 1), (stop - start, 2))
        for part in parts_of("qkv", tuple(whole.shape), fused):
            for match in matches(part, box):
                assert torch.equal(whole[at(match.live)], values[part.name][at(match.logical)])
