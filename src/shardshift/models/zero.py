"""ZeRO-1: which boxes of masters and moments each rank owns (Megatron's distributed optimizer).

Megatron lays the parameters of a model chunk out in flat buffers, and each data parallel rank owns one equal range of
each, whatever parameters lie there (``distributed/param_and_grad_buffer.py``, ``optimizer/distrib_optimizer.py``).

1. Buffers: one per model chunk for dense parameters, shared out over dp * cp ranks, and one for experts, shared out
   over the expert data parallel ranks. With several stages a tied embedding has a bucket of its own, on both.
2. In a buffer, parameters lie in reverse order, each starting at a multiple of 64 elements; the end is padded to a
   multiple of lcm(ranks, 128). One bucket: what Megatron has without overlap of the gradient reduction.
3. Each range meets each parameter in a flat range of the local shard. Parts of a fused parameter alternate in it.
4. A flat range of n dims is at most 2n - 1 boxes (``flat_boxes``), moved to global coordinates for each index along
   the axes that cut the tensor, and clipped where the local memory is padding.

The local experts are taken as one parameter each of fc1 and fc2, in ascending order of experts. Which of Megatron's
three expert modules is used changes that order; the bytes per rank are the same.

Everything is done for all ranges of all buffers at once: a loop over 131,072 ranks takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values import ParallelConfig
from ..values.boxes import expand
from .parameters import End, Parameter

Ints = NDArray[np.int64]

_ALIGN: Final = 64
_BUCKET: Final = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How a rule cuts its tensors.

    Attributes:
        low: first indices of the box of each index along the axes, shape (ways, dims); 0 in dims that the tensor has
            not.
        high: one past the last ones, 1 in such dims. Padding is left out.
        memory: shape of the local tensor, padding included; the same for all indices.
    """

    low: Ints
    high: Ints
    memory: Ints


@dataclass(frozen=True, slots=True)
class Buffers:
    """Parameters in buffers; a tied embedding is in two. Columns by parameter and buffer, all of shape (n,).

    Attributes:
        parameter: index of the parameter.
        rule: index of its rule.
        stage: pipeline stage of the buffer.
        is_expert: whether the buffer is one of experts.
        unit: number of the Megatron parameter, ascending with position; parts of a fused one share it.
        buffer: number of the buffer that the unit lies in.
        part: 0, or 1 for the second part of a fused parameter.
    """

    parameter: Ints
    rule: Ints
    stage: Ints
    is_expert: NDArray[np.bool_]
    unit: Ints
    buffer: Ints
    part: Ints

    @classmethod
    def of(cls, parameters: Sequence[Parameter], rule_of: Ints, virtual_of: Ints, config: ParallelConfig) -> Buffers:
        """Parameters, in order of ``named_parameters``, sorted into buffers.

        Args:
            parameters: all of the model.
            rule_of: index of the rule, per parameter.
            virtual_of: virtual stage, per parameter; the first one where both ends hold it.
            config: the configuration.
        """
        index, virtual = np.arange(len(parameters)), virtual_of
        both = np.array([parameter.place is End.BOTH for parameter in parameters])
        if config.pp > 1:
            index = np.append(index, np.flatnonzero(both))
            virtual = np.append(virtual, np.full(both.sum(), config.pp * config.vpp - 1))
        part = np.array([int(parameter.fused) for parameter in parameters])[index]
        is_expert = np.array([parameter.rule.is_expert for parameter in parameters])[index]
        apart = both[index] & (config.pp > 1)
        return cls(
            parameter=index,
            rule=rule_of[index],
            stage=virtual % config.pp,
            is_expert=is_expert,
            unit=np.cumsum(part == 0) - 1,
            buffer=virtual * 3 + np.where(apart, 2, is_expert),
            part=part,
        )


def flat_rows(buffers: Buffers, cuts: Sequence[Cut], config: ParallelConfig) -> tuple[Ints, Ints, Ints, Ints]:
    """What each rank owns of each parameter's master and moments.

    Args:
        buffers: parameters by buffer.
        cuts: per rule.
        config: the configuration.

    Returns:
        Columns: rank, parameter, low and high of a box in global coordinates (shape (n, dims), with 0 and 1 in dims
        that the tensor has not).
    """
    memory = np.stack([cut.memory for cut in cuts])
    ways = np.array([len(cut.low) for cut in cuts])
    cut_start = np.cumsum(ways) - ways
    low, high = np.concatenate([cut.low for cut in cuts]), np.concatenate([cut.high for cut in cuts])

    numel = memory.prod(axis=1)[buffers.rule]
    # A fused parameter repeats [part 0, part 1] once per local query group, which the second part's first dim counts.
    fused = np.flatnonzero(buffers.part == 1)
    groups = np.ones(len(numel), np.int64)
    groups[fused] = groups[fused - 1] = memory[buffers.rule[fused], 0]
    before = np.zeros(len(numel), np.int64)
    before[fused] = (numel // groups)[fused - 1]
    unit_numel = np.bincount(buffers.unit, numel).astype(np.int64)
    period = (unit_numel[buffers.unit]) // groups

    first = np.flatnonzero(buffers.part == 0)
    owners = np.where(buffers.is_expert[first], config.expert_dp, config.dp * config.cp)
    unit, owner, start, stop = _ranges(buffers.buffer[first], unit_numel, owners)

    # Each range of a unit, for each part of the unit.
    parts = np.bincount(buffers.unit)
    piece, member = expand(first[unit], parts[unit])
    start, stop = (
        _within(offset[piece], period[member], before[member], (numel // groups)[member]) for offset in (start, stop)
    )
    piece, member, start, stop = (column[start < stop] for column in (piece, member, start, stop))
    at, box_low, box_high = flat_boxes(memory[buffers.rule[member]], start, stop)
    piece, member = piece[at], member[at]

    # Each box for each index along the axes that cut the tensor; ranks of a stage are (owner, index).
    rule = buffers.rule[member]
    box, index = expand(np.zeros(len(rule), np.int64), ways[rule])
    shard = cut_start[rule][box] + index
    box_low, box_high = box_low[box] + low[shard], np.minimum(box_high[box] + low[shard], high[shard])
    rank = buffers.stage[member[box]] * config.stage_size + owner[piece[box]] * ways[rule[box]] + index
    filled = (box_low < box_high).all(axis=1)
    return rank[filled], buffers.parameter[member[box[filled]]], box_low[filled], box_high[filled]


def _ranges(buffer: Ints, numel: Ints, owners: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where the owners' ranges of each buffer meet its units: columns unit, owner, start, stop within the unit."""
    order = np.lexsort((-np.arange(len(buffer)), buffer))
    room = -(-numel[order] // _ALIGN) * _ALIGN
    is_first = np.diff(buffer[order], prepend=-1) > 0
    begin = np.cumsum(room) - room
    begin -= begin[is_first][np.cumsum(is_first) - 1]
    last = np.flatnonzero(np.append(is_first[1:], True))
    multiple = np.lcm(owners[order][last], _BUCKET)
    size = -(-(begin + numel[order])[last] // multiple) * multiple
    share = (size // owners[order][last])[np.cumsum(is_first) - 1]

    at, owner = expand(begin // share, (begin + numel[order] - 1) // share - begin // share + 1)
    start = np.maximum(owner * share[at] - begin[at], 0)
    stop = np.minimum((owner + 1) * share[at] - begin[at], numel[order][at])
    return order[at], owner, start, stop


def _within(offset: Ints, period: Ints, before: Ints, size: Ints) -> Ints:
    """How many elements of a part lie before an offset of a unit that repeats (``before`` others, ``size`` of it)."""
    whole, rest = np.divmod(offset, period)
    return whole * size + np.clip(rest - before, 0, size)


def flat_boxes(shape: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """The boxes that hold elements ``start`` to ``stop`` (row-major) of tensors; ``values.flat_range`` for many.

    With the digits a of ``start`` and b of ``stop`` in the mixed base of the shape, and d the first dim in which they
    differ: the middle box runs from a to b in dim d; per later dim one box completes a's row, and one begins b's.

    Args:
        shape: of each tensor, shape (n, dims).
        start: shape (n,).
        stop: shape (n,), greater than ``start``.

    Returns:
        Columns: index of the range, low and high of the box.
    """
    dims = shape.shape[1]
    a, b = np.empty_like(shape), np.empty_like(shape)
    rest_a, rest_b = start, stop
    for dim in range(dims):
        row = shape[:, dim + 1 :].prod(axis=1)
        a[:, dim], rest_a = np.divmod(rest_a, row)
        b[:, dim], rest_b = np.divmod(rest_b, row)
    differ = (a != b).argmax(axis=1)
    # The last dim in which a row begins within: rows after it are whole.
    last_a = dims - 1 - (a != 0)[:, ::-1].argmax(axis=1)
    last_a[~(a != 0).any(axis=1)] = 0
    found: list[tuple[Ints, Ints, Ints]] = []

    def emit(which: NDArray[np.bool_], prefix: Ints, dim: int, low: Ints, high: Ints) -> None:
        at = np.flatnonzero(which & (low < high))
        box_low, box_high = np.zeros((len(at), dims), np.int64), shape[at]
        box_low[:, :dim], box_high[:, :dim] = prefix[at, :dim], prefix[at, :dim] + 1
        box_low[:, dim], box_high[:, dim] = low[at], high[at]
        found.append((at, box_low, box_high))

    for dim in range(dims):
        after = a[:, dim] + (dim < last_a)
        emit(differ == dim, a, dim, after, b[:, dim])
        emit((differ < dim) & (dim <= last_a), a, dim, after, shape[:, dim])
        emit(differ < dim, b, dim, np.zeros_like(start), b[:, dim])
    at, low, high = (np.concatenate(column) for column in zip(*found, strict=True))
    return at, low, high
