"""Everything that live objects reach, with the path to it; knows torch's tensors, and no training framework.

The walk is depth first, from named roots:

1. a container (dict, list, tuple, set, deque, and what derives from them) leads to its items, a tensor to its gradient
   and attributes, any other object to its attributes, from ``__dict__`` and ``__slots__``. Properties are never called:
   they run code, and show what is kept elsewhere anyway;
2. each object is visited once, by identity, so cycles end. Attributes that raise are passed over;
3. modules lead to their parameters, buffers and submodules first, so a tensor gets the name that torch gives it, and
   not that of some list which holds it too. A tensor as a dict's key is written by its own path.

Not followed: classes, Python modules, functions, methods, ``functools.partial`` (so neither the closures of hooks),
weak references, process groups, stores, streams, running generators, loggers. Python's own values are no state here:
a counter that an object keeps as an int is not found.

Rejected: ``gc.get_referents`` (no names, and it follows closures, frames and modules to everything there is);
``state_dict`` (shows what its author thought of).
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

_PLAIN: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), torch.dtype, torch.device}
    | {torch.Size, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type}
)
"""Types of what is neither state nor leads to any: most of what a walk meets, so they are told apart by one look-up."""
_EMPTY: Final = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
"""Types of what leads nowhere if it holds nothing: a module has a dozen tables of hooks."""
_CLOSED: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
    types.CoroutineType,
    functools.partial,
    weakref.ref,
    Enum,
    logging.Logger,
    np.generic,
    dist.ProcessGroup,
    dist.Store,
    dist.Work,
    torch.Stream,
    torch.Event,
    torch.autograd.graph.Node,
)
_STATE: Final = (torch.Tensor, np.ndarray, torch.UntypedStorage, torch.TypedStorage, torch.Generator)
_FIRST: Final = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Found:
    """State that was reached.

    Attributes:
        path: how, e.g. ``model[0].module.decoder.layers.1.mlp.linear_fc1.weight.main_grad``.
        value: a tensor, numpy array, storage or random generator.
        owner: the nearest object on the path that is no container.
        attribute: the owner's attribute that leads here; ``"grad"`` of a tensor is one.
        key: the last step of the path: an attribute, a key, or an index.
    """

    path: str
    value: Any
    owner: object
    attribute: str
    key: str


@dataclass(slots=True)
class Reached:
    """What a walk found.

    Attributes:
        state: tensors, arrays, storages and generators, in order of the walk.
        objects: per path every other object that is no container.
    """

    state: list[Found] = field(default_factory=list)
    objects: list[tuple[str, object]] = field(default_factory=list)


def reach(roots: Mapping[str, object]) -> Reached:
    """Walk from the roots; each object is found once, by the first path that leads to it."""
    reached, names = Reached(), dict[int, str]()
    kinds: dict[type, _Kind] = {}
    # Per entry: path, object, owner, attribute, key. What is visited stays alive: the roots hold it.
    stack: list[_Step] = [(path, root, None, path, path) for path, root in reversed(list(roots.items()))]
    seen: set[int] = set()
    while stack:
        path, value, owner, attribute, key = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = kinds.get(type(value)) or kinds.setdefault(type(value), _Kind.of(type(value)))
        if kind.what == "closed":
            continue
        children: list[_Step] = []
        if kind.what == "dict":
            for name, item in list(dict.items(value)):
                if type(item) in _PLAIN and type(name) in _PLAIN:
                    continue
                text = name if isinstance(name, str) else _key(name, names)
                children.append((f"{path}[{text}]", item, owner, attribute, text))
                if type(name) not in _PLAIN:
                    children.append((f"{path}.keys[{text}]", name, owner, attribute, text))
        elif kind.what == "sequence":
            iterate: Any = kind.iterate
            children = [
                (f"{path}[{index}]", item, owner, attribute, str(index))
                for index, item in enumerate(list(iterate(value)))
                if type(item) not in _PLAIN
            ]
        elif kind.what == "state":
            reached.state.append(Found(path, value, owner, attribute, key))
            names[id(value)] = path
            # Asking a tensor that has a graph for its gradient makes torch warn; it has none of its own.
            if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
                children.append((f"{path}.grad", value.grad, value, "grad", "grad"))
        else:
            reached.objects.append((path, value))
        if kind.has_attributes:
            for name, item in _attributes(value, kind):
                if type(item) in _PLAIN or (type(item) in _EMPTY and not item and not getattr(item, "__dict__", None)):
                    continue
                if name in _FIRST and kind.what == "module" and isinstance(item, dict):
                    children += [(f"{path}.{k}", each, value, k, k) for k, each in item.items()]
                else:
                    children.append((f"{path}.{name}", item, value, name, name))
        stack += [child for child in reversed(children) if type(child[1]) not in _PLAIN]
    return reached


_Step = tuple[str, Any, object, str, str]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the walk treats objects of a class: found out once for each."""

    what: str
    iterate: Any
    slots: tuple[str, ...]
    has_attributes: bool

    @classmethod
    def of(cls, kind: type) -> _Kind:
        slots = tuple(
            name
            for each in kind.__mro__
            if "__slots__" in each.__dict__
            for name, member in each.__dict__.items()
            if isinstance(member, types.MemberDescriptorType)
        )
        what, iterate = "object", None
        if issubclass(kind, _CLOSED):
            what = "closed"
        elif issubclass(kind, _STATE):
            what = "state"
        elif issubclass(kind, dict):
            what = "dict"
        elif issubclass(kind, torch.nn.Module):
            what = "module"
        else:
            # The container's own way to iterate, whatever a class that derives from it makes of that.
            for container in (list, tuple, set, frozenset, deque):
                if issubclass(kind, container):
                    what, iterate = "sequence", container.__iter__
        # Asking the containers themselves, most of what is met, for attributes means an exception each.
        return cls(what, iterate, slots, bool(slots) or kind.__dictoffset__ != 0)


def _attributes(value: Any, kind: _Kind) -> list[tuple[str, Any]]:
    """Attributes that are stored, parameters and submodules first."""
    found: list[tuple[str, Any]] = []
    own: Any = None
    try:
        own = object.__getattribute__(value, "__dict__")
        found = list(own.items()) if isinstance(own, dict) else []
    except Exception:  # there is none, or it is a property that raises
        pass
    if kind.what == "module" and found:
        found = [*((n, own[n]) for n in _FIRST if n in own), *((n, item) for n, item in found if n not in _FIRST)]
    for name in kind.slots:
        try:
            found.append((name, object.__getattribute__(value, name)))
        except Exception:  # not set
            continue
    return found


def _key(key: object, names: Mapping[int, str]) -> str:
    """A key for people: a tensor by its own path, if that is known."""
    if id(key) in names:
        return names[id(key)]
    if isinstance(key, torch.Tensor):
        return f"a tensor of shape {tuple(key.shape)}"
    return str(key) if type(key) in _PLAIN else type(key).__name__
