"""Names that do not mean the same on both sides, and copies that do not hold the same: refused by name, or kept.

Each job is asked for changes that must not be made. Nobody hangs, all hear one error, and no bit of the job changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import check, nothing, walk
from tests.megatron.test_cases_numbers import GATED, TINY, Tour, number, seen
from tests.megatron.training import training

from shardshift import Infeasible, Mismatch, ParallelConfig, Unaccounted
from shardshift.adapters.megatron import Adapter, Job
from shardshift.adapters.megatron.job import unwrapped
from shardshift.demo import held, oracle
from shardshift.demo.text import Corpus

Change = Callable[[Any, Any], None]


def adapter_with(change: Change, recipe: Any, corpus: Corpus, **shape: Callable[[Any], Any]) -> Adapter:
    """The adapter of ``training``, with chunks changed after they are built."""

    def build(layout: Any) -> Any:
        own = replace(recipe.shape, **{key: value(layout) for key, value in shape.items()})
        chunks = jobs.build_model(replace(recipe, shape=own), layout)
        for chunk in chunks:
            change(chunk, layout)
        return chunks

    return Adapter(
        build_model=build,
        wrap=lambda chunks, layout: jobs.wrap(recipe, chunks, layout),
        data=lambda layout, position: jobs.micro_batches(corpus, layout, position),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size,
    )


def weight_like(tensor: torch.Tensor, value: float) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.full_like(tensor, value))
    made.__dict__.update(tensor.__dict__)
    return made


def unchanged(chunk: Any, layout: Any) -> None:
    pass


def a_head_of_its_own(recipe: Any, corpus: Corpus) -> Adapter:
    """Declared tied; where there is one stage, the output layer has a matrix all the same."""

    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp == 1:
            chunk.output_layer.weight = weight_like(chunk.embedding.word_embeddings.weight, 2.0)

    return adapter_with(change, recipe, corpus)


def a_head_that_is_the_embedding(recipe: Any, corpus: Corpus) -> Adapter:
    """Really one parameter under two names."""

    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp == 1:
            chunk.output_layer.weight = chunk.embedding.word_embeddings.weight

    return adapter_with(change, recipe, corpus)


def tied_on_one_stage_only(recipe: Any, corpus: Corpus) -> Adapter:
    return adapter_with(unchanged, recipe, corpus, tied=lambda layout: layout.config.pp == 1)


def dead_matrix_on_the_last_of_several(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp > 1 and layout.is_last_stage:
            chunk.dead = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    return adapter_with(change, recipe, corpus)


def dead_matrix_on_one_stage(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp == 1:
            chunk.dead = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    return adapter_with(change, recipe, corpus)


def buffer_on_the_last_of_several(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp > 1 and layout.is_last_stage:
            chunk.register_buffer("seen", torch.ones(3))

    return adapter_with(change, recipe, corpus)


def one_matrix_in_two_layers(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.config.pp == 1:
            first, second = chunk.decoder.layers
            second.mlp.linear_fc1.weight = first.mlp.linear_fc1.weight

    return adapter_with(change, recipe, corpus)


class Stack(torch.nn.Module):
    """All experts of a rank in one tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count, 8, 4))


def stacked_on_one_rank(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.config.ep == 1:
            for layer in chunk.decoder.layers:
                layer.mlp.experts = Stack(4)

    return adapter_with(change, recipe, corpus)


def stacked_everywhere(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        for layer in chunk.decoder.layers:
            layer.mlp.experts = Stack(4 // layout.config.ep)

    return adapter_with(change, recipe, corpus)


def undeclared(part: str, **marks: Any) -> Callable[[Any, Corpus], Adapter]:
    def change(chunk: Any, layout: Any) -> None:
        for name, parameter in chunk.named_parameters():
            if part in name and "local_experts" in name:
                for key, value in marks.items():
                    setattr(parameter, key, value)

    return lambda recipe, corpus: adapter_with(change, recipe, corpus)


def fc1_of_experts_not_declared(recipe: Any, corpus: Corpus) -> Adapter:
    return undeclared("linear_fc1", tensor_model_parallel=False)(recipe, corpus)


def fc2_of_experts_not_declared(recipe: Any, corpus: Corpus) -> Adapter:
    return undeclared("linear_fc2", tensor_model_parallel=False)(recipe, corpus)


def fc2_of_experts_declared_along_another_dim(recipe: Any, corpus: Corpus) -> Adapter:
    return undeclared("linear_fc2", partition_dim=0)(recipe, corpus)


def a_parameter_of_the_second_tensor_rank(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        if layout.coordinate.tp == 1:
            chunk.mine = torch.nn.Parameter(torch.ones(2))

    return adapter_with(change, recipe, corpus)


def copies_of_the_embedding_differ(job: Job) -> None:
    for one in held.named(job.model):
        if one.name == held.EMBEDDING:
            one.parameter.data.fill_(1.0 + job.layout.coordinate.pp)


def moments_of_the_copies_differ(job: Job) -> None:
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        if one.name == held.EMBEDDING:
            kept[one.parameter].state["exp_avg"].fill_(1.0 + job.layout.coordinate.pp)


def replicas_of_an_expert_differ(job: Job) -> None:
    for one in held.named(job.model):
        if ".local_experts.3." in one.name and one.name.endswith("fc2.weight"):
            one.parameter.data.fill_(float(job.layout.expert_coordinate.edp))


def biases_of_the_router_differ(job: Job) -> None:
    for _, module, key in held.named_buffers(job.model):
        module._buffers[key].fill_(float(job.layout.expert_coordinate.ep))


def masters_of_a_norm_differ(job: Job) -> None:
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        if one.name.endswith("final_layernorm.weight"):
            value = 1.0 + 2 * job.layout.coordinate.tp
            kept[one.parameter].main.data.fill_(value)
            one.parameter.data.fill_(value)


DENSE = training(1, **TINY | {"layers": 2})
BIAS = {"experts": 4, "expert_bias": True}
MOE = training(1, **TINY | GATED | {"rms_norm": True}, experts=4)
SPLIT = training(1, sequence_parallel=True, rms_norm=True, experts=4, **TINY | GATED)
REFUSED: dict[str, tuple[Any, tuple[str, ...], Any, Any, type[Exception], str]] = {
    "declared tied, stored apart": (
        DENSE, ("pp1", "pp2", "tp2pp2"), a_head_of_its_own, nothing, Unaccounted, r"output_layer\.weight"),
    "declared tied, stored apart, from two stages": (
        DENSE, ("pp2", "pp1", "tp2"), a_head_of_its_own, nothing, Unaccounted, r"output_layer\.weight"),
    "tied on one side only": (
        DENSE, ("pp1", "pp2"), tied_on_one_stage_only, nothing, Mismatch, r"output_layer\.weight"),
    "copies of a tied matrix that differ": (
        DENSE, ("pp2", "pp1", "pp2dp2"), jobs.make_adapter, copies_of_the_embedding_differ, Mismatch,
        r"param:embedding\.word_embeddings\.weight.*hold different bits"),
    "moments of a tied matrix that differ": (
        DENSE, ("pp2", "tp2"), jobs.make_adapter, moments_of_the_copies_differ, Mismatch,
        r"exp_avg:embedding\.word_embeddings\.weight.*hold different bits"),
    "a matrix that Megatron makes on a stage and never reads": (
        training(1, mtp=1, **TINY | {"layers": 2}), ("pp2", "pp1", "tp4"), jobs.make_adapter, nothing, Mismatch,
        r"output_layer\.weight is in the model of this rank, but not in the same model"),
    "a dead parameter of the last of two stages": (
        DENSE, ("pp2", "pp1", "tp2"), dead_matrix_on_the_last_of_several, nothing, Mismatch, "dead"),
    "a dead parameter that two stages lack": (
        DENSE, ("pp1", "pp2", "pp2dp2"), dead_matrix_on_one_stage, nothing, Unaccounted, "dead"),
    "a dead parameter that the old layout lacks": (
        DENSE, ("pp2", "pp1"), dead_matrix_on_one_stage, nothing, Unaccounted, "dead"),
    "a buffer of the last of two stages": (
        DENSE, ("pp2", "pp1"), buffer_on_the_last_of_several, nothing, Mismatch, "seen"),
    "a matrix of two layers that stages part": (
        DENSE, ("tp2", "pp2"), one_matrix_in_two_layers, nothing, Mismatch, r"layers\.1\.mlp\.linear_fc1\.weight"),
    "experts in one tensor on one side": (
        MOE, ("dp1", "dp2ep2"), stacked_on_one_rank, nothing, Mismatch, r"experts\."),
    "experts in one tensor on the other side": (
        MOE, ("dp2ep2", "dp1", "dp4ep4"), stacked_on_one_rank, nothing, Mismatch, r"local_experts\.\d"),
    "experts in one tensor, cut and not declared": (
        MOE, ("dp2ep2", "dp1", "dp4ep4"), stacked_everywhere, nothing, Mismatch, r"experts\.weight.*\(2, 8, 4\)"),
    "slices of experts sent as if whole": (
        SPLIT, ("tp2dp2ep2etp2", "tp1dp2ep2", "dp4ep4"), fc1_of_experts_not_declared, nothing, Mismatch,
        r"local_experts\.\d\.linear_fc1\.weight: local shape \(8, 8\).*global shape \(16, 8\)"),
    "slices of rows of experts": (
        SPLIT, ("tp2dp2ep2etp2", "tp1dp2ep2"), fc2_of_experts_not_declared, nothing, Mismatch,
        r"linear_fc2\.weight: local shape \(8, 4\).*global shape \(8, 8\)"),
    "slices of experts along another dim": (
        SPLIT, ("tp2dp2ep2etp2", "tp1dp2ep2"), fc2_of_experts_declared_along_another_dim, nothing, Mismatch,
        r"linear_fc2\.weight: local shape \(8, 4\)"),
    "slices of experts, seen from the receiver": (
        SPLIT, ("dp2ep2", "tp2dp2ep2etp2"), fc1_of_experts_not_declared, nothing, Mismatch, r"linear_fc1\.weight"),
    "two ranks that claim one expert": (
        MOE, ("dp4ep2", "dp1", "dp4ep4"), jobs.make_adapter, replicas_of_an_expert_differ, Mismatch,
        r"local_experts\.3\.linear_fc2\.weight.*hold different bits"),
    "biases of routers that differ": (
        training(1, **TINY | GATED | BIAS), ("dp2ep2", "dp1"), jobs.make_adapter, biases_of_the_router_differ, Mismatch,
        r"expert_bias.*hold different bits"),
    "norms of tensor ranks that differ": (
        replace(DENSE, precision="bf16"), ("tp2", "tp1", "tp2dp2"), jobs.make_adapter, masters_of_a_norm_differ,
        Mismatch, r"final_layernorm\.weight.*hold different bits"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "configs", "adapter", "before", "kind", "text"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_is_not_the_same_under_one_name_is_refused_on_all(
    recipe: Any, configs: tuple[str, ...], adapter: Any, before: Any, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    trains = before is not nothing
    found = seen(Tour(recipe, configs, adapter, before, train=trains), tmp_path)
    assert found.told == {}, "no change was made"
    for iteration in range(trains, trains + len(configs) - 1):
        errors = found.refused[iteration]
        assert len(errors) == ParallelConfig.parse(configs[0]).world_size
        assert {(type(error), str(error)) for error in errors} == {(kind, str(errors[0]))}
        assert re.search(text, str(errors[0])), errors[0]
    assert not found.touched


def test_a_parameter_that_other_ranks_of_a_stage_lack_is_refused_before_anything_moves(tmp_path: Path) -> None:
    found = seen(Tour(DENSE, ("dp1", "tp2"), a_parameter_of_the_second_tensor_rank, train=False), tmp_path)
    assert [type(error) for error in found.refused[0]] == [Mismatch]


def test_grouped_experts_of_megatron_and_experts_of_ones_own_are_refused_as_such() -> None:
    """Megatron's own stack of experts needs a GPU's library; one that is marked as experts is refused for being one."""

    def mark(chunk: Any, layout: Any) -> None:
        for layer in chunk.decoder.layers:
            layer.mlp.experts = Stack(4)
            layer.mlp.experts.weight.allreduce = False

    corpus = Corpus(bytes(100), 4, 1)
    with pytest.raises(Unaccounted, match=r"experts\.weight is an expert parameter of a module other than"):
        adapter_with(mark, MOE, corpus).check(ParallelConfig())
    grouped = training(1, config=(("moe_grouped_gemm", True),), experts=4, **TINY | GATED)
    with pytest.raises(Infeasible, match="what to do"):
        jobs.make_adapter(grouped, corpus).check(ParallelConfig())


def shares(job: Job) -> list[bool]:
    """Whether parameters that are one under two names are so still."""
    found = []
    for chunk in unwrapped(job.model):
        inside: Any = chunk
        if inside.output_layer.weight is not None:
            found.append(inside.output_layer.weight is inside.embedding.word_embeddings.weight)
        if len(inside.decoder.layers) == 2:
            first, second = inside.decoder.layers
            found.append(second.mlp.linear_fc1.weight is first.mlp.linear_fc1.weight)
    return found


@pytest.mark.parametrize(
    ("adapter", "configs", "expected"),
    [
        (a_head_that_is_the_embedding, ("pp2", "pp1", "tp2"), [True, False]),
        (one_matrix_in_two_layers, ("dp1", "tp2dp2", "tp1"), [True]),
    ],
    ids=["the head is the embedding", "two layers have one matrix"],
)
def test_what_is_really_one_parameter_stays_one(adapter: Any, configs: Any, expected: Any, tmp_path: Path) -> None:
    found = seen(Tour(DENSE, configs, adapter, number, shares), tmp_path)
    assert found.refused == {}
    for told in found.told.values():
        assert all(said == expected for said in told.values()), found.told


@pytest.mark.parametrize("settings", [{}, {"distributed": True, "precision": "bf16"}], ids=["fp32", "ZeRO-1"])
def test_a_tied_matrix_is_on_the_first_and_the_last_chunk_alone_and_its_state_is_moved_once(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    scenario = walk(
        "pp1", "pp4", "pp2dp1vpp2", "pp4dp1vpp2", "pp1", first=1, every=1, **settings, **TINY | {"layers": 8}
    )
    outcome = check(scenario, tmp_path)
    for change, config in scenario.changes.items():
        parsed = ParallelConfig.parse(config)
        copies = sorted(
            record["coordinate"][0]
            for record in outcome.after[change].values()
            for name, *_ in record["tensors"]
            if name == held.EMBEDDING
        )
        assert copies == sorted({0, parsed.pp - 1})
        whole = oracle.assemble(list(outcome.after[change].values()))
        assert ("param", held.OUTPUT) not in whole
        assert whole["exp_avg", held.EMBEDDING].any()
