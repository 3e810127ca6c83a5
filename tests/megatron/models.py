"""Variants of the demo's training job for the tests: other models, optimizers, orders. All can be sent to processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from shardshift.adapters.megatron import Adapter, RankLayout
from shardshift.adapters.megatron.slots import Slot
from shardshift.demo import model as demo
from shardshift.demo.model import ModelShape, Recipe
from shardshift.demo.text import Corpus

Chunks = Sequence[torch.nn.Module]
Build = Callable[[ModelShape, RankLayout], Chunks]
Wrap = Callable[[Recipe, Chunks], Any]


def adapter_of(
    recipe: Recipe,
    corpus: Corpus,
    *,
    build: Build = demo.build_model,
    wrap: Wrap = demo.wrap,
    vocab_size: int | None = -1,
) -> Adapter:
    """The demo's adapter with another way to build or to wrap."""
    return Adapter(
        build_model=lambda layout: build(recipe.shape, layout),
        wrap=lambda chunks, layout: wrap(recipe, chunks),
        data=corpus.micro_batches,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        vocab_size=recipe.shape.vocab_size if vocab_size == -1 else vocab_size,
        seed=recipe.seed,
    )


def split_by_tensor_ranks(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Three stages have 4, 3, 3 layers, but 2, 5, 3 under TP 2."""

    def build(shape: ModelShape, layout: RankLayout) -> Chunks:
        split = (2, 5, 3) if layout.config.tp == 2 else (4, 3, 3)
        return demo.build_model(replace(shape, layer_split=(split,)), layout)

    return adapter_of(recipe, corpus, build=build)


def frozen_embedding_and_norms(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Embedding and norms do not train, so the optimizer has no moments of them."""

    def build(shape: ModelShape, layout: RankLayout) -> Chunks:
        chunks = demo.build_model(shape, layout)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "embedding" in name or "layernorm" in name:
                    parameter.requires_grad = False
        return chunks

    return adapter_of(recipe, corpus, build=build)


def groups_in_another_order(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Param groups are in reverse order on odd stages and under TP 1."""

    def wrap(recipe: Recipe, chunks: Chunks) -> Any:
        from megatron.core import parallel_state

        wrapped, optimizer, scheduler = demo.wrap(recipe, chunks)
        at, ways = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        if at % 2 or ways == 1:
            for part in optimizer.chained_optimizers:
                part.optimizer.param_groups.reverse()
        return wrapped, optimizer, scheduler

    return adapter_of(recipe, corpus, wrap=wrap)


def memory_full_of_nan(recipe: Recipe, corpus: Corpus) -> Adapter:
    """What a new shard is given as memory is NaN until something is written to it (in this process)."""

    def empty(slot: Slot) -> torch.Tensor:
        return torch.full(slot.shape, float("nan"), dtype=slot.dtype)

    Slot.empty = empty  # type: ignore[assignment,method-assign]
    return adapter_of(recipe, corpus)


def _with_optimizer(settings: dict[str, Any], *, distributed: bool = False, half: bool = False) -> Wrap:
    """The demo's wrap with other settings of the optimizer, without a schedule."""

    def wrap(recipe: Recipe, chunks: Chunks) -> Any:
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        if half:
            chunks = [chunk.bfloat16() for chunk in chunks]
        wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
        config = OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed, **settings)
        optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
        for chunk in wrapped:
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = optimizer.scale_loss
        return wrapped, optimizer, NoSchedule()

    return wrap


class NoSchedule:
    """Leaves learning rates alone."""

    def step(self, increment: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def distributed_optimizer(recipe: Recipe, corpus: Corpus) -> Adapter:
    """ZeRO-1."""
    return adapter_of(recipe, corpus, wrap=_with_optimizer({"optimizer": "adam"}, distributed=True))


def bf16(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Parameters in bf16 with masters in fp32."""
    settings = {"optimizer": "adam", "bf16": True, "params_dtype": torch.bfloat16}
    return adapter_of(recipe, corpus, wrap=_with_optimizer(settings, half=True))


def sgd_with_momentum(recipe: Recipe, corpus: Corpus) -> Adapter:
    """SGD with a momentum buffer."""
    return adapter_of(recipe, corpus, wrap=_with_optimizer({"optimizer": "sgd", "sgd_momentum": 0.9}))


def amsgrad(recipe: Recipe, corpus: Corpus) -> Adapter:
    """AdamW that keeps the largest second moments too."""

    def wrap(recipe: Recipe, chunks: Chunks) -> Any:
        wrapped, optimizer, scheduler = demo.wrap(recipe, chunks)
        for group in optimizer.param_groups:
            group["amsgrad"] = True
        return wrapped, optimizer, scheduler

    return adapter_of(recipe, corpus, wrap=wrap)


def adagrad(recipe: Recipe, corpus: Corpus) -> Adapter:
    """A torch optimizer that nobody has told shardshift about."""

    def wrap(recipe: Recipe, chunks: Chunks) -> Any:
        wrapped, optimizer, scheduler = demo.wrap(recipe, chunks)
        for part in optimizer.chained_optimizers:
            part.optimizer = torch.optim.Adagrad(part.optimizer.param_groups)
        return wrapped, optimizer, scheduler

    return adapter_of(recipe, corpus, wrap=wrap)


def _changed(recipe: Recipe, corpus: Corpus, change: Callable[[Any], None], **config: Any) -> Adapter:
    """The demo's adapter with other entries of the ``TransformerConfig``, and the built chunk changed."""

    def build(shape: ModelShape, layout: RankLayout) -> Chunks:
        with patch.object(demo, "TransformerConfig", partial(TransformerConfig, **config)):
            chunks = demo.build_model(shape, layout)
        for chunk in chunks:
            change(chunk)
        return chunks

    return adapter_of(recipe, corpus, build=build)


class Counting(torch.nn.Identity):
    """Has extra state."""

    def get_extra_state(self) -> int:
        """Some."""
        return 3


def extra_state(recipe: Recipe, corpus: Corpus) -> Adapter:
    """A module begins to have extra state as training goes on, so the model built on the meta device has none."""

    def wrap(recipe: Recipe, chunks: Chunks) -> Any:
        for chunk in chunks:
            chunk.add_module("counting", Counting())
        return demo.wrap(recipe, chunks)

    return adapter_of(recipe, corpus, wrap=wrap)


def undeclared_partition(recipe: Recipe, corpus: Corpus) -> Adapter:
    """A matrix is cut, but does not say so."""

    def undeclare(chunk: Any) -> None:
        chunk.decoder.layers[0].mlp.linear_fc1.weight.tensor_model_parallel = False

    return _changed(recipe, corpus, undeclare)


def ffn_of_three(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Gate and up have three rows each: the six of both could be cut in two, but across the parts."""
    return _changed(
        recipe, corpus, lambda chunk: None, ffn_hidden_size=3, gated_linear_unit=True, add_bias_linear=False
    )


def no_vocab_size(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Nobody says how many rows of the vocabulary are data."""
    return adapter_of(recipe, corpus, vocab_size=None)


def vocab_size_60(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Somebody says more than there are."""
    return adapter_of(recipe, corpus, vocab_size=60)


def buffer(recipe: Recipe, corpus: Corpus) -> Adapter:
    """A persistent buffer."""
    return _changed(recipe, corpus, lambda chunk: chunk.decoder.register_buffer("expert_bias", torch.zeros(3)))


def experts(recipe: Recipe, corpus: Corpus) -> Adapter:
    """Parameters marked as experts."""

    def mark(chunk: Any) -> None:
        chunk.decoder.layers[0].mlp.linear_fc1.weight.allreduce = False

    return _changed(recipe, corpus, mark)
