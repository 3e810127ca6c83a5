"""Layers in stages and chunks, experts on ranks: each arrives once, under the number that it has in the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.cases.moves import arrive, box, ranks, tensor, walk
from tests.unit.strategies import identities, inside, state_of

from shardshift.plan import make_plan
from shardshift.schedule import compile_programs
from shardshift.simulator import execute
from shardshift.values import Layout, Mismatch, PlacedLayout, Tensor, Unaccounted

Chunks = Sequence[Sequence[int]]


def interleaved(layers: int, stages: int, chunks: int) -> list[list[int]]:
    """Layers of each stage where each has several chunks that take turns, as Megatron numbers them."""
    each = layers // (stages * chunks)
    return [
        [
            layer
            for chunk in range(chunks)
            for layer in range((chunk * stages + stage) * each, (chunk * stages + stage + 1) * each)
        ]
        for stage in range(stages)
    ]


@pytest.mark.parametrize(
    ("layers", "splits"),
    [
        (8, [interleaved(8, 4, 1), interleaved(8, 2, 2)]),
        (8, [interleaved(8, 2, 2), interleaved(8, 4, 1), interleaved(8, 2, 4), interleaved(8, 1, 1)]),
        (12, [[[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11]], interleaved(12, 3, 2), interleaved(12, 2, 3)]),
        (30, [interleaved(30, 1, 1), [list(range(a, min(a + 8, 30))) for a in range(0, 30, 8)], interleaved(30, 5, 2)]),
        (70, [[list(range(70 * i // 12, 70 * (i + 1) // 12)) for i in range(12)], interleaved(70, 7, 2)]),
        (2, [[[0], [1]], [[], [0, 1], [], []], [[], [], [], [1, 0]], [[0], [], [], [1]]]),
    ],
    ids=["PP4 to PP2 x VPP2", "and back", "uneven", "30 over 4", "70 over 12", "empty stages"],
)
def test_chunks_that_take_turns_get_the_layers_of_their_global_numbers(layers: int, splits: list[Chunks]) -> None:
    values: dict[Tensor, torch.Tensor] = {}
    for layer in range(layers):
        values |= tensor(f"layers.{layer}", torch.full((3,), float(layer)))
    names = list(values)

    def layout(split: Chunks) -> Layout:
        return ranks(*[[box(names[layer]) for layer in stage] for stage in split])

    for split, (plan, held) in zip(splits[1:], walk(values, *map(layout, splits), staging_bytes=12), strict=True):
        found = [
            sorted({int(value) for t in held[device].values() for value in t.tolist()}) for device in plan.curr.devices
        ]
        assert found == [sorted(stage) for stage in split]


def test_the_listed_interleaving_is_megatrons() -> None:
    assert interleaved(8, 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("first", [(0, 1), (1, 0)])
def test_an_expert_is_known_by_its_global_number_whatever_its_rank_calls_it(first: tuple[int, int]) -> None:
    values: dict[Tensor, torch.Tensor] = {}
    for expert in range(12):
        values |= tensor(f"experts.{expert}", torch.full((2, 3), float(expert)))
    names = list(values)

    def layout(ways: int, backwards: bool = False) -> Layout:
        roles = [[box(names[e]) for e in range(12 * r // ways, 12 * (r + 1) // ways)] for r in range(ways)]
        return ranks(*(reversed(roles) if backwards else roles))

    walked = [layout(2), layout(1), layout(4), layout(2, backwards=True), layout(3, backwards=True), layout(6)]
    for plan, held in walk(values, *walked, first=first):
        for device in plan.curr.devices:
            for shard, found in held[device].items():
                assert torch.equal(found, torch.full((2, 3), float(shard.tensor.name.removeprefix("experts."))))
    again = make_plan(PlacedLayout(layout(4), range(4)), layout(4, backwards=True), devices=range(4))  # type: ignore[arg-type]
    assert again.moved_bytes == 0, "with the same experts on other ranks nothing moves between devices"


def test_experts_stacked_on_one_side_are_told_apart_on_the_other_where_that_is_declared() -> None:
    """A stack (4, 8, 4) is the logical tensor; an expert of its own is a box of depth one."""
    values = tensor("experts", torch.arange(128.0).reshape(4, 8, 4))
    (of,) = values
    stacked = ranks([box(of)])
    unstacked = ranks(*[[box(of, (e, e + 1)) for e in (2 * r, 2 * r + 1)] for r in range(2)])
    sliced = ranks(*[[box(of, (0, 4), (2 * r, 2 * r + 2))] for r in range(4)])
    arrive(values, stacked, unstacked, sliced, stacked, sliced, unstacked)


def test_experts_stacked_on_one_side_only_are_refused_where_that_is_not_declared() -> None:
    (stack,) = tensor("experts", torch.zeros(4, 8, 4))
    single = [of for e in range(4) for of in tensor(f"experts.{e}", torch.zeros(8, 4))]
    before = PlacedLayout(ranks([box(stack)]), (0,))
    with pytest.raises(Unaccounted, match="param:experts") as refused:
        make_plan(before, ranks([box(of) for of in single]), devices=[0])
    assert refused.value.names == ("param:experts",)


def test_a_slice_that_is_declared_as_if_it_were_whole_is_refused_with_both_shapes() -> None:
    """Two expert tensor ranks hold four of eight rows each, and one of the sides takes four for all."""
    (half,), (whole,) = tensor("fc1", torch.zeros(4, 4)), tensor("fc1", torch.zeros(8, 4))
    before = PlacedLayout(ranks([box(half)], [box(half)]), (0, 1))
    with pytest.raises(Mismatch, match=r"\(4, 4\) .* \(8, 4\)"):
        make_plan(before, ranks([box(whole)]), devices=[0, 1])


def test_layers_that_no_stage_of_the_old_layout_held_are_refused_by_name() -> None:
    """The division that forgets the remainder: ten layers over three stages of three."""
    values: dict[Tensor, torch.Tensor] = {}
    for layer in range(10):
        values |= tensor(f"layers.{layer}", torch.zeros(2))
    names = list(values)
    forgetful = ranks(*[[box(names[layer]) for layer in range(3 * s, 3 * s + 3)] for s in range(3)])
    whole = ranks([box(of) for of in names])
    for before, after, where in ((forgetful, whole, "new"), (whole, forgetful, "old")):
        with pytest.raises(Unaccounted, match=rf"only the {where} layout knows 1 tensors: param:layers\.9;"):
            make_plan(PlacedLayout(before, tuple(range(before.world_size))), after, devices=range(3))


def test_an_order_of_ranks_turned_round_changes_where_layers_are_and_not_what_they_are() -> None:
    values: dict[Tensor, torch.Tensor] = {}
    for layer in range(6):
        values |= tensor(f"layers.{layer}", torch.full((2,), float(layer)))
    names = list(values)
    layout = ranks(*[[box(names[2 * s]), box(names[2 * s + 1])] for s in range(3)])
    prev = PlacedLayout(layout, (4, 2, 0))
    state = state_of(prev, identities(layout))
    plan = make_plan(prev, layout, devices=(4, 2, 0), placement=(0, 2, 4))
    found = execute(compile_programs(plan, 8), state)
    for rank, device in enumerate((0, 2, 4)):
        for shard in layout.shards(rank):
            assert np.array_equal(found[device][shard], identities(layout)[shard.tensor][inside(shard.region)])
