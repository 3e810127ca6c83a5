"""Placements of device meshes: two axes on one dim, shards that are uneven or empty, moments beside their parameter."""

from __future__ import annotations

import pytest
import torch
from tests.cases.moves import arrive, box, ranks, tensor, walk

from shardshift.plan import make_plan
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Tensor


def chunk(size: int, ways: int, index: int) -> tuple[int, int]:
    """Start and stop as ``torch.chunk`` has them: of equal size as far as it goes, the last are short or empty."""
    each = -(-size // ways)
    return min(each * index, size), min(each * (index + 1), size)


@pytest.mark.parametrize("size", [16, 14, 3])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 5)])
def test_tensor_ranks_first_then_replicas_on_one_dim_read_back_in_order(size: int, dp: int, tp: int) -> None:
    """Rank (dp, tp) holds the dp-th chunk of the tp-th chunk, so neighbours in dp are neighbours in the tensor."""
    values = tensor("w", torch.arange(float(size)))
    (of,) = values

    def strided(dp: int, tp: int) -> Layout:
        roles = []
        for replica in range(dp):
            for rank in range(tp):
                low, high = chunk(size, tp, rank)
                start, stop = chunk(high - low, dp, replica)
                roles.append([box(of, (low + start, low + stop))])
        return ranks(*roles)

    for plan, held in walk(values, strided(dp, tp), strided(1, 1), strided(dp, tp), strided(tp, dp)):
        for rank, device in enumerate(plan.curr.devices):
            ((shard, found),) = held[device].items()
            assert found.tolist() == list(range(shard.region.offsets[0], shard.region.stops[0])), rank
    if (size, dp, tp) == (16, 2, 2):
        assert [role[0].region.offsets[0] for role in strided(2, 2).roles] == [0, 8, 4, 12]


@pytest.mark.parametrize(("size", "ways"), [(6, (3, 4, 8, 1)), (1, (4, 1, 3)), (7, (64, 8, 5, 64)), (0, (2, 3, 1))])
def test_an_empty_shard_is_a_shard(size: int, ways: tuple[int, ...]) -> None:
    values = tensor("w", torch.arange(2.0 * size).reshape(size, 2))
    values |= tensor("w", torch.arange(2.0 * size).reshape(size, 2) + 100, Kind.EXP_AVG)
    values |= tensor("bias", torch.arange(float(size > 0)), Kind.EXP_AVG)

    def layout(count: int) -> Layout:
        return ranks(*[[box(of, chunk(of.shape[0], count, rank)) for of in values] for rank in range(count)])

    for plan, held in walk(values, *map(layout, ways)):
        for device in plan.curr.devices:
            assert len(held[device]) == len(values), "an entry for every tensor, whatever its size"
            assert {(s.region.numel == 0) == (t.numel() == 0) for s, t in held[device].items()} == {True}


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 9)])
def test_moments_follow_their_parameter_element_by_element(shape: tuple[int, int]) -> None:
    numel = shape[0] * shape[1]
    values: dict[Tensor, torch.Tensor] = {}
    for index, name in enumerate(("a", "b")):
        ids = (1000.0 * index + torch.arange(numel)).reshape(shape)
        values |= tensor(name, ids) | tensor(name, ids, Kind.EXP_AVG) | tensor(name, ids, Kind.EXP_AVG_SQ)

    def both(dp: int, tp: int) -> Layout:
        """Columns by tensor rank, rows by replica."""
        return ranks(
            *[
                [box(of, chunk(shape[0], dp, d), chunk(shape[1], tp, t)) for of in values]
                for d in range(dp)
                for t in range(tp)
            ]
        )

    for plan, held in walk(values, both(2, 2), both(4, 1), both(1, 4), both(3, 2), both(1, 1)):
        for device in plan.curr.devices:
            found = {(s.tensor.kind, s.tensor.name): t for s, t in held[device].items()}
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                assert all(torch.equal(found[kind, name], found[Kind.PARAM, name]) for name in ("a", "b"))


def test_copies_that_overlap_in_any_way_give_each_element_once() -> None:
    """Whole copies beside rows, columns and a window in the middle; then each of these alone."""
    values = tensor("w", torch.arange(35.0).reshape(5, 7))
    (of,) = values
    mixed = ranks([box(of)], [box(of, (0, 3))], [box(of, (0, 5), (2, 6))], [box(of, (1, 4), (3, 5))], [box(of, (2, 5))])
    windows = ranks([box(of, (0, 4), (0, 5))], [box(of, (1, 5), (2, 7))], [box(of, (0, 3), (4, 7))], [box(of, (3, 5))])
    grid = ranks(*[[box(of, (a, a + 1), (b, b + 1))] for a in range(5) for b in range(7)])
    arrive(values, windows, mixed, grid, mixed, windows, ranks([box(of)]), windows, staging_bytes=8)


@pytest.mark.parametrize(("old", "new"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_another_element_type_is_refused_and_never_cast(old: torch.dtype, new: torch.dtype) -> None:
    (before,), (after,) = (tensor("w", torch.tensor([1 + 2**-12], dtype=dtype)) for dtype in (old, new))
    name_of = [str(dtype).removeprefix("torch.") for dtype in (old, new)]
    with pytest.raises(Mismatch, match=rf"param:w: .*{name_of[0]} .*{name_of[1]}"):
        make_plan(PlacedLayout(ranks([box(before)]), (0,)), ranks([box(after)]), devices=[0])


def test_each_tensor_keeps_an_element_type_and_bits_of_its_own() -> None:
    """A master beside the int16 remainder that it is rebuilt from, and a router's fp32 bias beside bf16 parameters."""
    bits = torch.tensor([0x3F802000, -0x3F7FE000, 0x7F800001, 1], dtype=torch.int32)
    values = tensor("w", bits.view(torch.float32), Kind.MASTER)
    values |= tensor("w.remainder", (bits & 0xFFFF).to(torch.int16), Kind.MASTER)
    values |= tensor("w", (bits >> 16).to(torch.int16).view(torch.bfloat16))
    values |= tensor("expert_bias", torch.full((3,), 1 + 2**-12), Kind.BUFFER)

    def layout(ways: int) -> Layout:
        return ranks(*[[box(of, chunk(of.shape[0], ways, rank)) for of in values] for rank in range(ways)])

    arrive(values, layout(2), layout(3), layout(1), layout(4), layout(2), staging_bytes=8)
