"""The table of Megatron-core's features in ``docs/megatron.md``: each is tried here, for real, and the outcome shown.

    python scripts/megatron_features.py                 try all, print the table
    python scripts/megatron_features.py --only GQA MTP  try some
    python scripts/megatron_features.py --json          the same as JSON
    python scripts/megatron_features.py --write         put the table into docs/megatron.md

For each feature a tiny job is

1. built and trained for a step by Megatron alone, without shardshift: what fails here cannot be built on this machine,
   and the table has the exception;
2. trained for a step under a session, moved to another layout and trained on: *ran*;
3. where it can be built but not trained here, moved as it was built: *state only*;
4. where shardshift says no: *refused*, with its words.

Whether a move is exact is for the tests; this asks what can be moved at all. Layouts are as small as the feature
permits, so that the whole table takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.megatron import training as t  # noqa: E402
from tests.megatron.harness import TIMEOUT_S, Scenario, Send, open_session, run_processes  # noqa: E402
from tests.megatron.layers import SplitNorm  # noqa: E402

from shardshift import Member, ParallelConfig, PeerLost, ShardshiftError  # noqa: E402
from shardshift.adapters.megatron import Job, RankLayout, world  # noqa: E402

# isort: split

from megatron.core import num_microbatches_calculator as calculator  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

PAGE = ROOT / "docs" / "megatron.md"
BEGIN, END = "[//]: # (features)", "[//]: # (end)"
RESULTS = ("ran", "state only", "refused", "cannot be built here", "failed")
STEPS = 3
_MOST_CHARACTERS = 220


@dataclass(frozen=True)
class Feature:
    """One line of the table: how a job with the feature differs from the plain one.

    Attributes:
        settings: of ``tests.megatron.training.training``.
        layouts: from and to.
        transformer, optimizer, ddp, model: further arguments of ``TransformerConfig``, ``OptimizerConfig``,
            ``DistributedDataParallelConfig`` and ``GPTModel``.
        instances: of the distributed optimizer, in worlds that they divide.
        change: does something to the chunks that were built.
        build: builds them instead.
        wrap: wraps them instead.
        before: called with the job before it is moved.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[str, str] = ("dp1", "tp2")
    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    instances: int = 1
    change: Callable[[Sequence[Any]], None] | None = None
    build: Callable[[t.Training, RankLayout], list[torch.nn.Module]] | None = None
    wrap: Callable[[t.Training, Sequence[Any], RankLayout], Any] | None = None
    before: Callable[[Any], None] = lambda job: None

    @property
    def recipe(self) -> t.Training:
        """The job."""
        return t.training(STEPS, **({"config": tuple(self.transformer.items())} | dict(self.settings)))

    @contextmanager
    def patches(self) -> Iterator[None]:
        """While the job is built so."""
        with ExitStack() as stack:
            for holder, name, more in (
                (t, "OptimizerConfig", self.optimizer),
                (t, "DistributedDataParallelConfig", self.ddp),
                (t, "GPTModel", self.model),
            ):
                if more:
                    stack.enter_context(patch.object(holder, name, _with(getattr(holder, name), more)))
            if self.instances > 1:
                stack.enter_context(patch.object(parallel_state, "initialize_model_parallel", self._groups))
            build, wrap = self.build or t.build_model, self.wrap
            stack.enter_context(patch.object(t, "build_model", lambda *given: self._built(build(*given))))
            if wrap is not None:
                stack.enter_context(patch.object(t, "wrap", wrap))
            yield

    def _groups(self, *given: Any, **named: Any) -> None:
        if dist.get_world_size() % self.instances == 0:
            named["num_distributed_optimizer_instances"] = self.instances
        _INITIALIZE(*given, **named)

    def _built(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        if self.change is not None:
            self.change(chunks)
        return chunks


def _with(call: Callable[..., Any], more: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda *given, **named: call(*given, **(named | dict(more)))


def _freeze(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = "embedding" not in name


def _own_norm(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if chunk.post_process:
            chunk.decoder.final_layernorm = SplitNorm(chunk.config, chunk.config.hidden_size)


def _buffer(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.register_buffer("seen", torch.zeros(3))


class _Counting(torch.nn.Identity):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def _extra_state(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.counting = _Counting()


def _compiled_around(chunks: Sequence[Any]) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    for chunk in chunks:
        for index, layer in enumerate(chunk.decoder.layers):
            chunk.decoder.layers[index] = torch.compile(layer, backend="eager")


def _compiled_in_place(chunks: Sequence[Any]) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.mlp.compile(backend="eager")


def _stray_tensor(job: Any) -> None:
    job.model[0].module.decoder.average = torch.ones(3)


def _ramp_up(job: Any) -> None:
    calculator.destroy_num_microbatches_calculator()
    at = job.position
    now = at.global_batch_size  # to twice of it in one go, in a while
    calculator.init_num_microbatches_calculator(1, [now, now, 64], 2 * now, at.micro_batch_size, job.config.dp)


def _te_layers(recipe: t.Training, layout: RankLayout) -> list[torch.nn.Module]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    config = t.transformer_config(recipe, layout)
    return [GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 64, recipe.shape.sequence_length)]


def _grouped_gemm(recipe: t.Training, layout: RankLayout) -> list[torch.nn.Module]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = t.transformer_config(recipe, layout)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=True)
    return [GPTModel(config, spec, 64, recipe.shape.sequence_length)]


def _mamba(recipe: t.Training, layout: RankLayout) -> list[torch.nn.Module]:
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.models.mamba.mamba_model import MambaModel

    config = t.transformer_config(recipe, layout)
    return [MambaModel(config, mamba_stack_spec, 64, recipe.shape.sequence_length, hybrid_override_pattern="M*")]


def _muon(recipe: t.Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    wrapped = [DistributedDataParallel(c.config, DistributedDataParallelConfig(), c) for c in chunks]
    settings = OptimizerConfig(optimizer="muon", lr=1e-3)
    return wrapped, get_megatron_muon_optimizer(settings, wrapped, use_gloo_process_groups=False), None


def _layer_wise(recipe: t.Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    wrapped, optimizer, scheduler = _WRAP(recipe, chunks, layout)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    spread = LayerWiseDistributedOptimizer(list(optimizer.chained_optimizers), optimizer.config, groups)
    for chunk in chunks:
        chunk.config.grad_scale_func = spread.scale_loss
    return wrapped, spread, scheduler


def _under_the_step(recipe: t.Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    if len(chunks) == 1:  # Megatron asks for several
        return _WRAP(recipe, chunks, layout)
    with patch.object(t, "OptimizerConfig", _with(OptimizerConfig, {"overlap_param_gather_with_optimizer_step": True})):
        return _WRAP(recipe, chunks, layout)


def _torch_fsdp(recipe: t.Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    from megatron.core.distributed import TorchFullyShardedDataParallel

    config = DistributedDataParallelConfig()
    wrapped = [TorchFullyShardedDataParallel(c.config, config, c) for c in chunks]
    settings = OptimizerConfig(optimizer="adam", lr=1e-3)
    return wrapped, get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False), None


def _megatron_fsdp(recipe: t.Training, chunks: Sequence[Any], layout: RankLayout) -> Any:
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    wrapped = [FullyShardedDataParallel(c.config, config, c) for c in chunks]
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
    return wrapped, get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False), None


_WRAP, _INITIALIZE = t.wrap, parallel_state.initialize_model_parallel
_MOE = {"experts": 4, "biases": False}
_ZERO1 = {"distributed": True}
_OVERLAP = {"distributed": True, "overlap": True, "bucket_size": 600}

FEATURES: dict[str, Feature] = {
    "Adam, fp32": Feature(),
    "AdamW with amsgrad": Feature(wrap=lambda *given: _amsgrad(_WRAP(*given))),
    "SGD with momentum": Feature({"optimizer": "sgd"}),
    "bf16 with fp32 masters": Feature({"precision": "bf16"}),
    "fp16 with a dynamic loss scale": Feature({"precision": "fp16"}),
    "distributed optimizer (ZeRO-1), fp32": Feature(_ZERO1, ("dp2", "dp1")),
    "distributed optimizer (ZeRO-1), bf16": Feature({**_ZERO1, "precision": "bf16"}, ("dp2", "tp2")),
    "overlapped gradient reduction": Feature({"overlap": True}, ("dp2", "tp2")),
    "overlapped parameter gathers, several buckets": Feature(_OVERLAP, ("dp2", "tp2")),
    "gathers aligned over stages (align_param_gather)": Feature(
        {**_OVERLAP, "layers": 4}, ("pp2vpp2", "dp2"), ddp={"align_param_gather": True}
    ),
    "gathers under the optimizer step": Feature(
        {**_OVERLAP, "layers": 4},
        ("pp2vpp2", "pp2"),
        wrap=lambda *given: _under_the_step(*given),
    ),
    "several optimizer instances": Feature(
        _ZERO1,
        ("dp2", "dp1"),
        ddp={"num_distributed_optimizer_instances": 2},
        instances=2,
    ),
    "precision-aware optimizer": Feature(
        {**_ZERO1, "precision": "bf16"}, ("dp1", "dp2"), optimizer={"use_precision_aware_optimizer": True}
    ),
    "optimizer CPU offload": Feature(
        {**_ZERO1, "precision": "bf16"},
        ("dp1", "dp2"),
        optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    ),
    "Muon": Feature(wrap=_muon),
    "layer-wise distributed optimizer": Feature({}, ("dp2", "dp1"), wrap=_layer_wise),
    "torch FSDP2 inside Megatron": Feature({}, ("dp2", "dp1"), wrap=_torch_fsdp),
    "Megatron FSDP": Feature({}, ("dp2", "dp1"), wrap=_megatron_fsdp),
    "LayerNorm, biases": Feature(),
    "RMSNorm, no biases": Feature({"rms_norm": True, "biases": False}),
    "SwiGLU": Feature({"swiglu": True}),
    "GQA": Feature({"query_groups": 2}),
    "GQA with TP beyond its groups": Feature({"query_groups": 1}),
    "QK norm": Feature({"qk_norm": True}),
    "learned positions": Feature({"learned_positions": True}),
    "rotary positions": Feature(),
    "no positions": Feature(model={"position_embedding_type": "none"}),
    "tied embeddings": Feature({"tied": True}, ("dp1", "pp2")),
    "untied embeddings": Feature({"tied": False}, ("dp1", "pp2")),
    "padded vocabulary that changes with TP": Feature({"vocab_size": 50, "vocab_divisor": 4}),
    "dropout": Feature({"dropout": 0.1}),
    "frozen parameters": Feature(change=_freeze),
    "modules of one's own": Feature(change=_own_norm),
    "persistent buffers": Feature(change=_buffer),
    "extra state (_extra_state)": Feature(change=_extra_state),
    "a tensor that nobody declared": Feature(before=_stray_tensor),
    "multi-token prediction": Feature({"mtp": 1}),
    "multi-latent attention": Feature({"latent": True, "rms_norm": True}),
    "experts, EP": Feature(_MOE, ("dp2ep2", "dp2")),
    "experts, ETP other than TP": Feature({**_MOE, "sequence_parallel": True}, ("tp2ep2etp1", "tp2")),
    "experts by all-to-all": Feature({**_MOE, "dispatcher": "alltoall"}, ("dp2ep2", "dp2")),
    "shared experts": Feature({**_MOE, "shared_expert": 16, "sequence_parallel": True}),
    "router with an expert bias": Feature({**_MOE, "expert_bias": True}, ("dp2ep2", "dp1")),
    "dense layers before experts": Feature({**_MOE, "dense_first": True, "sequence_parallel": True}),
    "experts under ZeRO-1": Feature({**_MOE, **_ZERO1}, ("dp2ep2", "dp2")),
    "grouped GEMM experts": Feature({**_MOE, "rms_norm": True}, build=_grouped_gemm),
    "virtual pipeline stages": Feature({"layers": 4}, ("pp2vpp2", "dp1")),
    "uneven stages": Feature({"layers": 3, "stages": (((2, 1), "Et|ttL"),)}, ("dp1", "pp2")),
    "stages of the embedding or the loss alone": Feature({"stages": (((2, 1), "E|ttL"),)}, ("dp1", "pp2")),
    "sequence parallelism": Feature({"sequence_parallel": True}, ("tp2", "dp1")),
    "context parallelism": Feature({}, ("cp2", "dp2")),
    "activation recomputation": Feature(
        transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "cross-entropy fusion, native": Feature(transformer={"cross_entropy_loss_fusion": True}),
    "cross-entropy fusion, Transformer Engine": Feature(
        transformer={"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    ),
    "fused bias and activation": Feature(transformer={"bias_activation_fusion": True}),
    "fused rotary embedding": Feature(transformer={"apply_rope_fusion": True}),
    "fused gradient accumulation": Feature(transformer={"gradient_accumulation_fusion": True}),
    "torch.compile of modules in place": Feature(change=_compiled_in_place),
    "torch.compile around modules": Feature(change=_compiled_around),
    "CUDA graphs": Feature(transformer={"cuda_graph_impl": "local"}),
    "Transformer Engine layers": Feature(build=_te_layers),
    "FP8 (Transformer Engine)": Feature({"precision": "bf16"}, transformer={"fp8": "hybrid"}),
    "offload of activations (Transformer Engine)": Feature(
        transformer={"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    ),
    "Mamba": Feature(build=_mamba),
    "ramp-up of the batch": Feature(before=_ramp_up),
}


def _amsgrad(wrapped: Any) -> Any:
    for part in wrapped[1].chained_optimizers:
        for group in part.optimizer.param_groups:
            group["amsgrad"] = True
    return wrapped


def try_here(send: Send, name: str) -> None:
    """The worker: what this rank saw of a feature."""
    torch.set_num_threads(1)
    feature = FEATURES[name]
    with feature.patches():
        stage, text = _plain(feature)
        if stage == "build":
            send(("cannot be built here", text))
            return
        try:
            refused = _elastic(feature, trains=stage == "trained")
        except PeerLost:
            return  # whose fault it was says so
        except ShardshiftError as error:
            send(("refused", str(error)))
        except Exception as error:
            send(("failed", _words(error)))
        else:
            if refused is not None:
                send(("refused", refused))
            else:
                send(("ran", "") if stage == "trained" else ("state only", text))


def _plain(feature: Feature) -> tuple[str, str]:
    """How far Megatron alone gets, the same on all ranks: ("trained", ""), or the stage that failed and why."""
    member, config = Member.from_launcher(timeout_s=TIMEOUT_S), ParallelConfig.parse(feature.layouts[0])
    if member.device < config.world_size:
        stage, text = "build", ""
        try:
            store = dist.PrefixStore("plain", member.store)
            job = t.start_plain(feature.recipe, store, config, member.device)
            stage = "train"
            t.train_step(job)
            job.optimizer.step()
            dist.barrier()
            stage = "trained"
        except Exception as error:
            text = _words(error)
        member.store.set(f"plain/{member.device}", json.dumps([stage, text]))
        if dist.is_initialized():
            world.leave()
    seen = [json.loads(member.store.get(f"plain/{device}")) for device in range(config.world_size)]
    worst = min(seen, key=lambda one: (["build", "train", "trained"].index(one[0]), "gloo" in one[1]))
    return str(worst[0]), str(worst[1])


def _scenario(feature: Feature, at: int) -> Scenario:
    return Scenario(feature.recipe, feature.layouts[0], {at: feature.layouts[1]})


def _elastic(feature: Feature, *, trains: bool) -> str | None:
    """Train, move, train on; the refusal, if there was one."""
    at = 1 if trains else 0
    with open_session(_scenario(feature, at)) as elastic:
        job: Job | None = elastic.start()
        while job is not None and job.iteration < (STEPS if trains else 1):
            if elastic.resize_due(job):
                feature.before(job)
                try:
                    job = elastic.resize(job)
                except PeerLost:
                    raise
                except ShardshiftError as refused:
                    return str(refused)
                job = job or elastic.start()
                continue
            if not trains:
                break
            t.train_step(job)
            with elastic.commit_step(job):
                t.optimizer_step(job) if job.scheduler is not None else job.optimizer.step()
    return None


def _words(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"


def attempt(name: str) -> dict[str, Any]:
    """Try one feature; its row."""
    feature = FEATURES[name]
    devices = max(ParallelConfig.parse(layout).world_size for layout in feature.layouts)
    try:
        heard = [message for _, message in run_processes(devices, try_here, name)]
    except Exception as error:
        heard = [("failed", _words(error))]
    order = ("failed", "cannot be built here", "refused", "state only", "ran")
    result, seen = min(heard, key=lambda one: order.index(one[0]), default=("failed", "no rank said anything"))
    start, to = (str(ParallelConfig.parse(layout)) for layout in feature.layouts)
    return {"feature": name, "from": start, "to": to, "result": result, "seen": seen}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| feature | tried | result | what was said |", "|---|---|---|---|"]
    for row in rows:
        seen = re.sub(r"\s+", " ", str(row["seen"])).replace("|", "\\|")
        if len(seen) > _MOST_CHARACTERS:
            seen = seen[: seen.rindex(" ", 0, _MOST_CHARACTERS)] + " ..."
        said = f"`{seen.replace('`', chr(39))}`" if seen else ""
        lines.append(f"| {row['feature']} | {row['from']} to {row['to']} | {row['result']} | {said} |")
    return "\n".join(lines)


def write(text: str, page: Path = PAGE) -> None:
    """Put the table between the marks of the page, which is made if there is none."""
    old = page.read_text() if page.exists() else f"# Megatron-core\n\n{BEGIN}\n{END}\n"
    head, rest = old.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def main() -> int:
    """Try features as the command line says."""
    parser = argparse.ArgumentParser(description="Try Megatron-core's features with shardshift on this machine.")
    parser.add_argument("--only", nargs="+", metavar="FEATURE", choices=sorted(FEATURES), help="not all of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    rows = []
    for name in options.only or FEATURES:
        rows.append(attempt(name))
        print(f"{rows[-1]['result']:<22}{name}", file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    if options.write:
        write(table(rows))
    return int(any(row["result"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
