"""Every tensor that a job reaches is accounted for, each byte once; what nothing accounts for is refused by path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.megatron import training as t
from tests.megatron.harness import TIMEOUT_S, Scenario, Send, run_processes, start_alone
from tests.megatron.training import PlainJob, Training, training

import shardshift as ss
from shardshift import Member, ParallelConfig, Unaccounted
from shardshift.adapters.account import Audit
from shardshift.adapters.claims import Fate
from shardshift.adapters.megatron import world
from shardshift.adapters.megatron.audit import audit, by_path, roots
from shardshift.adapters.megatron.features import features, refuse
from shardshift.adapters.megatron.job import unwrapped
from shardshift.adapters.reach import reach

# isort: split

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from torch._dynamo.eval_frame import DisableContext, OptimizedModule

JOBS: dict[str, Training] = {
    "fp32": training(1),
    "bf16, ZeRO-1, overlaps": training(1, distributed=True, precision="bf16", overlap=True, bucket_size=600),
    "fp16 with masters": training(1, precision="fp16"),
    "momentum, learned positions": training(1, optimizer="sgd", learned_positions=True, tied=False, qk_norm=True),
    "experts with a bias": training(1, experts=4, biases=False, shared_expert=16, expert_bias=True),
    "experts by all-to-all": training(1, experts=4, biases=False, dispatcher="alltoall", dense_first=True),
    "latent attention": training(1, latent=True, rms_norm=True),
    "multi-token prediction": training(1, mtp=1),
}


def start(name: str, recipe: Training, config: str) -> PlainJob:
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    store = dist.PrefixStore(name, member.store)
    job = t.start_plain(recipe, store, ParallelConfig.parse(config), member.device)
    for _ in range(recipe.steps):
        t.train_step(job)
        t.optimizer_step(job)
        t.advance(job)
    return job


def built(recipe: Training, job: PlainJob) -> dict[str, Any]:
    with world.undisturbed_rng(), torch.device("meta"):
        return by_path(unwrapped(t.build_model(recipe, job.layout)))


def state(job: PlainJob) -> dict[str, torch.Tensor]:
    """What an adapter would carry, found without any of its rules."""
    found: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(job.model):
        found |= {f"param {index} {name}": parameter for name, parameter in chunk.named_parameters()}
        lasting = chunk.state_dict()  # of the module inside
        found |= {
            f"buffer {index} {name}": buffer
            for name, buffer in chunk.named_buffers()
            if name.removeprefix("module.") in lasting
        }
    for part in job.optimizer.chained_optimizers:
        kept = [] if part.optimizer is None else list(part.optimizer.state.items())
        for key, values in kept:
            found[f"trained {len(found)}"] = key
            for kind, value in values.items():
                if kind != "step" and value is not None:
                    found[f"{kind} {len(found)}"] = value
    return {label: tensor.detach() for label, tensor in found.items()}


def audit_jobs(send: Send, config: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name, recipe in ((name, JOBS[name]) for name in names):
        job = start(name, recipe, config)
        carried = state(job)
        seen = audit(job, carried, built(recipe, job))
        ranges = {(x.data_ptr(), x.numel() * x.element_size()) for x in carried.values()}
        own = [
            (at, size) for at, size in ranges if not any(a <= at and at + size <= a + s and s > size for a, s in ranges)
        ]
        buffers = [
            buffer
            for chunk in job.model
            for held in ("buffers", "expert_parallel_buffers")
            for buffer in vars(chunk)[held]
        ]
        gradients = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers)
        send((name, seen, sum(size for _, size in own), gradients))
        if name == "fp32":
            send(("derived", *_derived_or_not(job, carried, recipe)))
        t.leave_plain()


def _derived_or_not(job: PlainJob, carried: dict[str, torch.Tensor], recipe: Training) -> tuple[Any, ...]:
    inside: Any = unwrapped(job.model)[0]
    meta = built(recipe, job)
    inside.rotary_pos_emb.inv_freq.mul_(2.0)
    changed = audit(job, carried, meta).unknown
    inside.rotary_pos_emb.inv_freq.mul_(0.5)
    return audit(job, carried, meta).unknown, changed, audit(job, carried).unknown


@pytest.mark.parametrize(
    ("config", "names"),
    [("dp2", [*JOBS]), ("pp2", [*JOBS][:2]), ("dp2ep2", ["experts by all-to-all"])],
    ids=["dp2", "pp2", "dp2ep2"],
)
def test_every_byte_of_a_real_job_is_carried_rebuilt_or_derived(config: str, names: list[str]) -> None:
    heard: dict[str, int] = {}
    for _, message in run_processes(2, audit_jobs, config, names):
        match message:
            case (str(name), Audit() as seen, int(carried), int(gradients)):
                heard[name] = heard.get(name, 0) + 1
                assert (seen.unknown, seen.unreached) == ((), ()), name
                assert seen.bytes_by_fate[Fate.UNKNOWN] == 0
                assert seen.bytes_by_fate[Fate.CARRIED] == carried, name
                assert seen.bytes_by_fate[Fate.REBUILT] >= gradients
                seen.check()
                assert sum(size for _, _, size in seen.rows()) == sum(seen.bytes_by_fate.values())
            case ("derived", tuple(before), tuple(changed), tuple(without)):
                assert before == ()
                assert changed == without == ("model[0].rotary_pos_emb.inv_freq",)
    assert heard == dict.fromkeys(names, 2)


def audit_strangers(send: Send) -> None:
    job = start("strangers", training(1), "dp1")
    carried, meta = state(job), built(training(1), job)
    inside: Any = unwrapped(job.model)[0]
    inside.decoder.average = torch.ones(3)
    inside.decoder.layers[0].register_buffer("seen", torch.ones(5, dtype=torch.bfloat16), persistent=False)
    inside.decoder.notes = {"tables": [np.ones(2), torch.ones(4)[1:]], "itself": inside}
    inside.random = torch.Generator()
    base = job.optimizer.chained_optimizers[0].optimizer
    base.state[inside.embedding.word_embeddings.weight]["largest"] = torch.ones(7)
    job.scheduler.history = torch.ones(6)
    base.average = torch.ones(9)
    scaler: Any = ConstantGradScaler.__new__(ConstantGradScaler)
    scaler._scale, scaler.overflows = torch.ones(1), torch.ones(10)
    job.optimizer.chained_optimizers[0].grad_scaler = scaler
    seen = audit(job, carried, meta)
    with pytest.raises(Unaccounted) as refused:
        seen.check()
    send((seen.unknown, seen.bytes_by_fate[Fate.UNKNOWN], refused.value.names, str(refused.value), str(seen)))

    del base.average
    job.optimizer.chained_optimizers[0].grad_scaler = None
    del inside.decoder.average, inside.decoder.notes, inside.random, job.scheduler.history
    del inside.decoder.layers[0].seen, base.state[inside.embedding.word_embeddings.weight]["largest"]
    audit(job, carried, meta).check()
    weight = inside.decoder.final_layernorm.weight.detach()
    others = {label: tensor for label, tensor in carried.items() if tensor.data_ptr() != weight.data_ptr()}
    send((audit(job, others | {"param half": weight[:8]}, meta).unknown,))
    gone = audit(job, carried | {"param gone": torch.ones(3)}, meta)
    with pytest.raises(Unaccounted, match="param gone"):
        gone.check()
    t.leave_plain()


def test_what_no_rule_covers_is_refused_by_its_path() -> None:
    (_, strangers), (_, half) = run_processes(1, audit_strangers)
    unknown, unknown_bytes, names, text, shown = strangers
    assert set(unknown) == {
        "model[0].decoder.average",
        "model[0].decoder.layers.0.seen",
        "model[0].decoder.notes[tables][0]",
        "model[0].decoder.notes[tables][1]",
        "model[0].random",
        "optimizer.chained_optimizers[0].grad_scaler.overflows",
        "optimizer.chained_optimizers[0].optimizer.average",
        "optimizer.chained_optimizers[0].optimizer.state[model[0].embedding.word_embeddings.weight][largest]",
        "scheduler.history",
    }
    generator = torch.Generator().get_state().numel()
    assert unknown_bytes == 3 * 4 + 5 * 2 + 2 * 8 + 3 * 4 + generator + 7 * 4 + 6 * 4 + 9 * 4 + 10 * 4
    assert names == unknown
    assert "model[0].decoder.average" in text
    assert "What to do" in text
    assert "unknown: scheduler.history" in shown
    assert half == (("model[0].decoder.final_layernorm.weight",),)


class Slotted:
    __slots__ = ("__hidden", "tensor", "unset")

    def __init__(self) -> None:
        self.tensor, self.__hidden = torch.zeros(1), torch.zeros(2)


class Hostile:
    """Raises wherever it is touched, except for what it stores."""

    def __init__(self) -> None:
        self.stored = torch.zeros(3)

    @property
    def computed(self) -> torch.Tensor:
        raise AssertionError("properties are not called")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("iterated")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def test_a_walk_survives_cycles_and_objects_that_raise_and_ends_at_functions_and_classes() -> None:
    hidden = torch.zeros(9)

    class Kind:
        of_the_class = torch.zeros(9)

    def function() -> torch.Tensor:
        return hidden

    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.main_grad = torch.zeros(4)  # type: ignore[attr-defined]
    parameter.grad = torch.zeros(4)
    root: dict[str, Any] = {
        "slots": Slotted(),
        "hostile": Hostile(),
        "kind": Kind(),
        "not followed": [function, Kind, np, Hostile.__iter__, Slotted().tensor.sum],
        "by parameter": {parameter: {"step": torch.zeros(())}, 3: {torch.zeros(5)}},
        "plain": [1, "text", None, 2.0, b"bytes"] * 3,
    }
    root["itself"] = root
    found = {each.path: tuple(each.value.shape) for each in reach({"root": root}).state}
    assert found == {
        "root[slots].tensor": (1,),
        "root[slots]._Slotted__hidden": (2,),
        "root[hostile].stored": (3,),
        "root[by parameter].keys[a tensor of shape (4,)]": (4,),
        "root[by parameter].keys[a tensor of shape (4,)].grad": (4,),
        "root[by parameter].keys[a tensor of shape (4,)].main_grad": (4,),
        "root[by parameter][a tensor of shape (4,)][step]": (),
        "root[by parameter][3][0]": (5,),
    }


@dataclass
class TransformerConfig:
    fp8: str | None = None
    cuda_graph_impl: str = "none"


class Float8Tensor(torch.Tensor):
    """As Transformer Engine's is called."""


def test_features_that_cannot_be_carried_are_refused_by_name() -> None:
    plain = reach({"model": torch.nn.Linear(2, 2), "config": OptimizerConfig(optimizer="adam", lr=1e-3)})
    assert features(plain) == []
    refuse(features(plain))

    in_place = torch.nn.Linear(2, 2)
    in_place.compile(backend="eager")
    # What torch.compile returns, where the environment has not switched it off.
    around = OptimizedModule(torch.nn.Linear(2, 2), DisableContext())
    carried = features(reach({"model": torch.nn.Sequential(in_place, around)}))
    assert [(one.path, one.carried) for one in carried] == [("model.0", True), ("model.1", True)]
    refuse(carried)

    job = {
        "config": TransformerConfig(fp8="hybrid", cuda_graph_impl="local"),
        "tensor": torch.zeros(2).as_subclass(Float8Tensor),
        "optimizer": [OptimizerConfig(optimizer="adam", lr=1e-3, optimizer_cpu_offload=True)],
    }
    with pytest.raises(Unaccounted, match="what to do") as refused:
        refuse(features(reach(job)))
    assert refused.value.names == (
        "FP8 (Transformer Engine)",
        "captured CUDA graphs",
        "optimizer CPU offload",
        "quantised tensors (Transformer Engine)",
    )


def test_the_walk_begins_inside_the_wrappers() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    @dataclass
    class Job:
        model: list[torch.nn.Module]
        optimizer: Any = None
        scheduler: Any = None

    inside = torch.nn.Linear(2, 2)
    found = reach(roots(Job([Wrapper(Wrapper(inside))])))
    assert [each.path for each in found.state] == ["model[0].weight", "model[0].bias"]
    assert [each for each in by_path([inside])] == ["model[0].weight", "model[0].bias"]


def ask_a_job(send: Send, recipe: Training) -> None:
    torch.set_num_threads(1)
    scenario = Scenario(recipe, "pp1tp1dp2ep2", {})
    job = start_alone(scenario.make(), scenario.start, "asked")
    assert job is not None
    seen = ss.audit(job)
    seen.check()
    job.model[0].kept = torch.ones(5)
    send((seen.rows(), str(seen), ss.audit(job).unknown))


def test_a_job_accounts_for_itself() -> None:
    recipe = training(1, experts=2, biases=False, distributed=True, precision="bf16")
    for _, (rows, text, unknown) in run_processes(2, ask_a_job, recipe):
        sizes = {name: size for name, _, size in rows}
        assert sizes["carried"] > 0
        assert "unknown" not in sizes
        assert "carried" in text
        assert unknown == ("wrapped[0].kept",)
