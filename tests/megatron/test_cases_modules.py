"""Experts, buffers, extra state, caches and samples of real jobs, on axes that are met together and on the way back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron import training as jobs
from tests.megatron.harness import Scenario, Send, initialise, open_session, run_processes
from tests.megatron.test_carry import Recorder, layers_of, plain
from tests.megatron.test_cases_names import adapter_with
from tests.megatron.test_cases_numbers import GATED, TINY, Tour, check_numbers, number, seen
from tests.megatron.training import training

from shardshift import Infeasible
from shardshift.adapters.megatron import Adapter, Job, slots
from shardshift.demo import held, oracle
from shardshift.demo.text import Corpus
from shardshift.elastic import transition

MOE: dict[str, Any] = TINY | GATED | {"experts": 4, "expert_bias": True, "precision": "bf16"}
ODD = 1 + 2.0**-12
"""No bf16 has this value."""


def experts_by_their_number(job: Job) -> None:
    """Once: expert i is i in parameters, masters and moments; then the router's bias is another tensor each time."""
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        if ".local_experts." in one.name and not job.generation:
            expert = float(one.name.split(".local_experts.")[1].split(".")[0])
            own = kept[one.parameter]
            for tensor in (one.parameter.data, own.main.data, own.state["exp_avg"], own.state["exp_avg_sq"]):
                tensor.fill_(expert)
    for layer in layers_of(job).values():
        bias = layer.mlp.router.expert_bias
        layer.mlp.router.expert_bias = (torch.zeros_like(bias) if not job.generation else bias) + ODD


def experts_held(job: Job) -> dict[int, list[float]]:
    """Per global expert number the distinct values of its parameters."""
    found: dict[int, list[float]] = {}
    for one in held.named(job.model):
        if ".local_experts." in one.name:
            expert = int(one.name.split(".local_experts.")[1].split(".")[0])
            found[expert] = sorted({*found.get(expert, []), *one.parameter.unique().tolist()})
    return found


def in_another_order(recipe: Any, corpus: Corpus) -> Adapter:
    """With two replicas ranks are put on devices in reverse order (in this process, and all others)."""
    plan_of: Any = transition.make_plan  # type: ignore[attr-defined]

    def reversed_order(*args: Any, **options: Any) -> Any:
        ranks = args[1].world_size
        if options["placement"] is None and ranks <= 2:
            options["placement"] = tuple(reversed(range(ranks)))
        return plan_of(*args, **options)

    transition.make_plan = reversed_order  # type: ignore[attr-defined]
    return jobs.make_adapter(recipe, corpus)


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "ZeRO-1"])
def test_expert_i_is_i_and_biases_set_anew_arrive_in_fp32_whatever_the_order_of_ranks(
    distributed: bool, tmp_path: Path
) -> None:
    recipe = training(1, distributed=distributed, **MOE)
    configs = ("dp2ep2", "dp1", "dp4ep4", "dp2ep2", "pp1dp4ep2", "dp2ep2")
    found = seen(Tour(recipe, configs, in_another_order, experts_by_their_number, experts_held), tmp_path)
    assert found.refused == {}
    for generation, told in found.told.items():
        for experts in told.values():
            assert experts == {expert: [float(expert)] for expert in experts}
        assert {expert for experts in told.values() for expert in experts} == {0, 1, 2, 3}
        for (kind, name), tensor in oracle.assemble(found.records[generation]).items():
            if kind == oracle.BUFFER and name.endswith("expert_bias"):
                assert tensor.dtype == torch.float32
                assert (tensor == generation * torch.tensor(ODD)).all(), (generation, tensor)
            if ".local_experts." in name:
                assert (tensor == float(name.split(".local_experts.")[1].split(".")[0])).all(), (kind, name)


def memory_full_of_nan(recipe: Any, corpus: Corpus) -> Adapter:
    """New memory of any kind is NaN until something is written to it (in this process)."""
    made: Any = slots.empty  # type: ignore[attr-defined]

    def empty(*args: Any) -> torch.Tensor:
        tensor: torch.Tensor = made(*args)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    slots.empty = empty  # type: ignore[attr-defined,assignment]
    return jobs.make_adapter(recipe, corpus)


NAN = {
    "stages to virtual stages and back": (TINY | {"layers": 8}, ("pp4", "pp2dp1vpp2", "pp4dp1vpp2", "pp1")),
    "ten layers, three stages, then two, five and three": (
        TINY | {"layers": 10, "stages": (((3, 1), "Ett|ttttt|tttL"), ((2, 2), "Et|tttttt||tttL"))},
        ("pp1", "pp3", "pp2dp1vpp2", "pp3tp2", "pp1"),
    ),
    "more stages than layers": (
        TINY | {"layers": 2, "stages": (((4, 1), "E|t|t|L"), ((5, 1), "Et||||tL"))},
        ("pp2", "pp4", "pp5", "tp2"),
    ),
    "ZeRO-1 with masters, virtual stages": (
        TINY | {"layers": 4, "distributed": True, "precision": "bf16", "bucket_size": 100, "vocab_size": 13,
                "vocab_divisor": 1},
        ("pp2dp2vpp2", "dp8", "pp4dp2", "pp1tp2dp3"),
    ),
    "experts": (
        TINY | GATED | {"experts": 4, "distributed": True, "precision": "bf16", "rms_norm": True,
                        "sequence_parallel": True},
        ("pp1dp2ep2", "pp1tp2dp2ep2etp1", "pp1tp2dp4ep4etp2", "dp1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "configs"), NAN.values(), ids=NAN.keys())
def test_nothing_is_left_of_what_new_memory_held(settings: dict[str, Any], configs: Any, tmp_path: Path) -> None:
    recipe = training(1, global_batch_size=24, **settings)
    found = seen(Tour(recipe, configs, memory_full_of_nan, number), tmp_path)
    assert found.refused == {}
    assert found.told.keys() == set(range(1, len(configs)))
    rows = 16 if "vocab_divisor" not in settings else 13
    for records in found.records.values():
        check_numbers(records, rows)
        for record in records:
            for name, _, tensors, _, _ in record["tensors"]:
                for kind, tensor in tensors.items():
                    assert not torch.isnan(tensor).any(), f"{kind} of {name}"


STATES: dict[int, Any] = {
    0: b"",
    1: torch.arange(4, dtype=torch.uint8),
    2: torch.arange(2322).to(torch.uint8),
    3: io.BytesIO(b"\x80\x04" + bytes(range(256)) * 9),
    4: None,
    5: {"scale": torch.tensor(2.0), "amax": [1.0, 2.0], "kind": "e4m3"},
    6: torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    7: b"\x00",
}


class Cache(torch.nn.Module):
    """What is derived from the experts of this rank: all their first matrices in one tensor, in reverse order."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.of = [experts]  # no child of this module: its parameters have their names already
        self.stack: torch.Tensor | None = None
        self.after_move()

    def after_move(self) -> None:
        experts = reversed(self.of[0].local_experts)
        self.stack = torch.stack([expert.linear_fc1.weight.detach() for expert in experts])


def with_extra_state(recipe: Any, corpus: Corpus) -> Adapter:
    def change(chunk: Any, layout: Any) -> None:
        for layer in chunk.decoder.layers:
            layer.add_module("recorder", Recorder())
            if recipe.shape.experts:
                layer.add_module("cache", Cache(layer.mlp.experts))
                for expert in layer.mlp.experts.local_experts:
                    expert.add_module("recorder", Recorder())

    return adapter_with(change, recipe, corpus)


def set_extra_state(job: Job) -> None:
    if job.generation:
        return
    first = job.layout.expert_coordinate.ep * 4 // job.config.ep
    for index, layer in layers_of(job).items():
        layer.recorder.state = STATES[index]
        if "cache" in layer._modules:
            for local, expert in enumerate(layer.mlp.experts.local_experts):
                expert.recorder.state = bytes([index, first + local])


def extra_state(job: Job) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    first = job.layout.expert_coordinate.ep * 4 // job.config.ep
    for index, layer in layers_of(job).items():
        found[index] = plain(layer.recorder.state)
        if "cache" in layer._modules:
            now = [expert.linear_fc1.weight.detach() for expert in reversed(layer.mlp.experts.local_experts)]
            found[index, "cached"] = torch.equal(layer.cache.stack, torch.stack(now))
            for local, expert in enumerate(layer.mlp.experts.local_experts):
                found[index, first + local] = expert.recorder.state
    return found


def test_extra_state_of_each_layer_keeps_its_length_and_type(tmp_path: Path) -> None:
    recipe = training(1, **TINY | {"layers": 8})
    configs = ("pp2", "pp4", "pp2dp1vpp2", "pp2tp2dp1vpp4", "dp2")
    found = seen(Tour(recipe, configs, with_extra_state, set_extra_state, extra_state), tmp_path)
    assert found.refused == {}
    for told in found.told.values():
        assert {index for said in told.values() for index in said} == set(range(8))
        for said in told.values():
            for index, state in said.items():
                expected = plain(STATES[index])
                assert type(state) is type(expected)
                if isinstance(expected, torch.Tensor):
                    assert oracle.same_bits(state, expected)
                elif isinstance(expected, dict):
                    assert repr(state) == repr(expected)
                else:
                    assert state == expected


def test_extra_state_of_experts_and_what_is_derived_from_them_follow_them(tmp_path: Path) -> None:
    recipe = training(1, **TINY | GATED | {"experts": 4, "layers": 2})
    configs = ("dp2ep2", "pp2dp2ep2", "dp4ep4", "dp1", "pp2dp4ep2")
    found = seen(Tour(recipe, configs, with_extra_state, set_extra_state, extra_state), tmp_path)
    assert found.refused == {}
    for told in found.told.values():
        whole = {key: value for said in told.values() for key, value in said.items()}
        assert {key for key in whole if isinstance(key, tuple) and key[1] != "cached"} == {
            (layer, expert) for layer in range(2) for expert in range(4)
        }
        for said in told.values():
            for key, value in said.items():
                if isinstance(key, tuple):
                    assert value is True if key[1] == "cached" else value == bytes(key)


class Listed(Corpus):
    """Writes down which samples were read, chunk by chunk."""

    read: list[int]

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        Listed.read.append(index)
        return super().sample(index)


def listing(recipe: Any, corpus: Corpus) -> Adapter:
    Listed.read = []
    corpus.__class__ = Listed
    return jobs.make_adapter(recipe, corpus)


def read_through(send: Send, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    refused: set[int] = set()
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job) and job.iteration not in refused:
                at = job.iteration
                try:
                    job = elastic.resize(job) or elastic.start()
                except Infeasible as error:
                    send(("refused", at, str(error)))
                    refused.add(at)
                continue
            Listed.read.clear()
            jobs.train_step(job)
            place = job.layout.coordinate
            reads = sorted(set(Listed.read))
            send(("read", job.iteration, (place.pp, place.dp, place.cp), (reads, job.num_microbatches, job.config.pp)))
            with elastic.commit_step(job):
                jobs.optimizer_step(job)


def test_a_batch_of_eight_in_twos_stays_eight_or_is_refused_and_every_sample_comes_once() -> None:
    """With virtual stages each chunk reads for itself, the same; context ranks read alike."""
    recipe = training(7, global_batch_size=8, micro_batch_size=2, **TINY | {"layers": 4})
    changes = {1: "dp4", 2: "dp3", 3: "dp8", 4: "pp2dp2vpp2", 5: "pp1dp2cp2", 6: "dp1"}
    read: dict[int, dict[Any, Any]] = {}
    refused: dict[int, list[str]] = {}
    scenario = Scenario(recipe, "dp2", changes, listing)
    for _, message in run_processes(scenario.devices, read_through, scenario):
        match message:
            case ("read", int(iteration), at, what):
                read.setdefault(iteration, {})[at] = what
            case ("refused", int(iteration), str(text)):
                refused.setdefault(iteration, []).append(text)
    assert {iteration: len(texts) for iteration, texts in refused.items()} == {2: 4, 3: 4}
    assert all("global batch of 8" in text and "micro-batch 2" in text for texts in refused.values() for text in texts)
    for iteration, (dp, accumulated) in enumerate([(2, 2), (4, 1), (4, 1), (4, 1), (2, 2), (2, 2), (1, 4)]):
        batch = list(range(8 * iteration, 8 * iteration + 8))
        by_replica: dict[int, list[int]] = {}
        for (pp, replica, _), (samples, count, stages) in read[iteration].items():
            assert count == accumulated
            if pp in (0, stages - 1):  # what lies between reads nothing
                assert by_replica.setdefault(replica, samples) == samples
        assert sorted(sample for samples in by_replica.values() for sample in samples) == batch
        assert by_replica.keys() == set(range(dp))
