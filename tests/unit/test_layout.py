"""Layouts: what they refuse, and that they survive JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from tests.unit.strategies import Move, moves

from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, Tensor, digest

WEIGHT = Tensor(Kind.PARAM, "w", (4, 3), "bfloat16", 2)


def rows(start: int, count: int) -> Shard:
    """Rows of the weight."""
    return Shard(WEIGHT, Region((start, 0), (count, 3)))


@settings(max_examples=30)
@given(moves())
def test_layouts_survive_json(move: Move) -> None:
    record = json.loads(json.dumps(move.prev.to_json()))
    assert PlacedLayout.from_json(record) == move.prev


def test_bytes_count_each_tensor_once() -> None:
    layout = Layout(((rows(0, 2),), (rows(2, 2),)), (0, 1, 0, 1))
    assert WEIGHT.nbytes == 24
    assert rows(0, 2).nbytes == 12
    assert layout.state_bytes == 24
    assert layout.tensors == (WEIGHT,)
    assert layout.shards(3) == (rows(2, 2),)


def test_a_device_without_a_rank_holds_nothing() -> None:
    placed = PlacedLayout(Layout(((rows(0, 4),),), (0,)), (7,))
    assert placed.shards_on(7) == (rows(0, 4),)
    assert placed.shards_on(0) == ()


def test_a_shard_lies_inside_its_tensor() -> None:
    with pytest.raises(Mismatch, match="not inside"):
        rows(3, 2)
    with pytest.raises(Mismatch, match="not inside"):
        Shard(WEIGHT, Region((0,), (4,)))


def test_a_role_holds_no_element_twice() -> None:
    with pytest.raises(Mismatch, match="overlap"):
        Layout(((rows(0, 3), rows(2, 2)),), (0,))


def test_all_roles_agree_on_a_tensor() -> None:
    other = Shard(Tensor(Kind.PARAM, "w", (4, 3), "float32", 4), Region.whole((4, 3)))
    with pytest.raises(Mismatch, match="role 1 describes it"):
        Layout(((rows(0, 2),), (other,)), (0, 1))


def test_ranks_name_roles_that_exist() -> None:
    with pytest.raises(Mismatch, match="outside"):
        Layout(((rows(0, 2),),), (0, 1))


@pytest.mark.parametrize("devices", [(0,), (0, 0)])
def test_every_rank_has_a_device_of_its_own(devices: tuple[int, ...]) -> None:
    with pytest.raises(Mismatch):
        PlacedLayout(Layout(((rows(0, 2),),), (0, 0)), devices)


def test_digests_do_not_depend_on_the_process() -> None:
    script = "from shardshift.values import digest; print(digest({'b': [1, 2], 'a': {'x': 'y'}}))"
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert run.stdout.strip() == digest({"a": {"x": "y"}, "b": [1, 2]})
