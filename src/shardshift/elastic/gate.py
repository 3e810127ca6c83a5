"""The gate before an optimizer step: nobody steps before all have their gradients, and all hear of what comes next.

One all-reduce of a few integers on the job's own world (its default group, so gloo for these): as fast as a barrier can
be, and it ends with an error where a rank is lost, like any other collective of the step. It carries

1. the iteration, summed: a rank at another one would mix steps, and all refuse;
2. the number of the newest change that the lead has published: ranks that do not know it yet read it in the store.

Agreeing through the store was rejected: every rank would poll it, each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from ..coordination import Control, opened, to_record
from ..values import Mismatch, ParallelConfig
from .resize import Resize

_COUNT: Final = "announced"


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

    def pass_through(self, iteration: int, lead: int, *, leads: bool) -> None:
        """Wait until all ranks of the job's world are here.

        Args:
            iteration: finished steps.
            lead: the device that announces.
            leads: whether that is this one.

        Raises:
            Mismatch: on all ranks, if one is at another iteration.
            RuntimeError: from torch, if a rank is lost.
        """
        numbers = torch.tensor([iteration, iteration * iteration, self._known if leads else 0])
        dist.all_reduce(numbers)
        total, squares, newest = numbers.tolist()
        ranks = dist.get_world_size()
        # The mean of the squares is the square of the mean only where all are equal.
        if squares * ranks != total * total:
            raise Mismatch(
                f"ranks are at different iterations, on average {total / ranks:g}, this one at {iteration}; no step "
                "was taken. What to do: call commit_step once for each step, on every rank"
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
