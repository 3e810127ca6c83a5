"""The account of a job of torch's own parallelism: every tensor that modules, optimizers and extras reach.

Carried are the tensors that ``live`` finds. Companions are what the records say by value (param groups, optimizer
state) and what extras hold or say. Rebuilt is what a module makes anew itself (``after_move``). What else is reached is
unknown, and refused by its path: so is a tensor that an optimizer keeps on itself, which no record says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from ...values import Mismatch
from .. import hooks
from ..account import Audit, Entry, judged
from ..claims import Claims, Fate, Places, nbytes
from ..reach import Found, Reached, reach
from .job import Job, inside
from .live import Lives, optimizers_in

_TORCHS: Final = "torch.distributed."
_HOOKS: Final = "hooks"
"""Root of what communication hooks keep, those of torch.distributed included: nothing carries it, so it is refused."""
_ADVICE: Final = (
    "; what an optimizer keeps beside its state: put what belongs to a parameter into optimizer.state[parameter], in "
    "the parameter's shape, and let an extra's state_dict give all else (the tensor itself, no copy); an optimizer "
    "inside another: let both have the very same param_groups and state"
)


def audit(job: Job, lives: Lives | None = None) -> Audit:
    """Account for every tensor that a live job reaches. Local; FSDP2 modules come to rest (``settle``).

    Args:
        job: the job.
        lives: what it moves, if that is known already.

    Raises:
        Mismatch: if a tensor has no rule, or no data.
        Unaccounted: naming state of the optimizer that has no rule.
    """
    lives = lives or Lives.of(job.models, job.optimizer)
    carried = {str(each): each.local for each in lives.tensors}
    if without := [label for label, tensor in carried.items() if tensor.is_meta]:
        raise Mismatch(
            f"{', '.join(without[:8])} of this job is on the meta device, so it has no data to move; nothing was "
            "moved. What to do: give the model its data (to_empty, then initialise or load) before the change"
        )
    roots: dict[str, object] = {f"model[{index}]": model for index, model in enumerate(lives.models)}
    # What communication hooks keep (PowerSGD's errors) is no part of any module.
    roots |= {
        f"{_HOOKS}[{index}]": [state for _, state in getattr(model, "_comm_hooks", ())]
        for index, model in enumerate(job.models)
    }
    reached = reach(roots | {"optimizer": job.optimizer, "extras": job.extras})
    optimizers = optimizers_in(job.optimizer)
    said = _said_by_records(lives, optimizers)
    found = _judged(job, carried, said, reached)
    if found.unknown and job.extras:  # only now: a loader may have to ask its workers for its state
        states = reach({name: inside(extra).state_dict() for name, extra in job.extras.items()}).state
        said += [(each.value, "of an extra") for each in states if isinstance(each.value, torch.Tensor)]
        found = _judged(job, carried, said, reached)
    found = replace(found, entries=(*found.entries, *_optimizers_inside(reached, optimizers)))
    ours = any(path.startswith("optimizer") for path in found.unknown)
    return replace(found, advice=_ADVICE) if ours else found


def _judged(
    job: Job, carried: dict[str, torch.Tensor], said: Iterable[tuple[torch.Tensor, str]], reached: Reached
) -> Audit:
    places = Places()
    claims = Claims(places)
    for label, tensor in carried.items():
        claims.add(tensor, Fate.CARRIED, label)
    for tensor, by in said:
        claims.add(tensor, Fate.COMPANION, by)
    extras = {id(inside(extra)) for extra in job.extras.values()}
    for each in reached.state:
        if isinstance(each.value, torch.Tensor) and (rule := _rule(each, extras)) is not None:
            claims.add(each.value, *rule)
    return judged(reached.state, claims, places, lambda each: _other(each, extras), carried)


def _said_by_records(lives: Lives, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.Tensor, str]]:
    """The tensors that this rank's record says by value (``companions``), or that only began its settings."""
    groups = [{k: v for k, v in group.items() if k != "params"} for each in optimizers for group in each.param_groups]
    defaults = [each.defaults for each in optimizers]
    return [
        (
            each.value,
            "optimizer state by value" if each.path.startswith("state") else f"setting of a param group ({each.key})",
        )
        for each in reach({"state": lives.scalars, "groups": groups, "defaults": defaults}).state
        if isinstance(each.value, torch.Tensor)
    ]


def _optimizers_inside(reached: Reached, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Entry]:
    """Optimizers inside others with settings or state of their own: records are of the ones that a job is given."""
    groups = {id(group) for each in optimizers for group in each.param_groups}
    states, known = {id(each.state) for each in optimizers}, {id(each) for each in optimizers}
    for path, each in reached.objects:
        if not isinstance(each, torch.optim.Optimizer) or id(each) in known or path.startswith("extras"):
            continue
        own = getattr(each, "state", None)
        shared = all(id(group) in groups for group in getattr(each, "param_groups", ()))
        # A container (torchtitan's) steps nothing itself, and those inside it are known.
        if not hasattr(each, "optimizers") and not (shared and (not own or id(own) in states)):
            yield Entry(path, Fate.UNKNOWN, f"{type(each).__name__} with param groups or state of its own", 0)


def is_torchs_own(found: Found) -> bool:
    """Whether torch.distributed keeps this for itself: FSDP2's records of a module, a mesh's table of ranks.

    The class that ``fully_shard`` gives a module is torch's, what the module holds is the user's.
    """
    users = torch.Tensor | torch.nn.Module | torch.optim.Optimizer | torch.amp.GradScaler
    return type(found.owner).__module__.startswith(_TORCHS) and not isinstance(found.owner, users)


def _rule(found: Found, extras: set[int]) -> tuple[Fate, str] | None:
    if _is_of_an_extra(found, extras):
        return Fate.COMPANION, "of an extra"
    if is_torchs_own(found) and not found.path.startswith(_HOOKS):
        return Fate.REBUILT, "of FSDP2 or a mesh"
    if found.value.grad_fn is not None and not isinstance(found.value, torch.nn.Parameter):
        return Fate.REBUILT, "of the last forward (has a graph)"
    if isinstance(found.owner, torch.nn.Module) and hooks.vouches(found.owner):
        return Fate.REBUILT, f"made anew by {hooks.AFTER_MOVE}"
    return None


def _is_of_an_extra(found: Found, extras: set[int]) -> bool:
    """Whether an extra holds this, which says by ``state_dict`` what of it is state, wherever it was met first.

    An optimizer says only what torch knows of it, so one given as an extra vouches for nothing here.
    """
    return found.path.startswith("extras") or (
        id(found.owner) in extras and not isinstance(found.owner, torch.optim.Optimizer)
    )


def _other(found: Found, extras: set[int]) -> tuple[Fate, str]:
    if _is_of_an_extra(found, extras):
        return Fate.COMPANION, "of an extra"
    if nbytes(found.value) == 0:
        return Fate.DERIVED, "holds no bytes"
    if isinstance(found.owner, torch.nn.Module) and hooks.vouches(found.owner):
        return Fate.REBUILT, f"made anew by {hooks.AFTER_MOVE}"
    return Fate.UNKNOWN, type(found.value).__name__
