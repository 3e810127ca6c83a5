"""Old objects raise on use: modules and optimizers of a job that was consumed.

Their class is changed to one whose every attribute raises, and what they held is let go, so that the memory of the
old layout is given back however long a training loop keeps the names. Tensors that the user holds by themselves stay
what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from ...values import Mismatch


def _refuse(what: str) -> NoReturn:
    raise Mismatch(
        f"this {what} was consumed by a change of layout; what to do: use the one of the job that shardshift.migrate "
        "has given (job.model, job.optimizer)"
    )


class _ConsumedModule(torch.nn.Module):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _KNOWN else _refuse("module")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("module")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name in _KNOWN else _refuse("module")

    def __len__(self) -> int:
        _refuse("module")

    def __iter__(self) -> NoReturn:
        _refuse("module")

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("module")

    def __contains__(self, item: Any) -> bool:
        _refuse("module")

    def __bool__(self) -> bool:
        return True  # as a module without __len__ is

    def __repr__(self) -> str:
        return "<module consumed by a change of layout>"


class _ConsumedOptimizer(torch.optim.Optimizer):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _KNOWN else _refuse("optimizer")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name in _KNOWN else _refuse("optimizer")

    def __repr__(self) -> str:
        return "<optimizer consumed by a change of layout>"


_KNOWN = frozenset({"__class__", "__dict__", "__repr__", "__hash__", "__eq__", "__weakref__"})
"""What a debugger or a set asks of any object."""


def retire(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
    """Make modules, all that they consist of, and optimizers raise on use."""
    for module in [each for model in models for each in model.modules()]:
        _emptied(module, _ConsumedModule)
    for optimizer in optimizers:
        _emptied(optimizer, _ConsumedOptimizer)


def _emptied(value: Any, kind: type) -> None:
    content = value.__dict__
    value.__class__ = kind
    content.clear()
