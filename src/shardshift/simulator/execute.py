"""Run all programs of a plan in lock step on numpy arrays, in one process.

The reference for the engine: the same programs, no transport, no torch. Per round

1. every device posts its sends, one queue per (source, target) pair;
2. every device takes its receives from the fronts of those queues, and runs its copies;
3. every queue must be empty: nothing was sent that nobody awaited.

Targets start as poison (NaN, or the highest integer), so an element that no instruction writes shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..schedule import Program
from ..values import Mismatch, Region, Shard

Array: TypeAlias = NDArray[Any]


def execute(
    programs: Mapping[int, Program], states: Mapping[int, Mapping[Shard, Array]]
) -> dict[int, dict[Shard, Array]]:
    """Run every program and return what every device then holds in the new layout.

    Args:
        programs: per device its program.
        states: per device its shards now, each of shape ``shard.region.shape``; only read. A lost device may be
            left out.

    Returns:
        Per device its new shards. A referred shard's array is the very one in ``states``.

    Raises:
        Mismatch: if the two ends of a piece do not meet, or an array is not of its shard's shape.
    """
    for device, state in states.items():
        for shard, array in state.items():
            if array.shape != shard.region.shape:
                raise Mismatch(f"{shard} on device {device}: expected shape {shard.region.shape}, got {array.shape}")
    dtypes = {shard.tensor: array.dtype for state in states.values() for shard, array in state.items()}
    targets: dict[int, dict[Shard, Array]] = {}
    for device, program in programs.items():
        targets[device] = {shard: _poison(shard, dtypes) for shard in program.allocate}
        targets[device] |= {refer.shard: states[device][refer.shard] for refer in program.refers}

    for index in range(len(next(iter(programs.values())).rounds) if programs else 0):
        wires: dict[tuple[int, int], deque[tuple[Shard, Array]]] = {}
        for device, program in programs.items():
            for send in program.rounds[index].sends:
                payload = _part(states[device][send.source], send.piece.region, send.source.region).copy()
                wires.setdefault((device, send.peer), deque()).append((send.piece, payload))
        for device, program in programs.items():
            for recv in program.rounds[index].recvs:
                wire = wires.get((recv.peer, device))
                if not wire or wire[0][0] != recv.piece:
                    raise Mismatch(
                        f"round {index}, device {recv.peer} to {device}: expected {recv.piece}, "
                        f"got {wire[0][0] if wire else 'nothing'}; what to do: compile both programs from one plan"
                    )
                _, payload = wire.popleft()
                _part(targets[device][recv.target], recv.piece.region, recv.target.region)[...] = payload
            for copy in program.rounds[index].copies:
                part = _part(states[device][copy.source], copy.piece.region, copy.source.region)
                _part(targets[device][copy.target], copy.piece.region, copy.target.region)[...] = part
        for (source, target), wire in wires.items():
            if wire:
                raise Mismatch(f"round {index}, device {source} to {target}: nobody awaits {wire[0][0]}")
    return targets


def _poison(shard: Shard, dtypes: Mapping[Any, np.dtype[Any]]) -> Array:
    dtype = dtypes.get(shard.tensor, np.dtype(np.float64))
    value = np.nan if dtype.kind in "fc" else np.iinfo(dtype).max
    return np.full(shard.region.shape, value, dtype)


def _part(array: Array, region: Region, shard_region: Region) -> Array:
    """The view of a shard's array that is ``region`` (both global)."""
    inside = region.relative_to(shard_region)
    slices = (slice(start, stop) for start, stop in zip(inside.offsets, inside.stops, strict=True))
    index: tuple[Any, ...] = (*slices, ...)  # the ellipsis keeps the one element of a 0-dim shard a view
    view: Array = array[index]
    return view
