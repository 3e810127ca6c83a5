"""A Megatron job's weights and moments become an FSDP2 model's, under other names and unfused, and back again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.megatron.harness import run_processes, start_alone
from tests.megatron.training import corpus_of, make_adapter, optimizer_step, train_step, training
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardshift as ss
from shardshift.values import Kind, Region, Shard

Send = Callable[[Any], None]
HIDDEN, HEADS, GROUPS, LAYERS, VOCAB, FFN = 16, 4, 2, 2, 64, 64
HEAD = HIDDEN // HEADS
QUERIES = HEADS // GROUPS
"""Heads of a query group."""


class Layer(torch.nn.Module):
    """The parameters of a layer under the names of the Hugging Face Llama."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "wq": (HEADS * HEAD, HIDDEN),
            "wk": (GROUPS * HEAD, HIDDEN),
            "wv": (GROUPS * HEAD, HIDDEN),
            "wo": (HIDDEN, HIDDEN),
            "gate": (FFN, HIDDEN),
            "up": (FFN, HIDDEN),
            "down": (HIDDEN, FFN),
            "norm_1": (HIDDEN,),
            "norm_2": (HIDDEN,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, torch.nan)))

    def forward(self) -> None:
        """Never called."""


class Llama(torch.nn.Module):
    """All parameters of the job in ``RECIPE``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((VOCAB, HIDDEN), torch.nan))
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.Parameter(torch.full((HIDDEN,), torch.nan))

    def forward(self) -> None:
        """Never called."""


RECIPE = training(
    4, layers=LAYERS, hidden=HIDDEN, heads=HEADS, query_groups=GROUPS, swiglu=True, rms_norm=True, ffn=FFN
)
WHOLE = {
    "wo": "self_attention.linear_proj.weight",
    "down": "mlp.linear_fc2.weight",
    "norm_1": "input_layernorm.weight",
    "norm_2": "pre_mlp_layernorm.weight",
}


def megatrons(name: str, shape: tuple[int, ...]) -> str | Sequence[ss.fsdp.Part]:
    """What a parameter of ``Llama`` is in Megatron's logical tensors."""
    if name in ("embed", "norm"):
        return {"embed": "embedding.word_embeddings.weight", "norm": "decoder.final_layernorm.weight"}[name]
    _, number, key = name.split(".")
    prefix = f"decoder.layers.{number}"
    if key in WHOLE:
        return f"{prefix}.{WHOLE[key]}"
    if key in ("gate", "up"):  # SwiGLU: one dim more for the two halves
        half = Region((("gate", "up").index(key), 0, 0), (1, FFN, HIDDEN))
        return [ss.fsdp.Part(f"{prefix}.mlp.linear_fc1.weight", (2, FFN, HIDDEN), half)]
    rows, before = {"wq": (QUERIES * HEAD, 0), "wk": (HEAD, QUERIES * HEAD), "wv": (HEAD, (QUERIES + 1) * HEAD)}[key]
    group = (QUERIES + 2) * HEAD
    return [
        ss.fsdp.Part(
            f"{prefix}.self_attention.linear_qkv.weight",
            (GROUPS * group, HIDDEN),
            Region((index * group + before, 0), (rows, HIDDEN)),
            Region((index * rows, 0), (rows, HIDDEN)),
        )
        for index in range(GROUPS)
    ]


def whole_tensors(shards: dict[Shard, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every logical tensor of a job, put together from what all ranks have."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        parts, [(str(s.tensor), s.tensor.shape, s.region.offsets, t.clone()) for s, t in shards.items()]
    )
    found: dict[str, torch.Tensor] = {}
    for name, shape, offsets, tensor in (part for of_rank in parts for part in of_rank):
        whole = found.setdefault(name, torch.full(shape, torch.nan))
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return found


def unfused(megatron: dict[str, torch.Tensor], kind: str, layer: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer as Hugging Face has them, cut out of Megatron's by hand."""
    prefix = f"{kind}:decoder.layers.{layer}"
    qkv = megatron[f"{prefix}.self_attention.linear_qkv.weight"].view(GROUPS, QUERIES + 2, HEAD, HIDDEN)
    fc1 = megatron[f"{prefix}.mlp.linear_fc1.weight"].view(2, FFN, HIDDEN)
    return {
        "wq": qkv[:, :QUERIES].reshape(-1, HIDDEN),
        "wk": qkv[:, QUERIES].reshape(-1, HIDDEN),
        "wv": qkv[:, QUERIES + 1].reshape(-1, HIDDEN),
        "gate": fc1[0],
        "up": fc1[1],
    } | {name: megatron[f"{prefix}.{whole}"] for name, whole in WHOLE.items()}


def of_kind(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    """The whole of a parameter, or of its state."""
    tensor: Any = parameter.data if kind == "param" else optimizer.state[parameter][kind]
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def there_and_back(send: Send) -> None:
    """Train with Megatron, hand over to FSDP2, look, write other values there, hand back, train on."""
    adapter = make_adapter(RECIPE, corpus_of(RECIPE))
    job = start_alone(adapter, "pp2tp2dp1", "megatron")
    assert job is not None
    for _ in range(2):
        train_step(job)
        optimizer_step(job)
        adapter.advance(job)
    trained = whole_tensors(adapter.shards(job))

    model = Llama()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    get_state_dict(model, optimizer)  # makes the optimizer's state
    fsdp = ss.fsdp.Job(model, optimizer, names=megatrons)
    moved_bytes = ss.transfer(adapter.shards(job), ss.fsdp.shards(fsdp), timeout_s=30.0)
    send(("moved", moved_bytes))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for number, layer in enumerate(model.layers):
            for name, expected in unfused(trained, kind, number).items():
                assert torch.equal(of_kind(optimizer, layer.get_parameter(name), kind), expected), (
                    f"{kind} {number} {name}"
                )
        embedding = trained[f"{kind}:embedding.word_embeddings.weight"]
        assert torch.equal(of_kind(optimizer, model.embed, kind), embedding), kind

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    optimizer.zero_grad()
    ss.transfer(ss.fsdp.shards(fsdp), adapter.shards(job), timeout_s=30.0)
    back = whole_tensors(adapter.shards(job))
    for name, before in trained.items():
        expected = before * 2 if name.startswith("param:") else before
        assert torch.equal(back[name], expected), name
    loss = train_step(job)
    send(("loss", loss is None or bool(torch.isfinite(torch.tensor(loss)))))
    dist.barrier()
    adapter.retire(job)


def test_megatron_and_fsdp2_hand_their_state_to_each_other_under_names_that_the_user_maps() -> None:
    sent = run_processes(4, there_and_back)
    told: dict[str, set[Any]] = {}
    for _, (what, value) in sent:
        told.setdefault(what, set()).add(value)
    assert len(told["moved"]) == 1
    assert told["moved"] != {0}
    assert told["loss"] == {True}


def alone(tensors: dict[Shard, torch.Tensor], targets: dict[Shard, torch.Tensor], **options: Any) -> int:
    return ss.transfer(tensors, targets, **options)


def shard(name: str, *shape: int, kind: Kind = Kind.PARAM) -> tuple[Shard, torch.Tensor]:
    tensor = torch.rand(shape)
    return Shard(ss.Tensor(kind, name, shape, "float32", 4), Region.whole(shape)), tensor


@pytest.fixture
def _world() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
class TestOneRank:
    def test_what_only_the_sources_have_is_refused_or_dropped_by_name_or_kind(self) -> None:
        (weight, value), (moment, other) = shard("w", 3, 2), shard("w", 3, 2, kind=Kind.EXP_AVG)
        target = torch.full((3, 2), torch.nan)
        with pytest.raises(ss.Unaccounted, match="exp_avg:w"):
            alone({weight: value, moment: other}, {weight: target})
        assert target.isnan().all()
        for drop in (["exp_avg"], ["exp_avg:w"]):
            target.fill_(torch.nan)
            alone({weight: value, moment: other}, {weight: target}, drop=drop)
            assert torch.equal(target, value)

    def test_what_no_source_has_is_named(self) -> None:
        (weight, value), (bias, target) = shard("w", 3, 2), shard("b", 3)
        with pytest.raises(ss.Unaccounted, match="param:b"):
            alone({weight: value}, {weight: torch.empty(3, 2), bias: target})

    def test_a_tensor_that_is_not_its_shard_is_refused(self) -> None:
        weight, value = shard("w", 3, 2)
        with pytest.raises(ss.Mismatch, match=r"has shape \(2, 3\)"):
            alone({weight: value}, {weight: torch.empty(2, 3)})
        with pytest.raises(ss.Mismatch, match="float64"):
            alone({weight: value.double()}, {weight: torch.empty(3, 2)})

    def test_two_dtypes_of_one_tensor_are_refused(self) -> None:
        weight, value = shard("w", 3, 2)
        half = replace(weight, tensor=replace(weight.tensor, dtype="bfloat16", itemsize=2))
        with pytest.raises(ss.Mismatch, match="bfloat16"):
            alone({weight: value}, {half: torch.empty(3, 2, dtype=torch.bfloat16)})

    def test_a_target_that_cannot_hold_what_is_written_to_it_is_refused(self) -> None:
        (weight, value), (other, target) = shard("w", 3, 2), shard("b", 2)
        for bad, says in (
            (torch.empty(3, 2, device="meta"), "is on the meta device"),
            (torch.zeros(()).expand(3, 2), "is one element seen several times"),
            (value[:], "lies in memory of the source param:w"),
        ):
            target.fill_(torch.nan)
            with pytest.raises(ss.Mismatch, match=says):
                alone({weight: value, other: torch.ones(2)}, {other: target, weight: bad})
            assert target.isnan().all()
        alone({weight: value}, {weight: value})

    def test_targets_that_share_memory_in_part_are_refused(self) -> None:
        sources = dict([shard("w", 4), shard("b", 4)])
        memory = torch.full((6,), torch.nan)
        with pytest.raises(ss.Mismatch, match="share memory without being one tensor"):
            alone(sources, dict(zip(sources, (memory[:4], memory[2:]), strict=True)))
        assert memory.isnan().all()

    def test_targets_that_are_one_tensor_are_given_one_content_or_nothing(self) -> None:
        sources = dict([shard("emb", 4), shard("out", 4)])
        target = torch.full((4,), torch.nan)
        with pytest.raises(ss.Mismatch, match=r"param:emb.* and param:out.* are one tensor in the targets"):
            alone(sources, dict.fromkeys(sources, target))
        assert target.isnan().all()
        emb, out = sources
        sources[out] = sources[emb].clone()
        alone(sources, dict.fromkeys(sources, target))
        assert torch.equal(target, sources[emb])
