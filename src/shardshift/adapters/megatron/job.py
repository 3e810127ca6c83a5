"""A running Megatron job on one rank, and what the user's callbacks are told about where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...values import Coordinate, ExpertCoordinate, Mismatch, ParallelConfig

if TYPE_CHECKING:
    from ..account import Audit
    from ..reach import Reached
    from ..sockets import Sockets
    from .mark import Mark
    from .present import Present


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Where the model, optimizer or data being built will run.

    Attributes:
        config: the parallel configuration.
        rank: the virtual rank, which is the rank in torch's default process group too.
    """

    config: ParallelConfig
    rank: int

    @property
    def coordinate(self) -> Coordinate:
        """Index along each parallel axis."""
        return self.config.coordinate(self.rank)

    @property
    def expert_coordinate(self) -> ExpertCoordinate:
        """Index along each axis of the experts."""
        return self.config.expert_coordinate(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding (Megatron's ``pre_process``)."""
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer (Megatron's ``post_process``)."""
        return self.coordinate.pp == self.config.pp - 1


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How far training is in its data, whatever the layout.

    Attributes:
        consumed_samples: samples of the training set that were used, over all ranks.
        global_batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per forward on one rank.
        num_microbatches: forwards per optimizer step on one rank.
    """

    consumed_samples: int
    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int


@dataclass(slots=True)
class Parts:
    """The live objects of a job; gone once the job is consumed by a change of layout."""

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    data: Any


class Job:
    """One rank's running job: what a training loop works with.

    A change of layout consumes the job: every attribute that reaches a live object then raises ``Mismatch``.

    Attributes:
        layout: where this rank runs.
        iteration: optimizer steps finished.
        position: how far training is in its data.
        generation: how many changes of layout came before.
        counters: what else the loop counts, alike on all ranks (consumed_valid_samples, skipped_samples,
            floating_point_operations, ...); goes on through changes.
        individual_streams: random streams that belong to the whole coordinate (``rng.py``).
        stepped_at: how often gradient buffers had been written when the last step was over (``quiesce.py``).
        has_stepped: whether a step was taken since this job was built.
        marks: by iteration, of the two newest (``mark.py``); or why there is none.
        present: its tensors by shard, as they were found last (``present.py``).
        keeping: its modules that may have extra state, once they were looked for.
        reached: what it reaches, from when it was held against a change until it goes on or is consumed.
        sockets: of its world (``sockets.py``).
    """

    def __init__(
        self,
        parts: Parts,
        layout: RankLayout,
        iteration: int,
        position: DataPosition,
        generation: int,
        auditor: Callable[[Job], Audit],
        data_from: Callable[[Job, int], tuple[DataPosition, Any]],
    ) -> None:
        self.counters: dict[str, int | float] = {}
        self.individual_streams: tuple[str, ...] = ()
        self.stepped_at: tuple[int, ...] | None = None
        self.has_stepped = False
        self.marks: dict[int, Mark | Exception] = {}
        self.present: Present | None = None
        self.keeping: list[tuple[str, torch.nn.Module]] | None = None
        self.reached: Reached | None = None
        self.sockets: Sockets | None = None
        self._auditor, self._data_from = auditor, data_from
        self._parts: Parts | None = parts
        self.layout = layout
        self.iteration = iteration
        self.position = position
        self.generation = generation

    def audit(self) -> Audit:
        """Account for every tensor that the job reaches; see ``shardshift.audit``.

        Raises:
            Mismatch: if the job is consumed.
        """
        self._live()
        return self._auditor(self)

    def begin_at(self, iteration: int, consumed_samples: int) -> None:
        """Go on from where a checkpoint was written; called by what loads it, before the first step.

        The data iterator is made anew, from that position on. Everything else is in the checkpoint.

        Args:
            iteration: optimizer steps finished.
            consumed_samples: samples of the training set that were used, over all ranks.

        Raises:
            Mismatch: if the job is consumed.
        """
        parts = self._live()
        self.position, parts.data = self._data_from(self, consumed_samples)
        self.iteration = iteration
        self.marks.clear()

    @property
    def config(self) -> ParallelConfig:
        """The parallel configuration."""
        return self.layout.config

    @property
    def num_microbatches(self) -> int:
        """Forwards per optimizer step on this rank."""
        return self.position.num_microbatches

    @property
    def model(self) -> list[torch.nn.Module]:
        """The wrapped model chunks."""
        return self._live().model

    @property
    def optimizer(self) -> Any:
        """The Megatron optimizer."""
        return self._live().optimizer

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler; None if the user has none."""
        return self._live().scheduler

    @property
    def data(self) -> Any:
        """What the user's ``data`` gave: this rank's iterator over micro-batches, or one for each model chunk."""
        return self._live().data

    @property
    def is_consumed(self) -> bool:
        """Whether its objects are gone."""
        return self._parts is None

    def consume(self) -> Parts:
        """Take the live objects out; the job is unusable afterwards."""
        parts = self._live()
        self._parts = self.present = self.keeping = self.reached = None
        self.marks.clear()
        return parts

    def _live(self) -> Parts:
        if self._parts is None:
            raise Mismatch(
                f"this job ({self.config}, iteration {self.iteration}) was consumed by a change of layout; what to "
                "do: use the job that session.resize returned"
            )
        return self._parts


def gradient_buffers(model: Sequence[torch.nn.Module]) -> list[Any]:
    """The buffers of ``DistributedDataParallel`` of all wrapped chunks, in one order (``param_and_grad_buffer.py``)."""
    names = ("buffers", "expert_parallel_buffers")  # a bare module has a method of that name
    return [buffer for chunk in model for name in names for buffer in vars(chunk).get(name, ())]


def unwrapped(model: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The model chunks inside their wrappers (DistributedDataParallel, Float16Module)."""
    chunks: list[torch.nn.Module] = []
    for chunk in model:
        inside: Any = chunk
        while hasattr(inside, "module"):
            inside = inside.module
        chunks.append(inside)
    return chunks
