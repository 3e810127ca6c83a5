"""Slots: where a local tensor lies in a logical one, held against plain cutting of numbered tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift import Kind, Mismatch
from shardshift.adapters.megatron.names import EMBEDDING, Named, named_modules, named_parameters, named_tensors
from shardshift.adapters.megatron.slots import Cut, Local, Whole, state_of, weight


def local_of(tensor: torch.Tensor, name: str = "w") -> Local:
    return Local(Named(name, (0, name), tensor, True, False), True, False, None, False)


def cut_parameter(shape: tuple[int, ...], dim: int, stride: int) -> torch.Tensor:
    parameter = torch.empty(shape, device="meta")
    marks: Any = parameter
    marks.tensor_model_parallel, marks.partition_dim, marks.partition_stride = True, dim, stride
    return parameter


@st.composite
def cut_matrices(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """A numbered whole matrix, and dim, stride and ways of its cut."""
    dim, stride, ways = draw(st.integers(0, 1)), draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    shape[dim] *= stride * ways
    return torch.arange(math.prod(shape)).reshape(shape), dim, stride, ways


def megatrons_slice(whole: torch.Tensor, dim: int, stride: int, ways: int, index: int) -> torch.Tensor:
    """As Megatron cuts it when it loads a whole weight."""
    parts: list[torch.Tensor] = [part.chunk(ways, dim)[index] for part in whole.chunk(stride, dim)]
    return torch.cat(parts, dim)


@given(cut_matrices(), st.integers(1, 5), st.data())
def test_ranges_of_all_owners_hold_every_element_of_a_slice_once(
    matrix: tuple[torch.Tensor, int, int, int], owners: int, data: st.DataObject
) -> None:
    whole, dim, stride, ways = matrix
    index = data.draw(st.integers(0, ways - 1))
    mine = megatrons_slice(whole, dim, stride, ways, index)
    parameter = cut_parameter(tuple(mine.shape), dim, stride)
    wholes = {"w": Whole(tuple(whole.shape), parameter.dtype, True)}
    slot = weight(local_of(parameter), "w", wholes, Cut(ways, index), None)

    bounds = sorted(data.draw(st.lists(st.integers(0, mine.numel()), min_size=owners - 1, max_size=owners - 1)))
    seen = []
    for start, stop in zip([0, *bounds], [*bounds, mine.numel()], strict=True):
        if start == stop:
            continue
        held = state_of(slot, Kind.EXP_AVG, torch.float32, (start, stop))
        local = mine.reshape(-1)[start:stop].clone()
        numbered = whole.reshape(slot.pieces[0].shard.tensor.shape)
        tensors = held.views(local)
        assert len(tensors) <= 2 * mine.dim() + 1
        for shard, view in tensors.items():
            box = tuple(slice(a, a + n) for a, n in zip(shard.region.offsets, shard.region.shape, strict=True))
            assert torch.equal(view, numbered[box])
            seen.append(view.reshape(-1))
        parts = {shard: view.clone() for shard, view in tensors.items()}
        joined = torch.empty(held.shape, dtype=torch.long)
        for piece in held.pieces:
            piece.view(joined).copy_(parts[piece.shard])
        assert torch.equal(joined, local)
    assert torch.equal(torch.cat(seen).sort().values, mine.reshape(-1).sort().values)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.data())
def test_padding_of_the_vocabulary_lies_in_no_piece(rows: int, ways: int, hidden: int, data: st.DataObject) -> None:
    each = -(-rows // ways) + data.draw(st.integers(0, 3))
    whole = torch.arange(rows * hidden).reshape(rows, hidden)
    found = []
    for index in range(ways):
        parameter = cut_parameter((each, hidden), 0, 1)
        wholes = {EMBEDDING: Whole((rows, hidden), parameter.dtype, True)}
        slot = weight(local_of(parameter, EMBEDDING), EMBEDDING, wholes, Cut(ways, index), rows)
        padded = torch.full((each, hidden), -1)
        mine = whole[index * each : (index + 1) * each]
        padded[: len(mine)] = mine
        middle = data.draw(st.integers(1, each * hidden))
        for start, stop in ((0, middle), (middle, each * hidden)):
            if start < stop:
                held = state_of(slot, Kind.EXP_AVG, torch.float32, (start, stop))
                views = held.views(padded.reshape(-1)[start:stop].clone()).values()
                found += [view.reshape(-1) for view in views]
    assert torch.equal(torch.cat(found).sort().values, whole.reshape(-1))


def test_a_joined_range_lies_where_it_lay_if_it_is_a_tensor_of_its_own() -> None:
    parameter = cut_parameter((4, 6), 0, 1)
    slot = weight(local_of(parameter), "w", {"w": Whole((8, 6), parameter.dtype, True)}, Cut(2, 0), None)
    held = state_of(slot, Kind.EXP_AVG, torch.float32, (6, 18))
    (shard,) = (piece.shard for piece in held.pieces)
    own = torch.arange(12.0)
    assert held.join(held.views(own)).data_ptr() == own.data_ptr()
    part = torch.arange(24.0)[6:18]  # of a larger buffer: keeping it would keep the rest
    joined = held.join({shard: part.view(2, 6)})
    assert torch.equal(joined, part)
    assert joined.untyped_storage().nbytes() == 12 * 4


def test_a_cut_that_does_not_make_the_global_shape_is_refused_by_name() -> None:
    undeclared = torch.empty(4, 6, device="meta")
    wholes = {"w": Whole((8, 6), undeclared.dtype, True)}
    with pytest.raises(Mismatch, match=r"w: local shape \(4, 6\), cut 1 ways .* \(8, 6\)"):
        weight(local_of(undeclared), "w", wholes, Cut(2, 0), None)
    with pytest.raises(Mismatch, match="in the model of this rank, but not in the same model"):
        weight(local_of(undeclared, "v"), "v", wholes, Cut(1, 0), None)


class Layer(torch.nn.Module):
    def __init__(self, number: int, experts: int) -> None:
        super().__init__()
        self.layer_number = number
        self.norm = torch.nn.LayerNorm(2)
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        self.mlp.experts.num_local_experts = experts  # type: ignore[assignment]
        self.mlp.experts.local_experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(3))


def chunk_of(numbers: list[int], experts: int = 0) -> torch.nn.Module:
    chunk = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList(Layer(number, experts) for number in numbers)
    chunk.output_layer = torch.nn.Linear(2, 2, bias=False)
    return chunk


def test_names_have_global_numbers_of_layers_and_experts() -> None:
    chunks = [chunk_of([3, 4], experts=2), chunk_of([11, 12], experts=2)]
    names = {named.name for named in named_tensors(chunks, ep_rank=3)}
    for layer in (2, 3, 10, 11):
        assert f"decoder.layers.{layer}.norm.weight" in names
        assert f"decoder.layers.{layer}.bias" in names
        for expert in (6, 7):
            assert f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.weight" in names
    assert len(names) == 1 + 4 * (2 + 1 + 2 * 2)
    experts = {named.name for named in named_tensors(chunks) if named.is_expert}
    assert experts == {name for name in (n.name for n in named_tensors(chunks)) if "local_experts" in name}
    assert "decoder.layers.10.mlp.experts.local_experts.7" in dict(named_modules(chunks, 3))


def test_a_copy_that_is_marked_as_shared_is_the_embedding() -> None:
    chunk: Any = chunk_of([1])
    assert "output_layer.weight" in {named.name for named in named_parameters([chunk])}
    chunk.output_layer.weight.shared = True
    assert EMBEDDING in {named.name for named in named_parameters([chunk])}
