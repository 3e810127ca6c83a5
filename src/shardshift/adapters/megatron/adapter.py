"""The Megatron-core adapter: a live job to a layout, and tensors in a new layout back to a live job."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch

from ...values import Infeasible, Kind, Mismatch, ParallelConfig
from ..protocol import Place
from ..reach import reach
from . import carry, microbatches, world
from . import optimizer as optim
from .audit import Audit, roots
from .build import release
from .change import Live, MegatronChange, audit_of
from .divide import refuse_indivisible
from .extras import Differing
from .grid import Grid
from .job import DataPosition, Job, Parts, RankLayout, unwrapped
from .meta import BuildModel, MetaJobs, Stage, Wrap, checked, keep_router_bias
from .microbatches import BatchSizes
from .names import VOCABULARY
from .quiesce import close_data, gradient_versions, quiesce, unheard
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

    def start(self, place: Place, consumed_samples: int = 0) -> Job:
        """Enter the first generation's world and build the job for real, with the model's own initial weights.

        Args:
            place: where.
            consumed_samples: where the data begins, for a job that goes on from elsewhere.
        """
        world.enter(place)
        layout = RankLayout(place.config, place.rank)
        seed = self._seed + 100 * layout.coordinate.pp
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        megatron_random.model_parallel_cuda_manual_seed(seed)
        chunks = list(self._build_model(layout))
        self._meta.refuse_shared(chunks)
        return self._assemble(chunks, layout, JobRecord(0, consumed_samples, 0, None, {}))

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

    def advance(self, job: Job) -> None:
        """Count one finished optimizer step and the samples that it used."""
        job.iteration += 1
        job.position = self._position(job.config, job.position.consumed_samples + job.position.global_batch_size)
        microbatches.advance(job.position)
        job.stepped_at = gradient_versions(job)

    def retire(self, job: Job) -> None:
        """Leave the job's world; its model and optimizer raise on use from now on and hold no state."""
        parts = job.consume()
        close_data(parts.data)
        optimizers = [part for part in optim.parts(parts.optimizer) if part is not None]
        release(parts.model, optimizers)
        for old in (*parts.model, *unwrapped(parts.model), *optimizers, parts.scheduler):
            for name in _USES:
                if hasattr(old, name):
                    setattr(old, name, _consumed)
        if self._leaving is not None:
            self._leaving.wait()  # as a rule it is over long since
        self._leaving = world.leave()

    def _assemble(self, chunks: Sequence[torch.nn.Module], layout: RankLayout, record: JobRecord) -> Job:
        model, optimizer, scheduler = checked(self._wrap(chunks, layout))
        keep_router_bias(unwrapped(model))
        position = self._position(layout.config, record.consumed_samples)
        data = None if self._data is None else self._data(layout, position)
        parts = Parts(list(model), optimizer, scheduler, data)
        job = Job(parts, layout, record.iteration, position, record.generation, self._audit)
        job.stepped_at = gradient_versions(job)
        return job

    def _audit(self, job: Job) -> Audit:
        wholes, kinds = self._meta.wholes(), optim.kinds_of(job.optimizer)
        grid = Grid(job.config, self._meta.stages(job.config), wholes, kinds, None)
        return audit_of(job, grid, Live.of(job), reach(roots(job)))

    def _position(self, config: ParallelConfig, consumed_samples: int) -> DataPosition:
        size = microbatches.size_at(consumed_samples, config.dp, self._global_batch_size)
        return DataPosition(
            consumed_samples, size, self._micro_batch_size, size // (self._micro_batch_size * config.dp)
        )

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


def _consumed(*args: Any, **kwargs: Any) -> Any:
    raise Mismatch(
        "this object belongs to a job that a change of layout has consumed; what to do: use those of the job that "
        "session.resize returned"
    )
