"""Memory for new tensors on CPU: huge pages, buffers that have just been released, pages that are there already.

A fresh page costs more than the wire: Linux zeroes it at the first touch, 4 KiB at a time. Measured on the
development machine (AMD EPYC, Linux 6.18), filling fresh memory once: 2.7 GB/s on small pages, 9.6 GB/s where huge
pages were asked for, 12 GB/s on warm memory. So:

1. New tensors of 2 MiB and more ask for huge pages on the part of them that is aligned to 2 MiB. This is advice; where
   the kernel does not follow it, nothing changes.
2. A released buffer is kept for a tensor that is known to be wanted next and has exactly its size. Nothing else is
   kept: memory that lies idle would break the bound on peaks. It is taken only if nobody else can reach it.
3. A process that joins has its pages made (``prefault``) before the others pause for it.

What comes back is ordinary torch memory (resizable, counted, freed with its last tensor), so frameworks may do with it
what they like. Mappings of our own, aligned as a whole, were rejected for that. On GPUs torch's caching allocator does
all this already: its memory is neither kept nor advised.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import torch

from ..values import Shard

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_CPU: Final = torch.device("cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """As ``torch.empty``; large CPU tensors ask for huge pages."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu" and tensor.numel() * dtype.itemsize >= HUGE_PAGE_BYTES:
        _advise(tensor, HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
    return tensor


def prefault(tensors: Iterable[torch.Tensor]) -> int:
    """Make the pages of CPU tensors, so that the first who writes to them need not wait.

    Contents stay. Where the kernel (before Linux 5.14) cannot make pages, one byte of each is read and written.

    Returns:
        Bytes of the tensors looked at.
    """
    total_bytes = 0
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        storage = tensor.untyped_storage()
        total_bytes += storage.nbytes()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        if whole.numel() and not _advise(whole, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
            one_a_page = whole[:: mmap.PAGESIZE]
            one_a_page.copy_(one_a_page.clone())
    return total_bytes


class Pages:
    """Gives memory to new shards, of old ones that have just been released where that fits.

    The pool is of one move and holds buffers only between the fence of one epoch and the beginning of the next.
    """

    def __init__(self) -> None:
        self._wanted: Counter[int] = Counter()
        self._free: dict[int, list[torch.UntypedStorage]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
        """A tensor whose contents are undefined: on a kept buffer of its size, or else as ``empty``."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if device.type == "cpu" and self._free.get(size_bytes):
            # Not a view of bytes: the base of a view would hold the storage as well.
            strides = torch.empty(tuple(shape), device="meta").stride()
            kept: torch.Tensor = torch.empty(0, dtype=dtype)
            kept.set_(self._free[size_bytes].pop(), 0, tuple(shape), strides)
            return kept
        return empty(shape, dtype, device)

    def of_shard(self, shard: Shard, device: torch.device = _CPU) -> torch.Tensor:
        """A tensor of a shard's shape and dtype: what ``run_program`` takes as ``allocate``."""
        dtype: torch.dtype = getattr(torch, shard.tensor.dtype)
        return self.empty(shard.region.shape, dtype, device)

    def expect(self, sizes_bytes: Iterable[int]) -> None:
        """Say what is allocated next; of other sizes nothing is kept."""
        self._wanted = Counter(size for size in sizes_bytes if size)

    def give(self, tensors: list[torch.Tensor]) -> int:
        """Take what is not needed any more: keep it if it is wanted and nobody else holds it, else drop it.

        Args:
            tensors: the last references to them, as far as the caller knows; emptied.

        Returns:
            Bytes that were kept.
        """
        if not tensors:
            return 0  # under ``keep``, and between epochs: nothing to trim either
        kept_bytes = 0
        of_one_holder = _holders([torch.empty(1)])  # what the counts of a tensor are that nobody else holds
        while tensors:
            alone = _holders(tensors) == of_one_holder
            storage = tensors.pop().untyped_storage()
            size_bytes = storage.nbytes()
            if alone and self._wanted[size_bytes] > 0 and _is_ours(storage):
                self._wanted[size_bytes] -= 1
                self._free.setdefault(size_bytes, []).append(storage)
                kept_bytes += size_bytes
        _trim()
        return kept_bytes

    def clear(self) -> None:
        """Let go of what is kept."""
        self._free.clear()
        self._wanted.clear()


def _trim() -> None:
    """Let glibc give the pages of small freed tensors back, which it would keep for ever in the middle of its heap.

    Without it a move of shards below 1 MiB went 17 MiB over its bound. It takes 64 ms for 500 MB.
    """
    with suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _holders(tensors: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """Reference counts of the tensor in the list's last place: its Python object, itself, its storage's two.

    A variable elsewhere shows in the first, an autograd graph or a C++ bucket in the second, a name for the storage in
    the third, a view in the last. Torch has no public way to ask for the second and the last.
    """
    storages = [tensors[-1].untyped_storage()]
    return (
        sys.getrefcount(tensors[-1]),
        tensors[-1]._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storages[0]),
        torch._C._storage_Use_Count(storages[0]._cdata),
    )


def _is_ours(storage: torch.UntypedStorage) -> bool:
    """Whether memory is torch's own on CPU, and no array, file or other process may be looking at it."""
    return storage.device.type == "cpu" and storage.resizable() and not storage.is_shared()


def _advise(tensor: torch.Tensor, page_bytes: int, advice: int) -> bool:
    """``madvise`` on the whole pages inside a contiguous tensor; whether the kernel took it."""
    begin = tensor.data_ptr()
    first = -(-begin // page_bytes) * page_bytes
    last = (begin + tensor.numel() * tensor.element_size()) // page_bytes * page_bytes
    if first >= last:
        return page_bytes != mmap.PAGESIZE
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except AttributeError:  # not on every system
        return False
    failed: int = madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
    return not failed
