"""The new job after the move: tensors that have arrived become its parameters, buffers, state and gradients.

A parameter keeps its identity, so optimizers, param groups and the records of FSDP2 and DDP, which hold it, hold the
new content. DTensors, and what is on the meta device, have their content swapped (``torch.utils.swap_tensors``); plain
tensors with data are given other data, because DDP's reducer holds them below Python, where no swap reaches. Plain
buffers likewise: DDP broadcasts those that it found when it was made. A local part that is one piece is the very
tensor that arrived, or that stayed; one of several pieces is put together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ...values import Kind, Mismatch, Region, Shard
from .companions import Companions
from .described import Entry, Standing, local_shape, pieces
from .job import Job
from .live import Held, fsdp_groups, optimizers_in

_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_USES: Final = 2
"""Of a tensor, by itself and its gradient accumulator; ``torch.utils.swap_tensors`` allows no more."""


def assembled(entry: Entry, standing: Standing, tensors: Mapping[Shard, torch.Tensor]) -> torch.Tensor:
    """A rank's local part of a tensor out of its pieces."""
    shape, found = local_shape(entry, standing), list(pieces(entry, standing))
    if len(found) == 1:
        return tensors[found[0].shard].reshape(shape).contiguous()
    first = tensors[found[0].shard]
    local = torch.empty(shape, dtype=first.dtype, device=first.device)
    for piece in found:
        at(local, piece.local).copy_(tensors[piece.shard].reshape(piece.local.shape))
    return local


def at(local: torch.Tensor, box: Region) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def install(
    job: Job,
    held: Held,
    locals_of: Mapping[tuple[Kind, str], torch.Tensor],
    parts: Mapping[str, tuple[str, ...]],
    companions: Companions,
) -> None:
    """Put tensors in place.

    Args:
        job: the new job.
        held: what its modules hold.
        locals_of: by kind and live name this rank's local parts.
        parts: per live parameter its logical names.
        companions: of the old job.
    """
    for (kind, name), local in locals_of.items():
        if kind is Kind.PARAM:
            parameter = held.parameters[name]
            trains = not any(one in companions.frozen for one in parts[name])
            if not _takes_data(parameter, local):
                _swap(parameter, torch.nn.Parameter(_like(parameter, local), requires_grad=trains))
            else:
                parameter.data = local
                parameter.requires_grad_(trains)
        elif kind is Kind.BUFFER:
            for module, key in held.homes[kind, name]:
                buffer = module._buffers[key]
                if buffer is not None and _takes_data(buffer, local):
                    buffer.data = local
                else:
                    module._buffers[key] = _like(buffer, local)
    _renew_fsdp(job.models)
    _install_state(job, held, locals_of, parts, companions)
    for name, parameter in held.parameters.items():
        grad = locals_of.get((Kind.GRAD, name))  # without one, what build may have left goes
        parameter.grad = None if grad is None else _like(parameter, grad)
    companions.set_modules(job.models)


def _install_state(
    job: Job,
    held: Held,
    locals_of: Mapping[tuple[Kind, str], torch.Tensor],
    parts: Mapping[str, tuple[str, ...]],
    companions: Companions,
) -> None:
    kinds: dict[str, list[Kind]] = {}
    for kind, name in locals_of:
        if kind not in (Kind.PARAM, Kind.BUFFER, Kind.GRAD):
            kinds.setdefault(name, []).append(kind)
    for optimizer in optimizers_in(job.optimizer):
        optimizer.state.clear()
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            name = held.names[id(parameter)]
            state: dict[str, Any] = companions.scalars(parts[name])
            for kind in kinds.get(name, ()):
                plain = any((str(kind), one) in companions.plain for one in parts[name])
                state[str(kind)] = locals_of[kind, name] if plain else _like(parameter, locals_of[kind, name])
            if state:
                optimizer.state[parameter] = state


def check_swappable(held: Held) -> None:
    """Hold it that the new job's parameters can be given their content.

    Raises:
        Mismatch: naming a parameter that something else holds, so that torch would not swap it.
    """
    for name, parameter in held.parameters.items():
        plain = not isinstance(parameter, DTensor) and not parameter.is_meta
        if not plain and (weakref.getweakrefs(parameter) or parameter._use_count() > _USES):  # type: ignore[attr-defined]
            raise Mismatch(
                f"something that build made holds parameter {name} of the new model from outside (a weak reference, a "
                "hook on its gradient accumulator, a wrapper that records parameters), so it cannot be given its "
                "content; nothing was moved. What to do: make that after the change, or give the module data first "
                "(model.to_empty(device=...)) if its parameters are plain"
            )


def _swap(parameter: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Give a parameter the content of another, and leave it what was set and hooked on it."""
    attributes = dict(vars(parameter))
    hooks = {name: getattr(parameter, name) for name in _HOOKS}
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
    vars(parameter).update(attributes)
    for name, registered in hooks.items():
        if registered:
            setattr(parameter, name, registered)


def _renew_fsdp(models: Iterable[torch.nn.Module]) -> None:
    """Let FSDP2 look at its parameters again: it keeps views of their data from the first forward on.

    Where ``build`` has run none, it looks by itself before the first.
    """
    for module in (each for model in models for each in model.modules() if isinstance(each, FSDPModule)):
        for group in fsdp_groups(module):
            for parameter in group.fsdp_params if group._reset_sharded_params else ():
                parameter.reset_sharded_param()


def _takes_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.device == data.device


def _like(tensor: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """A local part as its parameter or buffer has it: in a DTensor of the same placements, or by itself."""
    if not isinstance(tensor, DTensor):
        return local
    spec = tensor._spec
    if local.dtype != tensor.dtype:  # fp32 state of a 16-bit parameter
        meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
