"""The demo's training job: megatron-core's own GPTModel, DistributedDataParallel, optimizer and schedule.

This is what a user of Megatron writes anyway. What shardshift needs of it are three functions: build the model
chunks of a rank, wrap them, and iterate over a rank's data.
"""

from __future__ import annotations

from ..adapters.megatron import Adapter, Job, RankLayout

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from .held import named, slice_of, whole_shape
from .text import SEQUENCE_LENGTH, Corpus


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The GPT that the demo trains.

    Attributes:
        layers: transformer layers.
        hidden: hidden size.
        heads: attention heads.
        sequence_length: tokens of one sample; a token is a byte.
        vocab_size: rows of the vocabulary that are data.
        vocab_divisor: the vocabulary is padded to a multiple of this times TP.
        swiglu: gated feed-forward (a fused gate and up matrix).
        query_groups: for grouped query attention; None for as many as heads.
        tied: the output layer shares the embedding's weight.
        dropout: of hidden states and attention.
        layer_split: layers of each pipeline stage by number of stages, where they shall not be even.
    """

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    sequence_length: int = SEQUENCE_LENGTH
    vocab_size: int = 256
    vocab_divisor: int = 32
    swiglu: bool = False
    query_groups: int | None = None
    tied: bool = True
    dropout: float = 0.0
    layer_split: tuple[tuple[int, ...], ...] = ()

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary as Megatron pads it for a TP size."""
        unit = self.vocab_divisor * tp
        return -(-self.vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the demo trains.

    Attributes:
        shape: the model.
        global_batch_size: samples per step.
        micro_batch_size: samples per forward.
        learning_rate: at its highest.
        steps: steps of the whole run, which the schedule of the learning rate is made for.
        seed: of weights, data order and random streams.
    """

    shape: ModelShape = ModelShape()
    global_batch_size: int = 8
    micro_batch_size: int = 2
    learning_rate: float = 1e-3
    steps: int = 100
    seed: int = 1234


def make_adapter(recipe: Recipe, corpus: Corpus) -> Adapter:
    """The demo's adapter."""
    return Adapter(
        build_model=lambda layout: build_model(recipe.shape, layout),
        wrap=lambda chunks, layout: wrap(recipe, chunks),
        data=corpus.micro_batches,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size,
        seed=recipe.seed,
    )


def build_model(shape: ModelShape, layout: RankLayout) -> Sequence[torch.nn.Module]:
    """The GPT of one rank."""
    split = {len(stages): stages for stages in shape.layer_split}.get(layout.config.pp)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        gated_linear_unit=shape.swiglu,
        activation_func=torch.nn.functional.silu if shape.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not shape.swiglu,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        tensor_model_parallel_size=layout.config.tp,
        pipeline_model_parallel_size=layout.config.pp,
        pipeline_model_parallel_layout=None if split is None else _stage_layout(split),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        shape.padded_vocab(layout.config.tp),
        shape.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    )
    return [model]


def _stage_layout(split: Sequence[int]) -> list[list[str]]:
    stages = [["decoder"] * layers for layers in split]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def wrap(recipe: Recipe, chunks: Sequence[Any]) -> tuple[Sequence[torch.nn.Module], Any, Any]:
    """Megatron's data parallelism, optimizer and schedule around model chunks."""
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    settings = OptimizerConfig(
        optimizer="adam", lr=recipe.learning_rate, min_lr=recipe.learning_rate / 10, weight_decay=0.01, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=torch.cuda.is_available())
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.learning_rate,
        min_lr=recipe.learning_rate / 10,
        lr_warmup_steps=min(5, recipe.steps - 1) * recipe.global_batch_size,
        lr_decay_steps=recipe.steps * recipe.global_batch_size,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer, scheduler


def set_initial_weights(job: Job, seed: int) -> None:
    """Weights that depend on logical names alone, so that every layout begins with the same model.

    Each logical tensor is drawn whole from a seed of its own and sliced by Megatron's attributes.
    """
    for one in named(job.model):
        if one.parameter.dim() == 1:
            continue  # norms start at one, biases at zero, in every layout
        digest = hashlib.sha256(f"{seed}:{one.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.randn(whole_shape(one), generator=generator) * 0.02
        one.parameter.data.copy_(slice_of(whole, one.cut, one.parameter.shape))
    job.optimizer.reload_model_params()  # fp32 masters, where there are some


def train_step(job: Job) -> float | None:
    """Forward and backward of one step; the mean loss on the last pipeline stage, None elsewhere."""
    model: list[Any] = job.model
    for chunk in model:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=job.data,
        model=model,
        num_microbatches=job.num_microbatches,
        seq_length=model[0].module.max_sequence_length,
        micro_batch_size=job.position.micro_batch_size,
        forward_only=False,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    total = torch.stack([loss["loss"] for loss in losses]).sum()
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total) / (job.num_microbatches * job.config.dp)


def optimizer_step(job: Job) -> None:
    """Step the optimizer and the schedule of the learning rate."""
    job.optimizer.step()
    job.scheduler.step(increment=job.position.global_batch_size)


def _forward(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    micro, length = tokens.shape
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    positions = torch.arange(length).expand(micro, length)
    losses = model(tokens, positions, mask, labels=labels)

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}  # cloned: the schedule divides the loss in place

    return losses, mean
