"""The new job before anything has moved: what ``build`` makes on its mesh, and what must hold of that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...values import Infeasible, Kind, Mesh, Mismatch, Unaccounted
from .. import hooks
from ..reach import reach
from .audit import is_torchs_own
from .companions import Companions
from .job import Job, inside
from .live import Held, clean, optimizers_in

Build = Callable[[DeviceMesh], Any]
"""From torch's mesh a ``Job``, or (model, optimizer), or (model, optimizer, extras)."""
_FILLED: Final = ("state", "param_groups", "defaults")
"""Of an optimizer: what the old job's takes the place of, and what only began its settings."""


def built(build: Build, device_mesh: DeviceMesh, to: Mesh, old: Job | None) -> Job:
    """The new job as ``build`` makes it, its parameters without data or with data that nobody wants.

    Raises:
        Mismatch: if ``build`` gives something else, or an object of the old job.
    """
    made = build(device_mesh)
    if isinstance(made, Job):
        job = made
    else:
        parts = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(parts) <= 3:
            raise Mismatch(
                f"build gave {len(parts)} values; nothing was moved. What to do: return model, optimizer, and if "
                "there are any a dict of extras, or a shardshift.fsdp.Job"
            )
        models = (parts[0],) if isinstance(parts[0], torch.nn.Module) else parts[0]
        if not isinstance(models, Sequence) or not all(isinstance(each, torch.nn.Module) for each in models):
            raise Mismatch(
                f"build gave a {type(parts[0]).__name__} as the model; nothing was moved. What to do: return a module, "
                "or a list of the modules of a pipeline stage, first"
            )
        job = Job(*parts, mesh=to, names=None, random=True if old is None else old.random)
    if job is old:
        raise Mismatch("build gave the old job; nothing was moved. What to do: make a new model and a new optimizer")
    if old is not None and not old.is_consumed:
        ours = {id(each) for model in old.models for each in model.modules()} | {id(each) for each in _optimizers(old)}
        theirs = [*(each for model in job.models for each in model.modules()), *_optimizers(job)]
        if shared := [type(each).__name__ for each in theirs if id(each) in ours]:
            raise Mismatch(
                f"build gave objects of the old job ({', '.join(shared[:4])}), which cannot change their mesh; "
                "nothing was moved. What to do: make a new model and a new optimizer on the mesh that it is given"
            )
    job.mesh, job.device_mesh = to, device_mesh
    return job


def _optimizers(job: Job) -> tuple[Any, ...]:
    return optimizers_in(job.optimizer)


def refuse_data_of_its_own(job: Job, held: Held) -> None:
    """Hold it that nothing but parameters and buffers of the new model waits for data.

    Raises:
        Unaccounted: naming tensors on the meta device that nothing will fill.
    """
    known = {id(each) for each in held.parameters.values()}
    known |= {id(module._buffers.get(key)) for homes in held.homes.values() for module, key in homes}
    known |= {id(each.local) for each in held.tensors}
    left = [
        found.path
        for found in reach({f"model[{index}]": model for index, model in enumerate(job.models)}).state
        if isinstance(found.value, torch.Tensor) and found.value.is_meta and id(found.value) not in known
        if not (isinstance(found.owner, torch.nn.Module) and hooks.vouches(found.owner)) and not is_torchs_own(found)
    ]
    if left:
        raise Unaccounted(
            f"{', '.join(left[:8])} of the new model has no data and is neither parameter nor buffer, so nothing "
            "would fill it; nothing was moved. What to do: register it as a buffer, make it on an explicit device, "
            f"or give its module a method {hooks.AFTER_MOVE} that makes it anew",
            left,
        )


def refuse_optimizers_without_data(job: Job) -> None:
    """Hold it that what new optimizers keep on themselves has data, once the extras have had their state.

    Raises:
        Unaccounted: naming tensors on the meta device that nothing will fill.
    """
    left = [
        found.path
        for found in reach({"optimizer": job.optimizer}).state
        if isinstance(found.value, torch.Tensor) and found.value.is_meta
        if isinstance(found.owner, torch.optim.Optimizer) and found.attribute not in _FILLED
    ]
    if left:
        raise Unaccounted(
            f"{', '.join(left[:8])} of the new job is on the meta device, and nothing would fill it; nothing was "
            "moved. What to do: make it on an explicit device, or keep it in optimizer.state[parameter]",
            left,
        )


def check_stepped(
    job: Job,
    held: Held,
    parts: Mapping[str, Sequence[str]],
    tensors: Collection[tuple[Kind, str]],
    companions: Companions,
) -> None:
    """Hold it that the new optimizers step every parameter that has state, so that none of it is left behind.

    Args:
        job: the new job, whose optimizers step parameters of its model only.
        held: what its modules hold.
        parts: per live parameter its logical names.
        tensors: of the old job, by kind and logical name.
        companions: of the old job.

    Raises:
        Unaccounted: naming parameters whose state nobody would take.
    """
    stepped = {held.names[id(p)] for each in _optimizers(job) for group in each.param_groups for p in group["params"]}
    names = {name for kind, name in tensors if kind not in (Kind.PARAM, Kind.BUFFER, Kind.GRAD)}
    left = [
        name
        for name in sorted(held.parameters.keys() - stepped)
        if names.intersection(parts[name]) or companions.scalars(parts[name])
    ]
    if left:
        raise Unaccounted(
            f"the old job's optimizer has state of {', '.join(left[:8])}, which the new one does not step; nothing was "
            "moved. What to do: give the new optimizer these parameters, too, or drop their state from the old one's",
            left,
        )


def check_frozen(job: Job, parts: Mapping[str, Sequence[str]], companions: Companions) -> None:
    """Hold it that under DDP the parameters that train are those of the old job: DDP looks once, when it wraps.

    Raises:
        Mismatch: naming parameters.
    """
    for model in job.models:
        if not isinstance(model, DistributedDataParallel):
            continue
        trains = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
        frozen = {name: not companions.frozen.isdisjoint(parts[clean(name)]) for name in trains}
        if differ := [name for name in trains if trains[name] == frozen[name]]:
            raise Mismatch(
                f"{', '.join(differ[:8])} {'is' if frozen[differ[0]] else 'is not'} frozen (requires_grad) in the old "
                "job and otherwise in the new one, and DDP takes that as it is when it wraps; nothing was moved. What "
                "to do: set requires_grad in build, before DistributedDataParallel"
            )


def take_extras(job: Job, old: Job | None, companions: Companions) -> list[Callable[[], None]]:
    """Bring the new job's extras to where the old ones were; those that ``build`` did not make are kept.

    Returns:
        What is left to do once the change is committed: kept schedulers are turned to the new optimizer.

    Raises:
        Infeasible: if a state has no meaning on the new mesh, or a rank that joins lacks an extra.
        Mismatch: if ``build`` gives an extra of which the old job knows nothing.
    """
    if unknown := sorted(job.extras.keys() - set(companions.extras)):
        raise Mismatch(
            f"build gives extra {', '.join(unknown)}, of which the old job knows nothing (it has "
            f"{', '.join(companions.extras) or 'none'}); nothing was moved. What to do: give it to the old job, too"
        )
    later: list[Callable[[], None]] = []
    for name in companions.extras:
        if name in job.extras and not (old and inside(job.extras[name]) is inside(old.extras.get(name))):
            extra = job.extras[name]
            inside(extra).load_state_dict(companions.extra(name, extra, job.mesh, job.rank))
            continue
        if old is None or name not in old.extras:
            raise Infeasible(
                f"rank {job.rank} joins, or its job has no extra {name!r}, and build does not give one; nothing was "
                f"moved. What to do: return it from build: model, optimizer, {{{name!r}: ...}}"
            )
        kept = job.extras.get(name, old.extras[name])  # the same object, maybe with another merge
        inner = inside(kept)
        state = companions.extra(name, kept, job.mesh, job.rank)
        job.extras[name] = kept

        def turn(inner: Any = inner, state: Any = state, before: tuple[Any, ...] = _optimizers(old)) -> None:
            _turned(inner, before, _optimizers(job))  # first: an extra may write its state into the optimizer
            inner.load_state_dict(state)

        later.append(turn)
    return later


def _turned(scheduler: Any, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Turn a scheduler, and those inside it, from old optimizers to the new ones of the same places."""
    for inner in (*getattr(scheduler, "_schedulers", ()), *getattr(scheduler, "schedulers", ())):
        _turned(inner, before, after)
    for old, new in zip(before, after, strict=False):
        if getattr(scheduler, "optimizer", None) is old:
            scheduler.optimizer = new
