"""Building the new job for real: parameters around given tensors; and letting go of the old one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ..reach import Reached, reach
from .names import Where

_BUFFERS: Final = (
    "grad_data",
    "param_data",
    "cached_param_buffer_shard_list",
    "cached_grad_buffer_shard_list",
    "grad_accs",
    "param_gather_handle",
    "grad_reduce_handle",
)
"""Where buffers, buckets and the wrapper keep memory, hooks and works under way (``distributed/``)."""


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


def set_parameters(live: Mapping[Where, torch.Tensor], values: Mapping[Where, torch.Tensor]) -> None:
    """Write values into parameters whose memory is no longer the one that they were given.

    ``Float16Module`` casts a parameter that ``wrap`` brings back to fp32 afterwards, which loses bits; into buffers of
    ``DistributedDataParallel`` the same bits are written again.
    """
    with torch.no_grad():
        for where, value in values.items():
            tensor = live[where]
            if isinstance(tensor, torch.nn.Parameter) and tensor.data_ptr() != value.data_ptr():
                tensor.copy_(value)


def set_buffers(chunks: Sequence[torch.nn.Module], values: Mapping[Where, torch.Tensor]) -> None:
    """Put buffers in place; the parameters among the values are left alone."""
    for index, chunk in enumerate(chunks):
        # By identity: a buffer that two modules share has one name.
        real = {id(old): values[index, name] for name, old in chunk.named_buffers() if (index, name) in values}
        for module in chunk.modules():
            for key, old in module._buffers.items():
                if old is not None and id(old) in real:
                    module._buffers[key] = real[id(old)]


def release(model: Sequence[torch.nn.Module], optimizers: Sequence[Any], reached: Reached | None = None) -> None:
    """Let go of what wrapped chunks and their optimizers hold, once they are done with: tensors and process groups.

    Models are full of cycles, so without this their groups would live on, each with its threads and sockets, until
    Python happens to collect its oldest generation. Groups are kept by much that is no module: dispatchers of tokens,
    buffers, buckets. So whatever is reached is looked at. Dispatchers keep tensors of the last forward too, with its
    graph, which holds groups where no collector of Python's comes.

    Args:
        model: the wrapped chunks.
        optimizers: Megatron's and torch's.
        reached: what they reach, if it was walked already and nothing has run since.
    """
    walk = reached or reach({"model": list(model), "optimizers": list(optimizers)})
    things = [thing for _, thing in walk.objects]
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.new_empty(0)
            parameter.grad = None
            parameter.__dict__.clear()  # main_grad: a view of the gradient buffer; main_param: the master
    groups: dict[type, bool] = {}  # torch's own check of an instance runs in Python, for each attribute there is
    for thing in things:
        own = getattr(thing, "__dict__", {})
        for key, value in list(own.items()):
            kind = type(value)
            if kind not in groups:
                groups[kind] = issubclass(kind, dist.ProcessGroup | ProcessGroupCollection)
            of_a_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
            if of_a_graph or groups[kind]:
                del own[key]
            elif key in _BUFFERS:
                own[key] = None
    # Shards of fp32 parameters are views with a graph, which ends in the hooks of DistributedDataParallel.
    for optimizer in optimizers:
        for key, value in list(vars(optimizer).items()):
            if isinstance(value, list | dict) and key != "chained_optimizers":  # whose parts say that they are gone
                setattr(optimizer, key, type(value)())
    # Methods under lru_cache hold their modules, and these their groups (rotary_pos_embedding.py, forward).
    for kind in {type(thing) for thing in things if isinstance(thing, torch.nn.Module)}:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
