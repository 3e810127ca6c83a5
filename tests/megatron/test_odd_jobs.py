"""Jobs that do what few do: fp32 modules in a bf16 job, a shared buffer, groups of one's own, shared objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, Send, initialise, open_session, run, run_processes, walk
from tests.megatron.training import Training, training

from shardshift import Mismatch, ParallelConfig, ShardshiftError
from shardshift.adapters.megatron import Adapter, Job, RankLayout, world
from shardshift.adapters.megatron.job import unwrapped
from shardshift.demo import oracle
from shardshift.demo.text import Corpus

Chunks = list[torch.nn.Module]
Build = Callable[[Training, RankLayout], Chunks]


def with_fp32_norms(recipe: Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    """Norms are brought back to fp32 after all was cast to bf16."""
    module_of_jobs: Any = jobs
    cast = module_of_jobs.Float16Module

    def kept(config: Any, module: torch.nn.Module) -> torch.nn.Module:
        made: torch.nn.Module = cast(config, module)
        for name, inside in made.named_modules():
            if "layernorm" in name and list(inside.parameters(recurse=False)):
                inside.float()
        return made

    with patch.object(jobs, "Float16Module", kept):
        return jobs.wrap(recipe, chunks, layout)


def fp32_norms(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, wrapping=with_fp32_norms)


def give_norms_values_that_bf16_has_not(job: Job) -> None:
    for chunk in unwrapped(job.model):
        for name, parameter in chunk.named_parameters():
            if "layernorm" in name:
                with torch.no_grad():
                    parameter.copy_(1 + torch.arange(parameter.numel()) * 2.0**-20)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "ZeRO-1"])
def test_modules_in_fp32_keep_their_bits_though_wrapping_casts_them_down_and_up(
    distributed: bool, tmp_path: Path
) -> None:
    scenario = walk("dp2", "dp1", first=0, every=1, precision="bf16", distributed=distributed)
    outcome = run(replace(scenario, adapter=fp32_norms, prepare=give_norms_values_that_bf16_has_not), tmp_path)
    before, after = (oracle.assemble(list(records[0].values())) for records in (outcome.before, outcome.after))
    assert oracle.differences(before, after) == []
    assert any(tensor.dtype == torch.float32 for (kind, _), tensor in after.items() if kind == "param")


def build_with_one_buffer_in_two_modules(recipe: Training, layout: RankLayout) -> Chunks:
    chunks: Any = jobs.build_model(recipe, layout)
    for chunk in chunks:
        for name, buffer in (("held", torch.zeros(3, device="cpu")), ("built", torch.zeros(3))):
            chunk.decoder.register_buffer(f"{name}_one", buffer)
            chunk.register_buffer(f"{name}_two", buffer)
    return list(chunks)


def one_buffer_in_two_modules(recipe: Any, corpus: Corpus) -> Adapter:
    return jobs.make_adapter(recipe, corpus, build=build_with_one_buffer_in_two_modules)


def set_and_change(send: Send, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start()
        assert job is not None
        chunks: Any = unwrapped(job.model)
        for name in ("held_one", "built_one"):
            getattr(chunks[0].decoder, name).fill_(5.0)
        job = elastic.resize(job)
        assert job is not None
        (chunk,) = unwrapped(job.model)
        inside: Any = chunk
        for name in ("held", "built"):
            one, two = getattr(inside.decoder, f"{name}_one"), getattr(inside, f"{name}_two")
            send((one.tolist(), one is two))


def test_a_buffer_of_two_modules_is_one_buffer_afterwards() -> None:
    scenario = replace(walk("dp2", "tp2", first=0), adapter=one_buffer_in_two_modules)
    assert [sent for _, sent in run_processes(2, set_and_change, scenario)] == [([5.0] * 3, True)] * 4


def give_one_parameter_a_rate_of_its_own(job: Job) -> None:
    for part in job.optimizer.chained_optimizers:
        group = part.optimizer.param_groups[0]
        if len(group["params"]) > 1:
            part.optimizer.param_groups.append(group | {"params": [group["params"].pop()], "lr": 0.77})


def change_once(send: Send, scenario: Scenario) -> None:
    """Tell what refused the change, and whether the job can still be used."""
    torch.set_num_threads(1)
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        assert job is not None
        jobs.train_step(job)
        with elastic.commit_step(job):
            jobs.optimizer_step(job)
        scenario.before(job)
        with pytest.raises(ShardshiftError) as refused:
            elastic.resize(job)
        jobs.train_step(job)
        send((type(refused.value), str(refused.value)))


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "ZeRO-1"])
def test_groups_that_the_new_optimizer_would_join_are_refused_before_anything_moves(distributed: bool) -> None:
    scenario = walk("tp2", "dp2", first=1, before=give_one_parameter_a_rate_of_its_own, distributed=distributed)
    for _, (kind, text) in run_processes(2, change_once, scenario):
        assert kind is Mismatch
        assert "into one param group, but their settings differ in ['lr']" in text


def test_a_config_that_calls_of_build_model_share_is_refused_at_the_start() -> None:
    recipe = training(1)
    kept: dict[str, Any] = {}

    def build(recipe: Training, layout: RankLayout) -> Chunks:
        chunks = jobs.build_model(recipe, layout)
        config: Any = kept.setdefault("config", chunks[0].config)
        for chunk in chunks:
            chunk.config = config
        return chunks

    adapter = jobs.make_adapter(recipe, Corpus(b"text" * 50, 8, 1), build=build)
    adapter.check(ParallelConfig())
    with pytest.raises(Mismatch, match="one and the same TransformerConfig object"):
        adapter.check(ParallelConfig.parse("dp2"))


@pytest.mark.parametrize("wrapping", [False, True], ids=["building", "wrapping"])
def test_other_threads_make_tensors_where_they_did(wrapping: bool) -> None:
    made: list[torch.Tensor] = []

    def prefetch() -> None:
        made.append(torch.empty(3))
        made.append(torch.zeros(3, device=torch.cuda.current_device()))

    with world.virtual_rank(ParallelConfig(), 0), world.on_meta(wrapping=wrapping):
        thread = threading.Thread(target=prefetch)
        thread.start()
        thread.join()
    assert [tensor.is_meta for tensor in made] == [False, False]


def noncontiguous(job: Job) -> None:
    chunk: Any = unwrapped(job.model)[0]
    weight = chunk.decoder.layers[0].mlp.linear_fc1.weight
    weight.data = weight.data.t().contiguous().t()


def test_a_parameter_that_is_not_contiguous_is_refused_by_name() -> None:
    scenario = walk("dp2", "tp2", first=1, before=noncontiguous)
    for _, (kind, text) in run_processes(2, change_once, scenario):
        assert kind is Mismatch
        assert "decoder.layers.0.mlp.linear_fc1.weight on rank" in text
        assert "is not contiguous" in text
