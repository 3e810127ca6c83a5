"""The columns of a layout: which role holds which box of which bundle, and what is wrong with such columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .boxes import Ints
from .errors import Infeasible, Mismatch
from .region import Region
from .tensor import Kind, Tensor

TOO_FAR: Final = "reaches beyond index 2**63 - 1; what to do: check the global shapes"
"""The end of a message about a shape or a shard."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which role holds which box of every tensor of which bundle, as columns.

    Attributes:
        role: shape (n,), ascending.
        bundle: shape (n,).
        low: first indices, shape (n, dims); 0 in dims that the bundle's tensors do not have.
        high: one past the last indices, shape (n, dims); 1 in such dims. Equal to ``low`` in a dim: an empty shard.
    """

    role: NDArray[np.int32]
    bundle: NDArray[np.int32]
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.role)

    @property
    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.int32], Ints, Ints]:
        """All four, in the order of the attributes."""
        return self.role, self.bundle, self.low, self.high


def columns(indices: Sequence[tuple[int, ...]], dims: int, filler: int) -> Ints:
    """Indices of several dims as a table of ``dims`` columns; dims that are not there become ``filler``.

    Raises:
        Infeasible: if an index does not fit 64 bits.
    """
    try:
        padded = [(*index, *(filler,) * (dims - len(index))) for index in indices]
        return np.array(padded, np.int64).reshape(-1, dims)
    except OverflowError as error:
        raise Infeasible(f"a shard {TOO_FAR}") from error


def box(low: Ints, high: Ints, dims: int) -> Region:
    """A box as a value, without its padding dims."""
    return Region(tuple(low[:dims].tolist()), tuple((high[:dims] - low[:dims]).tolist()))


def check_bundles(tensors: Sequence[Tensor], bundle_of: NDArray[np.int32], rows: Rows) -> None:
    """Check indices and names, before anything is looked up by them.

    Raises:
        Mismatch: naming the first that is wrong.
    """
    if len(rows) and ((np.diff(rows.role) < 0).any() or rows.role[0] < 0):
        raise Mismatch("the rows of a layout must be sorted by role, and roles be numbered from 0")
    bundles = int(bundle_of.max(initial=-1)) + 1
    if len(bundle_of) != len(tensors) or not np.array_equal(np.unique(bundle_of), np.arange(bundles)):
        raise Mismatch(f"{len(tensors)} tensors, {len(bundle_of)} bundle numbers; every bundle from 0 needs a tensor")
    if (strange := rows.bundle[(rows.bundle < 0) | (rows.bundle >= bundles)]).size:
        raise Mismatch(f"a row names bundle {strange[0]}, outside 0..{bundles - 1}")
    first: dict[int, Tensor] = {}
    named: set[tuple[Kind, str]] = set()
    for bundle, tensor in zip(bundle_of.tolist(), tensors, strict=True):
        if (other := first.setdefault(bundle, tensor)).shape != tensor.shape:
            raise Mismatch(f"{tensor} has global shape {tensor.shape}, and {other} of the same bundle {other.shape}")
        if (tensor.kind, tensor.name) in named:
            raise Mismatch(f"{tensor} is named twice")
        named.add((tensor.kind, tensor.name))
