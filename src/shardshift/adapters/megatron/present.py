"""The live tensors of a job by shard, cheap enough to be asked for at every step.

``MegatronChange.shards`` holds a job against both layouts and audits it, which takes as long as a step. This answers
the question of the undo copy alone: where is each shard now?

1. Found once per job and set of state kinds: the slots of the rank in its present layout, the live tensor of each, and
   views of its pieces.
2. With them, where each tensor was found: the module's dict and key, torch's optimizer and the parameter. Each further
   call looks there, and compares identity and address (``.data`` may be replaced under a parameter), and the
   parameters of the optimizers' groups by identity. Whatever differs, all is found anew.

State that does not exist is left out, and noticed when it comes. Rejected: finding everything anew (named modules and
ranges of a hundred layers take tens of milliseconds), and trusting the first look (``load_state_dict`` replaces
moments, users replace parameters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...values import Kind, Mismatch, Shard
from . import optimizer as optim
from .change import Live
from .grid import Grid
from .job import Job, unwrapped
from .names import Where

_Found = tuple[torch.Tensor | None, int]
"""A tensor and its address; None and 0 where there is none."""


class Present:
    """One job's tensors as they lie now.

    Args:
        job: the live job.
        grid: of its configuration alone.

    Attributes:
        kinds: of optimizer state, which the grid has.
        views: per shard the view of it.
        buffers: per buffer that is state the live tensor.

    Raises:
        Mismatch: if a tensor is not contiguous, or not of its slot's shape.
        Unaccounted: as ``Live.of``.
    """

    def __init__(self, job: Job, grid: Grid) -> None:
        live, chunks = Live.of(job), unwrapped(job.model)
        self.kinds: tuple[Kind, ...] = grid.kinds
        self.views: dict[Shard, torch.Tensor] = {}
        self.buffers: dict[Where, torch.Tensor] = {}
        self._weights: list[tuple[Mapping[str, Any], str, _Found]] = []
        self._masters: list[tuple[torch.Tensor, int]] = []
        self._state: list[tuple[torch.optim.Optimizer, torch.Tensor, str, _Found]] = []
        self._groups = [(part.optimizer, _members(part.optimizer)) for part in optim.wrappers(job.optimizer)]
        for slot in grid.of_rank(job.layout.rank):
            tensor = live.find(slot)
            at = (None, 0) if tensor is None else (tensor, tensor.data_ptr())
            if slot.kind in (Kind.PARAM, Kind.BUFFER):
                self._weights.append((*_home(chunks, slot.where, slot.kind), at))
                if slot.kind is Kind.BUFFER and tensor is not None:
                    self.buffers[slot.where] = tensor
            elif slot.kind is Kind.MASTER:
                self._masters += [] if tensor is None else [(tensor, tensor.data_ptr())]
            elif slot.where in live.holdings:
                holding = live.holdings[slot.where]
                self._state.append((holding.base, holding.key, slot.kind.value, at))
            if tensor is None:
                continue
            if not tensor.is_contiguous() or tuple(tensor.shape) != slot.shape:
                raise Mismatch(
                    f"{slot.kind} of {slot.name} on rank {job.layout.rank} has shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}, not {slot.shape} in one piece. What to do: keep it as it was built"
                )
            self.views |= slot.views(tensor)

    def holds(self) -> bool:
        """Whether everything is where it was."""
        return (
            all(_same(place.get(key), at) for place, key, at in self._weights)
            and all(tensor.data_ptr() == address for tensor, address in self._masters)
            and all(_same(base.state.get(key, {}).get(kind), at) for base, key, kind, at in self._state)
            and all(_alike(_members(base), members) for base, members in self._groups)
        )


def _same(tensor: torch.Tensor | None, at: _Found) -> bool:
    return tensor is at[0] and (tensor is None or tensor.data_ptr() == at[1])


def _members(base: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer steps."""
    return [parameter for group in base.param_groups for parameter in group["params"]]


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _home(chunks: Sequence[torch.nn.Module], where: Where, kind: Kind) -> tuple[Mapping[str, Any], str]:
    """The dict and key that a module has a parameter or buffer under."""
    path, _, key = where[1].rpartition(".")
    module = chunks[where[0]].get_submodule(path)
    return (module._parameters if kind is Kind.PARAM else module._buffers), key
