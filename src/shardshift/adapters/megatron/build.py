"""Building the new job for real: parameters around given tensors; and letting go of the old one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from .names import Where


def materialise(chunks: Sequence[torch.nn.Module], values: Mapping[Where, torch.Tensor]) -> None:
    """Replace parameters and buffers of chunks that were built on the meta device by given tensors.

    Args:
        chunks: the model chunks; tied parameters stay tied, attributes that Megatron set are kept.
        values: per parameter, and per buffer that is state, the tensor; no copy is made.
    """
    for index, chunk in enumerate(chunks):
        names = {id(parameter): name for name, parameter in chunk.named_parameters()}
        real: dict[int, torch.nn.Parameter] = {}
        for module in chunk.modules():
            for key, meta in module._parameters.items():
                if meta is None:
                    continue
                if id(meta) not in real:
                    made = torch.nn.Parameter(values[index, names[id(meta)]], requires_grad=meta.requires_grad)
                    made.__dict__.update(meta.__dict__)
                    real[id(meta)] = made
                module._parameters[key] = real[id(meta)]
    set_buffers(chunks, values)


def set_buffers(chunks: Sequence[torch.nn.Module], values: Mapping[Where, torch.Tensor]) -> None:
    """Put buffers in place; the parameters among the values are left alone."""
    for index, chunk in enumerate(chunks):
        for name, _ in list(chunk.named_buffers()):
            if (index, name) in values:
                path, _, key = name.rpartition(".")
                chunk.get_submodule(path)._buffers[key] = values[index, name]


def release(chunk: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """Let go of what a wrapped chunk and its optimizers hold, once they are done with: tensors and process groups.

    Models are full of cycles, so without this their groups would live on, each with its threads and sockets, until
    Python happens to collect its oldest generation.
    """
    for parameter in chunk.parameters():
        parameter.data = parameter.data.new_empty(0)
        parameter.grad = None
        parameter.__dict__.clear()  # main_grad: a view of the gradient buffer; main_param: the master
    own = vars(chunk)  # where DDP has its buffers; a bare module has a method of that name
    buffers = [buffer for key in ("buffers", "expert_parallel_buffers") for buffer in own.get(key, ())]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    bucket_groups = [group for key in ("bucket_groups", "expert_parallel_bucket_groups") for group in own.get(key, ())]
    for part in (*buffers, *buckets):
        part.grad_data = part.param_data = None
    for group in bucket_groups:
        for key in ("cached_param_buffer_shard_list", "cached_grad_buffer_shard_list"):
            if hasattr(group, key):
                setattr(group, key, [])
    for holder in (*chunk.modules(), *buffers, *buckets, *bucket_groups, *optimizers):
        for key, value in list(vars(holder).items()):
            if isinstance(value, dist.ProcessGroup | ProcessGroupCollection):
                delattr(holder, key)
    # Methods under lru_cache hold their modules, and these their groups (rotary_pos_embedding.py, forward).
    for kind in {type(module) for module in chunk.modules()}:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
