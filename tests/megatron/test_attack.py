"""Odd jobs: values that are hardly numbers, groups of one's own, dtypes side by side, state that replicas must share.

Each is a job that somebody may well have; what it holds must arrive bit for bit, or be refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, check, run, walk
from tests.megatron.test_refusals import check_refused
from tests.megatron.training import Training

from shardshift import Mismatch
from shardshift.adapters.megatron import Adapter, Job, RankLayout
from shardshift.adapters.megatron.job import unwrapped
from shardshift.demo import held, oracle
from shardshift.demo.text import Corpus

# isort: split

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey

Chunks = Sequence[torch.nn.Module]
ZERO1: dict[str, Any] = {"distributed": True, "overlap": True, "bucket_size": 500}


def hardly_numbers(job: Job) -> None:
    """NaN of an odd payload, infinities, minus zero and denormals in parameters and moments, on all copies alike."""
    bits = torch.tensor([0x7FC0BEEF, 0x7F800000, -0x80000000, 1, -0x7FFFFFFF, -0x3F4111], dtype=torch.int64)
    odd = bits.to(torch.int32).view(torch.float32)
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        if one.parameter.numel() < 6:
            continue
        one.parameter.data.view(-1)[:6] = odd
        own = kept.get(one.parameter)
        if own is not None:
            start, stop = (0, 6) if own.span is None else own.span
            for kind in oracle.KINDS[1:]:
                own.state[kind].view(-1)[: max(0, min(6, stop) - start)] = odd[start : min(6, stop)]


def test_nan_minus_zero_and_denormals_keep_their_bits(tmp_path: Path) -> None:
    scenario = walk("dp2", "tp2", "dp3", first=1, every=1, global_batch_size=6, distributed=True, before=hardly_numbers)
    outcome = run(scenario, tmp_path)
    for change in scenario.changes:
        before, after = (oracle.assemble(list(each[change].values())) for each in (outcome.before, outcome.after))
        assert any(bool(torch.isnan(tensor).any()) for tensor in before.values())
        assert oracle.differences(before, after) == []


def build_frozen_stage(recipe: Training, layout: RankLayout) -> Chunks:
    chunks: list[Any] = jobs.build_model(recipe, layout)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            first = [layer for layer in chunk.decoder.layers if layer.layer_number == 1]
            parameter.requires_grad = not (
                "embedding" in name or any(parameter is own for layer in first for own in layer.parameters())
            )
    return chunks


def frozen_stage(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, build=build_frozen_stage)


def build_two_dtypes(recipe: Training, layout: RankLayout) -> Chunks:
    chunks = jobs.build_model(recipe, layout)
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if "layernorm" in name:
                module.float()
    return chunks


def wrap_as_built(recipe: Training, chunks: Chunks, layout: RankLayout) -> Any:
    with patch.object(jobs, "Float16Module", lambda config, module: module):
        return jobs.wrap(recipe, chunks, layout)


def two_dtypes(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, build_two_dtypes, wrap_as_built)


def wrap_by_parameter(recipe: Training, chunks: Chunks, layout: RankLayout) -> Any:
    def optimizer_of(settings: OptimizerConfig, wrapped: Any, **options: Any) -> Any:
        overrides = {
            ParamKey(name="*.bias"): {"wd_mult": 0.0},
            ParamKey(name=("*word_embeddings.weight", "*output_layer.weight")): {"max_lr": 0.003, "min_lr": 0.001},
            ParamKey(name="*linear_fc2.weight"): {"max_lr": 0.02, "wd_mult": 0.5},
        }
        return get_megatron_optimizer(settings, wrapped, overrides, **options)

    with patch.object(jobs, "get_megatron_optimizer", optimizer_of):
        return jobs.wrap(recipe, chunks, layout)


def groups_by_parameter(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, wrapping=wrap_by_parameter)


EXPERTS: dict[str, Any] = {"experts": 4, "biases": False, "swiglu": True, "ffn": 8}
SCENARIOS = {
    "a stage that trains nothing": replace(
        walk("pp2", "dp2", "pp2dp2", first=1, every=1, precision="bf16", tied=False, distributed=True),
        adapter=frozen_stage,
    ),
    "norms in fp32 beside bf16, in buffers of their own": replace(
        walk("dp3", "tp2dp1", "dp2", first=1, every=1, global_batch_size=6, precision="bf16", **ZERO1),
        adapter=two_dtypes,
    ),
    "groups by parameter, decoupled rates": replace(
        walk("pp2dp2", "tp2", "dp4", first=1, every=1, tied=False, **ZERO1), adapter=groups_by_parameter
    ),
    "a tied embedding that does not train": walk(
        "pp2", "tp2", "pp2dp2", first=1, every=1, precision="bf16", frozen=("word_embeddings", "output_layer"), **ZERO1
    ),
    "ranks that leave and join again": walk(
        "dp4ep4", "dp1", "dp4ep2", "dp2ep2", first=1, every=1, precision="bf16", **EXPERTS, **ZERO1
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_an_odd_job_arrives(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)


def build_with_a_buffer(recipe: Training, layout: RankLayout) -> Chunks:
    chunks: list[Any] = jobs.build_model(recipe, layout)
    for chunk in chunks:
        chunk.decoder.register_buffer("average", torch.zeros(3))
    return chunks


def with_a_buffer(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, build=build_with_a_buffer)


def an_average_of_each_replica(job: Job) -> None:
    inside: Any = unwrapped(job.model)[0]
    inside.decoder.average.fill_(job.layout.rank)


def test_a_buffer_that_replicas_hold_otherwise_is_refused_by_name() -> None:
    scenario = walk("dp2", "tp2", first=1, every=1, before=an_average_of_each_replica)
    check_refused(replace(scenario, adapter=with_a_buffer), {1: (Mismatch, "buffer:decoder.average")}, 2)
