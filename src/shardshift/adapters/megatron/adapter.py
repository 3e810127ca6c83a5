"""The Megatron-core adapter: a live job to a layout, and tensors in a new layout back to a live job."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from numbers import Integral
from typing import Any, Final, get_args

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch

from ...models.load import Load, load_of
from ...models.step import Step
from ...values import Infeasible, Kind, Mismatch, ParallelConfig, Shard
from ..account import Audit
from ..protocol import Place
from ..reach import reach
from . import carry, mark, microbatches, world
from . import optimizer as optim
from .ahead import Standing
from .audit import roots
from .build import release
from .change import Live, MegatronChange, audit_of
from .divide import refuse_indivisible
from .extras import Differing
from .grid import Grid
from .job import DataPosition, Job, Parts, RankLayout, unwrapped
from .load import states_of, step_of
from .meta import BuildModel, MetaJobs, Stage, Wrap, as_chunks, checked, keep_router_bias
from .microbatches import BatchSizes
from .names import VOCABULARY
from .present import Present
from .quiesce import close_data, drain, gathered, gradient_versions, quiesce, unheard
from .records import JobRecord

MakeData = Callable[[RankLayout, DataPosition], Any]

_USES: Final = ("forward", "zero_grad_buffer", "finish_grad_sync", "step", "zero_grad", "state_dict", "load_state_dict")
"""What of a consumed job's model, optimizer and scheduler raises."""


class Adapter:
    """Carries megatron-core jobs from layout to layout.

    Args:
        build_model: gives the model chunks of one rank, not wrapped. Called on the meta device, except for the
            first start; asks ``parallel_state`` (or the layout) for the stage, as Megatron's own providers do.
        wrap: gives (wrapped chunks, optimizer, scheduler or None) for chunks whose parameters are real.
        data: gives the iterator over micro-batches of one rank, from a position on (a list of one for each model chunk,
            where Megatron's interleaved schedule wants that). None if the loop has its own.
        global_batch_size: samples per optimizer step over all ranks; the same in every layout.
        micro_batch_size: samples per forward on one rank.
        vocab_size: rows of the vocabulary without padding; needed where TP changes how far it is padded.
        seed: seeds weights and random streams at the first start, as Megatron's ``initialize.py`` does.
        extra_state: what is done where ranks hold different extra state (``get_extra_state``) of one module, and the
            new layout does not keep them apart: ``"error"``, or ``"first"`` to take the lowest rank's.
        after_move: called with the new job when everything is in place, to make anew what is derived from parameters.
            Modules with a method of that name are called before it.
        async_saves: Megatron's ``AsyncCallsQueue``, if the loop saves checkpoints in the background: they are finished
            before a change.
        say: takes a line where something was mended (a parameter that was not the cast of its master).

    Raises:
        Infeasible: if a number of samples or rows is none, or ``extra_state`` is another word.
    """

    def __init__(
        self,
        build_model: BuildModel,
        wrap: Wrap,
        data: MakeData | None = None,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        vocab_size: int | None = None,
        seed: int = 1234,
        extra_state: Differing = "error",
        after_move: Callable[[Job], None] | None = None,
        async_saves: Any = None,
        say: Callable[[str], None] = unheard,
    ) -> None:
        _refuse_no_count("global_batch_size", global_batch_size, "samples of a step over all ranks")
        _refuse_no_count("micro_batch_size", micro_batch_size, "samples of a forward on one rank")
        if vocab_size is not None:
            _refuse_no_count("vocab_size", vocab_size, "rows of the vocabulary without padding")
        if extra_state not in get_args(Differing):
            raise Infeasible(f"unknown extra_state {extra_state!r}; what to do: use 'error' or 'first'")
        self._build_model = build_model
        self._wrap = wrap
        self._data = data
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._extra_state, self._after_move = extra_state, after_move
        self._async_saves, self._say = async_saves, say
        self._seen: carry.Seen | None = None
        self._leaving: world.Leaving | None = None
        self._standing = Standing()
        self._meta = MetaJobs(build_model, wrap)

    def check(self, config: ParallelConfig) -> None:
        """Refuse a configuration that the model, the batch or this adapter cannot take, and say why."""
        microbatches.refuse_dp(config.dp, BatchSizes.constant(self._global_batch_size, self._micro_batch_size))
        if config.vpp > 1 and config.pp == 1:
            raise Infeasible(
                f"{config}: model chunks of a stage are interleaved over stages; what to do: choose pp > 1"
            )
        refuse_indivisible(self._meta.transformer_config, config)
        self._meta.stages(config)

    def load(self, config: ParallelConfig, *, exact: bool = True) -> Load:
        """What a configuration costs: memory, operations and traffic of the fullest rank of each stage.

        Args:
            config: the configuration.
            exact: whether state is counted on the stages, built on the meta device, rather than worked out. Operations
                and traffic are the same either way.

        Raises:
            Infeasible: if a size or the batch is not divisible, or, if ``exact``, the stages cannot be built.
        """
        microbatches.refuse_dp(config.dp, BatchSizes.constant(self._global_batch_size, self._micro_batch_size))
        refuse_indivisible(self._meta.transformer_config, config)
        states = states_of(config, self._meta.stages(config)) if exact else None
        return load_of(self._step, config, states)

    def start(self, place: Place, consumed_samples: int = 0) -> Job:
        """Enter the first generation's world and build the job for real, with the model's own initial weights.

        Args:
            place: where.
            consumed_samples: where the data begins, for a job that goes on from elsewhere.
        """
        sockets = world.enter(place)
        with world.given_up(sockets):
            job = self._build(place, consumed_samples)
        sockets.note()
        job.sockets = sockets
        return job

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, kinds: Sequence[str]) -> MegatronChange:
        """Both layouts of a change."""
        rows, wholes = self._vocab_rows(prev, curr), self._meta.wholes()
        grids = [Grid(one, self._meta.stages(one), wholes, tuple(map(Kind, kinds)), rows) for one in (prev, curr)]
        return MegatronChange(
            *grids,
            build_model=self._build_model,
            assemble=self._assemble,
            batch_sizes=(self._global_batch_size, self._micro_batch_size),
            extra_state=self._extra_state,
            after_move=self._after_move,
            curr_rows=self._vocab_rows(curr, curr),
            say=self._say,
            standing=self._standing,
        )

    def state_kinds(self, job: Job) -> tuple[Kind, ...]:
        """The kinds of optimizer state that exist.

        A rank that has nothing to train (frozen parameters, padding) cannot see them: there it goes by what the
        optimizers make.
        """
        kinds = optim.kinds_of(job.optimizer)
        if kinds or not job.iteration or any(group["params"] for group in optim.groups(job.optimizer)):
            return kinds
        made = {kind for stage in self._meta.stages(job.config) for kind in stage.makes}
        return tuple(kind for kind in optim.STATE if kind in made)

    def quiesce(self, job: Job) -> None:
        """Bring every tensor up to date; see ``Adapter`` in ``protocol``."""
        keep_router_bias(unwrapped(job.model))
        quiesce(job, stepped_at=job.stepped_at, async_saves=self._async_saves, say=self._say)
        self._seen = carry.look(job)

    def companions(self, job: Job) -> dict[str, bytes]:
        """This rank's records; ``quiesce`` comes first."""
        assert self._seen is not None
        live = Live.of(job)
        return carry.records(job, self._seen, live.names_of_keys(), live.own_names(job.layout))

    def shards(self, job: Job) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard of its present layout; see ``Adapter`` in ``protocol``."""
        return dict(self._present(job).views)

    def mark(self, job: Job, *, settled: bool = True) -> None:
        """Take note of the state between two steps; see ``Adapter`` in ``protocol``, and ``mark.py``."""
        try:
            keeping = carry.keeping(job)
            found: mark.Mark | Exception = mark.take(job, self._present(job).buffers, keeping, settled=settled)
        except Exception as error:  # only a loss needs the mark: ``alone`` raises it
            found = error
        job.marks[job.iteration] = found
        for old in [iteration for iteration in job.marks if not 0 <= job.iteration - iteration <= 1]:
            del job.marks[old]

    def alone(self, job: Job, iteration: int) -> dict[str, bytes]:
        """The companions of a marked iteration that this rank can give by itself; see ``Adapter`` in ``protocol``.

        Raises:
            Unaccounted: naming what no record can carry.
            Mismatch: if the iteration is not marked.
        """
        return mark.records(job, _marked(job, iteration))

    def rewind(self, job: Job, iteration: int) -> None:
        """Make a job's counts and buffers those of a marked iteration; see ``Adapter`` in ``protocol``.

        Raises:
            Mismatch: if the iteration is not marked.
        """
        mark.rewind(job, iteration, _marked(job, iteration), self._present(job).buffers)
        job.marks = {iteration: job.marks[iteration]}

    def whole(self, job: Job) -> bool:
        """Whether live parameters are those of the last finished step; see ``Adapter`` in ``protocol``.

        If not, an overlapped gather has not brought them all: what this rank can offer is the step before, which at
        the last gate all ranks had whole.
        """
        return not job.has_stepped or gathered(job, job.stepped_at)

    def sever(self, job: Job) -> None:
        """End whatever is under way in the job's world, with an error; see ``Adapter`` in ``protocol``.

        May be called by any thread: that is how one ends which waits for a rank that has stopped.
        """
        if not job.is_consumed:  # by another thread, meanwhile: there may be another world already
            world.cut(job.sockets)
            drain(job)

    def advance(self, job: Job) -> None:
        """Count one finished optimizer step and the samples that it used."""
        job.iteration += 1
        job.reached = None
        if self._leaving is not None:
            self._leaving.begin()
        job.position = self._position(job.config, job.position.consumed_samples + job.position.global_batch_size)
        microbatches.advance(job.position)
        job.stepped_at = gradient_versions(job)
        job.has_stepped = True

    def retire(self, job: Job) -> None:
        """Leave the job's world; its model and optimizer raise on use from now on and hold no state."""
        self._consume(job)
        if self._leaving is not None:
            self._leaving.wait()  # as a rule it is over long since
        self._leaving = world.leave()

    def abandon(self, job: Job) -> None:
        """``retire`` after a loss: the job is severed, and nobody is waited for.

        Groups go when nothing refers to them any more, the traceback of what the loss raised included.
        """
        self.sever(job)
        self._standing.close()
        self._consume(job)
        self._leaving = world.leave(aborted=True)

    def _consume(self, job: Job) -> None:
        reached = job.reached
        parts = job.consume()
        close_data(parts.data)
        optimizers = [part for part in optim.parts(parts.optimizer) if part is not None]
        release(parts.model, optimizers, reached)
        for old in (*parts.model, *unwrapped(parts.model), *optimizers, parts.scheduler):
            for name in _USES:
                if hasattr(old, name):
                    setattr(old, name, _consumed)

    def _present(self, job: Job) -> Present:
        kinds = self.state_kinds(job)
        if job.present is None or job.present.kinds != kinds or not job.present.holds():
            job.present = Present(job, self._grid(job.config, kinds))
        return job.present

    def _grid(self, config: ParallelConfig, kinds: Sequence[Kind]) -> Grid:
        """The layout of a configuration by itself, padding of the vocabulary and all."""
        rows = self._vocab_rows(config, config)
        return Grid(config, self._meta.stages(config), self._meta.wholes(), tuple(kinds), rows)

    def _build(self, place: Place, consumed_samples: int) -> Job:
        layout = RankLayout(place.config, place.rank)
        seed = self._seed + 100 * layout.coordinate.pp
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        megatron_random.model_parallel_cuda_manual_seed(seed)
        chunks = as_chunks(self._build_model(layout))
        self._meta.refuse_shared(chunks)
        return self._assemble(chunks, layout, JobRecord(0, consumed_samples, 0, None, {}))

    def _assemble(self, chunks: Sequence[torch.nn.Module], layout: RankLayout, record: JobRecord) -> Job:
        model, optimizer, scheduler = checked(self._wrap(chunks, layout))
        keep_router_bias(unwrapped(model))
        position = self._position(layout.config, record.consumed_samples)
        data = None if self._data is None else self._data(layout, position)
        parts = Parts(list(model), optimizer, scheduler, data)
        job = Job(parts, layout, record.iteration, position, record.generation, self._audit, self._data_from)
        job.stepped_at = gradient_versions(job)
        return job

    def _data_from(self, job: Job, consumed_samples: int) -> tuple[DataPosition, Any]:
        """For ``Job.begin_at``: end the job's iterator, and make one from a position on."""
        close_data(job.data)
        position = self._position(job.config, consumed_samples)
        microbatches.advance(position)
        return position, None if self._data is None else self._data(job.layout, position)

    def _audit(self, job: Job) -> Audit:
        grid = self._grid(job.config, optim.kinds_of(job.optimizer))
        return audit_of(job, grid, Live.of(job), reach(roots(job)))

    def _position(self, config: ParallelConfig, consumed_samples: int) -> DataPosition:
        size = microbatches.size_at(consumed_samples, config.dp, self._global_batch_size)
        return DataPosition(
            consumed_samples, size, self._micro_batch_size, size // (self._micro_batch_size * config.dp)
        )

    @cached_property
    def _step(self) -> Step:
        """What a step works through; the same in every configuration."""
        return step_of(self._meta, self._global_batch_size, self._micro_batch_size)

    def _vocab_rows(self, prev: ParallelConfig, curr: ParallelConfig) -> int | None:
        """Rows of the vocabulary that both layouts have; None where padding plays no part."""
        sizes = [
            {rows for stage in self._meta.stages(config) for rows in _padded_vocabulary(stage, config.tp)}
            for config in (ParallelConfig(), prev, curr)
        ]
        rows = min(chain(*sizes[1:]), default=None)
        if rows is None or len(set().union(*sizes)) == 1:
            return None
        if self._vocab_size is None:
            raise Mismatch(
                f"the vocabulary has {sorted(sizes[1])} rows as {prev}, {sorted(sizes[2])} as {curr} and "
                f"{sorted(sizes[0])} with TP 1; nothing was moved. What to do: tell the adapter which rows are data "
                "(vocab_size), so that padding can change and data cannot be cut"
            )
        if rows < self._vocab_size:
            raise Mismatch(
                f"a vocabulary of {self._vocab_size} rows does not fit the {rows} rows that build_model gives as "
                f"{prev} or {curr}; nothing was moved. What to do: pad it to at least {self._vocab_size} rows"
            )
        return rows


def _padded_vocabulary(stage: Stage, tp_size: int) -> set[int]:
    """Rows of the padded vocabulary, as the embedding and output layer of a stage have it; often one number."""
    return {
        local.named.tensor.shape[0] * (tp_size if getattr(local.named.tensor, "tensor_model_parallel", False) else 1)
        for local in stage.locals
        if local.named.name in VOCABULARY
    }


def _refuse_no_count(name: str, number: object, what: str) -> None:
    """Refuse what is no number of things, before it divides something or is divided."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise Infeasible(
            f"{name} is {reprlib.repr(number)}, expected the number of {what}; what to do: give a whole number of 1 or "
            "more"
        )


def _marked(job: Job, iteration: int) -> mark.Mark:
    found = job.marks.get(iteration)
    if isinstance(found, Exception):
        raise found
    if found is None:
        raise Mismatch(
            f"rank {job.layout.rank} cannot go back to step {iteration}, only to {sorted(job.marks)}; what to do: call "
            "mark (session.commit_step) after every step, on all ranks"
        )
    return found


def _consumed(*args: Any, **kwargs: Any) -> Any:
    raise Mismatch(
        "this object belongs to a job that a change of layout has consumed; what to do: use those of the job that "
        "session.resize returned"
    )
