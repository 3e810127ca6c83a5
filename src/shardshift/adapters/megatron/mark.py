"""Marks: what a rank must know of a finished step to go back to it, apart from what only the optimizer changes.

Forward and backward change a job before any gate: they draw from random streams, read samples, move buffers (Megatron
updates a router's expert bias with the gradients, ``finalize_model_grads.py``) and scales in extra state. So a copy
taken at the gate is too late for these. A mark is taken between two steps instead, of everything that is not a
parameter or optimizer state with a region; the two newest are kept, since ranks that survive a loss may be one step
apart, never more: nobody passes a gate before all have come to it.

1. ``take``: values are copied, nothing is made bytes of and nobody is asked; some tenths of a millisecond. What cannot
   be carried is refused when the mark is read: a job that never loses a rank need not care.
2. ``records``: this rank's companions of then, complete. In a quiet change a rank tells only in what it differs from
   the first of its replicas; after a loss nobody can ask who that is, and it may be who is lost.
3. ``rewind``: buffers are written back in place, the job's counts are set. Random streams, settings, scheduler and
   extra state follow when the job is built in its new world, from the records.

Rejected: taking marks at the gate; one mark (ranks would have no common step); serialising each time (ten times the
cost, for bytes that hardly ever are read).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...values import Mismatch
from .. import groups
from ..generators import Streams
from ..plain import pack
from . import carry, extras, microbatches, rerun, rng, scaler
from . import optimizer as optim
from .change import Live
from .job import DataPosition, Job
from .names import Where
from .records import JobRecord, RankRecord, alone


@dataclass(frozen=True, slots=True)
class Mark:
    """One rank's state after a finished step, but for parameters and what the optimizer keeps of them.

    Attributes:
        settled: whether the loop was done with the step (``early``).
        position: of the data.
        counters: the user's.
        buffers: a copy of each buffer that is state.
        record: the whole job's, as this rank has it.
        groups: live param groups with values of their own.
        steps: per tensor that torch's optimizers know its step, as the state has it.
        streams: ``rng.capture``.
        extra_state: ``extras.capture``.
        scalers: ``scaler.capture``.
    """

    settled: bool
    position: DataPosition
    counters: Mapping[str, int | float]
    buffers: Mapping[Where, torch.Tensor]
    record: JobRecord
    groups: Sequence[Mapping[str, Any]]
    steps: Mapping[torch.Tensor, Mapping[str, Any]]
    streams: Streams
    extra_state: Mapping[str, Any]
    scalers: Mapping[str, Any]


def take(job: Job, buffers: Mapping[Where, torch.Tensor], keeping: extras.Modules, *, settled: bool) -> Mark:
    """Mark the state of now. Local; between two steps.

    Args:
        job: the live job.
        buffers: those that are state.
        keeping: the modules that may have extra state.
        settled: whether the loop is done with the step.

    Raises:
        Unaccounted: naming what no record can carry.
    """
    where = f"rank {job.layout.rank} ({job.layout.coordinate})"
    record = carry.job_record(job)
    return Mark(
        settled,
        job.position,
        dict(job.counters),
        {at: tensor.clone() for at, tensor in buffers.items()},
        record.frozen(),
        [{key: _own(value) for key, value in group.items()} for group in optim.groups(job.optimizer)],
        {
            key: {groups.STEP: _own(state[groups.STEP])}
            for part in optim.wrappers(job.optimizer)
            for key, state in part.optimizer.state.items()
            if state.get(groups.STEP) is not None
        },
        rng.capture(),
        extras.capture(keeping),
        scaler.capture(job.optimizer, where),
    )


def records(job: Job, mark: Mark) -> dict[str, bytes]:
    """This rank's companions of a mark's step, complete.

    Args:
        job: live, in whatever state; its names do not change.
        mark: one of its own.
    """
    where = f"rank {job.layout.rank} ({job.layout.coordinate})"
    names = Live.of(job).names_of_keys()
    told = groups.describe(names, mark.groups, mark.steps, where)
    record = RankRecord(job.layout.rank, told, mark.streams, mark.extra_state, mark.scalers)
    return alone(mark.record, record, settled=mark.settled)


def rewind(job: Job, iteration: int, mark: Mark, buffers: Mapping[Where, torch.Tensor]) -> None:
    """Set a job back to a mark: counts and buffers.

    Args:
        job: live, its world gone.
        iteration: finished steps of the mark.
        mark: one of its own.
        buffers: those that are state, as they are now.

    Raises:
        Mismatch: if a buffer has another shape now.
    """
    for where, value in mark.buffers.items():
        live = buffers.get(where)
        if live is None or live.shape != value.shape:
            raise Mismatch(
                f"buffer {where[1]} has shape {None if live is None else tuple(live.shape)}, at step {iteration} "
                f"{tuple(value.shape)}: this rank cannot go back. What to do: keep shapes of buffers as they are"
            )
        live.detach().copy_(value)
    job.iteration, job.position, job.counters = iteration, mark.position, dict(mark.counters)
    microbatches.advance(job.position)
    rerun.rewind(mark.record.rerun)


def _own(value: Any) -> Any:
    """A value that later steps do not change: a tensor is copied, a list of parameters is another one of the same."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        return list(value)
    return pack(value, "a setting of a param group") if isinstance(value, list | dict | set) else value
