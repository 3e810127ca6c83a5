"""Fused matrices: every row stays the row that it was, however the matrix is cut and whatever it is fused with."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.cases.moves import arrive, box, cut, ranks, right, run_plan, tensor, walk

from shardshift.plan import make_plan
from shardshift.values import Kind, Layout, PlacedLayout, Shard, Tensor, Unaccounted, flat_range

KINDS = (Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def flat_shards(of: Tensor, start: int, stop: int) -> list[Shard]:
    return [Shard(of, region) for region in flat_range(of.shape, start, stop)]


@pytest.mark.parametrize("rows", [8, 5])
def test_gate_and_up_keep_their_order_however_many_replicas_cut_the_fused_matrix(rows: int) -> None:
    """The logical tensor is (2, rows, 4); a data parallel shard is a run of the 2 * rows fused rows."""
    whole = torch.stack([torch.arange(rows), 100 + torch.arange(rows)])[:, :, None].expand(2, rows, 4).float()
    values = {of: value for kind in KINDS for of, value in tensor("fc1", whole.contiguous(), kind).items()}

    def by_replica(ways: int) -> Layout:
        bounds = [min(-(-2 * rows // ways) * i, 2 * rows) * 4 for i in range(ways + 1)]
        return ranks(*[[s for of in values for s in flat_shards(of, a, b)] for a, b in itertools.pairwise(bounds)])

    def by_tensor_rank(ways: int) -> Layout:
        return ranks(
            *[[box(of, (0, 2), (rows * i // ways, rows * (i + 1) // ways)) for of in values] for i in range(ways)]
        )

    ways = (4, 2, 1, 8, 3, 1)
    for layout, (_, held) in zip(ways[1:], walk(values, *map(by_replica, ways)), strict=True):
        if layout == 1:
            ((shard, found),) = [(s, t) for s, t in held[0].items() if s.tensor.kind is Kind.EXP_AVG_SQ]
            assert found[:, :, 0].flatten().tolist() == [*range(rows), *range(100, 100 + rows)], shard
    arrive(values, by_replica(8), by_tensor_rank(2), by_tensor_rank(3), by_replica(3), by_tensor_rank(1))


@pytest.mark.parametrize(("heads", "groups", "ways"), [(8, 2, (2, 4, 1)), (12, 3, (3, 6, 12, 1, 6)), (8, 1, (1, 8, 2))])
def test_key_heads_that_tensor_ranks_share_are_one_head_and_not_many(
    heads: int, groups: int, ways: tuple[int, ...]
) -> None:
    """Heads of two rows; where there are more ranks than key heads, neighbours hold the same head whole."""
    values = tensor("q", torch.arange(heads * 8.0).reshape(heads, 2, 4))
    values |= tensor("k", 1000 + torch.arange(groups * 8.0).reshape(groups, 2, 4))
    q, k = values

    def role(rank: int, ways: int) -> list[Shard]:
        share = max(ways // groups, 1)
        first = rank // share * max(groups // ways, 1)
        return [
            box(q, (rank * heads // ways, (rank + 1) * heads // ways)),
            box(k, (first, first + max(groups // ways, 1))),
        ]

    def layout(ways: int) -> Layout:
        return ranks(*[role(rank, ways) for rank in range(ways)])

    for count, (plan, held) in zip(ways[1:], walk(values, *map(layout, ways)), strict=True):
        for rank, device in enumerate(plan.curr.devices):
            ((_, found),) = [(s, t) for s, t in held[device].items() if s.tensor is k or s.tensor == k]
            mine = rank * groups // count
            assert found.shape[0] == max(groups // count, 1)
            assert torch.equal(found[0], values[k][mine])


@pytest.mark.parametrize("rows", [24, 36])
def test_rows_declared_contiguous_are_cut_as_declared(rows: int) -> None:
    """The same 24 rows as above would be if nobody fused them: nothing is read off a shape."""
    values = tensor("fused", torch.arange(rows * 3.0).reshape(rows, 3))
    (of,) = values

    def layout(ways: int) -> Layout:
        return ranks(*[[box(of, (rows // ways * r, rows // ways * (r + 1)))] for r in range(ways)])

    for plan, held in walk(values, layout(1), layout(4), layout(3), layout(1), layout(4)):
        for rank, device in enumerate(plan.curr.devices):
            ((_, found),) = held[device].items()
            each = rows // plan.curr.layout.world_size
            assert found[:, 0].tolist() == [3.0 * row for row in range(each * rank, each * (rank + 1))]


@pytest.mark.parametrize(("apart", "fused"), [(2, 4), (4, 3), (1, 16)])
def test_matrices_that_are_joined_and_parted_again_come_back_bit_for_bit(apart: int, fused: int) -> None:
    """q, k, v cut by row apart; as one matrix of 16 rows cut by row; the shards are views of each rank's one buffer."""
    values = tensor("q", torch.randn(8, 4)) | tensor("k", torch.randn(4, 4)) | tensor("v", torch.randn(4, 4))
    begins = dict(zip(values, (0, 8, 12), strict=True))

    def separate() -> Layout:
        return ranks(
            *[
                [box(of, (of.shape[0] * r // apart, of.shape[0] * (r + 1) // apart)) for of in values]
                for r in range(apart)
            ]
        )

    def rows_of(rank: int) -> tuple[int, int]:
        return 16 * rank // fused, 16 * (rank + 1) // fused

    def joined_role(rank: int) -> list[Shard]:
        start, stop = rows_of(rank)
        return [
            box(of, (max(start, begin) - begin, min(stop, begin + of.shape[0]) - begin))
            for of, begin in begins.items()
            if max(start, begin) < min(stop, begin + of.shape[0])
        ]

    joined = ranks(*[joined_role(rank) for rank in range(fused)])
    before = PlacedLayout(separate(), tuple(range(apart)))
    there = make_plan(before, joined, devices=range(max(apart, fused)))
    buffers = {device: torch.full((16, 4), float("nan")) for device in there.devices}
    views = {
        device: {
            shard: buffers[device][begins[shard.tensor] + shard.region.offsets[0] :][: shard.region.shape[0]]
            for shard in there.curr.shards_on(device)
        }
        for device in there.devices
    }
    held = run_plan(there, cut(before, values), 48, views)
    assert right({d: held[d] for d in there.curr.devices}, there.curr, values)
    whole = torch.cat([values[of] for of in begins])
    for rank, device in enumerate(there.curr.devices):
        start, stop = rows_of(rank)
        kept = {refer.shard for refer in there.refers if refer.device == device}
        if not kept:
            assert torch.equal(buffers[device][start:stop], whole[start:stop])
            assert buffers[device][:start].isnan().all()
            assert buffers[device][stop:].isnan().all()
    back = make_plan(there.curr, before.layout, devices=range(max(apart, fused)))
    assert right(run_plan(back, held, 48), back.curr, values)


def test_a_shard_boundary_may_fall_inside_an_experts_gate() -> None:
    """Two experts of (gate and up, 3, hidden 4), 48 elements in a flat optimizer: ranges of 10, then of 16."""
    values = tensor("experts", torch.arange(48.0).reshape(2, 2, 3, 4), Kind.EXP_AVG)
    (of,) = values

    def flat(size: int) -> Layout:
        return ranks(*[flat_shards(of, a, min(a + size, 48)) for a in range(0, 48, size)])

    for plan, held in walk(values, flat(10), flat(16), flat(7), flat(1), flat(48), flat(5)):
        found = torch.cat(
            [held[device][s].flatten() for device in plan.curr.devices for s in plan.curr.shards_on(device)]
        )
        assert found.tolist() == list(range(48))


def test_a_matrix_fused_on_one_side_only_and_not_declared_so_is_refused_by_name() -> None:
    apart = tensor("q", torch.zeros(8, 4)) | tensor("k", torch.zeros(4, 4))
    (fused,) = tensor("qk", torch.zeros(12, 4))
    before = PlacedLayout(ranks([box(of) for of in apart]), (0,))
    with pytest.raises(Unaccounted, match="param:q, param:k"):
        make_plan(before, ranks([box(fused)]), devices=[0])
