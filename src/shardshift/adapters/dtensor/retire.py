"""Old objects raise on use: modules and optimizers of a job that was consumed.

Their class is changed to one whose every attribute raises, and what they held is let go, so that the memory of the
old layout is given back however long a training loop keeps the names. Tensors that the user holds by themselves stay
what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule

from ...values import Mismatch
from .live import fsdp_groups

_KNOWN: Final = frozenset({"__class__", "__dict__", "__repr__", "__hash__", "__eq__", "__weakref__"})
"""What a debugger or a set asks of any object."""


class _Refusing:
    """Refuses whatever is asked of it; what Python looks up in the class is written out."""

    _what: str

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _KNOWN else _refuse(self)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name in _KNOWN else _refuse(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse(self)

    def __len__(self) -> int:
        _refuse(self)

    def __iter__(self) -> NoReturn:
        _refuse(self)

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse(self)

    def __contains__(self, item: Any) -> bool:
        _refuse(self)

    def __bool__(self) -> bool:
        return True  # as that of what has no length

    def __repr__(self) -> str:
        return f"<{type(self)._what} consumed by a change of layout>"


def _refuse(value: _Refusing) -> NoReturn:
    raise Mismatch(
        f"this {type(value)._what} was consumed by a change of layout; what to do: use the one of the job that "
        "shardshift.migrate has given (job.model, job.optimizer)"
    )


def _consumed(base: type, what: str, **more: Any) -> type:
    # One base, not two: an object can only become of a class whose instances lie in memory as its own do.
    own = {name: each for name, each in vars(_Refusing).items() if callable(each)}
    return type(f"Consumed{base.__name__}", (base,), {**own, "_what": what, **more})


_MODULE: Final = _consumed(torch.nn.Module, "module")
_OPTIMIZER: Final = _consumed(torch.optim.Optimizer, "optimizer")


def retire(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
    """Make modules, all that they consist of, and optimizers raise on use."""
    modules = [each for model in models for each in model.modules()]
    for module in modules:
        if isinstance(module, FSDPModule):
            _let_go(module)
    for module in modules:
        _emptied(module, _MODULE, "module")
    for optimizer in optimizers:
        _emptied(optimizer, _OPTIMIZER, "optimizer")


def _let_go(module: FSDPModule) -> None:
    """Break the cycles through which FSDP2 holds parameters: torchtitan turns the collector off."""
    for group in fsdp_groups(module):
        group.fsdp_params.clear()
    context = getattr(module._get_fsdp_state(), "_state_ctx", None)
    if context is not None:
        context.all_states.clear()


def _emptied(value: Any, kind: type, what: str) -> None:
    content = value.__dict__
    try:
        value.__class__ = kind
    except TypeError:  # an object with slots
        value.__class__ = _consumed(type(value), what, __slots__=())
    content.clear()
