"""Rows, heads, layers and experts of described models: each with a value that says what it is, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.cases.described import KINDS, Side, live, local
from tests.cases.moves import cut, right, run_plan, walk
from tests.unit.strategies import inside

from shardshift.models import Catalogue, Experts, Model
from shardshift.plan import make_plan
from shardshift.values import Infeasible, Kind, ParallelConfig, PlacedLayout, Tensor, Unaccounted

FC1, KV, Q = (
    f"decoder.layers.0.{name}"
    for name in ("mlp.linear_fc1.weight", "self_attention.linear_qkv.weight[kv]", "self_attention.linear_qkv.weight[q]")
)
GATED = Model(layers=1, hidden=4, heads=8, kv_heads=2, head_dim=2, ffn=8, vocab=8, tied=True, vocab_divisor=1)


def whole_of(values: dict[Tensor, torch.Tensor], name: str, kind: Kind) -> Tensor:
    (found,) = [of for of in values if (of.kind, of.name) == (kind, name)]
    return found


@pytest.mark.parametrize("zero1", [False, True])
def test_gate_and_up_read_as_one_matrix_of_megatrons_for_every_target(zero1: bool) -> None:
    """fc1 = 8 rows of gate (0 to 7) and 8 of up (100 to 107): parameters, masters and moments obey the same order."""
    catalogue = Catalogue.of(GATED)
    values = live(catalogue.tensors)
    rows = torch.cat([torch.arange(8.0), 100 + torch.arange(8.0)])
    for kind in KINDS:
        of = whole_of(values, FC1, kind)
        values[of] = rows.reshape(2, 8, 1).expand(2, 8, 4).to(values[of].dtype).contiguous()
    walked = ["dp4", "dp2", "pp1", "dp8", "tp2dp3", "tp4", "tp8", "pp2tp2", "pp1"]
    layouts = [Side(text, zero1).of(catalogue) for text in walked]
    for text, (plan, held) in zip(walked[1:], walk(values, *layouts, staging_bytes=128), strict=True):
        config = ParallelConfig.parse(text)
        for rank, device in enumerate(plan.curr.devices):
            at = config.coordinate(rank)
            if at.pp == 0:
                fused = local(held, device, FC1).reshape(-1, 4)  # as Megatron has it in memory
                mine = torch.chunk(rows[:8], config.tp)[at.tp], torch.chunk(rows[8:], config.tp)[at.tp]
                assert fused[:, 0].tolist() == torch.cat(mine).tolist()
        for kind in KINDS:
            whole = torch.full((2, 8, 4), float("nan"))
            for device in plan.curr.devices:
                for shard, found in held[device].items():
                    if (shard.tensor.kind, shard.tensor.name) == (kind, FC1):
                        whole[inside(shard.region)] = found.float()
            assert whole.reshape(16, 4)[:, 1].tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        (replace(GATED, ffn=3), "tp2", r"ffn 3 .* tp 2, which cuts decoder\.layers\.0\.mlp\.linear_fc1\.weight"),
        (replace(GATED, ffn=9), "tp2", r"ffn 9 .* tp 2, which cuts decoder\.layers\.0\.mlp\.linear_fc1\.weight"),
        (replace(GATED, gated=False, ffn=6), "tp4", r"ffn 6 .* tp 4, which cuts decoder\.layers\.0\.mlp\.linear_fc1"),
        (GATED, "tp3", r"heads 8 .* tp 3, which cuts decoder\.layers\.0\.self_attention\.linear_qkv\.weight"),
        (replace(GATED, heads=12, kv_heads=3, ffn=12), "tp2", r"kv_heads 3 .* tp 2, which cuts .*linear_qkv"),
        (
            replace(GATED, layers=3, experts=Experts(4, 3, first_dense=2)),
            "tp2",
            r"ffn of an expert 3 .* etp 2, which cuts decoder\.layers\.2\.mlp\.experts\.linear_fc1\.weight",
        ),
        (
            replace(GATED, experts=Experts(6, 8)),
            "dp4ep4",
            r"experts 6 .* ep 4, which cuts decoder\.layers\.0\.mlp\.experts\.linear_fc1\.weight",
        ),
    ],
    ids=["F 3", "F 9", "without a gate", "heads", "key heads", "an expert's F", "experts"],
)
def test_a_cut_that_does_not_divide_is_refused_with_the_parameter_and_the_size(
    model: Model, config: str, text: str
) -> None:
    catalogue = Catalogue.of(model)
    catalogue.layout(ParallelConfig())
    with pytest.raises(Infeasible, match=f"{text}.*what to do"):
        catalogue.layout(ParallelConfig.parse(config))


@pytest.mark.parametrize("zero1", [False, True])
def test_key_and_value_heads_of_shared_groups_are_equal_and_come_together_as_one(zero1: bool) -> None:
    """8 query heads, 2 groups, head_dim 2, hidden 4."""
    catalogue = Catalogue.of(GATED)
    values = live(catalogue.tensors)
    walked = ["tp2", "tp4", "tp1", "tp8", "tp4dp2", "pp1tp2"]
    layouts = [Side(text, zero1).of(catalogue) for text in walked]
    for text, (plan, held) in zip(walked[1:], walk(values, *layouts, staging_bytes=64), strict=True):
        tp = ParallelConfig.parse(text).tp
        found = [local(held, device, KV) for device in plan.curr.devices[:tp]]
        whole = values[whole_of(values, KV, Kind.PARAM)]
        for rank, kv in enumerate(found):
            first, count = rank * 2 // tp, max(2 // tp, 1)
            assert torch.equal(kv.view(torch.int16), whole[first : first + count].view(torch.int16))
        if tp == 4:
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[2], found[3])
            assert not torch.equal(found[1], found[2])
        if tp == 1:
            k = found[0][:, :2].reshape(-1, 4)
            assert k.shape == (4, 4), "four rows of keys, not eight"


@pytest.mark.parametrize(
    ("layers", "walked"),
    [
        (10, [("pp1", None), ("pp3", None), ("pp3", (2, 5, 3)), ("pp1", None)]),
        (2, [("pp1", None), ("pp4", None), ("pp4", (0, 1, 0, 1)), ("pp2", (2, 0)), ("pp4vpp2", None)]),
        (8, [("pp4", None), ("pp2vpp2", None), ("pp4", None), ("pp2vpp4", None)]),
        (30, [("pp4", None), ("pp7vpp2", None), ("pp1vpp4", None)]),
        (70, [("pp12", None), ("pp5vpp3", (0, *range(2, 12), 1, 1, 1, 2)), ("pp3", None)]),
    ],
    ids=["10 over 3", "empty stages", "PP4 to PP2 x VPP2", "30 over 4", "70 over 12"],
)
def test_each_layer_lies_once_on_the_stage_of_its_chunk_and_is_itself(
    layers: int, walked: Sequence[tuple[str, tuple[int, ...] | None]]
) -> None:
    """Memory is full of NaN before; each layer is full of its number."""
    model = Model(layers=layers, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=2, vocab_divisor=1)
    catalogue = Catalogue.of(model, moments=False)
    values = live(catalogue.tensors)
    for of in values:
        if ".layers." in of.name:
            values[of] = torch.full(of.shape, float(of.name.split(".")[2]), dtype=torch.bfloat16)
    layouts = [Side(text, split=split).of(catalogue) for text, split in walked]
    for (text, split), (plan, held) in zip(walked[1:], walk(values, *layouts, staging_bytes=64), strict=True):
        config = ParallelConfig.parse(text)
        counts = split or [len(part) for part in torch.arange(layers).tensor_split(config.pp * config.vpp)]
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        for stage, device in enumerate(plan.curr.devices):
            mine = [
                layer for chunk in range(config.vpp) for v in [chunk * config.pp + stage]
                for layer in range(ends[v], ends[v + 1])
            ]  # fmt: skip
            found = {s.tensor.name: t for s, t in held[device].items() if ".layers." in s.tensor.name}
            assert sorted({int(name.split(".")[2]) for name in found}) == mine
            assert all((t == float(name.split(".")[2])).all() for name, t in found.items())


def test_ten_layers_over_three_stages_are_four_three_and_three_and_then_as_asked() -> None:
    catalogue = Catalogue.of(replace(GATED, layers=10), moments=False)
    for split, expected in ((None, [4, 3, 3]), ((2, 5, 3), [2, 5, 3])):
        layout = Side("pp3", split=split).of(catalogue)
        numbers = [
            {shard.tensor.name.split(".")[2] for shard in layout.shards(rank) if ".layers." in shard.tensor.name}
            for rank in range(3)
        ]
        assert [len(held) for held in numbers] == expected
        assert set.union(*numbers) == set(map(str, range(10)))


MOE = replace(GATED, layers=2, kv_heads=8, experts=Experts(4, 4))


@pytest.mark.parametrize("zero1", [False, True])
def test_an_expert_stays_itself_whatever_rank_counts_it_from_nought(zero1: bool) -> None:
    """EP 2 to 1 to 4 to 2 with the devices the other way round, to slices of experts, and back."""
    catalogue = Catalogue.of(MOE)
    values = live(catalogue.tensors)
    for of in values:
        if ".mlp.experts." in of.name:
            expert = torch.arange(4.0).reshape(4, *(1,) * (len(of.shape) - 1))
            values[of] = expert.expand(of.shape).to(values[of].dtype).contiguous()
    placed = PlacedLayout(Side("dp2ep2", zero1).of(catalogue), (1, 0))
    held = cut(placed, values)
    walked = [
        ("pp1", None), ("dp4ep4", None), ("dp2ep2", (3, 0)), ("dp2ep2", (0, 3)), ("dp4ep2etp2", (2, 0, 1, 3)),
        ("tp2dp2ep4etp1", None), ("dp4ep2", None),
    ]  # fmt: skip
    for text, placement in walked:
        plan = make_plan(placed, Side(text, zero1).of(catalogue), devices=range(4), placement=placement)
        held, placed = run_plan(plan, held, 128), plan.curr
        assert right({device: held[device] for device in placed.devices}, placed, values)
        config = ParallelConfig.parse(text)
        for rank, device in enumerate(placed.devices):
            experts = local(held, device, "decoder.layers.1.mlp.experts.linear_fc2.weight")
            first = config.expert_coordinate(rank).ep * len(experts)
            assert experts.amax((1, 2)).tolist() == [float(first + i) for i in range(len(experts))]
            assert experts.amin((1, 2)).tolist() == experts.amax((1, 2)).tolist()


def test_a_model_of_other_experts_or_layers_is_refused_by_the_names_that_are_new() -> None:
    eight = Catalogue.of(replace(MOE, experts=Experts(4, 4, shared_ffn=4)), moments=False)
    four = Catalogue.of(MOE, moments=False)
    prev = PlacedLayout(Side("dp2ep2").of(four), (0, 1))
    with pytest.raises(Unaccounted, match=r"only the new layout knows 4 tensors: .*layers\.0\.mlp\.shared_experts\."):
        make_plan(prev, Side("dp2ep2").of(eight), devices=[0, 1])
    longer = Catalogue.of(replace(MOE, layers=3), moments=False)
    with pytest.raises(Unaccounted) as refused:
        make_plan(prev, Side("dp2ep2").of(longer), devices=[0, 1])
    assert all(name.startswith("param:decoder.layers.2.") for name in refused.value.names)
