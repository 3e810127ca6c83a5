"""The bytes of tensors: as flat payloads, and as runs of contiguous memory that can be read where they lie.

A message is the bytes of its parts, each in row-major order, whatever their strides. Who copies for himself needs no
more than ``pack`` and ``spread``. Who hands addresses to the kernel needs runs:

1. The dims of a part are joined from the right as long as memory goes on without a gap: that gives the length of one
   run and the dims that are left.
2. A part whose runs are long becomes rows (address, length), in slabs, so that the table stays small.
3. A part whose runs are short becomes blocks, sub-views of a few KiB: copying those costs less than a row each.

Rows for every element were rejected: a transposed matrix of 256 MiB would need a table of several GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Table: TypeAlias = npt.NDArray[np.int64]
"""Runs of memory, one row each: address, length in bytes. In memory a row is a C ``struct iovec``."""

_SLAB_ROWS: Final = 1 << 16


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-dim uint8 view of the same storage."""
    # Not reshape: of a tensor of one element it keeps a stride other than 1, at which the view is refused.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of the parts, one after the other, as one flat uint8 tensor; a single contiguous part's own memory."""
    if len(parts) == 1:
        return byte_view(parts[0].contiguous())
    if not parts:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([byte_view(part.contiguous()) for part in parts])


def spread(payload: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """The reverse of ``pack``: write flat bytes into the parts.

    Args:
        payload: 1-dim uint8, as many bytes as the parts have together.
        parts: any strides and dtypes.
    """
    start = 0
    for part in parts:
        stop = start + part.nbytes
        mine = payload[start:stop]
        if part.is_contiguous():
            byte_view(part).copy_(mine)
        else:
            # A view of another dtype needs an aligned start, which a place in the middle of the bytes may not have.
            aligned = mine if mine.data_ptr() % part.element_size() == 0 and start == 0 else mine.clone()
            part.copy_(aligned.view(part.dtype).view(part.shape))
        start = stop


class Runs:
    """A table of runs that is used up from its front.

    Attributes:
        left_bytes: what is left of it.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._ends = table[:, 1].cumsum()
        self._first = 0  # row of the next byte
        self._at = 0
        self.left_bytes = int(self._ends[-1]) if len(table) else 0

    def reach(self, limit_bytes: int, limit_runs: int) -> int:
        """How many bytes the next rows have, at most so many bytes and rows."""
        last = min(self._first + limit_runs, len(self._table)) - 1
        return min(int(self._ends[last]) - self._at, limit_bytes, self.left_bytes)

    def peek(self, nbytes: int) -> Table:
        """The rows of the next ``nbytes``, which are no more than are left; the first and last may be cut."""
        if nbytes == self.left_bytes and not self._at:
            return self._table
        stop = self._at + nbytes
        last = self._first
        if int(self._ends[last]) < stop:
            last = int(self._ends.searchsorted(stop, "left"))
        rows = self._table[self._first : last + 1].copy()
        used = self._at - (int(self._ends[self._first]) - int(self._table[self._first, 1]))
        rows[0] += (used, -used)
        rows[-1, 1] -= int(self._ends[last]) - stop
        return rows

    def advance(self, nbytes: int) -> None:
        """Leave out the next ``nbytes``."""
        self._at += nbytes
        self.left_bytes -= nbytes
        if self.left_bytes and int(self._ends[self._first]) <= self._at:
            self._first = int(self._ends.searchsorted(self._at, "right"))


def one_run(address: int, nbytes: int) -> Runs:
    """The table of a single run."""
    return Runs(np.array([[address, nbytes]], dtype=np.int64))


def segments(parts: Sequence[torch.Tensor], *, shortest_bytes: int, block_bytes: int) -> Iterator[Runs | torch.Tensor]:
    """The bytes of the parts in their order, as runs where these are long and as small sub-views where not.

    Args:
        parts: tensors in host memory, which must be kept until the runs have been used.
        shortest_bytes: strided parts whose runs are shorter come as sub-views. Contiguous ones are one run each.
        block_bytes: the most bytes of a sub-view, unless one element has more.
    """
    tables: list[Table] = []
    rows: list[int] = []
    for part in parts:
        if not part.nbytes:
            continue
        if part.is_contiguous():
            rows += (part.data_ptr(), part.nbytes)
            continue
        if rows:
            tables.append(_table(rows))
            rows = []
        run_bytes, dims = _strided(part)
        if run_bytes < shortest_bytes:
            if tables:
                yield Runs(np.concatenate(tables))
                tables = []
            yield from _blocks(part, block_bytes)
            continue
        for slab in _slabs(part.data_ptr(), run_bytes, dims):
            tables.append(slab)
            if sum(map(len, tables)) >= _SLAB_ROWS:
                yield Runs(np.concatenate(tables))
                tables = []
    if rows:
        tables.append(_table(rows))
    if tables:
        yield Runs(np.concatenate(tables))


def _table(rows: list[int]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _strided(part: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of one run, and per dim around it (size, stride in bytes), outermost first."""
    itemsize = part.element_size()
    dims: list[tuple[int, int]] = []
    for size, stride in zip(part.shape, part.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride * itemsize:
            dims[-1] = (dims[-1][0] * size, stride * itemsize)
        else:
            dims.append((size, stride * itemsize))
    run_bytes = itemsize
    if dims and dims[-1][1] == itemsize:  # what is joined already leaves at most this one
        run_bytes *= dims.pop()[0]
    return run_bytes, dims


def _slabs(address: int, run_bytes: int, dims: Sequence[tuple[int, int]]) -> Iterator[Table]:
    inner = 1
    for size, _ in dims[1:]:
        inner *= size
    if dims and inner > _SLAB_ROWS:
        size, stride = dims[0]
        for index in range(size):
            yield from _slabs(address + index * stride, run_bytes, dims[1:])
        return
    size, stride = dims[0] if dims else (1, 0)
    step = max(_SLAB_ROWS // inner, 1)
    for low in range(0, size, step):
        starts: Any = address + np.arange(low, min(low + step, size), dtype=np.int64) * stride
        for more, by in dims[1:]:
            starts = (starts[:, None] + np.arange(more, dtype=np.int64) * by).ravel()
        table = np.empty((len(starts), 2), dtype=np.int64)
        table[:, 0], table[:, 1] = starts, run_bytes
        yield table


def _blocks(view: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """The view cut into sub-views of at most so many bytes, in row-major order."""
    nbytes = view.nbytes
    if nbytes <= limit_bytes or view.dim() == 0:
        yield view
        return
    rows = view.shape[0]
    step = limit_bytes * rows // nbytes
    if step:
        for low in range(0, rows, step):
            yield view.narrow(0, low, min(step, rows - low))
    else:
        for row in view.unbind(0):
            yield from _blocks(row, limit_bytes)
