"""The account of a job of torch's own parallelism: every tensor that modules, optimizers and extras reach.

Carried are the tensors that ``live`` finds. Companions are what param groups, optimizer state and extras say by
value. Derived is what a module makes anew itself (``after_move``). What else is reached is unknown, and refused by
its path.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...values import Mismatch
from .. import hooks
from ..account import Audit, judged
from ..claims import Claims, Fate, Places, nbytes
from ..reach import Found, reach
from .job import Job
from .live import Lives

_TORCHS: Final = "torch.distributed."
_HOOKS: Final = "hooks"
"""Root of what communication hooks keep, those of torch.distributed included: nothing carries it, so it is refused."""


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
    places = Places()
    claims = Claims(places)
    for label, tensor in carried.items():
        claims.add(tensor, Fate.CARRIED, label)
    valued = {id(value) for of_name in lives.scalars.values() for value in of_name.values()}
    roots: dict[str, object] = {f"model[{index}]": model for index, model in enumerate(lives.models)}
    # What communication hooks keep (PowerSGD's errors) is no part of any module.
    roots |= {
        f"{_HOOKS}[{index}]": [state for _, state in getattr(model, "_comm_hooks", ())]
        for index, model in enumerate(job.models)
    }
    found = reach(roots | {"optimizer": job.optimizer, "extras": job.extras}).state
    for each in found:
        if isinstance(each.value, torch.Tensor) and (rule := _rule(each, valued)) is not None:
            claims.add(each.value, *rule)
    return judged(found, claims, places, _other, carried)


def is_torchs_own(found: Found) -> bool:
    """Whether torch.distributed keeps this for itself: FSDP2's records of a module, a mesh's table of ranks.

    The class that ``fully_shard`` gives a module is torch's, what the module holds is the user's.
    """
    users = torch.Tensor | torch.nn.Module
    return type(found.owner).__module__.startswith(_TORCHS) and not isinstance(found.owner, users)


def _rule(found: Found, valued: set[int]) -> tuple[Fate, str] | None:
    owner: Any = found.owner
    if id(found.value) in valued:
        return Fate.COMPANION, "optimizer state by value"
    if isinstance(owner, torch.optim.Optimizer) and "[params]" not in found.path and found.attribute != "state":
        return Fate.COMPANION, f"setting of a param group ({found.key})"
    if found.path.startswith("extras"):
        return Fate.COMPANION, "of an extra"
    if is_torchs_own(found) and not found.path.startswith(_HOOKS):
        return Fate.REBUILT, "of FSDP2 or a mesh"
    if found.value.grad_fn is not None and not isinstance(found.value, torch.nn.Parameter):
        return Fate.REBUILT, "of the last forward (has a graph)"
    if isinstance(owner, torch.nn.Module) and hooks.vouches(owner):
        return Fate.REBUILT, f"made anew by {hooks.AFTER_MOVE}"
    return None


def _other(found: Found) -> tuple[Fate, str]:
    if found.path.startswith("extras"):
        return Fate.COMPANION, "of an extra"
    if nbytes(found.value) == 0:
        return Fate.DERIVED, "holds no bytes"
    if isinstance(found.owner, torch.nn.Module) and hooks.vouches(found.owner):
        return Fate.REBUILT, f"made anew by {hooks.AFTER_MOVE}"
    return Fate.UNKNOWN, type(found.value).__name__
