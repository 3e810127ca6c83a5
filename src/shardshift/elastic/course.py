"""The course of a job: which configuration runs on which devices, and how many changes and losses came before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch.distributed as dist

from ..values import ParallelConfig
from .proposal import Proposal

_KEY: Final = "course"


@dataclass(slots=True)
class Course:
    """Where the job stands, as far as this process has followed it.

    Attributes:
        config: the configuration that trains.
        devices: per virtual rank its device.
        generation: committed changes of layout.
        attempt: changes that were begun in this era, committed or not; their records are numbered by it.
        lost: those of the devices that are gone; only between a loss and the change that makes it good.
    """

    config: ParallelConfig
    devices: tuple[int, ...]
    generation: int = 0
    attempt: int = 0
    lost: tuple[int, ...] = ()

    @property
    def lead(self) -> int:
        """The device that speaks for the job: the lowest that trains."""
        return min(self.living)

    @property
    def living(self) -> tuple[int, ...]:
        """The devices that train and are not lost."""
        return tuple(device for device in self.devices if device not in self.lost)

    def follow(self, proposal: Proposal) -> None:
        """Take note of a committed change."""
        self.config, self.devices = proposal.curr, proposal.curr_devices
        self.generation += 1
        self.lost = ()

    def mourn(self, lost: Iterable[int]) -> None:
        """Take note of a loss: a new era begins with this course."""
        self.lost = tuple(sorted({*self.lost, *lost}.intersection(self.devices)))
        self.attempt = 0

    def publish(self, store: dist.Store) -> None:
        """Let those who come later read where the job stands: after each commit, and as an era begins."""
        store.set(_KEY, json.dumps(asdict(self) | {"config": str(self.config)}))

    @classmethod
    def read(cls, store: dist.Store) -> Course | None:
        """Where the job stands, by its last committed change in an era; None if there was none."""
        if not store.check([_KEY]):
            return None
        record: Mapping[str, Any] = json.loads(store.get(_KEY))
        return cls(
            ParallelConfig.parse(record["config"]),
            tuple(record["devices"]),
            record["generation"],
            record["attempt"],
            tuple(record["lost"]),
        )
