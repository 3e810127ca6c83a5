"""Copies of one tensor that differ: refused, or made one as the caller says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.together import together

from shardshift.engine import Mover, attempt, names_of
from shardshift.engine.readiness import Policy
from shardshift.values import Infeasible, Kind, Layout, Mismatch, PlacedLayout, Region, Shard, Tensor

NORM = Tensor(Kind.PARAM, "norm.weight", (4,), "float32", 4)
HALF = Tensor(Kind.PARAM, "half.weight", (2,), "bfloat16", 2)
COUNT = Tensor(Kind.BUFFER, "count", (1,), "int64", 8)
MATRIX = Tensor(Kind.PARAM, "matrix", (4, 3), "float32", 4)


def whole(tensor: Tensor) -> Shard:
    return Shard(tensor, Region.whole(tensor.shape))


def rows(low: int, high: int) -> Shard:
    return Shard(MATRIX, Region((low, 0), (high - low, 3)))


COMMON = (whole(NORM), whole(HALF))
TP2 = PlacedLayout(Layout([(*COMMON, rows(0, 2)), (*COMMON, rows(2, 4))], [0, 1]), (0, 1))
TP1 = PlacedLayout(Layout([(*COMMON, whole(MATRIX))], [0]), (0,))
DP3 = PlacedLayout(Layout([(*COMMON, whole(MATRIX))], [0, 0, 0]), (0, 1, 2))


def state_of(device: int, layout: PlacedLayout, norm: float) -> dict[str, torch.Tensor]:
    """All norms of a device have one value, and the matrix counts its elements."""
    matrix = torch.arange(12.0).reshape(4, 3)
    found = {}
    for name, shard in names_of(layout.shards_on(device)).items():
        if shard.tensor == MATRIX:
            start, count = shard.region.offsets[0], shard.region.shape[0]
            found[name] = matrix[start : start + count].clone()
        else:
            found[name] = torch.full(shard.region.shape, norm, dtype=getattr(torch, shard.tensor.dtype))
    return found


@pytest.mark.parametrize(("way", "expected"), [("first", 1.0), ("mean", 2.0)])
def test_norms_of_two_tensor_ranks_that_differ_become_one_as_the_caller_says(way: Any, expected: float) -> None:
    """Case 53: r0 = 1, r1 = 3."""

    def work(mover: Mover) -> Any:
        state = state_of(mover.device, TP2, (1.0, 3.0)[mover.device])
        before = {name: tensor.clone() for name, tensor in state.items()}
        found = mover.move(TP2, TP1, state, differing=way)
        assert all(torch.equal(state[name], before[name]) for name in before), "sources are only read"
        return found

    found = together((0, 1), work)
    assert found[1] == {}
    assert torch.equal(found[0]["norm.weight"], torch.full((4,), expected))
    assert torch.equal(found[0]["half.weight"], torch.full((2,), expected, dtype=torch.bfloat16))
    assert torch.equal(found[0]["matrix"], torch.arange(12.0).reshape(4, 3))


def test_they_are_refused_unless_the_caller_says_so() -> None:
    found = together((0, 1), lambda mover: mover.move(TP2, TP1, state_of(mover.device, TP2, float(mover.device))))
    for error in found.values():
        assert isinstance(error, Mismatch)
        assert "devices 0 and 1 hold different bits" in str(error)


def test_every_copy_of_three_is_the_same_afterwards_and_the_mean_is_that_of_torch() -> None:
    values = (0.1, 0.7, 1e-3)

    def work(mover: Mover) -> Any:
        return mover.move(DP3, DP3, state_of(mover.device, DP3, values[mover.device]), differing="mean")

    found = together((0, 1, 2), work)
    mean = (torch.tensor(values[0]) + torch.tensor(values[1]) + torch.tensor(values[2])) / 3
    for device in range(3):
        assert torch.equal(found[device]["norm.weight"], mean.expand(4))
    assert len({bytes(found[device]["half.weight"].view(torch.uint8).numpy()) for device in range(3)}) == 1


def test_what_does_not_differ_keeps_its_storage() -> None:
    def work(mover: Mover) -> bool:
        state = state_of(mover.device, DP3, 1.0)
        if mover.device == 1:
            state["half.weight"].fill_(2.0)
        found = mover.move(DP3, DP3, state, differing="first")
        assert torch.equal(found["half.weight"], torch.ones(2, dtype=torch.bfloat16))
        return found["norm.weight"].data_ptr() == state["norm.weight"].data_ptr()

    assert set(together((0, 1, 2), work).values()) == {True}


def test_a_whole_number_has_no_mean() -> None:
    layout = PlacedLayout(Layout([(whole(COUNT),)], [0, 0]), (0, 1))

    def work(mover: Mover) -> Any:
        return mover.move(layout, layout, {"count": torch.tensor([mover.device])}, differing="mean")

    for error in together((0, 1), work).values():
        assert isinstance(error, Mismatch)
        assert "int64 has no mean" in str(error)


def test_another_word_is_refused() -> None:
    def work(mover: Mover) -> Any:
        word: Any = "last"
        return mover.move(DP3, DP3, state_of(mover.device, DP3, 1.0), differing=word)

    assert {type(error) for error in together((0, 1, 2), work).values()} == {Infeasible}


def test_a_state_that_is_not_what_the_layout_says_is_refused_on_all() -> None:
    def work(mover: Mover) -> Any:
        state = state_of(mover.device, DP3, 1.0)
        if mover.device == 2:
            del state["matrix"]
        return mover.move(DP3, DP3, state, differing="first")

    assert {type(error) for error in together((0, 1, 2), work).values()} == {Mismatch}


@pytest.mark.parametrize("way", ["first", "mean"])
def test_what_is_one_tensor_under_two_names_stays_one(way: Any) -> None:
    """Also where only the bits of one of the names are compared first, and also if nothing has to move."""
    head = Tensor(Kind.PARAM, "head.weight", (4,), "float32", 4)
    both = PlacedLayout(Layout([(whole(NORM), whole(head))], [0, 0]), (0, 1))
    far = PlacedLayout(Layout([(whole(NORM), whole(head))], [0]), (2,))

    def work(mover: Mover) -> Any:
        tied = torch.full((4,), 1.0 + 2 * mover.device)
        state = {} if mover.device == 2 else {"norm.weight": tied, "head.weight": tied}
        stayed = mover.move(both, both, state, differing=way)
        moved = mover.move(both, far, state, differing=way)
        for found in (stayed, moved):
            assert not found or found["norm.weight"] is found["head.weight"]
        return [float(found["head.weight"][0]) for found in (stayed, moved) if found]

    expected = [1.0 if way == "first" else 2.0]
    assert together((0, 1, 2), work) == {0: expected, 1: expected, 2: expected}


def test_a_release_empties_the_callers_own_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who still held the old tensors would keep their memory. So, too, if nothing differs, and if auto chooses."""
    monkeypatch.setattr(attempt, "available_bytes", lambda devices: 0)
    cases: tuple[tuple[float, Policy], ...] = ((3.0, "release"), (1.0, "release"), (3.0, "auto"), (1.0, "auto"))

    def work(mover: Mover) -> Any:
        found = []
        for norm, policy in cases:
            state = state_of(mover.device, TP2, (1.0, norm)[mover.device])
            moved = mover.move(TP2, TP1, state, policy=policy, may_release=True, differing="first")
            assert state == {}, (norm, policy)
            found.append({name: float(tensor.float().sum()) for name, tensor in moved.items()})
        return found

    once = {"norm.weight": 4.0, "half.weight": 2.0, "matrix": 66.0}
    assert together((0, 1), work) == {0: [once] * 4, 1: [{}] * 4}


def test_what_is_moved_in_inference_mode_can_train_afterwards() -> None:
    def work(mover: Mover) -> Any:
        with torch.inference_mode():
            found = mover.move(TP2, TP1, state_of(mover.device, TP2, 1.0), policy="keep")
        return {name: tensor.is_inference() for name, tensor in found.items()}

    # What stays is the very tensor that was given, which was made in that mode.
    assert together((0, 1), work) == {0: {"norm.weight": True, "half.weight": True, "matrix": False}, 1: {}}
