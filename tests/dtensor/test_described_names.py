"""Layouts in logical names that are not the live ones, and the state that a new job will have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dtensor.test_described_jobs import built
from tests.dtensor.worlds import (
    at,
    coordinates,
    described_at_every_rank,
    entry,
    layout,
    numbered,
    torch_part,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from shardshift.adapters.dtensor.described import (
    Text,
    described,
    local_shape,
    pieces,
    with_state,
)
from shardshift.adapters.dtensor.live import live
from shardshift.adapters.dtensor.meshes import meshes_apart, torch_mesh
from shardshift.adapters.dtensor.parts import Part, joined, stacked
from shardshift.adapters.imagined import imagined_world
from shardshift.values import Kind, Layout, Mesh, Mismatch, Region, Tensor, Unaccounted


@settings(max_examples=100)
@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from(["stacked", "joined", "split"]), st.booleans())
def test_joined_and_stacked_tensors_are_laid_out_in_logical_names_also_where_a_rank_has_nothing(
    rows: int, ways: int, how: str, strided: bool
) -> None:
    """Every rank's shards are exactly its pieces, and tell each element of the logical tensors from every other."""

    def names(name: str, shape: tuple[int, ...]) -> Any:
        if how == "stacked":
            return stacked([f"e.{number}" for number in range(shape[0])], shape)
        if how == "joined":
            return joined({"q": shape[0] - shape[0] // 3, "k": shape[0] // 3}, shape)
        return Part("w", (shape[0] * 2, 2))

    whole = numbered((rows, 4))
    placements = (_StridedShard(0, split_factor=2) if strided else Shard(0), Shard(1))
    of = entry("w", whole, placements, names=names)
    logical = {part.name: torch.full(part.shape, -1.0, dtype=torch.float64) for part in of.parts}
    found = layout((ways, 2), [of])
    for rank, position in enumerate(coordinates((ways, 2))):
        standing = (((ways, 2), position),)
        local = torch_part(whole, placements, (ways, 2), position)
        own = list(pieces(of, standing))
        assert sorted(piece.shard for piece in own) == sorted(found.shards(rank))
        assert local_shape(of, standing) == tuple(local.shape)
        for piece in own:
            target = logical[piece.shard.tensor.name][at(piece.shard.region)]
            assert (target == -1).all()
            target.copy_(local[at(piece.local)].reshape(target.shape))
    if how == "stacked":
        assert torch.equal(torch.stack([logical[f"e.{number}"] for number in range(rows)]), whole)
    elif how == "joined":
        assert torch.equal(torch.cat([logical["q"], logical["k"]]), whole)
    else:
        assert torch.equal(logical["w"].reshape(rows, 4), whole)


def state(*kinds: str, dtype: str = "float32") -> dict[Kind, Tensor]:
    return {Kind(kind): Tensor(Kind(kind), "w", (4,), dtype, 4) for kind in kinds}


def test_a_new_text_gets_the_state_that_exists_and_in_its_dtype() -> None:
    text = Text((entry("w", torch.zeros(4, dtype=torch.bfloat16), (Shard(0),)), entry("b", torch.zeros(2), None)), ())
    found = with_state(text, {"w": state("exp_avg", "exp_avg_sq")})
    assert [(each.kind, each.name, each.dtype, each.cuts) for each in found.entries[2:]] == [
        (kind, "w", "float32", text.entries[0].cuts) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    ]
    assert with_state(text, {}) == text
    assert with_state(text, {"elsewhere": state("exp_avg")}) == text


@pytest.mark.parametrize(
    "other", [{}, state("exp_avg"), state("exp_avg", "sum"), state("exp_avg", "exp_avg_sq", dtype="bfloat16")]
)
def test_a_parameter_that_joins_what_was_stepped_differently_is_refused(other: dict[Kind, Tensor]) -> None:
    text = Text((entry("qk", torch.zeros(8), None, names=lambda name, shape: joined({"q": 4, "k": 4}, shape)),), ())
    with pytest.raises(Unaccounted, match="qk joins q, k, whose optimizer states differ"):
        with_state(text, {"q": state("exp_avg", "exp_avg_sq"), "k": other})


def test_parts_are_asked_for_once_for_a_parameter_and_its_state() -> None:
    asked: list[str] = []

    def names(name: str, shape: tuple[int, ...]) -> str:
        asked.append(name)
        return f"model.{name}"

    (text, _), *_ = described_at_every_rank({"dp": 1}, built, names)
    assert sorted(asked) == sorted({each.name for each in text.entries})
    assert all(each.parts[0].name == f"model.{each.name}" for each in text.entries)


def test_what_two_jobs_split_differently_is_one_layout_of_logical_tensors() -> None:
    """q, k, v apart on one side and fused on the other: both speak of the fused one's rows."""

    def apart(name: str, shape: tuple[int, ...]) -> Part:
        start = {"q": 0, "k": 8, "v": 12}[name]
        return Part("qkv", (16, 4), Region((start, 0), shape))

    split = [
        entry(name, torch.zeros(rows, 4), (Shard(0),), names=apart) for name, rows in (("q", 8), ("k", 4), ("v", 4))
    ]
    found = layout((2,), split)
    assert [tensor.shape for tensor in found.tensors] == [(16, 4)]
    assert [shard.region.offsets[0] for shard in found.shards(1)] == [4, 10, 14]
    assert isinstance(found, Layout)


def on(mesh: DeviceMesh) -> Any:
    """A replicated parameter's description."""
    weight = DTensor.from_local(torch.ones(2), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return described([live(Kind.PARAM, "w", weight)], (), None)


def test_a_mesh_whose_places_are_not_those_of_its_groups_is_refused_on_whoever_stands_elsewhere() -> None:
    """torch sorts the ranks of the groups that it makes, and FSDP2 goes by them."""
    for rank in range(2):
        with imagined_world(rank, 2), pytest.raises(Mismatch, match=r"param:w lies on .* \[1, 0\]; along axis 0"):
            on(DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",)))
    with meshes_apart():
        refused = {}
        for rank in range(4):
            with imagined_world(rank, 4):
                on(DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp")))
                made = torch_mesh(Mesh({"dp": 2, "tp": 2}, [1, 0, 3, 2]), "cpu")
                assert made is not None
                _, ((_, found),) = on(made)
                assert made.mesh[found].item() == rank
                try:
                    on(made._flatten("all"))
                except Mismatch as error:
                    refused[rank] = str(error)
        assert list(refused) == [0, 1, 2, 3]
        assert "number 1 of the mesh and 0 of the group" in refused[0]
