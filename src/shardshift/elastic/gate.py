"""The gate before an optimizer step: nobody steps before all have their gradients, and all hear of what comes next.

One all-reduce of a few integers on the job's own world (its default group, so gloo for these): as fast as a barrier can
be, and it ends with an error where a rank is lost, like any other collective of the step. It carries

1. the iteration, summed: a rank at another one would mix steps, and all refuse;
2. the number of the newest change that the lead has published: ranks that do not know it yet read it in the store;
3. a number of the next change that each rank's own source names, where sources are ``alike``, summed: ranks that would
   each change to another layout refuse, where later they would only miss one another.

Agreeing through the store was rejected: every rank would poll it, each step.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from ..coordination import Control, opened, to_record
from ..values import Mismatch, ParallelConfig
from .resize import Resize

_COUNT: Final = "announced"
_NUMBERS: Final = 1 << 22
"""Bound of a change's number: squares of 2^19 ranks sum up within 64 bits."""


class Gate:
    """One rank's side of the gates of an era.

    Args:
        control: of the era.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._known = 0
        self.announced: Resize | None = None

    def announce(self, resize: Resize | None) -> None:
        """The lead's part, before it passes: say which change comes next, if any."""
        if resize == self.announced:
            return
        # Numbered by the store: this rank may not have heard of all that leads before it announced.
        self._known, self.announced = self._control.store.add(_COUNT, 1), resize
        self._control.publish(_key(self._known), to_record() if resize is None else _record(resize))

    def pass_through(self, iteration: int, lead: int, *, leads: bool, named: str) -> None:
        """Wait until all ranks of the job's world are here.

        Args:
            iteration: finished steps.
            lead: the device that announces.
            leads: whether that is this one.
            named: the next change as this rank knows it from its own source; the same on all.

        Raises:
            Mismatch: on all ranks, if one is at another iteration, or its source names another change.
            RuntimeError: from torch, if a rank is lost.
        """
        change = zlib.crc32(named.encode()) % _NUMBERS
        numbers = torch.tensor([iteration, iteration * iteration, self._known if leads else 0, change, change * change])
        dist.all_reduce(numbers)
        total, squares, newest, changes, change_squares = numbers.tolist()
        ranks = dist.get_world_size()
        # The mean of the squares is the square of the mean only where all are equal.
        if squares * ranks != total * total:
            raise Mismatch(
                f"ranks are at different iterations, on average {total / ranks:g}, this one at {iteration}; no step "
                "was taken. What to do: call commit_step once for each step, on every rank"
            )
        if change_squares * ranks != changes * changes:
            raise Mismatch(
                f"ranks' sources name different changes; that of this one names {named}; no step was taken. What "
                "to do: give every rank the same source (resizes=), a script with the same changes"
            )
        if newest > self._known:
            record = opened(self._control.fetch(_key(newest), lead, "gate"))
            self._known, self.announced = newest, _resize(record) if record else None


def _key(number: int) -> str:
    return f"announced/{number}"


def _record(resize: Resize) -> bytes:
    return to_record(iteration=resize.iteration, config=str(resize.config), usable=resize.usable)


def _resize(record: Mapping[str, Any]) -> Resize:
    usable = record["usable"]
    return Resize(
        record["iteration"], ParallelConfig.parse(record["config"]), None if usable is None else tuple(usable)
    )
