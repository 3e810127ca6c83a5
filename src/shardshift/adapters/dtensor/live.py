"""The tensors of a live job: parameters, buffers, optimizer state and gradients, each with how it is cut.

1. Names are those of ``state_dict``: qualified, without what wrappers add (``DistributedDataParallel``,
   ``torch.compile``, activation checkpointing). A tensor that a job holds under several names goes by the first; the
   others are *ties*, which the new job must have as well.
2. A DTensor says how it is cut. A plain tensor is whole on every rank that has it.
3. State of an optimizer that has its parameter's global shape is cut as it says itself, or, where it is a plain
   tensor of the parameter's *local* shape, as the parameter is: optimizers make such state next to DTensors. Tensors
   of no dims, numbers, texts and None go along by value. What has another shape (factored moments, scales of
   quantised blocks) follows no rule of placement, and is refused by name.
4. Gradients that are there move like their parameters: nobody can tell whether a step has used them.

Rejected: ``get_optimizer_state_dict``, which makes state that is not there by a step of zero rate, and drops what it
does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...values import Kind, Mismatch, Unaccounted
from .. import hooks
from .cuts import Cut, cuts_of
from .refusals import by_value, refuse_shared_memory, strange, twice

STEP: Final = "step"
_WRAPPERS: Final = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_COMPILED: Final = "_orig_mod"
"""Where what ``torch.compile`` makes of a module has the module."""


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """One tensor of this rank.

    Attributes:
        kind: what it is.
        name: the qualified name; of the parameter, for its state and gradient.
        shape: of the whole tensor.
        local: this rank's part.
        cuts: how the whole is cut.
        mesh: along whose axes; None for a tensor that is whole here.
        by_fsdp: whether ``fully_shard`` has cut it, or its parameter (``cuts.cuts_of``).
        plain: whether it is a plain tensor of the local shape, beside a DTensor whose state or gradient it is.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    cuts: tuple[Cut, ...]
    mesh: DeviceMesh | None
    by_fsdp: bool = False
    plain: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a rank's modules hold.

    Attributes:
        tensors: parameters, then buffers, in the modules' order.
        parameters: by name, each once.
        names: the name of each parameter, by ``id``.
        ties: per tensor with several names these, the first one first.
        homes: per tensor the modules and attributes that hold it, by (kind, name).
    """

    tensors: tuple[Live, ...]
    parameters: Mapping[str, torch.nn.Parameter]
    names: Mapping[int, str]
    ties: tuple[tuple[str, ...], ...]
    homes: Mapping[tuple[Kind, str], tuple[tuple[torch.nn.Module, str], ...]]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that holds the parameters.

    Raises:
        Mismatch: for FSDP1, whose flat parameters have no placement.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise Mismatch(
                f"{name or 'the model'} is a FullyShardedDataParallel module, whose flat parameters say nothing of "
                "where they lie; nothing was moved. What to do: shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    return model


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    return model.module if isinstance(model, DistributedDataParallel) else model._modules.get(_COMPILED)


def modules_of(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules of some models by name, without the outermost wrappers; the model itself is called "".

    A module that several share is given under each name: the stages of a pipeline have some of the names each.
    """
    for model in models:
        for name, module in unwrapped(model).named_modules(remove_duplicate=False):
            yield clean(f"{name}.").removesuffix("."), module


def clean(name: str) -> str:
    """A qualified name without what wrappers add."""
    return _WRAPPERS.sub("", name)


def settle(models: Sequence[torch.nn.Module]) -> None:
    """Bring modules to the state that they have between steps: FSDP2's parameters sharded.

    After a forward without a backward, or with ``reshard_after_forward=False``, a module still holds whole parameters.

    Raises:
        Mismatch: if gradients are being accumulated without having been reduced.
    """
    for model in models:
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            if waiting := [clean(each) for each in _unreduced(module)]:
                raise Mismatch(
                    f"{clean(name) or 'the model'} accumulates gradients of {', '.join(waiting[:8])} that have not "
                    "been reduced (set_requires_gradient_sync or set_requires_all_reduce is off); nothing was moved. "
                    "What to do: change the layout between two optimizer steps"
                )
            module.reshard()


def _unreduced(module: FSDPModule) -> Iterator[str]:
    for group in fsdp_groups(module):
        # Reduced over the shards, not yet over the replicas (HSDP, set_requires_all_reduce(False)).
        half = getattr(group, "_partial_reduce_output", None) is not None
        for parameter in group.fsdp_params:
            # In the dtype of the reduction, if that is another, and else where autograd puts gradients.
            whole = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if half or whole is not None or getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                yield getattr(parameter, "_param_fqn", None) or parameter._module_info.param_name


def fsdp_groups(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's groups of parameters that it has cut; one at most in older releases."""
    state: Any = module._get_fsdp_state()
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return [group] if (group := state._fsdp_param_group) else []


def held_by(models: Sequence[torch.nn.Module]) -> Held:
    """The parameters and buffers of some modules (``unwrapped``).

    Raises:
        Mismatch: if two different tensors have one name, two parameters share memory, or a tensor is of a kind that
            has no rule.
    """
    tensors: dict[tuple[Kind, str], Live] = {}
    first: dict[int, str] = {}
    more: dict[str, list[str]] = {}
    parameters: dict[str, torch.nn.Parameter] = {}
    homes: dict[tuple[Kind, str], list[tuple[torch.nn.Module, str]]] = {}
    modules = (module for model in models for module in model.modules() if isinstance(module, FSDPModule))
    by_fsdp = {
        id(each.sharded_param) for module in modules for group in fsdp_groups(module) for each in group.fsdp_params
    }
    for kind in (Kind.PARAM, Kind.BUFFER):
        for name, home, value in _named(models, kind):
            known = id(value) in first
            own = first.setdefault(id(value), name)
            homes.setdefault((kind, own), []).append(home)
            if own != name:
                also = more.setdefault(own, [own])
                also += [] if name in also else [name]
                continue
            if known:
                continue  # a module that two parts share
            if (Kind.PARAM, name) in tensors or (Kind.BUFFER, name) in tensors:
                raise Mismatch(
                    f"two parts of the job hold different tensors called {name}; nothing was moved. What to do: give "
                    "the parts of a pipeline names that are of the whole model (layers.7, not the third of this stage)"
                )
            tensors[kind, name] = live(kind, name, value, by_fsdp=id(value) in by_fsdp)
            if isinstance(value, torch.nn.Parameter):
                parameters[name] = value
    names = {id(parameter): name for name, parameter in parameters.items()}
    ties = tuple(tuple(group) for group in more.values())
    refuse_shared_memory((each.name, each.local) for each in tensors.values() if each.kind is Kind.PARAM)
    return Held(tuple(tensors.values()), parameters, names, ties, {key: tuple(each) for key, each in homes.items()})


def _named(
    models: Sequence[torch.nn.Module], kind: Kind
) -> Iterator[tuple[str, tuple[torch.nn.Module, str], torch.Tensor]]:
    for model in models:
        for prefix, module in model.named_modules(remove_duplicate=False):
            table = module._parameters if kind is Kind.PARAM else module._buffers
            for key, value in table.items():
                made_anew = key in module._non_persistent_buffers_set and kind is Kind.BUFFER and hooks.vouches(module)
                if value is not None and not made_anew:
                    yield clean(f"{prefix}.{key}" if prefix else key), (module, key), value


def live(kind: Kind, name: str, value: torch.Tensor, of: Live | None = None, *, by_fsdp: bool = False) -> Live:
    """One tensor of this rank, and how it is cut.

    Args:
        kind: what it is.
        name: its name, or its parameter's.
        value: a DTensor or a plain tensor.
        of: the parameter, for its state and gradient, which must have its global shape.
        by_fsdp: whether ``fully_shard`` has cut it.

    Raises:
        Mismatch: if there is no rule for it, or its local part is not what its placements say.
    """
    what = f"{kind}:{name}"
    if (shown := strange(value)) is not None:
        raise Mismatch(
            f"{what} is a {shown}, of which shardshift does not know what its bytes are; nothing was moved. What to "
            "do: keep it as a plain tensor or a DTensor, or convert it before the change"
        )
    shape = tuple(map(int, value.shape))
    if isinstance(value, DTensor):
        if of is not None and shape != of.shape:
            raise _no_rule(what, shape, of)
        local = value._local_tensor
        if (shown := strange(local)) is not None:
            raise Mismatch(
                f"{what} is a DTensor of {shown}, of which shardshift does not know what its bytes are; "
                "nothing was moved. What to do: keep it in plain tensors, or convert it before the change"
            )
        by_fsdp = by_fsdp or (of is not None and of.by_fsdp)
        return Live(kind, name, shape, local, cuts_of(value, what, by_fsdp=by_fsdp), value.device_mesh, by_fsdp)
    if of is None:
        return Live(kind, name, shape, value.data if value.requires_grad else value, (), None)
    if shape != tuple(of.local.shape):
        raise _no_rule(what, shape, of)
    return Live(kind, name, of.shape, value, of.cuts, of.mesh, plain=of.mesh is not None)


def meshes_of(tensors: Iterable[Live]) -> list[DeviceMesh]:
    """The meshes that tensors lie on, each once, in order."""
    return list(dict.fromkeys(each.mesh for each in tensors if each.mesh is not None))


def _no_rule(what: str, shape: tuple[int, ...], of: Live) -> Unaccounted:
    return Unaccounted(
        f"{what} has shape {shape}; its parameter has global shape {of.shape} and {tuple(of.local.shape)} on this "
        "rank, so where its elements belong is not known; nothing was moved. What to do: drop it from the optimizer's "
        "state if it can be made anew, or keep it in the parameter's shape",
        [what],
    )


def optimizers_in(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that an optimizer, a sequence of them, or a container of them (torchtitan's) consists of.

    Raises:
        Unaccounted: if one is no ``torch.optim.Optimizer``.
    """
    if optimizer is None:
        return ()
    inner = getattr(optimizer, "optimizers", optimizer)
    several: Iterable[Any] = inner if isinstance(inner, Sequence) else (inner,)
    flat = (each for one in several for each in ((one,) if one is optimizer else optimizers_in(one)))
    found = tuple({id(each): each for each in flat}.values())
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise Unaccounted(
                f"{type(each).__name__} is no torch.optim.Optimizer, so its state is not known; nothing was moved. "
                "What to do: give the torch.optim.Optimizer inside",
                [type(each).__name__],
            )
    return found


Scalars = dict[str, dict[str, Any]]
"""Per parameter what its state holds by value."""


def state_of(optimizers: Iterable[torch.optim.Optimizer], held: Held) -> tuple[list[Live], Scalars]:
    """The state of some optimizers.

    Returns:
        Tensors with a region, and per parameter what goes along by value.

    Raises:
        Unaccounted: naming state that follows no rule, or of a parameter that is not in the model.
    """
    of = {each.name: each for each in held.tensors if each.kind is Kind.PARAM}
    found: dict[tuple[Kind, str], Live] = {}
    scalars: Scalars = {}
    for optimizer in optimizers:
        kind_of = type(optimizer).__name__
        states: Mapping[Any, Mapping[Any, Any]] = optimizer.state
        for parameter, state in states.items():
            name = held.names.get(id(parameter))
            if name is None:
                shown = f"shape {tuple(parameter.shape)}" if isinstance(parameter, torch.Tensor) else repr(parameter)
                raise Unaccounted(
                    f"{kind_of} keeps state of a parameter ({shown}) that is not in the model; nothing was moved. What "
                    "to do: give the job every module whose parameters it steps",
                    [shown],
                )
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or (value.ndim == 0 and (key == STEP or of[name].shape != ())):
                    if key in scalars.setdefault(name, {}):
                        raise twice(key, name, kind_of)
                    scalars[name][key] = by_value(value, f"{key}:{name}")
                    continue
                kind = _kind(key, name)
                if (kind, name) in found:
                    raise twice(key, name, kind_of)
                found[kind, name] = live(kind, name, value, of[name])
    return list(found.values()), scalars


def _kind(key: Any, name: str) -> Kind:
    if isinstance(key, str) and key.isidentifier() and key not in (Kind.PARAM, Kind.BUFFER, Kind.GRAD):
        return Kind(key)
    raise Unaccounted(
        f"the optimizer keeps a tensor of {name} under {key!r}, which is no name; nothing was moved. What to do: keep "
        "state under names as Python has them",
        [f"{key}:{name}"],
    )


def gradients_of(held: Held) -> list[Live]:
    """The gradients that are there."""
    of = {each.name: each for each in held.tensors if each.kind is Kind.PARAM}
    return [
        live(Kind.GRAD, name, parameter.grad, of[name])
        for name, parameter in held.parameters.items()
        if parameter.grad is not None
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """All that a job moves or carries of its modules and optimizers.

    Attributes:
        models: its modules, without wrappers; at rest.
        held: what they hold.
        state: of the optimizers, with a region.
        scalars: what goes along by value.
        gradients: those that are there.
    """

    models: tuple[torch.nn.Module, ...]
    held: Held
    state: tuple[Live, ...]
    scalars: Scalars
    gradients: tuple[Live, ...]

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module], optimizer: Any) -> Lives:
        """From live objects; FSDP2 modules come to rest.

        Raises:
            Mismatch, Unaccounted: naming what has no rule.
        """
        inner = tuple(unwrapped(model) for model in models)
        settle(inner)
        held = held_by(inner)
        state, scalars = state_of(optimizers_in(optimizer), held)
        return cls(inner, held, tuple(state), scalars, tuple(gradients_of(held)))

    @property
    def tensors(self) -> tuple[Live, ...]:
        """Parameters, buffers, state, gradients."""
        return (*self.held.tensors, *self.state, *self.gradients)
