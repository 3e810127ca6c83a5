"""The state of a live job that is not tensors by region: out of it, and into a new one.

1. ``look``, collective on the old world (while it is quiet): in which streams and extra states a rank differs from the
   first of its data parallel group, and whether all hold alike what the first rank tells for all.
2. ``records``: what this rank publishes. Refuses here what 1 found, since refusals travel from here as text.
3. ``restore``, in the new job, last: scheduler, then groups (which have the last word on lr and weight decay), grad
   scalers, extra state, counts, then hooks, then random streams, so that nothing before draws from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...values import Unaccounted
from .. import groups, hooks
from . import alike, extras, microbatches, rerun, rng, scaler
from . import optimizer as optim
from .job import Job, unwrapped
from .names import named_modules
from .records import Companions, JobRecord, RankRecord


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank learnt of the others.

    Attributes:
        streams: random streams in which it differs from the first of its data parallel group; None if it is the first.
        extra_state: modules whose extra state it holds otherwise than that one; None if it is the first.
        shared: values of the whole job, or settings of replicas, in which it differs from the first; to be refused.
        error: why it could not look; raised in ``records``.
    """

    streams: tuple[str, ...] | None
    extra_state: tuple[str, ...] | None
    shared: tuple[str, ...]
    error: Exception | None = None


def look(job: Job) -> Seen:
    """Compare with the first rank of the data parallel group and of the world. Collective on the job's world.

    Never raises for what it finds, so that no rank is left waiting.
    """
    values: list[dict[str, Any]] = [{}, {}, {}, {}]
    error = None
    try:
        job.keeping = None  # whatever the loop has put in place of a module
        values = [
            rng.capture(),
            extras.capture(keeping(job)),
            groups.replicated(optim.groups(job.optimizer)),
            job_record(job).values(),
        ]
    except Exception as caught:  # the others are in the collectives below
        error = caught
    replicas, world = parallel_state.get_data_parallel_group(with_context_parallel=True), dist.group.WORLD
    assert world is not None  # a live job has one
    of_replicas = {f"{which}/{name}": value for which, each in enumerate(values[:3]) for name, value in each.items()}
    unlike = [name.split("/", 1) for name in alike.differing(replicas, of_replicas)]
    streams, extra_state, settings = (tuple(name for of, name in unlike if of == str(which)) for which in range(3))
    shared = alike.differing(world, values[3])
    first = is_first(job)
    return Seen(None if first else streams, None if first else extra_state, (*settings, *shared), error)


def is_first(job: Job) -> bool:
    """Whether a rank is the first of its data parallel group: dp 0 and cp 0."""
    at = job.layout.coordinate
    return (at.dp, at.cp) == (0, 0)


def job_record(job: Job) -> JobRecord:
    """The record of the whole job, as this rank has it.

    Raises:
        Unaccounted: if the micro-batch calculator, the rerun state machine or a counter cannot be carried.
    """
    return JobRecord(
        iteration=job.iteration,
        consumed_samples=job.position.consumed_samples,
        global_batch_size=job.position.global_batch_size,
        micro_batch_size=job.position.micro_batch_size,
        generation=job.generation,
        scheduler=None if job.scheduler is None else job.scheduler.state_dict(),
        counters=job.counters,
        microbatches=microbatches.capture(),
        rerun=rerun.capture(f"rank {job.layout.rank}"),
        individual=job.individual_streams,
    )


def records(
    job: Job, seen: Seen, names: Mapping[torch.Tensor, str], own: Collection[str] | None = None
) -> dict[str, bytes]:
    """This rank's records.

    Args:
        job: the live job.
        seen: what ``look`` found, at the same iteration.
        names: the logical name of each tensor that torch's optimizers know.
        own: the names that this rank speaks for; None for all that it has.

    Raises:
        Unaccounted: naming what no record can carry.
        Mismatch: naming what ranks should hold alike and do not.
    """
    where = f"rank {job.layout.rank} ({job.layout.coordinate})"
    if seen.error is not None:
        raise seen.error
    whole = job_record(job).to_bytes() if job.layout.rank == 0 else {}  # first: it names what cannot be carried
    states: Mapping[torch.Tensor, Mapping[str, Any]] = {
        key: state for part in optim.wrappers(job.optimizer) for key, state in part.optimizer.state.items()
    }
    record = RankRecord(
        job.layout.rank,
        groups.describe(names, optim.groups(job.optimizer), states, where, own),
        rng.published(rng.capture(), seen.streams),
        extras.published(extras.capture(keeping(job)), seen.extra_state),
        scaler.capture(job.optimizer, where),
    )
    alike.refuse_differing(seen.shared, where)
    return whole | record.to_bytes(first=is_first(job))


def restore(
    job: Job, carried: Companions, names: Mapping[torch.Tensor, str], after_move: Callable[[Job], None] | None = None
) -> None:
    """Put everything in place in a new job whose tensors are there already, steps among the optimizer's state.

    Args:
        job: the job in the new world; its iteration, position and generation are set.
        carried: the records that ``accept`` read.
        names: the logical name of each tensor that the new job's torch optimizers know.
        after_move: the user's own hook.
    """
    layout = job.layout
    if job.scheduler is not None and carried.job.scheduler is not None:
        optim.restore_scheduler(job.scheduler, carried.job.scheduler)
    groups.restore(carried.groups, names, optim.groups(job.optimizer))
    scaler.restore(carried.scalers, job.optimizer)
    carried.extra_state.restore(keeping(job), layout.config, layout.rank)
    job.counters = dict(carried.job.counters)
    job.individual_streams = tuple(sorted(carried.streams.individual))
    rerun.restore(carried.job.rerun)
    hooks.run(unwrapped(job.model))
    if after_move is not None:
        after_move(job)
    rng.install(carried.streams.at(layout.config, layout.rank, job.generation))


def refuse_scheduler_lost(job: Job, makes_scheduler: bool) -> None:
    """Refuse a job with a scheduler whose ``wrap`` gives none for the new layout, or the other way round.

    Raises:
        Unaccounted: before anything moves.
    """
    if (job.scheduler is not None) != makes_scheduler:
        here, there = ("a", "no") if job.scheduler is not None else ("no", "a")
        raise Unaccounted(
            f"the job has {here} learning rate scheduler, wrap gives {there} one for the new layout; nothing was "
            "moved. What to do: let wrap make the same whatever the layout",
            ["scheduler"],
        )


def modules(job: Job) -> extras.Modules:
    """The live modules by logical name."""
    return named_modules(unwrapped(job.model), job.layout.expert_coordinate.ep)


def keeping(job: Job) -> extras.Modules:
    """Those among them that may have extra state; looked for once, and anew by ``look``."""
    if job.keeping is None:
        job.keeping = [(name, module) for name, module in modules(job) if extras.keeps(module)]
    return job.keeping
