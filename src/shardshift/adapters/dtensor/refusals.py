"""What a job may hold that follows no rule: found here, and refused by name before anything moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ...values import Mismatch, Unaccounted
from ..claims import Address, Stretch, place
from ..reach import reach

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)


def strange(value: torch.Tensor) -> str | None:
    """What a tensor is whose elements are not simply its bytes; None for all others."""
    if type(value) not in _PLAIN:
        return type(value).__name__
    if value.is_nested or value.layout is not torch.strided:
        return f"tensor of layout {'nested' if value.is_nested else value.layout}"
    if value.is_quantized:
        return f"quantized tensor ({value.dtype})"
    return "conjugate or negative view" if value.is_conj() or value.is_neg() else None


def refuse_shared_memory(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Hold it that no two parameters lie over the same bytes: they are one tensor, and nothing declares them to be one.

    Raises:
        Mismatch: naming two that do.
    """
    claimed: dict[Address, list[tuple[Stretch, str]]] = {}
    for name, local in parameters:
        # What lies between the elements of a tensor with gaps may well be another's.
        if local.is_contiguous() and (at := place(local)) is not None:
            claimed.setdefault(at[0], []).append((at[1], name))
    for stretches in claimed.values():
        for (one, first), (other, second) in itertools.pairwise(sorted(stretches)):
            if other[0] < one[1]:
                raise Mismatch(
                    f"{first} and {second} are two parameters over the same memory, and nothing says so; nothing was "
                    "moved. What to do: make them one torch.nn.Parameter under both names, or give each memory of its "
                    "own"
                )


def by_value(value: Any, what: str) -> Any:
    """What of an optimizer's state goes along by value: all who hold the parameter hold it alike.

    Args:
        value: a number, a text, a 0-dim tensor, a container of them.
        what: its key and parameter.

    Raises:
        Unaccounted: if tensors with dims are inside it, of which nobody can say how they are cut.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise Unaccounted(
                f"{what} is a sum of what ranks hold (Partial), not reduced yet; nothing was moved. What to do: reduce "
                "it (tensor.full_tensor()) before the change",
                [what],
            )
        return value.to_local()
    inside = () if isinstance(value, torch.Tensor) else reach({what: value}).state
    if any(isinstance(each.value, torch.Tensor) and each.value.ndim for each in inside):
        raise Unaccounted(
            f"{what} is a {type(value).__name__} with tensors in it, of which nobody can say how they are cut; nothing "
            "was moved. What to do: keep each tensor under a key of its own, in the parameter's shape",
            [what],
        )
    return value


def twice(key: Any, name: str, kind: str) -> Unaccounted:
    """The error for state that two optimizers keep of one parameter, the second of this kind."""
    return Unaccounted(
        f"two optimizers keep {key} of {name}, a {kind} the second; nothing was moved. What to do: let one optimizer "
        "step each parameter",
        [f"{key}:{name}"],
    )
