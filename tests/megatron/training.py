"""The jobs that the tests train: what the demo's recipe says, and everything else that a Megatron job may carry.

One ``Training`` describes model, data parallelism and optimizer for any ``ParallelConfig``. Everything comes from
megatron-core, except for the modules in ``layers``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardshift import ParallelConfig
from shardshift.adapters.megatron import Adapter, DataPosition, RankLayout
from shardshift.demo.model import ModelShape, Recipe
from shardshift.demo.text import Corpus

# isort: split

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.megatron.layers import held_positions, with_own

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Shape(ModelShape):
    """A GPT with all that megatron-core's local modules can do.

    Attributes:
        ffn: feed-forward size, of each expert too; None for 4 x hidden.
        rms_norm: RMSNorm; otherwise LayerNorm, which has biases.
        biases: of linear layers; None for what the demo does: where there is no SwiGLU.
        qk_norm: norms of queries and keys.
        learned_positions: an embedding of positions; otherwise rotary ones.
        sequence_parallel: activations outside of tensor parallel regions are cut along the sequence.
        experts: experts of each layer; 0 for a dense model.
        topk: experts of a token.
        dense_first: the first layer has no experts.
        dispatcher: how tokens get to experts, "allgather" or "alltoall".
        shared_expert: feed-forward size of the shared expert; 0 for none.
        expert_bias: the router balances by a bias, a buffer that training updates.
        mtp: layers of multi-token prediction.
        latent: multi-latent attention.
        stages: per (pp, vpp) Megatron's layout of layers, like "Et|tt|tL".
        first_stage: layers of the first stage, where there are several.
        last_stage: layers of the last stage, where there are several.
        count_ends: embedding and loss count as layers when stages are cut.
        config: other entries of ``TransformerConfig``.
    """

    ffn: int | None = None
    rms_norm: bool = False
    biases: bool | None = None
    qk_norm: bool = False
    learned_positions: bool = False
    sequence_parallel: bool = False
    experts: int = 0
    topk: int = 2
    dense_first: bool = False
    dispatcher: str = "allgather"
    shared_expert: int = 0
    expert_bias: bool = False
    mtp: int = 0
    latent: bool = False
    stages: tuple[tuple[tuple[int, int], str], ...] = ()
    first_stage: int | None = None
    last_stage: int | None = None
    count_ends: bool = False
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Training(Recipe):
    """A training job.

    Attributes:
        precision: "fp32", "bf16" or "fp16" with a dynamic loss scale; the last two with fp32 masters.
        optimizer: "adam" or "sgd" with momentum.
        distributed: whether the distributed optimizer (ZeRO-1) is used: always, never, or in which configurations.
        bucket_size: elements of a bucket, under overlap; None for one bucket.
        overlap: gradient reductions overlap with the backward, parameter gathers with the forward.
        loss_scale: the first, of fp16; a large one overflows at first.
        fp32_gradients: gradients of 16-bit parameters are summed in fp32.
        frozen: parameters with one of these in their local names do not train.
    """

    precision: str = "fp32"
    optimizer: str = "adam"
    distributed: bool | tuple[str, ...] = False
    bucket_size: int | None = None
    overlap: bool = False
    loss_scale: float = 2.0**10
    fp32_gradients: bool = True
    frozen: tuple[str, ...] = ()

    def zero1(self, layout: RankLayout) -> bool:
        """Whether the distributed optimizer is used in a layout."""
        if isinstance(self.distributed, bool):
            return self.distributed
        return str(layout.config) in self.distributed


def training(steps: int, **settings: Any) -> Training:
    """A small job; settings are of shape and training alike.

    By default 2 layers of hidden 16, 4 heads, vocabulary 64, global batches of 4.
    """
    defaults = {"layers": 2, "hidden": 16, "sequence_length": 8, "vocab_size": 64, "vocab_divisor": 4}
    of_shape = {field.name for field in fields(Shape)}
    shape = Shape(**{key: value for key, value in (defaults | settings).items() if key in of_shape})
    rest = {key: value for key, value in settings.items() if key not in of_shape}
    return Training(
        shape, steps=steps, **({"global_batch_size": 4, "micro_batch_size": 1, "learning_rate": 1e-2} | rest)
    )


def make_adapter(recipe: Training, corpus: Corpus, build: Any = None, wrapping: Any = None) -> Adapter:
    """An adapter for such a job, or for one that is built or wrapped otherwise."""
    return Adapter(
        build_model=lambda layout: (build or build_model)(recipe, layout),
        wrap=lambda chunks, layout: (wrapping or wrap)(recipe, chunks, layout),
        data=lambda layout, position: micro_batches(corpus, layout, position),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size,
        seed=recipe.seed,
    )


def corpus_of(recipe: Recipe) -> Corpus:
    """Random text in the model's vocabulary, always the same."""
    shape = recipe.shape
    text = np.random.default_rng(7).integers(0, min(shape.vocab_size, 256), 4000, dtype=np.uint8).tobytes()
    return Corpus(text, shape.sequence_length, recipe.seed)


def micro_batches(corpus: Corpus, layout: RankLayout, position: DataPosition) -> Any:
    """An iterator for each model chunk where there are several, as Megatron's interleaved schedule wants them."""
    if layout.config.vpp == 1:
        return corpus.micro_batches(layout, position)
    return [corpus.micro_batches(layout, position) for _ in range(layout.config.vpp)]


def transformer_config(recipe: Training, layout: RankLayout) -> TransformerConfig:
    """Megatron's description of the model on one rank."""
    shape, config = _shape(recipe), layout.config
    dtype = DTYPES[recipe.precision]
    stages = dict(shape.stages).get((config.pp, config.vpp))
    options: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.query_groups,
        "gated_linear_unit": shape.swiglu,
        "activation_func": torch.nn.functional.silu if shape.swiglu else torch.nn.functional.gelu,
        "add_bias_linear": not shape.swiglu if shape.biases is None else shape.biases,
        "normalization": "RMSNorm" if shape.rms_norm else "LayerNorm",
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "tensor_model_parallel_size": config.tp,
        "sequence_parallel": shape.sequence_parallel and config.tp > 1,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": config.vpp if config.vpp > 1 else None,
        "pipeline_model_parallel_layout": stages,
        "num_layers_in_first_pipeline_stage": shape.first_stage if config.pp > 1 else None,
        "num_layers_in_last_pipeline_stage": shape.last_stage if config.pp > 1 else None,
        "account_for_embedding_in_pipeline_split": shape.count_ends and config.pp > 1,
        "account_for_loss_in_pipeline_split": shape.count_ends and config.pp > 1,
        "context_parallel_size": config.cp,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": config.expert_tp,
        "mtp_num_layers": shape.mtp or None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": recipe.precision == "bf16",
        "fp16": recipe.precision == "fp16",
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
    }
    if shape.experts:
        options |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_router_topk": shape.topk,
            "moe_layer_freq": [int(layer > 0 or not shape.dense_first) for layer in range(shape.layers)],
            "moe_token_dispatcher_type": shape.dispatcher,
            "moe_shared_expert_intermediate_size": shape.shared_expert or None,
            "moe_router_enable_expert_bias": shape.expert_bias,
            "moe_router_score_function": "sigmoid" if shape.expert_bias else "softmax",
            "moe_router_load_balancing_type": "none" if shape.expert_bias else "aux_loss",
            "moe_aux_loss_coeff": 0.0 if shape.expert_bias else 0.01,
        }
    if shape.latent:
        quarter = shape.hidden // shape.heads
        options |= {
            "multi_latent_attention": True,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_head_dim": quarter,
            "qk_pos_emb_head_dim": quarter,
            "v_head_dim": quarter,
            "rope_type": "rope",
        }
    return (MLATransformerConfig if shape.latent else TransformerConfig)(**options | dict(shape.config))


def build_model(recipe: Training, layout: RankLayout) -> list[torch.nn.Module]:
    """The model chunks of one rank."""
    return [_chunk(recipe, layout, chunk if layout.config.vpp > 1 else None) for chunk in range(layout.config.vpp)]


def _chunk(recipe: Training, layout: RankLayout, vp_stage: int | None) -> torch.nn.Module:
    shape, config = _shape(recipe), transformer_config(recipe, layout)
    own_parts = config.sequence_parallel, config.context_parallel_size > 1 or shape.latent
    block = with_own(get_gpt_decoder_block_spec(config, False, config.normalization, vp_stage=vp_stage), *own_parts)
    mtp = None
    if shape.mtp:
        last = get_gpt_decoder_layer_specs(config, False, config.normalization)[-1]
        mtp = with_own(get_gpt_mtp_block_spec(config, last, False, vp_stage=vp_stage), *own_parts)
    model: torch.nn.Module = GPTModel(
        config,
        block,
        shape.padded_vocab(layout.config.tp),
        shape.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in recipe.frozen)
    return model


def wrap(recipe: Training, chunks: Sequence[Any], layout: RankLayout) -> tuple[list[torch.nn.Module], Any, Any]:
    """Megatron's data parallelism, optimizer and schedule around model chunks, as its own training does it."""
    zero1 = recipe.zero1(layout)
    if recipe.precision != "fp32":
        chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=zero1,
        bucket_size=recipe.bucket_size,
        overlap_grad_reduce=recipe.overlap,
        overlap_param_gather=recipe.overlap and zero1,
        grad_reduce_in_fp32=recipe.precision != "fp32" and recipe.fp32_gradients,
    )
    wrapped: list[Any] = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    settings = OptimizerConfig(
        optimizer=recipe.optimizer,
        sgd_momentum=0.9,
        lr=recipe.learning_rate,
        min_lr=recipe.learning_rate / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        params_dtype=DTYPES[recipe.precision],
        initial_loss_scale=recipe.loss_scale,
        loss_scale_window=2,
        hysteresis=1,
        use_distributed_optimizer=zero1,
        overlap_param_gather=recipe.overlap and zero1,
    )
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=torch.cuda.is_available())
    scheduler = schedule(recipe, optimizer)
    for chunk in wrapped:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
        if recipe.overlap:
            every = [each.no_sync for each in wrapped]
            chunk.config.no_sync_func = every if len(every) > 1 else every[0]
    return wrapped, optimizer, scheduler


def schedule(recipe: Training, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's schedule of learning rate and weight decay for the param groups of an optimizer."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.learning_rate,
        min_lr=recipe.learning_rate / 10,
        lr_warmup_steps=recipe.global_batch_size,
        lr_decay_steps=(recipe.steps + 1) * recipe.global_batch_size,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.02,
        wd_incr_steps=recipe.steps * recipe.global_batch_size,
        wd_incr_style="linear",
    )


@dataclass(slots=True)
class PlainJob:
    """A running job that shardshift's adapter has no part in; has what the tests use of ``Job``."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    data: Any
    layout: RankLayout
    iteration: int
    position: DataPosition

    @property
    def config(self) -> ParallelConfig:
        """The parallel configuration."""
        return self.layout.config

    @property
    def num_microbatches(self) -> int:
        """Forwards per optimizer step on this rank."""
        return self.position.num_microbatches


def start_plain(
    recipe: Training, store: dist.Store, config: ParallelConfig, rank: int, consumed_samples: int = 0
) -> PlainJob:
    """Start a job as Megatron's own training does (``initialize.py``), without anything of shardshift's adapter."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.world_size, timeout=timedelta(seconds=30))
    parallel_state.initialize_model_parallel(
        config.tp,
        config.pp,
        config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.expert_tp,
        distributed_timeout_minutes=1,
        create_gloo_process_groups=False,
    )
    layout = RankLayout(config, rank)
    seed = recipe.seed + 100 * layout.coordinate.pp
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model, optimizer, scheduler = wrap(recipe, build_model(recipe, layout), layout)
    many = recipe.global_batch_size // (recipe.micro_batch_size * config.dp)
    position = DataPosition(consumed_samples, recipe.global_batch_size, recipe.micro_batch_size, many)
    data = micro_batches(corpus_of(recipe), layout, position)
    return PlainJob(model, optimizer, scheduler, data, layout, 0, position)


def leave_plain() -> None:
    """Leave the world of a plain job."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def advance(job: PlainJob) -> None:
    """Count a finished step."""
    job.iteration += 1
    job.position = replace(
        job.position, consumed_samples=job.position.consumed_samples + job.position.global_batch_size
    )


def train_step(job: Any) -> float | None:
    """Forward and backward of one step; the mean loss on the last pipeline stage, None elsewhere."""
    model: list[Any] = job.model
    for chunk in model:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    inner = model[0]
    while hasattr(inner, "module"):
        inner = inner.module
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=job.data,
        model=model,
        num_microbatches=job.num_microbatches,
        seq_length=inner.max_sequence_length,
        micro_batch_size=job.position.micro_batch_size,
        forward_only=False,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    total = torch.stack([loss["loss"] for loss in losses]).sum()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    mean: float = float(total) / (job.num_microbatches * job.config.dp)
    return mean


def optimizer_step(job: Any) -> None:
    """Step the optimizer, and the schedule of the learning rate unless gradients overflowed."""
    done, _, _ = job.optimizer.step()
    if done:
        job.scheduler.step(increment=job.position.global_batch_size)


def _forward(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    micro, length = tokens.shape
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    ways = parallel_state.get_context_parallel_world_size()
    positions = held_positions(length, ways, parallel_state.get_context_parallel_rank())
    tokens, labels = tokens[:, positions], labels[:, positions]
    losses = model(tokens, positions.expand(micro, len(positions)), mask, labels=labels)

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean() / ways  # the schedule multiplies by the context parallel size
        return loss, {"loss": loss.detach().clone()}  # cloned: the schedule divides the loss in place

    return losses, mean


def _shape(recipe: Training) -> Shape:
    assert isinstance(recipe.shape, Shape)
    return recipe.shape
