"""Holders against brute force: per element the set of ranks that hold it, marked one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Model, Rule, even_grid, inside, layouts, models

from shardshift.plan import make_plan
from shardshift.plan.holders import Holders, buddies_of
from shardshift.values import Kind, Layout, PlacedLayout, Shard, Tensor


def holders(layout: Layout, copies: Mapping[int, Sequence[Shard]] | None = None) -> dict[Tensor, Any]:
    """Per tensor a boolean array of shape (ranks, *shape): who holds what, copies included."""
    marks = {tensor: np.zeros((layout.world_size, *tensor.shape), bool) for tensor in layout.tensors}
    for rank in range(layout.world_size):
        for shard in (*layout.shards(rank), *(copies or {}).get(rank, ())):
            marks[shard.tensor][(rank, *inside(shard.region))] = True
    return marks


def least(marks: dict[Tensor, Any], places: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor, of_rank in marks.items():
        if tensor.nbytes:
            at = [of_rank[[place == one for place in places]].any(axis=0) for one in sorted({*places})]
            losses = int(np.sum(at, axis=0).min()) - 1
            found[tensor.kind] = min(found.get(tensor.kind, losses), losses)
    return found


def brute_lonely(layout: Layout) -> list[tuple[Shard, ...]]:
    """Per rank."""
    count = {tensor: of_rank.sum(axis=0) for tensor, of_rank in holders(layout).items()}
    return [
        tuple(shard for shard in layout.shards(rank) if (count[shard.tensor][inside(shard.region)] == 1).any())
        for rank in range(layout.world_size)
    ]


def copies(layout: Layout, buddies: Sequence[int]) -> dict[int, list[Shard]]:
    given: dict[int, list[Shard]] = {}
    for shards, buddy in zip(brute_lonely(layout), buddies, strict=True):
        if buddy >= 0:
            given.setdefault(buddy, []).extend(shards)
    return given


any_layout = models().flatmap(lambda model: layouts(model, most_ranks=8))
some = settings(max_examples=60)


@some
@given(any_layout)
def test_lonely_shards_are_those_with_an_element_of_one_holder(layout: Layout) -> None:
    assert [Holders(layout).lonely(rank) for rank in range(layout.world_size)] == brute_lonely(layout)


@some
@given(any_layout, st.data())
def test_what_is_tolerated_is_counted_element_by_element(layout: Layout, data: st.DataObject) -> None:
    ranks = range(layout.world_size)
    nodes = [data.draw(st.integers(0, 3)) for _ in ranks]
    buddies = [data.draw(st.integers(-1, layout.world_size - 1)) for _ in ranks]
    assert Holders(layout).tolerates() == least(holders(layout), ranks)
    assert Holders(layout).tolerates(nodes) == least(holders(layout), nodes)
    with_copies = holders(layout, copies(layout, buddies))
    assert Holders(layout).tolerates(None, buddies) == least(with_copies, ranks)
    assert Holders(layout).tolerates(nodes, buddies) == least(with_copies, nodes)


@some
@given(any_layout, st.data())
def test_copies_are_held_once_beside_what_a_buddy_holds_itself(layout: Layout, data: st.DataObject) -> None:
    ranks = range(layout.world_size)
    buddies = [data.draw(st.integers(-1, layout.world_size - 1)) for _ in ranks]
    wards = {one: [rank for rank in ranks if buddies[rank] == one] for one in {*buddies} - {-1}}
    fuller = Holders(layout).with_copies(wards)
    assert fuller.tensors == layout.tensors
    expected = holders(layout, copies(layout, buddies))
    for tensor, marks in holders(fuller).items():
        assert (marks == expected[tensor]).all()
    for rank in ranks:
        assert {*layout.shards(rank)} <= {*fuller.shards(rank)}  # what it holds itself stays as it is


@some
@given(any_layout, st.data())
def test_with_buddies_any_one_loss_can_be_planned(layout: Layout, data: st.DataObject) -> None:
    if layout.world_size < 2:
        return
    devices = data.draw(st.permutations(range(layout.world_size + 1)))[: layout.world_size]
    buddies = buddies_of(devices, data.draw(st.integers(1, 4)))
    lost = data.draw(st.integers(0, layout.world_size - 1))
    prev = PlacedLayout(Holders(layout).with_copies({buddies[lost]: [lost]}), tuple(devices))
    rest = [device for device in range(layout.world_size + 1) if device != devices[lost]]
    plan = make_plan(prev, layout, devices=rest, lost=[devices[lost]])
    assert plan.curr.layout == layout


@given(st.sets(st.integers(0, 23), min_size=2), st.integers(1, 8), st.randoms(use_true_random=False))
def test_buddies_are_on_another_node_and_wards_are_shared_out(
    ids: set[int], devices_per_node: int, random: Any
) -> None:
    devices = sorted(ids)
    random.shuffle(devices)
    buddies = buddies_of(devices, devices_per_node)
    nodes = Counter(device // devices_per_node for device in devices)
    for rank, buddy in enumerate(buddies):
        assert buddy != rank
        if len(nodes) > 1:
            assert devices[buddy] // devices_per_node != devices[rank] // devices_per_node
    largest = max(nodes.values())
    others = len(devices) - largest
    fewest = -(-largest // others) if others else 1
    assert max(Counter(buddies).values()) == max(fewest, 1)
    by_device = {devices[rank]: devices[buddy] for rank, buddy in enumerate(buddies)}
    again = buddies_of(sorted(devices), devices_per_node)
    assert by_device == {device: sorted(devices)[again[i]] for i, device in enumerate(sorted(devices))}


def test_a_rank_by_itself_has_no_buddy() -> None:
    assert buddies_of([5], 4) == (-1,)
    assert buddies_of([], 4) == ()


@pytest.mark.parametrize(
    ("config", "expected"), [("dp2", {"param": 1, "exp_avg": 0}), ("tp2", {"param": 0, "exp_avg": 0})]
)
def test_a_distributed_optimizer_outlives_no_loss_whatever_dp_is(config: str, expected: dict[str, int]) -> None:
    weight = Tensor(Kind.PARAM, "w", (6, 4), "bfloat16", 2)
    moment = Tensor(Kind.EXP_AVG, "w", (6, 4), "float32", 4)
    layout = even_grid(Model(1, (Rule(weight, 0, 0), Rule(moment, 0, "flat"))), config)
    assert Holders(layout).tolerates() == expected
    assert Holders(layout).tolerates(None, buddies_of(range(2), 1)) == {"param": 1, "exp_avg": 1}
