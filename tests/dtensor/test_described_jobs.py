"""Texts that ranks tell one another, and the layout of all ranks from them: held to element masks and real DTensors."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dtensor.worlds import (
    at,
    coordinates,
    described_at_every_rank,
    dtensor,
    entry,
    layout,
    layout_at_every_rank,
    numbered,
    rank_of,
    torch_part,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardshift.adapters.dtensor.described import (
    Entry,
    Text,
    described,
    layout_of,
)
from shardshift.adapters.dtensor.live import held_by
from shardshift.adapters.dtensor.parts import Filled, Part, joined, parts_of
from shardshift.values import Kind, Mismatch, Region


@st.composite
def texts(draw: st.DrawFn) -> Text:
    entries = []
    for number in range(draw(st.integers(0, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
        name = f"{number}{draw(st.text(max_size=5))}"
        given = draw(st.sampled_from([None, lambda name, shape: f"model.{name}", _two_halves]))
        kind = draw(st.sampled_from([Kind.PARAM, Kind.BUFFER, Kind.EXP_AVG, Kind("odd_state")]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]))
        placements = tuple(
            draw(st.sampled_from([Replicate(), Shard(0), _StridedShard(0, split_factor=2)])) for _ in "ab"
        )
        whole = torch.empty(shape, dtype=dtype)
        entries.append(entry(name, whole, placements if shape else None, kind, given))
    return Text(tuple(entries), draw(st.sampled_from([(), (("a", "b"),), (("a", "b", "ü"), ("c", "d"))])))


def _two_halves(name: str, shape: tuple[int, ...]) -> Any:
    if not shape or shape[0] < 2:
        return Part(f"{name}.all")
    return joined({f"{name}.0": shape[0] // 2, f"{name}.1": shape[0] - shape[0] // 2}, shape)


@given(texts())
def test_a_text_that_has_travelled_is_the_same_text(text: Text) -> None:
    again = Text.of_body(text.body)
    assert again == text
    assert again.digest == text.digest
    assert json.loads(text.body) == json.loads(again.body)


def test_texts_that_differ_in_anything_have_different_digests() -> None:
    whole = torch.zeros(4, 2)
    base = entry("w", whole, (Shard(0),))
    others = [
        entry("v", whole, (Shard(0),)),
        entry("w", whole, (Shard(1),)),
        entry("w", whole, (Replicate(),)),
        entry("w", whole, None),
        entry("w", whole.double(), (Shard(0),)),
        entry("w", whole.T, (Shard(0),)),
        entry("w", whole, (Shard(0),), Kind.BUFFER),
        entry("w", whole, (_StridedShard(0, split_factor=2),)),
        entry("w", whole, (Shard(0),), names=lambda name, shape: "x"),
    ]
    digests = {Text((each,), ()).digest for each in (base, *others)} | {Text((base,), (("w", "x"),)).digest}
    assert len(digests) == len(others) + 2


@settings(max_examples=200)
@given(st.data())
def test_the_layout_of_all_ranks_is_the_mask_of_their_elements(data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 16))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=1, max_size=5))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4)),
    )
    placements = data.draw(st.tuples(*[placement] * len(mesh)))
    whole = numbered(shape)
    found = layout(mesh, [entry("w", whole, placements)])
    for rank, position in enumerate(coordinates(mesh)):
        mask = np.zeros(shape, np.int64)
        for shard in found.shards(rank):
            mask[at(shard.region)] += 1
        expected = np.isin(whole.numpy(), torch_part(whole, placements, mesh, position).numpy())
        assert np.array_equal(mask, expected)


def test_ranks_that_hold_alike_have_one_role_and_tensors_cut_alike_are_one_bundle() -> None:
    weights = [
        entry(f"{n}.weight", torch.zeros(8, 4), (Replicate(), Shard(0)), kind) for n in range(5) for kind in Kind
    ]
    found = layout((16, 4), weights)
    assert (found.role_count, len(found.rows), int(found.bundle_of.max())) == (4, 4, 0)
    assert found.world_size == 64


def big(ranks: int) -> tuple[Text, list[tuple[int, Any]]]:
    shapes = [(4096, 4096), (1024, 4096), (4096, 14336), (14336, 4096), (4096,), (128256, 4096), (1,)]
    entries = tuple(
        entry(f"layers.{number}.weight", torch.empty(shapes[number % 7], device="meta"), (Shard(0),), kind)
        for kind in (Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        for number in range(700)
    )
    return Text(entries, ()), [(0, (((ranks,), (rank,)),)) for rank in range(ranks)]


def test_a_thousand_ranks_of_700_parameters_and_their_moments_are_seven_bundles() -> None:
    text, ranks = big(1024)
    found = layout_of([text], ranks)
    assert (found.world_size, len(found.tensors), int(found.bundle_of.max()) + 1) == (1024, 2100, 7)
    whole = sum(math.prod(each.shape) * each.itemsize for each in text.entries)
    assert int(found.rank_bytes.sum()) == whole == found.state_bytes


def test_a_tensor_of_2_to_the_33_elements_and_one_of_no_elements_are_laid_out() -> None:
    huge = entry("w", torch.empty(2**33 + 3, 1, device="meta", dtype=torch.bfloat16), (Shard(0), Shard(0)))
    empty = entry("e", torch.empty(0, 7), (Shard(0), Shard(1)))
    found = layout((3, 5), [huge, empty, entry("s", torch.tensor(1.0), None)])
    assert found.state_bytes == 2 * (2**33 + 3) + 4
    assert int(found.rank_bytes.sum()) == 2 * (2**33 + 3) + 15 * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.norm(x)))
        return out


def built(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Any mix of tensor parallelism and FSDP2, HSDP included, with moments."""
    with torch.device("meta"):
        model = Net()
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if over := tuple(name for name in ("rep", "dp") if name in names):
        fully_shard(model, mesh=mesh[over])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return model, optimizer


@pytest.mark.parametrize(
    ("axes", "copies"),
    [
        ({"dp": 4}, 1),
        ({"dp": 8}, 1),
        ({"rep": 2, "dp": 2}, 2),
        ({"dp": 2, "tp": 2}, 1),
        ({"dp": 3, "tp": 2}, 1),
        ({"rep": 2, "dp": 2, "tp": 2}, 2),
        ({"tp": 3}, None),
    ],
)
def test_real_modules_of_all_ranks_together_hold_each_element_as_often_as_they_are_replicated(
    axes: dict[str, int], copies: int | None
) -> None:
    found = layout_at_every_rank(described_at_every_rank(axes, built))
    assert {(str(each), each.shape) for each in found.tensors if each.kind is Kind.PARAM} == {
        (f"param:{name}", tuple(parameter.shape)) for name, parameter in Net().named_parameters()
    }
    for tensor in found.tensors:
        count = np.zeros(tensor.shape, np.int64)
        for rank in range(found.world_size):
            for shard in found.shards(rank):
                if shard.tensor == tensor:
                    count[at(shard.region)] += 1
        if tensor.kind is Kind.BUFFER or copies is None:
            assert (count >= 1).all()
        elif axes.get("tp") and tensor.name.startswith("norm"):
            assert (count == copies * axes["tp"]).all()
        else:
            assert (count == copies).all(), tensor


def test_moments_are_laid_out_as_their_parameters() -> None:
    """Of both axes, whatever divides: role by role the same boxes."""
    found = layout_at_every_rank(described_at_every_rank({"dp": 2, "tp": 2}, built))
    for rank in range(4):
        boxes: dict[Kind, list[tuple[str, Region]]] = {}
        for shard in found.shards(rank):
            boxes.setdefault(shard.tensor.kind, []).append((shard.tensor.name, shard.region))
        assert boxes[Kind.PARAM] == boxes[Kind.EXP_AVG] == boxes[Kind.EXP_AVG_SQ]


def test_ranks_of_one_wrapping_have_one_text() -> None:
    found = described_at_every_rank({"rep": 2, "dp": 2, "tp": 2}, built)
    assert len({text.digest for text, _ in found}) == 1
    assert len({standing for _, standing in found}) == 8


def test_stages_of_a_pipeline_have_texts_of_their_own() -> None:
    def stage(mesh: DeviceMesh) -> nn.Module:
        number = mesh.get_local_rank("pp")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3))
        fully_shard(model, mesh=mesh["dp"])
        return nn.ModuleDict({str(number): model})

    found = described_at_every_rank({"pp": 2, "dp": 3}, stage)
    texts = [text.digest for text, _ in found]
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]
    whole = layout_at_every_rank(found)
    assert [tensor.name for tensor in whole.tensors] == ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]
    assert [len(whole.shards(rank)) for rank in range(6)] == [2] * 6


def one_tensor(tensor: Any) -> nn.Module:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(tensor, requires_grad=False))
    return model


@pytest.mark.parametrize(("ways", "local"), [(2, (4, 4)), (4, (8, 4))])
def test_a_part_sent_as_if_it_were_the_whole_is_refused_with_both_shapes(ways: int, local: tuple[int, ...]) -> None:
    """A global shape that the placement contradicts: local size times shards is not the global size."""
    with rank_of({"etp": ways}, 1) as mesh:
        wrong = dtensor(numbered((8, 4)), mesh, (Shard(0),))
        wrong._local_tensor = torch.zeros(local) if ways != 2 else torch.zeros(8, 4)
        held = held_by([one_tensor(wrong)])
        with pytest.raises(Mismatch, match=r"param:w of global shape \(8, 4\) on a mesh of .* at \(1,\) should have"):
            described(held.tensors, held.ties, None)


def test_an_uneven_shard_wrapped_without_its_global_shape_is_refused_with_advice() -> None:
    """from_local multiplies: 2 rows on rank 0 of 3 are 6, and rank 2 of a tensor of 5 has one."""
    with rank_of({"dp": 3}, 2) as mesh:
        guessed = DTensor.from_local(torch.zeros(1, 4), mesh, (Shard(0),), run_check=False)
        assert tuple(guessed.shape) == (3, 4)
        text, standing = described(held_by([one_tensor(guessed)]).tensors, (), None)
        assert text.entries[0].shape == (3, 4)
    with rank_of({"dp": 3}, 0) as mesh:
        guessed = DTensor.from_local(torch.zeros(2, 4), mesh, (Shard(0),), run_check=False)
        other, at_first = described(held_by([one_tensor(guessed)]).tensors, (), None)
    with pytest.raises(Mismatch, match=r"global shape .* on some ranks, .* on others"):
        layout_of([text, other], [(0, standing), (1, at_first)])


def test_a_padded_vocabulary_is_of_its_global_size_whatever_the_ranks() -> None:
    def embedding(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = nn.Embedding(56, 4)
        return parallelize_module(model, mesh["tp"], ColwiseParallel())

    for ways in (2, 1):
        (tensor,) = layout_at_every_rank(described_at_every_rank({"tp": ways}, embedding)).tensors
        assert tensor.shape == (56, 4)


def test_ranks_that_describe_one_tensor_differently_are_refused() -> None:
    one, other = (
        Text((entry("w", torch.zeros(4, dtype=dtype), None),), ()) for dtype in (torch.float32, torch.bfloat16)
    )
    with pytest.raises(Mismatch, match=r"param:w has .* dtype bfloat16 on some ranks, .* float32 on others"):
        layout_of([one, other], [(0, ()), (1, ())])


def test_two_live_tensors_that_are_the_same_part_are_refused() -> None:
    same = [entry(name, torch.zeros(4, 2), None, names=lambda name, shape: "w") for name in ("a", "b")]
    with pytest.raises(Mismatch, match=r"param:w: role 0 holds \[0:4, 0:2\] and \[0:4, 0:2\], which overlap"):
        layout((1,), same)


def test_a_mesh_that_a_rank_is_not_in_is_refused() -> None:
    with rank_of({"dp": 4}, 3) as mesh:
        there = DeviceMesh("cpu", mesh.mesh[:2], _init_backend=False)
        elsewhere = DTensor(torch.zeros(0), _spec(there), requires_grad=False)  # type: ignore[no-untyped-call]
        with pytest.raises(Mismatch, match=r"lies on a mesh of ranks .*, and this rank is none of them"):
            described(held_by([one_tensor(elsewhere)]).tensors, (), None)


def _spec(mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([4]), (1,), torch.float32))


def test_entries_of_dtensors_are_those_that_tests_make() -> None:
    """The tests of pairs of meshes make entries directly: they are what a live job's DTensors are described as."""
    placements: list[tuple[Placement, ...]] = [
        (Shard(0), Shard(0)),
        (Replicate(), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
    ]
    for number, placement in enumerate(placements):
        with rank_of({"a": 2, "b": 2}, number) as mesh:
            held = held_by([one_tensor(dtensor(numbered((7, 3)), mesh, placement))])
            text, standing = described(held.tensors, held.ties, None)
            assert text.entries == (entry("w", numbered((7, 3)), placement),)
            assert standing == (((2, 2), tuple(mesh.get_coordinate() or ())),)


def test_a_filled_part_says_what_it_is() -> None:
    of = Entry(Kind.PARAM, "w", (4,), "float32", 4, -1, (), parts_of("w", (4,), None))
    assert of.to_json()[-1] is None
    assert Entry.from_json(of.to_json()).parts == (Filled("w", (4,), Region((0,), (4,)), Region((0,), (4,))),)
