"""The new job after the move: tensors that have arrived become its parameters, buffers, state and gradients.

A parameter keeps its identity: its content is swapped (``torch.utils.swap_tensors``), so optimizers, param groups and
FSDP2's own records, which hold it, hold the new content. A local part that is one piece is the very tensor that
arrived, or that stayed; one of several pieces is put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...values import Kind, Region, Shard
from .companions import Companions
from .described import Entry, Standing, local_shape, pieces
from .job import Job
from .live import Held, clean, optimizers_in


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
    shapes = {each.name: each for each in held.tensors}
    for (kind, name), local in locals_of.items():
        if kind is Kind.PARAM:
            parameter = held.parameters[name]
            trains = not any(one in companions.frozen for one in parts[name])
            new = torch.nn.Parameter(_like(parameter, local), requires_grad=trains)
            torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
        elif kind is Kind.BUFFER:
            for module, key in held.homes[kind, name]:
                module._buffers[key] = _like(module._buffers[key], local)
    _install_state(job, held, locals_of, parts, companions)
    for name in shapes:
        if (grad := locals_of.get((Kind.GRAD, name))) is not None:
            held.parameters[name].grad = _like(held.parameters[name], grad)
    for model in job.models:
        for name, module in model.named_modules():
            module.training = clean(f"{name}.")[:-1] not in companions.evaluating


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
                state[str(kind)] = _like(parameter, locals_of[kind, name])
            if state:
                optimizer.state[parameter] = state


def _like(tensor: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """A local part as its parameter or buffer has it: in a DTensor of the same placements, or by itself."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def parts_by_name(entries: Iterable[Entry]) -> dict[str, tuple[str, ...]]:
    """Per live parameter its logical names."""
    return {entry.name: tuple(part.name for part in entry.parts) for entry in entries if entry.kind is Kind.PARAM}
