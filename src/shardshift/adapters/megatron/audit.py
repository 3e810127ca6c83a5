"""The audit: every byte of tensors that a job reaches, and what becomes of it in a change of layout.

A tensor that the adapter has not been told about would silently start anew after the change. So the audit does not
ask the rules what there is, it asks the job: it walks whatever model chunks, optimizer and scheduler reach
(``reach.py``) and holds each tensor against what the rules claim.

1. **Claims** are stretches of storages, each of a class:
   *carried*: the tensors that the adapter moves; *companion*: small tensors that go along by value (steps and settings
   of param groups, the loss scale, what the scheduler's ``state_dict`` gives); *rebuilt*: what Megatron makes anew or a
   step overwrites before it reads it (gradient and parameter buffers of ``DistributedDataParallel``, gradients,
   overflow flags, leftovers of the last forward); *derived*: a tensor with real data and equal bits stands at the same
   path in the job built on the meta device, so it follows from the configuration.
2. A tensor has the first class (in that order) up to which claims cover it whole. One that they do not cover is
   **unknown**, with its path.
3. Bytes are counted by storage, each byte once however many tensors view it: to the first class that claims it, to
   unknown if an unknown tensor views it, else to *slack* (no tensor reaches it).

Beside tensors the walk finds bare storages, numpy arrays and random generators; those that are not derived are unknown
too, since modules of one's own keep state in them. Python's own values are outside: what of them matters travels by
name (scheduler, counters, param groups). So are closures of hooks and whatever only a function holds.

A parameter buffer under the distributed optimizer is carried where parameters lie in it, and rebuilt (padding) between
them. Rejected: claims by tensor identity (views of one storage would count twice, and a view of a carried tensor would
be unknown).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from megatron.core.optimizer.grad_scaler import MegatronGradScaler

from .. import hooks
from ..account import Audit, judged
from ..claims import Claims, Fate, Places, nbytes
from ..reach import Found, Reached, reach
from . import extras
from .job import gradient_buffers, unwrapped


class Holds(Protocol):
    """What is walked: a live job, or one built on the meta device."""

    @property
    def model(self) -> Sequence[torch.nn.Module]:
        """The wrapped model chunks."""

    @property
    def optimizer(self) -> Any:
        """The Megatron optimizer."""

    @property
    def scheduler(self) -> Any:
        """The scheduler, or None."""


def audit(
    job: Holds,
    carried: Mapping[str, torch.Tensor],
    built: Mapping[str, Any] | None = None,
    found: Reached | None = None,
) -> Audit:
    """Account for every tensor that a live job reaches. Local; reads tensors only where ``built`` has the same path.

    Args:
        job: the live job.
        carried: by label (kind and logical name) every local tensor that the adapter moves. Labels are for people.
        built: ``by_path`` of the same stage's chunks, built on the meta device.
        found: ``reach(roots(job))``, if it was walked already.
    """
    found = found or reach(roots(job))
    places = Places()
    claims = Claims(places)
    for label, tensor in carried.items():
        claims.add(tensor, Fate.CARRIED, label)
    for fate, by, tensor in _buffers(job.model):
        claims.add(tensor, fate, by)
    scalers = [each for _, each in found.objects if isinstance(each, MegatronGradScaler)]
    told = {id(value) for holder in (job.scheduler, *scalers) for value in _values(holder)}
    for each in found.state:
        if isinstance(each.value, torch.Tensor):
            rule = _rule(each, told)
            if rule is None and _is_derived(each, built):
                rule = Fate.DERIVED, "equal in the job built on the meta device"
            if rule is not None:
                claims.add(each.value, *rule)
    return judged(found.state, claims, places, lambda each: _other(each, built), carried)


def roots(job: Holds) -> dict[str, object]:
    """Where the walk begins; with the chunks inside their wrappers, so that paths do not depend on these."""
    wrapped: dict[str, object] = {f"wrapped[{index}]": chunk for index, chunk in enumerate(job.model)}
    return _inside_roots(unwrapped(job.model)) | wrapped | {"optimizer": job.optimizer, "scheduler": job.scheduler}


def by_path(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """What chunks that were built on the meta device reach, by path, as ``audit`` wants it; not wrapped."""
    return {each.path: each.value for each in reach(_inside_roots(chunks)).state}


def _inside_roots(chunks: Sequence[torch.nn.Module]) -> dict[str, object]:
    return {f"model[{index}]": chunk for index, chunk in enumerate(chunks)}


_ATTRIBUTES: Final = {
    "found_inf": "overflow flag of a step (optimizer.py)",
    "_dummy_overflow_buf": "overflow flag of a step (optimizer.py)",
    "_scale_one": "constant (optimizer.py)",
}
"""Of Megatron's optimizers."""
_OF_A_SCALER: Final = ("_scale", "min_scale", "growth_factor", "backoff_factor")
"""What Megatron's own grad scalers keep in tensors: the scale, and settings that the new layout's begin with."""
_LEFTOVERS: Final[dict[str, tuple[str, str]]] = {
    "MoETokenDispatcher": ("", "of the last forward (moe/token_dispatcher.py)"),
    "_DispatchManager": ("", "of the last forward (moe/token_dispatcher.py)"),
    "SharedExpertMLP": (
        "cached_fc1_input cached_fc2_input cached_fc2_output cached_output gate_score",
        "of the last forward",
    ),
    "TransformerBlock": ("input_tensor", "input of the last forward (transformer_block.py)"),
    "MambaStack": ("input_tensor", "input of the last forward (mamba_block.py)"),
    "YarnRotaryEmbedding": ("cos_cached sin_cached", "made anew when too short (yarn_rotary_pos_embedding.py)"),
}
"""Megatron's classes that keep tensors of a forward: in which attributes ("": in all). Not what a user derives."""


def _rule(found: Found, told: set[int]) -> tuple[Fate, str] | None:
    """What the place where a tensor was found says about it."""
    owner, names = found.owner, {kind.__name__ for kind in type(found.owner).__mro__}
    if isinstance(owner, torch.Tensor) and found.attribute in ("grad", "main_grad", "decoupled_grad"):
        return Fate.REBUILT, "gradient"
    if found.value.grad_fn is not None and not isinstance(found.value, torch.nn.Parameter):
        return Fate.REBUILT, "of the last forward (has a graph)"
    if isinstance(owner, torch.optim.Optimizer):
        if found.attribute == "state" and found.key == "step":
            return Fate.COMPANION, "optimizer step"
        if found.attribute in ("param_groups", "defaults") and "[params]" not in found.path:
            return Fate.COMPANION, f"setting of a param group ({found.key})"
    if isinstance(owner, MegatronGradScaler) and found.attribute in _OF_A_SCALER:
        return Fate.COMPANION, "loss scale"
    if "MegatronOptimizer" in names:
        if found.attribute in _ATTRIBUTES:
            return Fate.REBUILT, _ATTRIBUTES[found.attribute]
        if found.attribute == "_scale" and "FP32Optimizer" in names:
            return Fate.REBUILT, "constant (optimizer.py)"
    if isinstance(owner, torch.nn.Module) and hooks.vouches(owner):
        return Fate.REBUILT, f"made anew by {hooks.AFTER_MOVE}"
    if isinstance(owner, torch.nn.Module) and extras.keeps(owner):
        return Fate.COMPANION, "of a module that has extra state"
    if id(found.value) in told:
        return Fate.COMPANION, "in the state_dict of the scheduler or of a grad scaler"
    return _leftover(found)


def _leftover(found: Found) -> tuple[Fate, str] | None:
    """Whether one of Megatron's own classes keeps this of its last forward."""
    kind = type(found.owner)
    if kind.__module__.startswith("megatron.core."):
        for name in {each.__name__ for each in kind.__mro__} & _LEFTOVERS.keys():
            attributes, text = _LEFTOVERS[name]
            if not attributes or found.attribute in attributes.split():
                return Fate.REBUILT, text
    return None


def _buffers(model: Sequence[torch.nn.Module]) -> Iterator[tuple[Fate, str, torch.Tensor]]:
    """What ``DistributedDataParallel`` allocates for itself (``param_and_grad_buffer.py``)."""
    for buffer in gradient_buffers(model):
        for attribute in ("grad_data", "param_data", "shared_buffer"):
            tensor = getattr(buffer, attribute, None)
            if isinstance(tensor, torch.Tensor):
                yield Fate.REBUILT, f"DistributedDataParallel's {attribute}", tensor


def _values(holder: Any) -> Iterator[object]:
    """What a scheduler or a grad scaler gives as its state; the walk decides what of it is a tensor."""
    state = holder.state_dict() if hasattr(holder, "state_dict") else {}
    yield from (found.value for found in reach({"state": state}).state)


def _is_derived(found: Found, built: Mapping[str, Any] | None) -> bool:
    """Whether the job built on the meta device has the same bits there."""
    other: Any = None if built is None else built.get(found.path)
    value: Any = found.value
    if type(other) is not type(value):
        return False
    if isinstance(value, np.ndarray):
        same = (value.dtype, value.shape) == (other.dtype, other.shape)
        return same and bool(value.tobytes() == other.tobytes())
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), other.get_state())
    if not isinstance(value, torch.Tensor) or other.is_meta or value.is_meta:
        return False
    if (value.dtype, value.shape) != (other.dtype, other.shape) or value.layout is not torch.strided:
        return False
    ours, theirs = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (value, other))
    return torch.equal(ours, theirs)


def _other(found: Found, built: Mapping[str, Any] | None) -> tuple[Fate, str]:
    if nbytes(found.value) == 0 or _is_derived(found, built):
        return Fate.DERIVED, "equal in the job built on the meta device"
    return _leftover(found) or (Fate.UNKNOWN, type(found.value).__name__)
