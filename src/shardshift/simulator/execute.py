"""Run all programs of a plan on numpy arrays, in one process.

The reference for the engine: the same programs, no transport, no torch.

1. A device that begins a round takes what it sends out of its arrays, at once, and runs its copies.
2. A message is delivered when both ends are in the round that holds it (``rendezvous``).
3. A device whose messages are all delivered begins its next round. When nobody can, all must have ended the epoch.
4. That is the fence: every device lets go of the epoch's old shards, and the next epoch begins.

Targets start as poison (NaN, or the highest integer) when their epoch begins, so an element that no instruction writes
shows. What is forwarded must have been received: that is kept by element, since any value may be somebody's state. A
shard that has been released cannot be read any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from ..schedule import Forward, Program, Send
from ..values import Mismatch, Region, Shard
from .rendezvous import Message, Rendezvous

Array: TypeAlias = NDArray[Any]


def execute(
    programs: Mapping[int, Program], states: Mapping[int, Mapping[Shard, Array]], *, fences: int | None = None
) -> dict[int, dict[Shard, Array]]:
    """Run every program and return what every device then holds in the new layout.

    Args:
        programs: per device its program.
        states: per device its shards now, each of shape ``shard.region.shape``; only read. A lost device may be
            left out.
        fences: stop after so many fences. None runs all epochs, and commits.

    Returns:
        Per device its new shards. A referred shard's array is the very one in ``states``. If stopped, what it holds
        whole: of tensors whose epoch has ended the new shards, of the others the old ones.

    Raises:
        Mismatch: if the two ends of a message do not meet, devices wait for one another, elements are forwarded that
            have not been received, released shards are read, programs have different numbers of epochs, or an array is
            not of its shard's shape.
    """
    for device, state in states.items():
        for shard, array in state.items():
            if array.shape != shard.region.shape:
                raise Mismatch(f"{shard} on device {device}: expected shape {shard.region.shape}, got {array.shape}")
    dtypes = {shard.tensor: array.dtype for state in states.values() for shard, array in state.items()}
    devices = {device: _Device(program, states.get(device, {}), dtypes) for device, program in programs.items()}
    rendezvous = Rendezvous(programs)
    if fences == 0:
        return {device: one.held() for device, one in devices.items()}
    while True:
        for one in devices.values():
            one.begin_epoch(rendezvous.fences)
        _run_epoch(rendezvous, devices)
        ended, goes_on = rendezvous.fences, rendezvous.pass_fence()
        for one in devices.values():
            one.end_epoch(ended)
        if fences == ended + 1 and goes_on:
            return {device: one.held() for device, one in devices.items()}
        if not goes_on:
            return {device: one.targets for device, one in devices.items()}


def _run_epoch(rendezvous: Rendezvous, devices: Mapping[int, _Device]) -> None:
    through, ready = deque(devices), deque[Message]()
    while through or ready:
        if through:
            device = through.popleft()
            if rendezvous.has_more(device):
                ready += rendezvous.enter_next(device)
                devices[device].begin(rendezvous.round_of(device))
                through += [device] if rendezvous.is_through(device) else []
        else:
            message = ready.popleft()
            devices[message.target].receive(message, devices[message.source].outbox[message.target])
            through += rendezvous.complete(message)


class _Device:
    """One device's arrays."""

    def __init__(self, program: Program, state: Mapping[Shard, Array], dtypes: Mapping[Any, np.dtype[Any]]) -> None:
        self._program, self._state, self._dtypes = program, dict(state), dtypes
        self._rounds = program.rounds
        self.targets = {refer.shard: state[refer.shard] for refer in program.refers}
        self._received = {
            send.source: np.zeros(send.source.region.shape, np.bool_)
            for step in self._rounds
            for send in step.sends
            if isinstance(send, Forward)
        }
        self.outbox: dict[int, list[Array]] = {}

    def begin_epoch(self, number: int) -> None:
        """Allocate."""
        if self._program.epochs:
            self.targets |= {shard: _poison(shard, self._dtypes) for shard in self._program.epochs[number].allocate}

    def end_epoch(self, number: int) -> None:
        """Release."""
        if self._program.epochs:
            for shard in self._program.epochs[number].release:
                del self._state[shard]

    def held(self) -> dict[Shard, Array]:
        """What is there whole at a fence."""
        return self._state | self.targets

    def begin(self, index: int) -> None:
        """Fill the outbox, and copy."""
        step = self._rounds[index]
        self.outbox = {}
        for send in step.sends:
            self.outbox.setdefault(send.peer, []).append(self._payload(send, index).copy())
        for copy in step.copies:
            part = _part(self._old(copy.source, index), copy.piece.region, copy.source.region)
            _part(self.targets[copy.target], copy.piece.region, copy.target.region)[...] = part

    def receive(self, message: Message, payloads: list[Array]) -> None:
        """Put what a peer has sent in its place."""
        for recv, payload in zip(message.recvs, payloads, strict=True):
            _part(self.targets[recv.target], recv.piece.region, recv.target.region)[...] = payload
            if recv.target in self._received:
                _part(self._received[recv.target], recv.piece.region, recv.target.region)[...] = True

    def _old(self, shard: Shard, index: int) -> Array:
        if shard not in self._state:
            raise Mismatch(
                f"device {self._program.device}, round {index}: reads {shard}, which it does not hold or has released; "
                "what to do: compile the programs anew from the plan"
            )
        return self._state[shard]

    def _payload(self, send: Send | Forward, index: int) -> Array:
        match send:
            case Send(piece, source, _):
                return _part(self._old(source, index), piece.region, source.region)
            case Forward(piece, source, peer):
                if not _part(self._received[source], piece.region, source.region).all():
                    raise Mismatch(
                        f"device {self._program.device}, round {index}: forwards {piece} to device {peer} and has not "
                        "received all of it in an earlier round; what to do: compile the programs anew from the plan"
                    )
                return _part(self.targets[source], piece.region, source.region)
            case _:
                assert_never(send)


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
