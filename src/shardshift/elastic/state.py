"""What one rank brings into a change of layout: its live job, or what it kept of one whose world is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol

import torch

from ..adapters import Adapter, Change
from ..adapters.protocol import J
from ..values import ParallelConfig, Shard


class State(Protocol[J]):
    """The state of one rank after some finished steps."""

    @property
    def config(self) -> ParallelConfig:
        """The configuration that it is laid out in."""

    @property
    def iteration(self) -> int:
        """Optimizer steps finished."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state that exist in the whole job."""

    def held(self, change: Change[J]) -> Mapping[Shard, torch.Tensor]:
        """This rank's tensors, by shard of the layout before the change."""

    def companions(self) -> dict[str, bytes]:
        """The state that is not tensors by region; no two ranks give the same key."""


@dataclass(frozen=True, slots=True)
class Live(Generic[J]):
    """A job that trains, at rest between two steps."""

    adapter: Adapter[J]
    job: J

    @property
    def config(self) -> ParallelConfig:
        """See ``State``."""
        return self.job.config

    @property
    def iteration(self) -> int:
        """See ``State``."""
        return self.job.iteration

    @property
    def kinds(self) -> tuple[str, ...]:
        """See ``State``."""
        return kinds_of(self.adapter, self.job)

    def held(self, change: Change[J]) -> Mapping[Shard, torch.Tensor]:
        """See ``State``; whatever no rule covers is refused."""
        return change.shards(self.job)

    def companions(self) -> dict[str, bytes]:
        """See ``State``; ``quiesce`` comes first."""
        return self.adapter.companions(self.job)


@dataclass(frozen=True, slots=True)
class Kept(Generic[J]):
    """What a survivor kept: tensors by shard and companions as they were after ``iteration`` steps."""

    config: ParallelConfig
    iteration: int
    kinds: tuple[str, ...]
    tensors: Mapping[Shard, torch.Tensor] = field(repr=False)
    records: Mapping[str, bytes] = field(repr=False)

    def held(self, change: Change[J]) -> Mapping[Shard, torch.Tensor]:
        """See ``State``."""
        return change.of_kept(self.tensors)

    def companions(self) -> dict[str, bytes]:
        """See ``State``."""
        return dict(self.records)


def kinds_of(adapter: Adapter[J], job: J) -> tuple[str, ...]:
    """The kinds of optimizer state that a job has, as proposals name them."""
    return tuple(map(str, adapter.state_kinds(job)))
