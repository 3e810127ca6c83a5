"""Placements to boxes: what a rank holds is what torch's own splitting gives it, whatever the shape and the mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dtensor.worlds import at, coordinates, cuts, dtensor, every_rank, numbered, rank_of, torch_part
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardshift.adapters.dtensor.cuts import Cut, boxes, cuts_of
from shardshift.adapters.dtensor.live import held_by, live
from shardshift.values import Kind, Mismatch

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 12]), min_size=1, max_size=3)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    """A shape, a mesh and placements on it."""
    shape = draw(shapes)
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements = []
    for _ in mesh:
        dim, factor = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        placements.append(
            draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=factor)]))
        )
    return shape, mesh, placements


def put_together(whole: torch.Tensor, found: tuple[Any, ...]) -> torch.Tensor:
    """The local part that boxes say; an element that none writes, or two, shows."""
    stops = [box.local.stops for box in found]
    local = torch.full(tuple(map(max, zip(*stops, strict=True))), -1.0, dtype=whole.dtype)
    for box in found:
        assert (local[at(box.local)] == -1).all()
        local[at(box.local)] = whole[at(box.whole)]
    return local


@settings(max_examples=300)
@given(sharded())
def test_boxes_are_what_torch_splits_off(case: tuple[list[int], list[int], list[Placement]]) -> None:
    shape, mesh, placements = case
    whole = numbered(shape)
    for position in coordinates(mesh):
        found = boxes(shape, cuts(placements), mesh, position)
        assert torch.equal(put_together(whole, found), torch_part(whole, placements, mesh, position))


@settings(max_examples=100)
@given(sharded())
def test_what_shards_all_ranks_cut_off_covers_the_whole_once_per_replica(
    case: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = case
    count = torch.zeros(shape, dtype=torch.int64)
    for position in coordinates(mesh):
        for box in boxes(shape, cuts(placements), mesh, position):
            count[at(box.whole)] += 1
    copies = math.prod(size for size, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    assert (count == copies).all()


def test_a_tensor_of_no_dims_is_one_box() -> None:
    (box,) = boxes((), (), (2, 2), (1, 0))
    assert box.whole.shape == box.local.shape == ()


def test_several_runs_in_two_dims_are_their_product() -> None:
    strided = (Cut(0, 0, 3), Cut(1, 1, 2))
    found = boxes((6, 4), strided, (2, 2), (0, 1))
    assert [box.whole.offsets for box in found] == [(a, b) for a in (0, 2, 4) for b in (1, 3)]
    assert [box.local.offsets for box in found] == [(a, b) for a in (0, 1, 2) for b in (0, 1)]


def test_five_axes_and_sizes_beyond_32_bits_cost_arithmetic_alone() -> None:
    size = 2**33 + 1
    mesh = (2, 2, 2, 2, 2)
    along = tuple(Cut(0, axis) for axis in range(5))
    ends = [box.whole for position in coordinates(mesh) for box in boxes((size, 1), along, mesh, position)]
    assert sum(box.numel for box in ends) == size
    assert max(box.stops[0] for box in ends) == size


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(1)),
    ],
)
def test_a_dtensor_says_how_it_is_cut(placements: tuple[Placement, ...]) -> None:
    with rank_of({"dp": 2, "tp": 2}, 1) as mesh:
        assert cuts_of(dtensor(numbered((7, 5)), mesh, placements), "w") == cuts(placements)


def test_distribute_tensor_gives_every_rank_what_the_cuts_say() -> None:
    whole = numbered((7, 5))
    for placements in [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))]:

        def make(mesh: DeviceMesh, placements: tuple[Placement, ...] = placements) -> tuple[DTensor, Any]:
            return distribute_tensor(whole, mesh, placements, src_data_rank=None), mesh.get_coordinate()

        for found, position in every_rank({"dp": 2, "tp": 2}, make):
            (box,) = boxes(whole.shape, cuts_of(found, "w"), (2, 2), position)
            assert torch.equal(found.to_local(), whole[at(box.whole)])


@pytest.mark.parametrize("partial", [Partial(), Partial("avg"), Partial("max")])
def test_a_partial_tensor_is_refused_with_advice(partial: Placement) -> None:
    with rank_of({"dp": 2, "tp": 2}, 0) as mesh:
        summand = DTensor.from_local(torch.ones(4), mesh, (Replicate(), partial), run_check=False)
        with pytest.raises(Mismatch, match=r"exp_avg:w is partial .* axis 1 .* What to do: reduce it first"):
            cuts_of(summand, "exp_avg:w")


def test_a_placement_of_another_kind_is_refused_by_name() -> None:
    class Odd(Shard):
        pass

    with rank_of({"dp": 2}, 0) as mesh:
        odd = dtensor(numbered((4,)), mesh, (Shard(0),))
        odd._spec.placements = (Odd(0),)
        with pytest.raises(Mismatch, match=r"param:w has placement .* axis 0 .* no rule"):
            cuts_of(odd, "param:w")


class Pair(nn.Module):
    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(into, out), nn.Linear(out, into, bias=False)


def sharded_twice(out: int, into: int, mesh: DeviceMesh) -> nn.Module:
    """Two linear layers, one cut by tensor parallelism in dim 0 and one in dim 1, and both by FSDP2 in dim 0."""
    with torch.device("meta"):
        model = Pair(out, into)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


@pytest.mark.parametrize(("out", "dp", "tp"), [(8, 2, 2), (11, 3, 3), (7, 3, 2), (9, 4, 2), (5, 2, 4), (1, 2, 2)])
def test_fsdp_over_tensor_parallelism_holds_the_chunk_of_the_chunk_also_where_nothing_divides(
    out: int, dp: int, tp: int
) -> None:
    """The oracle chunks as tensor parallelism does, and what that leaves as FSDP2 does: both by torch.chunk."""

    def chunk(whole: torch.Tensor, ways: int, index: int, dim: int) -> torch.Tensor:
        chunks = whole.chunk(ways, dim) if whole.shape[dim] else (whole,)
        return chunks[index] if index < len(chunks) else whole.narrow(dim, whole.shape[dim], 0)

    def make(mesh: DeviceMesh) -> tuple[Any, Any]:
        return held_by([sharded_twice(out, 4, mesh)]).tensors, mesh.get_coordinate()

    seen = {"up.weight": 0, "up.bias": 0, "down.weight": 0}
    for tensors, position in every_rank({"dp": dp, "tp": tp}, make):
        for each in tensors:
            whole = numbered(each.shape)
            by_tp = chunk(whole, tp, position[1], 1 if each.name == "down.weight" else 0)
            expected = chunk(by_tp, dp, position[0], 0)
            # FSDP2 gives an empty part any shape.
            assert each.local.shape == expected.shape or not each.local.numel() + expected.numel(), (each, position)
            found = put_together(whole, boxes(each.shape, each.cuts, tuple(each.mesh.shape), position))
            assert torch.equal(found, expected), (each, position)
            seen[each.name] += found.numel()
    assert seen == {"up.weight": out * 4, "up.bias": out, "down.weight": out * 4}


def test_state_that_a_sharded_parameter_has_is_cut_as_the_parameter() -> None:
    """Of 11 rows over 3 x 3 the last is where tensor parallelism put it, also in moments that look like any DTensor."""
    with rank_of({"dp": 3, "tp": 3}, 8) as mesh:
        model = sharded_twice(11, 4, mesh)
        held = held_by([model])
        weight = next(each for each in held.tensors if each.name == "up.weight")
        moment = live(Kind.EXP_AVG, "up.weight", torch.zeros_like(held.parameters["up.weight"]), weight)
        assert (moment.cuts, moment.local.shape) == (weight.cuts, weight.local.shape)
        assert weight.cuts == (Cut(0, 1), Cut(0, 0))
