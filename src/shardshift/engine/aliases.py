"""Which live tensors share memory: tied ones, which must stay tied, and those that merely lie in one storage.

1. Tensors are grouped by storage.
2. Those of one storage are sorted by where they begin. Tensors that have offset, shape, strides and dtype in common are
   one tensor under several names (tied embeddings).
3. Of all others, those whose stretches of memory cross are looked at element by element: the columns of one matrix
   cross and share nothing; a flat buffer and a parameter that is a view of it share bytes: moved both, they would part.

Steps 1 and 2 cost n log n. Step 3 has pairs only where views interleave; ``numpy.shares_memory`` solves each exactly,
and a pair that would take it too long counts as shared. A bitmap of the storage was rejected: it is as large as the
state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..values import Mismatch

_K = TypeVar("_K", bound=Hashable)
_Key: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]
_MOST_WORK: Final = 100_000  # candidates that numpy may try for one pair


def storages(tensors: Mapping[_K, torch.Tensor]) -> dict[tuple[_K, ...], int]:
    """Which tensors lie in one storage, and how many bytes it has.

    Args:
        tensors: live tensors by name, shard or whatever tells them apart.

    Returns:
        Per storage its tensors, in their order, and its size, which may be more than they need. What has no memory, on
        the meta device or of size zero, is a storage of its own.
    """
    found: dict[object, tuple[list[_K], int]] = {}
    for key, tensor in tensors.items():
        identity, size_bytes = _storage(tensor)
        found.setdefault(identity or (key,), ([], size_bytes))[0].append(key)
    return {tuple(keys): size_bytes for keys, size_bytes in found.values()}


def exact_aliases(tensors: Mapping[_K, torch.Tensor]) -> tuple[tuple[_K, ...], ...]:
    """Which keys stand for one and the same tensor.

    Args:
        tensors: live tensors by name, shard or whatever tells them apart.

    Returns:
        Groups of two or more, in the order of ``tensors``.

    Raises:
        Mismatch: naming two tensors that share some of their elements, or all of them in other shapes: to move both
            would part what is one.
    """
    ties = []
    for keys, _ in storages(tensors).items():
        if len(keys) < 2:
            continue
        same: dict[_Key, list[_K]] = {}
        for key in keys:
            same.setdefault(_identity(tensors[key]), []).append(key)
        for one, other in _crossing({group[0]: tensors[group[0]] for group in same.values()}):
            if _share(tensors[one], tensors[other]):
                raise Mismatch(
                    f"{one} and {other} share memory without being one tensor: offset, shape and strides are "
                    f"{_words(tensors[one])} and {_words(tensors[other])} of one storage; moved one by one they would "
                    "part, so nothing was moved. What to do: give one of them, or copies"
                )
        ties += [tuple(group) for group in same.values() if len(group) > 1]
    place = {key: index for index, key in enumerate(tensors)}
    return tuple(sorted(ties, key=lambda group: place[group[0]]))


def _storage(tensor: torch.Tensor) -> tuple[tuple[str, int] | None, int]:
    """What tells a tensor's storage from others, if it has memory; and its bytes."""
    storage = tensor.untyped_storage()
    if tensor.is_meta or not storage.nbytes():
        return None, storage.nbytes()
    return (str(tensor.device), storage.data_ptr()), storage.nbytes()


def _identity(tensor: torch.Tensor) -> _Key:
    return (
        int(tensor.storage_offset()) * tensor.element_size(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _crossing(tensors: Mapping[_K, torch.Tensor]) -> Iterator[tuple[_K, _K]]:
    """Pairs in one storage whose stretches from the first to the last byte have a byte in common."""
    stretches = sorted(
        ((*stretch(tensor), index, key) for index, (key, tensor) in enumerate(tensors.items()) if tensor.numel()),
        key=lambda one: one[:3],
    )
    open_ones: list[tuple[int, _K]] = []
    for start, stop, _, key in stretches:
        open_ones = [(end, other) for end, other in open_ones if end > start]
        yield from ((other, key) for _, other in open_ones)
        open_ones.append((stop, key))


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and one past the last, within the storage."""
    start = int(tensor.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


class _Addresses:
    """A tensor as numpy sees it. Addresses only: nothing is read, so the memory may be a GPU's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size_bytes = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size_bytes for stride in tensor.stride()),
            "typestr": f"|V{size_bytes}",
            "data": (tensor.storage_offset() * size_bytes + (1 << 20), True),
        }


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    first: npt.NDArray[np.void] = np.asarray(_Addresses(one))
    second: npt.NDArray[np.void] = np.asarray(_Addresses(other))
    try:
        return np.shares_memory(first, second, _MOST_WORK)  # type: ignore[arg-type]  # the stub knows two limits
    except np.exceptions.TooHardError:
        return True


def _words(tensor: torch.Tensor) -> str:
    return f"{tensor.storage_offset()}, {tuple(tensor.shape)}, {tensor.stride()}"
