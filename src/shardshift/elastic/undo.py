"""The undo copy: what an optimizer step is about to overwrite, kept on this rank until the next step's gate.

An optimizer step has collectives of its own (gradient norm, parameter gather), so a rank that is lost in the middle of
it leaves some ranks with the new state, some with the old and some with both. All go back to the state of the gate,
which every rank has passed or nobody has. The copy is of all that this rank holds, in host memory that is used again
at each step: on a CPU job it costs the time of one copy and as much memory as the state itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..values import Shard


class Undo:
    """One rank's copy of its state, of one iteration of one generation.

    Attributes:
        iteration: finished steps of the state that it holds; None if it holds none.
        kinds: of optimizer state that existed in the whole job then.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.kinds: tuple[str, ...] = ()
        self._copies: dict[Shard, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(copy.nbytes for copy in self._copies.values())

    def take(self, iteration: int, kinds: tuple[str, ...], live: Mapping[Shard, torch.Tensor]) -> None:
        """Copy the state as it is now.

        Args:
            iteration: finished steps.
            kinds: of optimizer state that exist.
            live: this rank's tensors by shard.
        """
        self.iteration = None  # not whole, should this fail half way
        if self._copies.keys() != live.keys():
            self._copies = {shard: torch.empty_like(tensor, device="cpu") for shard, tensor in live.items()}
        _copy([self._copies[shard] for shard in live], list(live.values()))
        self.iteration, self.kinds = iteration, kinds

    def put_back(self, live: Mapping[Shard, torch.Tensor]) -> None:
        """Make the live tensors what they were; state that did not exist then is left alone."""
        _copy([live[shard] for shard in self._copies], list(self._copies.values()))

    @property
    def shards(self) -> frozenset[Shard]:
        """What it holds."""
        return frozenset(self._copies)

    def forget(self) -> None:
        """Give the memory back: the layout is another one now."""
        self.iteration, self._copies = None, {}


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)
