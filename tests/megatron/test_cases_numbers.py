"""Where each element of a real job goes, told by numbers: element k holds k, so a misplaced one says whence.

Nothing is trained between changes, so numbers may be of any size. What a rank must hold is written down by hand where
the order inside a tensor is the point; elsewhere it is the oracle's slice of the numbered whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, Send, check, initialise, nothing, open_session, run_processes, walk
from tests.megatron.test_refusals import tensors as tensors_of
from tests.megatron.training import make_adapter, training

from shardshift import ParallelConfig, ShardshiftError
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo import held, oracle
from shardshift.demo.text import Corpus

Make = Callable[[Any, Corpus], Adapter]
Tell = Callable[[Job], Any]


def nothing_to_tell(job: Job) -> Any:
    return None


@dataclass(frozen=True, slots=True)
class Tour:
    """A job that goes from configuration to configuration, trains one step before the first change, and none after.

    Attributes:
        recipe: of ``training``; its steps do not count.
        configs: where it goes.
        adapter: makes the adapter.
        before: called with the job before each change.
        tell: what each rank says of its job, in each configuration after the first.
        train: whether the one step is trained.
    """

    recipe: jobs.Training
    configs: tuple[str, ...]
    adapter: Make = make_adapter
    before: Callable[[Job], None] = nothing
    tell: Tell = nothing_to_tell
    train: bool = True


@dataclass(slots=True)
class Seen:
    """What a tour gave.

    Attributes:
        told: per generation, per rank.
        refused: per iteration the errors.
        records: per generation the oracle's records by rank.
        touched: whether a refused change left anything otherwise than it was.
    """

    told: dict[int, dict[int, Any]]
    refused: dict[int, list[ShardshiftError]]
    records: dict[int, list[dict[str, Any]]]
    touched: bool = False

    def of(self, generation: int, kind: str, name: str) -> dict[int, torch.Tensor]:
        """One local tensor by rank, as it lies there."""
        return {
            record["rank"]: tensors[kind]
            for record in self.records[generation]
            for each, _, tensors, _, _ in record["tensors"]
            if each == name and kind in tensors
        }


def go(send: Send, tour: Tour, folder: Path) -> None:
    """The worker of ``seen``."""
    torch.set_num_threads(1)
    start, *others = tour.configs
    first = int(tour.train)
    scenario = Scenario(tour.recipe, start, {first + i: to for i, to in enumerate(others)}, tour.adapter)
    with open_session(scenario) as elastic:
        job, told = elastic.start(lambda job: initialise(scenario, job)), 0
        while job and job.iteration < first + len(others):
            if job.generation != told:
                told = job.generation
                oracle.save_rank(job, folder / str(told))
                send(("told", told, job.layout.rank, tour.tell(job)))
            if elastic.resize_due(job):
                tour.before(job)
                was, at = tensors_of(job), job.iteration
                try:
                    job = elastic.resize(job) or elastic.start()
                    continue
                except ShardshiftError as error:
                    refused = error
                assert job is not None
                same = all(oracle.same_bits(a, b) for a, b in zip(was, tensors_of(job), strict=True))
                send(("refused", at, refused.to_wire(), same))
            if job.iteration < first:
                jobs.train_step(job)
            with elastic.commit_step(job):
                if job.iteration < first:
                    jobs.optimizer_step(job)
        if job and job.generation != told:
            oracle.save_rank(job, folder / str(job.generation))
            send(("told", job.generation, job.layout.rank, tour.tell(job)))


def seen(tour: Tour, folder: Path) -> Seen:
    """Go on a tour."""
    devices = max(ParallelConfig.parse(config).world_size for config in tour.configs)
    found = Seen({}, {}, {})
    for _, message in run_processes(devices, go, tour, folder):
        match message:
            case ("told", int(generation), int(rank), said):
                found.told.setdefault(generation, {})[rank] = said
            case ("refused", int(iteration), str(wire), bool(same)):
                found.touched |= not same
                found.refused.setdefault(iteration, []).append(ShardshiftError.from_wire(wire))
    found.records = {
        generation: oracle.read_ranks(folder / str(generation), weights_only=False) for generation in found.told
    }
    return found


SIGN = {"param": 1, oracle.MASTER: 1, "exp_avg": -1, "exp_avg_sq": 2, "momentum_buffer": -1}


def numbered(kind: str, name: str, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor: elements 1, 2, 3, ... of a stretch of its own; exact in fp32."""
    first = 1 + zlib.crc32(name.encode()) % 500 * 8192
    return SIGN[kind] * torch.arange(first, first + prod(shape), dtype=torch.float32).view(*shape)


def number(job: Job) -> None:
    """Number everything once, before the first change."""
    if job.generation:
        return
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        shape, whole = one.parameter.shape, held.whole_shape(one)
        one.parameter.data.copy_(held.slice_of(numbered("param", one.name, whole), one.cut, shape))
        own = kept.get(one.parameter)
        if own is None:
            continue
        for kind, tensor in (own.state | ({} if own.main is one.parameter else {oracle.MASTER: own.main})).items():
            if kind != "step":
                local = held.slice_of(numbered(kind, one.name, whole), one.cut, shape)
                tensor.data.copy_(held.spanned(local, own.span))


def check_numbers(records: Sequence[dict[str, Any]], rows: int) -> int:
    """Hold every local tensor against the numbers; new padding beyond ``rows`` of the vocabulary is zero.

    Returns:
        How many tensors were looked at.
    """
    count = 0
    for record in records:
        for name, cut, tensors, _, more in record["tensors"]:
            whole = list(more["shape"])
            if cut is not None:
                whole[cut[0]] *= cut[2]
            if name in (held.EMBEDDING, held.OUTPUT):
                whole[0] = min(rows, whole[0])
            for kind, tensor in tensors.items():
                local = held.slice_of(numbered(kind, name, whole), cut, more["shape"])
                expected = held.spanned(local, more["spans"].get(kind)).to(tensor.dtype)
                assert oracle.same_bits(tensor, expected), f"{kind} of {name} on rank {record['rank']}"
                count += 1
    return count


ZERO1: dict[str, Any] = {"distributed": True, "bucket_size": 100}
TINY: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 4, "vocab_size": 16, "sequence_length": 4}
GATED: dict[str, Any] = {"swiglu": True, "biases": False, "ffn": 8}
EXPERTS: dict[str, Any] = GATED | {"experts": 4}
TOURS = {
    "several buckets, DP 4 to 3 to 1 and back": (
        training(1, global_batch_size=60, precision="bf16", overlap=True, **TINY, **ZERO1),
        ("dp4", "dp3", "dp1", "dp5", "dp4"),
    ),
    "a border of shards inside the gate of an expert, DP 5 to 3": (
        training(1, global_batch_size=30, distributed=True, experts=2, **TINY | GATED),
        ("dp5", "dp3", "dp2ep2", "dp5"),
    ),
    "experts, all their axes, bf16, ZeRO-1": (
        training(1, precision="bf16", sequence_parallel=True, rms_norm=True, **TINY, **EXPERTS, **ZERO1),
        ("tp2dp2ep2etp2", "pp1tp2dp2ep4etp1", "tp1dp4ep2", "tp2dp2ep2etp2"),
    ),
    "virtual stages, stages, untied": (
        training(1, tied=False, precision="bf16", **TINY | {"layers": 8}, **ZERO1),
        ("pp4", "pp2dp2vpp2", "pp2tp2dp1vpp4", "pp1", "pp4vpp2"),
    ),
    "momentum alone, vocabulary padded otherwise each time": (
        training(1, optimizer="sgd", tied=False, precision="bf16", **TINY | {"vocab_size": 50, "layers": 2}),
        ("tp1", "tp2dp2", "tp4dp2", "pp2tp1dp2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "configs"), TOURS.values(), ids=TOURS.keys())
def test_each_element_is_where_its_number_says(recipe: Any, configs: tuple[str, ...], tmp_path: Path) -> None:
    found = seen(Tour(recipe, configs, before=number), tmp_path)
    assert found.refused == {}
    assert found.told.keys() == set(range(1, len(configs)))
    rows = recipe.shape.padded_vocab(ParallelConfig.parse(configs[0]).tp)
    for generation, config in enumerate(configs[1:], 1):
        parsed = ParallelConfig.parse(config)
        rows = min(rows, recipe.shape.padded_vocab(parsed.tp))
        assert len(found.records[generation]) == parsed.world_size
        assert check_numbers(found.records[generation], rows) >= 4 * parsed.world_size


FC1, QKV = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_qkv.weight"


def number_the_rows(job: Job) -> None:
    """Rows of fc1 hold their number: the gate's from 0, the other half's from 100; rows of the fused q, k, v theirs."""
    if job.generation:
        return
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        rows = {"fc1": [*range(8), *range(100, 108)], "qkv": range(24)}.get(one.name.split("linear_")[-1][:3])
        if rows is None or (one.name == FC1 and one.cut is not None and one.cut[2] > 1):
            continue
        whole = torch.tensor(rows, dtype=torch.float32)[:, None].expand(held.whole_shape(one))
        local = held.slice_of(whole, one.cut, one.parameter.shape) if one.name.count("qkv") else whole
        one.parameter.data.copy_(local)
        own = kept.get(one.parameter)  # an owner may have nothing of it
        if own is not None:
            for tensor in (own.main, *(own.state[kind] for kind in oracle.KINDS[1:])):
                tensor.data.copy_(held.spanned(local, own.span))


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "ZeRO-1"])
def test_gate_and_up_read_in_order_for_every_number_of_replicas_and_tensor_ranks(
    distributed: bool, tmp_path: Path
) -> None:
    recipe = training(1, global_batch_size=8, precision="bf16", distributed=distributed, **TINY | GATED)
    configs = ("dp4", "dp2", "dp1", "dp8", "tp2dp2", "tp4dp1", "dp4")
    found = seen(Tour(recipe, configs, before=number_the_rows), tmp_path)
    for generation, config in enumerate(configs[1:], 1):
        parsed = ParallelConfig.parse(config)
        part = 8 // parsed.tp
        for rank, local in found.of(generation, "param", FC1).items():
            at = parsed.coordinate(rank).tp * part
            assert local[:, 0].tolist() == [*range(at, at + part), *range(100 + at, 100 + at + part)]
            assert (local == local[:, :1]).all()
        whole = oracle.assemble(found.records[generation])
        for kind in (oracle.MASTER, *oracle.KINDS):
            assert whole[kind, FC1][:, 0].tolist() == [*range(8), *range(100, 108)], kind


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "ZeRO-1"])
def test_the_24_rows_of_eight_query_heads_and_two_key_heads_are_6_on_each_of_four(
    distributed: bool, tmp_path: Path
) -> None:
    shape = TINY | {"hidden": 16, "heads": 8, "query_groups": 2, "vocab_size": 32, "ffn": 16}
    recipe = training(1, distributed=distributed, biases=False, **shape)
    configs = ("tp2", "tp4", "tp1", "tp8", "tp2dp2")
    found = seen(Tour(recipe, configs, before=number_the_rows), tmp_path)
    for generation, config in enumerate(configs[1:], 1):
        parsed = ParallelConfig.parse(config)
        part = 24 // parsed.tp
        for kind in oracle.KINDS[: 1 if distributed else 3]:
            for rank, local in found.of(generation, kind, QKV).items():
                at = parsed.coordinate(rank).tp * part
                assert local[:, 0].tolist() == list(range(at, at + part)), (config, kind, rank)


def test_replicas_that_own_nothing_but_padding_neither_send_nor_receive_state(tmp_path: Path) -> None:
    """One matrix of 48 elements trains, padded to 128 (to 384 for three): of 8 owners of 16, five have nothing."""
    frozen = ("embedding", "layernorm", "proj", "mlp")
    shape = TINY | {"hidden": 4, "heads": 1}
    scenario = walk("dp8", "dp2", "dp8", "dp3", biases=False, rms_norm=True, distributed=True, frozen=frozen,
                    precision="bf16", global_batch_size=24, **shape)  # fmt: skip
    outcome = check(scenario, tmp_path)
    for change, config in scenario.changes.items():
        owning = [
            record["rank"]
            for record in outcome.after[change].values()
            for name, _, tensors, _, more in record["tensors"]
            if name == QKV and "exp_avg" in tensors and more["spans"]["exp_avg"][1] > more["spans"]["exp_avg"][0]
        ]
        assert sorted(owning) == {"dp8": [0, 1, 2], "dp2": [0], "dp3": [0]}[config]


def other_buckets(recipe: Any, corpus: Corpus) -> Adapter:
    """Other buckets for each number of replicas, and parameters in reverse order where there are four of them."""

    def build(layout: Any) -> Any:
        chunks = jobs.build_model(recipe, layout)
        if layout.config.dp == 4:
            for chunk in chunks:
                for module in chunk.modules():
                    if type(module).__name__ in ("GPTModel", "TransformerLayer", "SelfAttention", "MLP"):
                        module._modules = dict(reversed(module._modules.items()))
        return chunks

    sizes = {2: 200, 4: 400, 1: 50}
    return Adapter(
        build_model=build,
        wrap=lambda chunks, layout: jobs.wrap(
            replace(recipe, bucket_size=sizes[layout.config.dp], overlap=layout.config.dp > 1), chunks, layout
        ),
        data=lambda layout, position: jobs.micro_batches(corpus, layout, position),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=1,
        vocab_size=recipe.shape.vocab_size,
    )


@pytest.mark.parametrize(
    ("precision", "configs"),
    [("fp32", ("dp2", "dp4", "dp1")), ("bf16", ("dp2", "dp4", "dp1", "pp2dp4"))],
    ids=["fp32", "bf16"],
)
def test_other_buckets_and_another_order_in_them_change_nothing_of_a_parameter(
    precision: str, configs: tuple[str, ...], tmp_path: Path
) -> None:
    scenario = walk(*configs, distributed=True, precision=precision, **TINY | {"layers": 2})
    check(replace(scenario, adapter=other_buckets), tmp_path)


def stale_parameters(job: Job) -> None:
    """Masters are 3 everywhere, parameters are 0: nobody has cast them yet."""
    if job.generation:
        return
    for part in held.parts(job.optimizer):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.data.fill_(3.0)
    for one in held.named(job.model):
        one.parameter.data.zero_()


@pytest.mark.parametrize("settings", [{}, {"distributed": True}, {"distributed": True, "overlap": True}])
def test_every_parameter_is_the_cast_of_its_master_on_every_rank_afterwards(settings: Any, tmp_path: Path) -> None:
    recipe = training(1, precision="bf16", **TINY, **settings)
    found = seen(Tour(recipe, ("dp2", "dp4", "tp2dp2"), before=stale_parameters), tmp_path)
    assert not found.refused
    for records in found.records.values():
        for record in records:
            for name, _, tensors, _, _ in record["tensors"]:
                assert (tensors["param"] == 3).all(), name
