"""Claims on stretches of storages: which bytes of a job are accounted for, and by what.

A tensor spans the bytes from its first element to its last; claims on a storage are joined per fate, so whether a
tensor is covered takes one look-up, and bytes are counted once however many tensors view them. A tensor with gaps
claims them too: what lies between is seen only where another tensor views it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Final

import torch


class Fate(StrEnum):
    """What becomes of a tensor in a change of layout; in order of precedence."""

    CARRIED = "carried"
    COMPANION = "companion"
    REBUILT = "rebuilt"
    DERIVED = "derived"
    UNKNOWN = "unknown"
    SLACK = "slack"


ORDER: Final = tuple(Fate)
CLAIMED: Final = ORDER[:4]
"""The fates that claims may have."""

Stretch = tuple[int, int]
"""Bytes [start, stop) of a storage."""
Address = tuple[str, int]
"""Which storage: its device and address."""


class Places:
    """Where tensors lie, each looked up once; as long as the tensors live, and none is resized."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Address, Stretch, int] | None] = {}

    def of(self, tensor: torch.Tensor) -> tuple[Address, Stretch, int] | None:
        """See ``place``."""
        key = id(tensor)
        if key not in self._of:
            self._of[key] = place(tensor)
        return self._of[key]


class Claims:
    """Stretches of storages by fate.

    Args:
        places: of the tensors that are asked for.
    """

    def __init__(self, places: Places | None = None) -> None:
        self._places = places or Places()
        self.sizes: dict[Address, int] = {}
        self._claimed: dict[Address, list[tuple[Fate, Stretch, str]]] = {}
        self._covered: dict[tuple[Address, Fate], list[Stretch]] = {}

    def add(self, tensor: torch.Tensor, fate: Fate, by: str) -> None:
        """Claim what a tensor spans."""
        at = self._places.of(tensor)
        if at is not None:
            storage, stretch, self.sizes[storage] = at
            self._claimed.setdefault(storage, []).append((fate, stretch, by))

    def judge(self, tensor: torch.Tensor) -> tuple[Fate, str]:
        """The fate of a tensor, and the rule."""
        at = self._places.of(tensor)
        if at is None:
            if nbytes(tensor) == 0 or hasattr(tensor, "_local_tensor"):  # DTensor: the walk finds what it wraps
                return Fate.DERIVED, "holds no bytes of its own"
            if _is_given_back(tensor):
                return Fate.REBUILT, "its memory was given back"
            return Fate.UNKNOWN, f"{type(tensor).__name__} shows no storage"
        storage, stretch, _ = at
        claimed = self._claimed.get(storage, ())
        if len(claimed) == 1:  # the usual case, and nothing has to be joined
            fate, (start, stop), by = claimed[0]
            return (fate, by) if start <= stretch[0] and stretch[1] <= stop else (Fate.UNKNOWN, "")
        for fate in CLAIMED:
            if inside(stretch, self.covered(storage, fate)):
                names = self._names(storage, fate, stretch)
                return fate, names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        return Fate.UNKNOWN, ""

    def alone(self, storage: Address) -> tuple[Fate, int] | None:
        """The fate and bytes of the one claim on a storage; None if there are several or none."""
        claimed = self._claimed.get(storage, ())
        if len(claimed) != 1:
            return None
        fate, (start, stop), _ = claimed[0]
        return fate, stop - start

    def covered(self, storage: Address, fate: Fate) -> list[Stretch]:
        """What claims up to and including a fate cover of a storage."""
        if (storage, fate) not in self._covered:
            upto = ORDER[: ORDER.index(fate) + 1]
            self._covered[storage, fate] = joined(s for f, s, _ in self._claimed.get(storage, ()) if f in upto)
        return self._covered[storage, fate]

    def _names(self, storage: Address, fate: Fate, stretch: Stretch) -> list[str]:
        claimed = self._claimed[storage]
        found = [by for f, (start, stop), by in claimed if f == fate and start < stretch[1] and stop > stretch[0]]
        return list(dict.fromkeys(found))


def place(tensor: torch.Tensor) -> tuple[Address, Stretch, int] | None:
    """The storage's address, the bytes that the tensor spans in it, and its size; None if there is no storage."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
        return None
    if address == 0:
        return None
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():
        span = tensor.numel() - 1
    else:
        span = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (str(tensor.device), address), (start, start + (span + 1) * item), size


def _is_given_back(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage was resized to nothing, as FSDP2 does with whole parameters after use."""
    try:
        return not tensor.is_meta and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):
        return False


def nbytes(value: Any) -> int:
    """Bytes of a tensor, storage, numpy array or generator itself; none on the meta device."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_meta else value.numel() * value.element_size()
    if isinstance(value, torch.Generator):
        return int(value.get_state().numel())
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        return 0 if value.device.type == "meta" else int(value.nbytes())
    return int(value.nbytes)


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same bytes in as few stretches as can be, in order."""
    joined: list[Stretch] = []
    for start, stop in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def inside(stretch: Stretch, joined: Sequence[Stretch]) -> bool:
    """Whether one of some joined stretches holds all of a stretch."""
    at = bisect_right(joined, (stretch[0], float("inf"))) - 1
    return at >= 0 and joined[at][0] <= stretch[0] and stretch[1] <= joined[at][1]
