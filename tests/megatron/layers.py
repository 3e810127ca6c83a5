"""Modules for what megatron-core's local ones (not Transformer Engine's) refuse on CPU, and a spec with them in place.

``SplitNorm`` is for sequence parallelism, ``GatheringAttention`` for context parallelism and latent attention.
"""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


def held_positions(length: int, ways: int, index: int) -> torch.Tensor:
    """Positions of the sequence that a context parallel rank has: one chunk from each end, as Megatron cuts it."""
    if ways == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ways)
    return torch.cat([chunks[index], chunks[2 * ways - 1 - index]])


class SplitNorm(torch.nn.Module):
    """LayerNorm or RMSNorm whose gradients Megatron sums over tensor ranks, each of which has a part of the sequence.

    torch's own are refused by ``transformer/torch_norm.py`` under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps, self.rms = eps, config.normalization == "RMSNorm"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None if self.rms else torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dim."""
        if self.rms:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class GatheringAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention that gathers keys and values over the context parallel ranks; no dropout.

    ``transformer/dot_product_attention.py`` refuses context parallelism, and does not know the arguments with which
    ``transformer/multi_latent_attention.py`` builds it.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *unused: Any, **also_unused: Any) -> torch.Tensor:
        """Queries, keys and values of shape (sequence here, batch, heads, size) to (sequence here, batch, all)."""
        ways = parallel_state.get_context_parallel_world_size()
        index, length = parallel_state.get_context_parallel_rank(), query.shape[0] * ways
        here = held_positions(length, ways, index)
        there = torch.cat([held_positions(length, ways, each) for each in range(ways)])
        if ways > 1:
            key, value = (_Gathered.apply(tensor) for tensor in (key, value))  # type: ignore[no-untyped-call]
        repeats = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(repeats, 2) for tensor in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * (self.scale or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(there[None, :] > here[:, None], float("-inf")).float().softmax(-1)
        mixed = torch.einsum("bhst,tbhd->sbhd", weights.to(value.dtype), value)
        return mixed.reshape(*mixed.shape[:2], -1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        group, summed = parallel_state.get_context_parallel_group(), gradient.contiguous().clone()
        dist.all_reduce(summed, group=group)
        mine: torch.Tensor = summed.chunk(group.size())[group.rank()]
        return mine


def with_own(spec: Any, norm: bool, attention: bool) -> Any:
    """A spec with the modules of this file in the place of megatron-core's."""
    if norm and spec is WrappedTorchNorm:
        return SplitNorm
    if attention and spec is DotProductAttention:
        return GatheringAttention
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        spec = deepcopy(spec)
        for field in fields(spec):
            setattr(spec, field.name, with_own(getattr(spec, field.name), norm, attention))
    if isinstance(spec, list):
        return [with_own(each, norm, attention) for each in spec]
    return spec
