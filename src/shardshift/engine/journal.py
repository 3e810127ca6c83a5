"""The journal of a move on one device: what it holds, whatever happens.

A move is epochs, in each of which whole tensors move, and after each of which all devices meet at a *fence*. So at any
time every tensor is wholly in the old layout, or wholly in the new one, or both. The journal says which, after an
error as well: ``held()`` is what a new plan may start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Final

import torch

from ..schedule import Epoch, Program, Send
from ..values import Mismatch, Shard
from .aliases import stretch
from .pages import Pages

_NAMES: Final = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


class Live:
    """The live tensors of one epoch, found by the program's own shard objects.

    A shard takes a microsecond to hash and another to compare, as long as copying 4 KiB three times; an object's id
    takes nothing. Equal shards that are other objects are found all the same.

    Args:
        sources: old shards.
        targets: new shards.
    """

    def __init__(self, sources: Mapping[Shard, torch.Tensor], targets: dict[Shard, torch.Tensor]) -> None:
        self._sources, self._targets = sources, targets
        self._old: dict[int, torch.Tensor] = {}
        self._new: dict[int, torch.Tensor] = {}

    def check(self, shards: Iterable[Shard]) -> None:
        """Look old shards up and hold their tensors against them.

        Raises:
            Mismatch: if one is not what its shard says.
        """
        known, sources = self._old, self._sources
        for shard in shards:
            if id(shard) not in known:
                known[id(shard)] = check_tensor(shard, sources.get(shard), "holds")

    def add(self, shards: Iterable[Shard], memory: Callable[[Shard], torch.Tensor]) -> None:
        """Get memory for new shards, and put them among the targets.

        Raises:
            Mismatch: if it is not what a shard needs.
        """
        known, targets = self._new, self._targets
        for shard in shards:
            tensor = known[id(shard)] = check_tensor(shard, memory(shard), "was given memory for")
            targets[shard] = tensor

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors are."""
        return {tensor.device for found in (self._old, self._new) for tensor in found.values()}

    def old(self, shard: Shard) -> torch.Tensor:
        """An old shard's tensor."""
        tensor = self._old.get(id(shard))
        return self._sources[shard] if tensor is None else tensor

    def new(self, shard: Shard) -> torch.Tensor:
        """A new shard's tensor."""
        tensor = self._new.get(id(shard))
        return self._targets[shard] if tensor is None else tensor

    def clear(self) -> None:
        """Let go of the tensors."""
        self._old.clear()
        self._new.clear()


class Journal:
    """What one device holds in the course of a move.

    Args:
        program: what it does.
        sources: its old shards. Those that are released are taken out of this very mapping, so that it does not keep
            them alive.

    Attributes:
        program: as given.
        sources: the old shards that are not released.
        targets: the new shards that have memory, those of an epoch under way among them, and the referred ones.
        finished: epochs of which this device has everything.
        fences: epochs that all devices are known to have finished: after each, old shards are released.
        under_way: what may still be read from or written to after an error, until the transport is closed.
    """

    def __init__(self, program: Program, sources: MutableMapping[Shard, torch.Tensor]) -> None:
        self.program = program
        self.sources = sources
        self.targets: dict[Shard, torch.Tensor] = {}
        self.finished = 0
        self.fences = 0
        self.under_way: list[object] = []
        self._begun = False
        self.live = [Live(sources, self.targets) for _ in program.epochs]

    def held(self) -> dict[Shard, torch.Tensor]:
        """Every shard that is complete on this device, old or new."""
        new = {shard: self.targets[shard] for epoch in self.program.epochs[: self.finished] for shard in epoch.allocate}
        return {**self.sources, **new}

    def hand_over(self) -> None:
        """Let go of all tensors: somebody else has taken what is held."""
        for live in self.live:
            live.clear()
        self.sources = {}
        self.targets = {}

    def begin(self) -> None:
        """Hold the old shards against the program, and take the referred ones over into the new layout.

        A second call does nothing: whoever has to know early whether all is well calls it before ``run_program`` does.

        Raises:
            Mismatch: if a live tensor is not what its shard says.
        """
        if self._begun:
            return
        for refer in self.program.refers:
            self.targets[refer.shard] = check_tensor(refer.shard, self.sources.get(refer.shard), "holds")
        for epoch, live in zip(self.program.epochs, self.live, strict=True):
            live.check(_read(epoch))
        self._begun = True

    def allocate(self, index: int, memory: Callable[[Shard], torch.Tensor]) -> None:
        """Get memory for the new shards of an epoch.

        Raises:
            Mismatch: if it is not what a shard needs.
        """
        self.live[index].add(self.program.epochs[index].allocate, memory)

    def release(self, index: int, pages: Pages | None) -> int:
        """Let go of the old shards of an epoch whose fence is passed; their bytes.

        Args:
            index: the epoch's number.
            pages: may keep their memory for new tensors.
        """
        self.live[index].clear()
        released = [self.sources.pop(shard) for shard in self.program.epochs[index].release if shard in self.sources]
        if pages is not None:
            pages.give(released)
        return sum(shard.nbytes for shard in self.program.epochs[index].release)


def check_held(sources: Mapping[Shard, torch.Tensor]) -> None:
    """Hold all tensors of a device to their shards: those too that only a digest of copies will read.

    Raises:
        Mismatch: naming one that is not what its shard says. Nothing has moved.
    """
    for shard, tensor in sources.items():
        check_tensor(shard, tensor, "holds")


def check_tensor(shard: Shard, tensor: torch.Tensor | None, what: str) -> torch.Tensor:
    """Hold a tensor to its shard, and give it back.

    Args:
        shard: what it should be.
        tensor: None if there is none.
        what: how the device came by it, for the error: "holds", "was given memory for".

    Raises:
        Mismatch: if it is missing, or of another shape or dtype, or has elements of another size.
    """
    if tensor is None:
        raise Mismatch(f"{shard}: the layout says that this device {what} it, but no tensor was given")
    if not _has_memory(tensor):
        raise Mismatch(
            f"{shard}: this device {what} a tensor with layout {tensor.layout} on {tensor.device}, which has no dense "
            "memory for its elements, or has it no more; nothing was moved. What to do: give dense tensors that hold "
            "their values"
        )
    if tensor.shape != shard.region.shape or _NAMES[tensor.dtype] != shard.tensor.dtype:
        raise Mismatch(
            f"{shard}: this device {what} a tensor of shape {tuple(tensor.shape)} and dtype "
            f"{_NAMES[tensor.dtype]}; expected shape {shard.region.shape} and dtype "
            f"{shard.tensor.dtype}; nothing was moved. What to do: describe the layout as the tensors really are"
        )
    if tensor.element_size() != shard.tensor.itemsize:  # pieces are cut and counted by what the layout says
        raise Mismatch(
            f"{shard}: the layout gives an element of {shard.tensor.dtype} {shard.tensor.itemsize} bytes (itemsize), "
            f"and it has {tensor.element_size()}; nothing was moved. What to do: make the Tensor with "
            f"itemsize={tensor.element_size()}"
        )
    return tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its storage, which may have been freed under it."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not tensor.numel() or stretch(tensor)[1] <= tensor.untyped_storage().nbytes()


def _read(epoch: Epoch) -> Iterator[Shard]:
    """The old shards that the rounds of an epoch read."""
    for step in epoch.rounds:
        yield from (copy.source for copy in step.copies)
        yield from (send.source for send in step.sends if isinstance(send, Send))
