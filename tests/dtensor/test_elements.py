"""Kinds of change that go wrong elsewhere, element by element: each number says which element of which tensor it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.dtensor.worlds import Locals, Rank, carry, coordinates, entry, layout_of_ranks, numbered, ranks, torch_part
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardshift.adapters.dtensor.parts import Names, Part, joined, stacked
from shardshift.plan import make_plan
from shardshift.values import Kind, Mismatch, PlacedLayout, Region, Unaccounted

Wholes = dict[tuple[Kind, str], torch.Tensor]
Placed = Sequence[Placement]
STATE = (Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def with_moments(name: str, whole: torch.Tensor) -> Wholes:
    """A parameter and its moments, each with numbers of its own."""
    return {(kind, name): whole + 10_000 * number for number, kind in enumerate(STATE)}


def side(mesh: Sequence[int], wholes: Wholes, placements: Placed, names: Names | None = None) -> list[Rank]:
    """The ranks of a mesh that cut all tensors in one way."""
    return ranks(mesh, [entry(name, whole, placements, kind, names) for (kind, name), whole in wholes.items()])


def parts(mesh: Sequence[int], wholes: Wholes, placements: Placed) -> list[Locals]:
    """What its ranks hold, by torch's own splitting."""
    return [
        {key: torch_part(whole, placements, mesh, position) for key, whole in wholes.items()}
        for position in coordinates(mesh)
    ]


def holds(found: Sequence[Locals], expected: Sequence[Locals]) -> bool:
    """Whether ranks hold exactly this, bit for bit and in these dtypes."""
    return all(
        one.keys() == other.keys()
        and all(one[key].dtype is other[key].dtype and torch.equal(one[key], other[key]) for key in other)
        for one, other in zip(found, expected, strict=True)
    )


def walk(wholes: Wholes, *steps: tuple[Sequence[int], Placed]) -> list[Locals]:
    """Through some ways of cutting, each arrived at right; what the last one gave."""
    (mesh, placements), *rest = steps
    of, found = side(mesh, wholes, placements), parts(mesh, wholes, placements)
    for mesh, placements in rest:
        target = side(mesh, wholes, placements)
        _, found = carry(of, found, target)
        assert holds(found, parts(mesh, wholes, placements))
        of = target
    return found


ROWS = [*range(8), *range(100, 108)]
"""Of a fused gate and up: 8 gate rows, then 8 up rows."""


@pytest.mark.parametrize("ways", [1, 2, 8, 3, 16, 5])
def test_a_fused_matrix_sharded_over_data_parallel_ranks_reads_back_in_order(ways: int) -> None:
    fused = torch.tensor(ROWS, dtype=torch.float64)[:, None].expand(16, 4).clone()
    found = walk(with_moments("fc1", fused), ((4,), [Shard(0)]), ((ways,), [Shard(0)]))
    for number, kind in enumerate(STATE):
        whole = torch.cat([local[kind, "fc1"] for local in found])
        assert (whole[:, 0] - 10_000 * number).tolist() == ROWS


@pytest.mark.parametrize(("before", "after"), [((2,), (4,)), ((1,), (3,)), ((4, 2), (2, 1))])
def test_gate_and_up_apart_become_one_fused_matrix_whatever_the_shards(before: Any, after: Any) -> None:
    """Two matrices on one side; [gate | up] on the other; and interleaved row by row."""
    gate, up = numbered((8, 4)), numbered((8, 4), 1)
    apart: Wholes = {**with_moments("gate", gate), **with_moments("up", up)}
    place: dict[int, Placed] = {1: [Shard(0)], 2: [_StridedShard(0, split_factor=2), Shard(0)]}

    def interleaved(name: str, shape: tuple[int, ...]) -> list[Part]:
        return [
            Part(("gate", "up")[row % 2], (8, 4), Region((row // 2, 0), (1, 4)), Region((row, 0), (1, 4)))
            for row in range(16)
        ]

    def one_behind_the_other(name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        return joined({"gate": 8, "up": 8}, shape)

    forms: list[tuple[Names, torch.Tensor]] = [
        (one_behind_the_other, torch.cat([gate, up])),
        (interleaved, torch.stack([gate, up], dim=1).reshape(16, 4)),
    ]
    for names, fused in forms:
        old, new = (
            side(before, apart, place[len(before)]),
            side(after, with_moments("fc1", fused), place[len(after)], names),
        )
        _, found = carry(old, parts(before, apart, place[len(before)]), new)
        assert holds(found, parts(after, with_moments("fc1", fused), place[len(after)]))
        _, again = carry(new, found, old)
        assert holds(again, parts(before, apart, place[len(before)]))


def test_a_contiguous_matrix_of_24_rows_goes_to_four_ranks_by_six_rows() -> None:
    """Declared as one matrix, not guessed to be q, k and v from its shape."""
    whole = numbered((24, 4))
    found = walk(
        {(Kind.PARAM, "qkv"): whole}, ((2,), [Shard(0)]), ((4,), [Shard(0)]), ((1,), [Shard(0)]), ((4,), [Shard(0)])
    )
    for rank, local in enumerate(found):
        assert torch.equal(local[Kind.PARAM, "qkv"], whole[6 * rank : 6 * rank + 6])


@pytest.mark.parametrize(("ways", "then"), [(2, 4), (1, 1), (3, 5), (8, 2)])
def test_q_k_and_v_apart_become_one_matrix_and_come_back_bit_for_bit(ways: int, then: int) -> None:
    q, k, v = numbered((8, 4)), numbered((4, 4), 1), numbered((4, 4), 2)
    apart = {**with_moments("q", q), **with_moments("k", k), **with_moments("v", v)}
    fused = with_moments("qkv", torch.cat([q, k, v]))

    def names(name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        return joined({"q": 8, "k": 4, "v": 4}, shape)

    old, new = side((ways,), apart, [Shard(0)]), side((then,), fused, [Shard(0)], names)
    _, found = carry(old, parts((ways,), apart, [Shard(0)]), new)
    assert holds(found, parts((then,), fused, [Shard(0)]))
    _, again = carry(new, found, old)
    assert holds(again, parts((ways,), apart, [Shard(0)]))


@pytest.mark.parametrize(("before", "after"), [(5, 3), (3, 7), (1, 48), (10, 1)])
def test_a_flat_range_that_ends_inside_an_experts_gate_finds_every_element_of_it(before: int, after: int) -> None:
    """Two experts of hidden 4 x (gate 3 + up 3), flat over the ranks of an optimizer; gate and up apart elsewhere."""

    def names(name: str, shape: tuple[int, ...]) -> list[Part]:
        return [
            Part(
                f"expert.{expert}.{half}", (4, 3), Region((row, 0), (1, 3)), Region((24 * expert + 6 * row + at,), (3,))
            )
            for expert, row, (half, at) in itertools.product(range(2), range(4), (("gate", 0), ("up", 3)))
        ]

    flat = with_moments("experts", numbered((48,)))
    old, new = (side((count,), flat, [Shard(0)], names) for count in (before, after))
    _, found = carry(old, parts((before,), flat, [Shard(0)]), new)
    assert torch.cat([local[Kind.PARAM, "experts"] for local in found]).tolist() == list(range(48))
    assert holds(found, parts((after,), flat, [Shard(0)]))

    blocks = numbered((48,)).reshape(2, 4, 2, 3)
    apart: Wholes = {}
    for expert, (half, at) in itertools.product(range(2), (("gate", 0), ("up", 1))):
        apart |= with_moments(f"expert.{expert}.{half}", blocks[expert, :, at].clone())
    _, unfused = carry(new, found, side((2, 2), apart, [Shard(0), Shard(1)]))
    assert holds(unfused, parts((2, 2), apart, [Shard(0), Shard(1)]))


def test_stacked_experts_go_to_experts_of_their_own_on_two_ranks() -> None:
    stack = with_moments("experts", numbered((4, 8, 4)))

    def names(name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        return stacked([f"experts.{number}" for number in range(4)], shape)

    old = side((2,), stack, [Shard(0)], names)
    new: list[Rank] = []
    expected: list[Locals] = []
    for first in (0, 2):
        own = {
            (kind, f"experts.{number}"): whole[number]
            for (kind, _), whole in stack.items()
            for number in (first, first + 1)
        }
        new.append(([entry(name, whole, None, kind) for (kind, name), whole in own.items()], ()))
        expected.append(own)
    _, found = carry(old, parts((2,), stack, [Shard(0)]), new)
    assert holds(found, expected)
    assert not any(torch.isnan(local).any() for of_rank in found for local in of_rank.values())
    _, again = carry(new, found, old)
    assert holds(again, parts((2,), stack, [Shard(0)]))
    undeclared = layout_of_ranks(side((2,), stack, [Shard(0)]))
    with pytest.raises(Unaccounted, match="experts"):
        make_plan(PlacedLayout(undeclared, (0, 1)), layout_of_ranks(new), devices=range(2))


def test_more_ranks_than_stacked_experts_hold_parts_of_them_or_nothing() -> None:
    stack = with_moments("experts", numbered((3, 4, 2)))

    def names(name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        return stacked([f"experts.{number}" for number in range(3)], shape)

    steps: list[tuple[Sequence[int], Placed]] = [((5,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((8,), [Shard(0)])]
    of, found = side(*steps[0][:1], stack, steps[0][1], names), parts(steps[0][0], stack, steps[0][1])
    for mesh, placements in steps[1:]:
        target = side(mesh, stack, placements, names)
        _, found = carry(of, found, target)
        assert holds(found, parts(mesh, stack, placements))
        of = target


def test_a_shard_declared_as_the_whole_is_refused_before_anything_moves() -> None:
    """Expert parts of (4, 4), declared with no placement: two tensors of other global shapes."""
    old = side((2,), {(Kind.PARAM, "fc1"): numbered((4, 4))}, [Replicate()])
    new = side((1,), {(Kind.PARAM, "fc1"): numbered((8, 4))}, [Replicate()])
    with pytest.raises(Mismatch, match="fc1"):
        make_plan(PlacedLayout(layout_of_ranks(old), (0, 1)), layout_of_ranks(new), devices=range(1))


def test_each_tensor_keeps_its_dtype_and_bits() -> None:
    """Router biases of 1 + 2^-12 in fp32 beside bf16 parameters, fp64 and integer state."""
    bias = torch.full((8,), 1 + 2**-12)
    wholes: Wholes = {
        (Kind.PARAM, "w"): (torch.arange(32.0) / 7).reshape(8, 4).bfloat16(),
        (Kind.BUFFER, "expert_bias"): bias,
        (Kind.EXP_AVG, "w"): torch.arange(32.0).reshape(8, 4) * (1 + 2**-20),
        (Kind("codes"), "w"): torch.arange(32, dtype=torch.int8).reshape(8, 4),
        (Kind("exact"), "w"): torch.arange(32, dtype=torch.float64).reshape(8, 4) + 2**-40,
        (Kind.BUFFER, "mask"): torch.arange(8, dtype=torch.int64) << 40,
    }
    walk(wholes, ((2,), [Shard(0)]), ((4,), [Shard(0)]), ((3, 2), [Shard(0), Replicate()]), ((1,), [Replicate()]))


def owned(wholes: Wholes, owners: Sequence[Sequence[str]]) -> tuple[list[Rank], list[Locals]]:
    """Ranks that hold whole matrices of their own."""
    held = [{key: whole for key, whole in wholes.items() if key[1] in own} for own in owners]
    return [([entry(name, whole, None, kind) for (kind, name), whole in own.items()], ()) for own in held], held


def test_whole_matrices_change_their_owners_with_whatever_state_they_have() -> None:
    momentum = Kind("momentum_of_newton_schulz")
    wholes: Wholes = {}
    for number, name in enumerate("ABC"):
        wholes |= {
            (kind, name): numbered((4 + number, 3), 10 * number + at) for at, kind in enumerate((Kind.PARAM, momentum))
        }
    for before, after in [
        (["AC", "B"], ["A", "B", "C"]),
        (["A", "B", "C"], ["", "ABC"]),
        (["ABC"], ["C", "", "A", "B"]),
    ]:
        (old, had), (new, expected) = owned(wholes, before), owned(wholes, after)
        plan, found = carry(old, had, new)
        assert holds(found, expected)
        moved = {
            name for rank, own in enumerate(after) for name in own if rank >= len(before) or name not in before[rank]
        }
        assert plan.moved_bytes == sum(8 * whole.numel() for (_, name), whole in wholes.items() if name in moved)


@pytest.mark.parametrize("to", [(1,), (2, 2), (4,), (3,)])
def test_fsdp_over_tensor_parallelism_on_one_dim_reads_back_in_order(to: tuple[int, ...]) -> None:
    strided: Placed = [_StridedShard(0, split_factor=2), Shard(0)]
    values = {(Kind.PARAM, "w"): numbered((16,))}
    first = parts((2, 2), values, strided)
    assert [local[Kind.PARAM, "w"].tolist() for local in first] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
        [4, 5, 6, 7],
        [12, 13, 14, 15],
    ]
    found = walk(values, ((2, 2), strided), (to, [Shard(0), Shard(0)][: len(to)]))
    assert torch.equal(torch.cat([local[Kind.PARAM, "w"] for local in found]), numbered((16,)))
    walk(values, (to, [Shard(0), Shard(0)][: len(to)]), ((2, 2), strided))


@pytest.mark.parametrize("axes", [(2, 3), (3, 2), (2, 2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("size", [16, 14, 7, 3, 1])
def test_strided_shards_of_what_nothing_divides_go_anywhere_and_back(axes: tuple[int, ...], size: int) -> None:
    strided: Placed = [
        *(_StridedShard(0, split_factor=math.prod(axes[axis + 1 :])) for axis in range(len(axes) - 1)),
        Shard(0),
    ]
    values = with_moments("w", numbered((size, 2)))
    plain: Placed = [Shard(0)] * len(axes)
    crossed: Placed = [Shard(1), *([Shard(0)] * (len(axes) - 1))]
    walk(values, (axes, strided), ((3,), [Shard(0)]), (axes, strided), (axes, plain), (axes, crossed), (axes, strided))


@pytest.mark.parametrize(
    ("size", "ways"), [(6, (3, 4, 8, 1)), (1, (4, 1, 3)), (7, (64, 8, 5, 64)), (0, (2, 3, 1)), (13, (4, 5, 6, 12, 13))]
)
def test_ranks_with_nothing_keep_their_entry_and_all_others_are_exact(size: int, ways: tuple[int, ...]) -> None:
    values = {**with_moments("w", numbered((size, 2))), (Kind.PARAM, "bias"): numbered((1,), 7)}
    for count in ways:
        found = walk(values, ((ways[0],), [Shard(0)]), ((count,), [Shard(0)]))
        each = -(-size // count)
        assert [len(local[Kind.EXP_AVG, "w"]) for local in found] == [
            max(0, min(each, size - each * rank)) for rank in range(count)
        ]
        assert [len(local[Kind.PARAM, "bias"]) for local in found] == [1] + [0] * (count - 1)


@pytest.mark.parametrize("back", [False, True])
def test_moments_follow_their_parameter_element_by_element(back: bool) -> None:
    """Coded as 1000 * parameter + flat index: TP 2 x DP 2 to DP 4, two parameters cut in different dims."""
    wholes = {
        (kind, name): numbered((8, 4), 10 * number + at)
        for number, name in enumerate("ab")
        for at, kind in enumerate(STATE)
    }
    two: Placed = [_StridedShard(0, split_factor=2), Shard(0)]
    cross: Placed = [Shard(0), Shard(1)]

    def both(mesh: Sequence[int], of_a: Placed, of_b: Placed) -> tuple[list[Rank], list[Locals]]:
        place = {"a": of_a, "b": of_b}
        entries = [entry(name, whole, place[name], kind) for (kind, name), whole in wholes.items()]
        held = [
            {key: torch_part(whole, place[key[1]], mesh, position) for key, whole in wholes.items()}
            for position in coordinates(mesh)
        ]
        return ranks(mesh, entries), held

    sides = [both((2, 2), two, cross), both((4,), [Shard(0)], [Shard(0)])]
    (old, had), (new, expected) = reversed(sides) if back else sides
    _, found = carry(old, had, new)
    assert holds(found, expected)


def test_a_size_1_axis_and_a_dim_of_size_1_change_nothing() -> None:
    values = with_moments("w", numbered((1, 6, 1)))
    walk(
        values,
        ((1, 2, 1), [Shard(0), Shard(1), Shard(2)]),
        ((2, 1), [Shard(2), Shard(0)]),
        ((1,), [Replicate()]),
        ((3, 1, 1, 2, 1), [Shard(1), Shard(0), Replicate(), Shard(1), Shard(1)]),
    )


def test_copies_cost_one_sending_each_and_what_is_there_stays() -> None:
    """HSDP 2 x 2 from FSDP 2: the first two ranks keep all, the two new ones get one copy each."""
    values = {(Kind.PARAM, "w"): numbered((8, 2))}
    old, new = side((2,), values, [Shard(0)]), side((2, 2), values, [Replicate(), Shard(0)])
    plan, found = carry(old, parts((2,), values, [Shard(0)]), new)
    assert holds(found, parts((2, 2), values, [Replicate(), Shard(0)]))
    assert plan.moved_bytes == 8 * 16
    assert plan.referred_bytes == 8 * 16
