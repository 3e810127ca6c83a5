"""Where a rank's local part of a DTensor lies in the whole: placements to boxes.

A placement that shards is a *cut* of one dim of the tensor along one axis of the mesh. Cuts are applied one after the
other, each to what the last one left of its dim:

1. A dim begins as one run of indices, [0, n).
2. ``Shard`` over k: the runs, one behind the other, are cut into pieces of ceil(n / k); rank i takes the i-th, which
   may be short or empty (``torch.chunk``; ``placement_types.py``, ``Shard.local_shard_size_and_offset``).
3. ``_StridedShard`` with split factor f: the runs are cut into f pieces as above, each of these into k, and rank i
   takes the i-th of each (``placement_types.py``, ``_StridedShard._split_tensor``). That is how ``fully_shard`` over
   tensor parallelism is written: TP cuts first, though its axis comes last.
4. The two are not the same where TP's last piece is short: of 11 rows over TP 3 and FSDP 3 rank (2, 2) holds row 10,
   while the placements give that to (2, 0). So of a tensor that ``fully_shard`` has cut, its cut is taken last
   (``_fsdp_param.py``, ``_init_sharded_param``). Without padding anywhere both say the same.
5. Mostly one run is left. Several runs (uneven strided cuts, or a factor that later axes do not take up) are as many
   boxes of the whole, one behind the other in the local tensor.

Order is that of the mesh's axes, or the spec's ``shard_order`` where it has another. Offsets are of the whole tensor,
as always. Rejected: ``compute_local_shape_and_global_offset``, which knows one offset and this rank's coordinate
only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ...values import Mismatch, Region

Run: TypeAlias = tuple[int, int]
"""Indices [start, stop) of a dim of the whole tensor."""


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """One dim of a tensor, sharded along one axis of its mesh.

    Attributes:
        dim: of the tensor.
        axis: of the mesh, by number.
        factor: pieces that later axes cut before this one (``_StridedShard``); 1 for ``Shard``.
    """

    dim: int
    axis: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the whole tensor that lies as one box in a rank's local tensor.

    Attributes:
        whole: in coordinates of the whole tensor.
        local: in those of the local tensor; of the same shape.
    """

    whole: Region
    local: Region


def cuts_of(tensor: DTensor, name: str, *, by_fsdp: bool = False) -> tuple[Cut, ...]:
    """The cuts of a DTensor, in the order in which they apply.

    Args:
        tensor: a parameter, a buffer, state.
        name: of it, for errors.
        by_fsdp: whether ``fully_shard`` has cut it, or the parameter that it is state of.

    Raises:
        Mismatch: naming the tensor, if a placement is partial, or of a kind that is not known.
    """
    placements: tuple[Any, ...] = tensor.placements
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise Mismatch(
                f"{name} is partial ({placement}) along axis {axis} of its mesh: each rank holds a summand, not a "
                "part; nothing was moved. What to do: reduce it first (tensor.redistribute to Replicate or Shard), or "
                "drop it (gradients: optimizer.zero_grad())"
            )
        if type(placement) not in (Replicate, Shard, _StridedShard):
            raise Mismatch(
                f"{name} has placement {placement!r} along axis {axis} of its mesh, of which shardshift has no rule; "
                "nothing was moved. What to do: redistribute it to Shard or Replicate before the change"
            )
    order = getattr(tensor._spec, "shard_order", None)
    axes = [axis for entry in order for axis in entry.mesh_dims] if order else range(len(placements))
    cuts = [
        Cut(placement.dim, axis, int(getattr(placement, "split_factor", 1)))
        for axis in axes
        if not (placement := placements[axis]).is_replicate()
    ]
    if by_fsdp:
        last = [Cut(cut.dim, cut.axis) for cut in cuts if cut.factor > 1]
        cuts = [cut for cut in cuts if cut.factor == 1] + last
    return tuple(cuts)


def boxes(shape: Sequence[int], cuts: Iterable[Cut], mesh: Sequence[int], at: Sequence[int]) -> tuple[Box, ...]:
    """What a rank holds of a tensor.

    Args:
        shape: of the whole tensor.
        cuts: in order.
        mesh: sizes of the mesh's axes.
        at: the rank's coordinate.

    Returns:
        Boxes that together are the local tensor; one, maybe empty, if it is in one piece.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs[cut.dim] = _taken(runs[cut.dim], mesh[cut.axis], at[cut.axis], cut.factor)
    placed = [list(_placed(of_dim)) for of_dim in runs]
    found = [
        Box(*(Region(tuple(offsets), tuple(sizes)) for offsets in (starts, local)))
        for combination in itertools.product(*placed)
        for starts, local, sizes in [tuple(zip(*combination, strict=True)) or ((), (), ())]
    ]
    return tuple(found)


def _placed(runs: Sequence[Run]) -> Iterable[tuple[int, int, int]]:
    """Per run where it starts in the whole and in the local tensor, and how long it is."""
    local = 0
    for start, stop in runs:
        yield start, local, stop - start
        local += stop - start


def _taken(runs: Sequence[Run], count: int, index: int, factor: int) -> list[Run]:
    """What one of ``count`` ranks gets of a dim; an empty run if nothing."""
    pieces = [runs] if factor == 1 else [_piece(runs, factor, number) for number in range(factor)]
    joined: list[Run] = []
    for start, stop in (run for piece in pieces for run in _piece(piece, count, index)):
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined or [(runs[-1][1], runs[-1][1])]


def _piece(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """The ``index``-th of ``count`` pieces of some runs, as ``torch.chunk`` cuts them."""
    total = sum(stop - start for start, stop in runs)
    longest = -(-total // count)
    low, high = min(index * longest, total), min((index + 1) * longest, total)
    found, before = [], 0
    for start, stop in runs:
        a, b = max(low - before, 0), min(high - before, stop - start)
        if a < b:
            found.append((start + a, start + b))
        before += stop - start
    return found
