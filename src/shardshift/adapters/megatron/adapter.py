"""The Megatron-core adapter: a live job to a layout, and tensors in a new layout back to a live job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch

from ...values import Infeasible, Mismatch, ParallelConfig
from ..protocol import Place
from . import optimizer as optim
from . import rng, world
from .build import BuildModel, MetaModels, refuse_unknown, release
from .change import Grid, MegatronChange
from .companions import JobRecord, RankRecord
from .job import DataPosition, Job, Parts, RankLayout, unwrapped
from .slots import named_parameters, padded_vocabulary

Wrapped = tuple[Sequence[torch.nn.Module], Any, Any]
Wrap = Callable[[Sequence[torch.nn.Module], RankLayout], Wrapped]
MakeData = Callable[[RankLayout, DataPosition], Iterator[Any]]

_USES: Final = ("forward", "zero_grad_buffer", "finish_grad_sync", "step", "zero_grad", "state_dict", "load_state_dict")
"""What of a consumed job's model, optimizer and scheduler raises."""


class Adapter:
    """Carries megatron-core jobs from layout to layout.

    Args:
        build_model: gives the model chunks of one rank, not wrapped. Called on the meta device, except for the
            first start; asks ``parallel_state`` (or the layout) for the stage, as Megatron's own providers do.
        wrap: gives (wrapped chunks, optimizer, scheduler or None) for chunks whose parameters are real.
        data: gives the iterator over micro-batches of one rank, from a position on. None if the loop has its own.
        global_batch_size: samples per optimizer step over all ranks; the same in every layout.
        micro_batch_size: samples per forward on one rank.
        vocab_size: rows of the vocabulary without padding; needed where TP changes how far it is padded.
        seed: seeds weights and random streams at the first start, as Megatron's ``initialize.py`` does.
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
    ) -> None:
        self._build_model = build_model
        self._wrap = wrap
        self._data = data
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._meta = MetaModels(build_model)

    def check(self, config: ParallelConfig) -> None:
        """Refuse a configuration that the model, the batch or this adapter cannot take, and say why."""
        carried = ParallelConfig(config.pp, config.tp, config.dp)
        if config != carried:
            others = str(config).removeprefix(str(carried))
            raise Infeasible(
                f"{config}: the Megatron adapter carries jobs over pp, tp and dp alone, not {others}; what to do: "
                "leave the other axes out"
            )
        per_forward = self._micro_batch_size * config.dp
        if self._global_batch_size % per_forward:
            raise Infeasible(
                f"{config}: the global batch of {self._global_batch_size} is not divisible by micro-batch "
                f"{self._micro_batch_size} x dp {config.dp} = {per_forward}; what to do: choose a dp that divides it"
            )
        model = self._meta.transformer_config
        query_groups = model.num_query_groups or model.num_attention_heads
        for what, size in (("attention heads", model.num_attention_heads), ("query groups", query_groups)):
            if size % config.tp:
                raise Infeasible(
                    f"{config}: {size} {what} are not divisible by tp {config.tp}; what to do: choose a tp that "
                    f"divides {size}"
                )
        if model.ffn_hidden_size % config.tp:
            raise Infeasible(
                f"{config}: mlp.linear_fc1 has parts of the ffn size {model.ffn_hidden_size}, which is not divisible "
                f"by tp {config.tp}; what to do: choose a tp that divides it"
            )
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
        refuse_unknown(chunks)
        return self._assemble(chunks, layout, JobRecord(0, consumed_samples, 0, None))

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, moments: bool) -> MegatronChange:
        """Both layouts of a change."""
        rows = self._vocab_rows(prev, curr)
        return MegatronChange(
            Grid(prev, self._meta.slots(prev, rows)),
            Grid(curr, self._meta.slots(curr, rows)),
            moments=moments,
            build_model=self._build_model,
            assemble=self._assemble,
        )

    def has_moments(self, job: Job) -> bool:
        """Whether the optimizer has made its moments."""
        if any(True for _ in optim.trained(job.optimizer)):
            return bool(optim.moments(job.optimizer))
        return job.iteration > 0  # all that this rank has is frozen, so it cannot see

    def companions(self, job: Job) -> dict[str, bytes]:
        """This rank's records; none from a DP replica that is not the first."""
        at = job.layout.coordinate
        if at.dp:
            return {}
        names: dict[torch.Tensor, str] = {
            parameter: name for name, _, parameter in named_parameters(unwrapped(job.model))
        }
        states = optim.moments(job.optimizer)
        groups = list(optim.groups(job.optimizer))
        steps = {names[p]: state["step"] for p, state in states.items() if "step" in state}
        same = {float(step): step for step in steps.values()}  # one tensor for all that agree: they are stored once
        record = RankRecord(
            coordinate=(at.pp, at.tp),
            steps={name: same[float(step)] for name, step in steps.items()},
            group_of={names[p]: index for index, group in enumerate(groups) for p in group["params"]},
            groups=[optim.settings(group) for group in groups],
            streams=rng.capture(),
        )
        records = [record.to_bytes()]
        if job.layout.rank == 0:
            scheduler = None if job.scheduler is None else job.scheduler.state_dict()
            whole = JobRecord(job.iteration, job.position.consumed_samples, job.generation, scheduler)
            records.append(whole.to_bytes())
        return dict(records)

    def advance(self, job: Job) -> None:
        """Count one finished optimizer step and the samples that it used."""
        job.iteration += 1
        job.position = self._position(job.config, job.position.consumed_samples + self._global_batch_size)

    def retire(self, job: Job) -> None:
        """Leave the job's world; its model and optimizer raise on use from now on and hold no state."""
        parts = job.consume()
        optimizers = [part for part in optim.parts(parts.optimizer) if part is not None]
        for chunk in parts.model:
            release(chunk, optimizers)
        for old in optimizers:
            if isinstance(old, torch.optim.Optimizer):
                old.state.clear()
        for old in (*parts.model, *unwrapped(parts.model), *optimizers, parts.scheduler):
            for name in _USES:
                if hasattr(old, name):
                    setattr(old, name, _consumed)
        world.leave()

    def _assemble(self, chunks: Sequence[torch.nn.Module], layout: RankLayout, record: JobRecord) -> Job:
        wrapped: Any = self._wrap(chunks, layout)
        if not (isinstance(wrapped, tuple) and len(wrapped) == 3 and isinstance(wrapped[0], Sequence)):
            raise Mismatch(
                "wrap must return (list of wrapped chunks, Megatron optimizer, scheduler or None); it returned "
                f"{type(wrapped).__name__}"
            )
        model, optimizer, scheduler = wrapped
        position = self._position(layout.config, record.consumed_samples)
        data = None if self._data is None else self._data(layout, position)
        parts = Parts(list(model), optimizer, scheduler, data)
        return Job(parts, layout, record.iteration, position, record.generation)

    def _position(self, config: ParallelConfig, consumed_samples: int) -> DataPosition:
        microbatches = self._global_batch_size // (self._micro_batch_size * config.dp)
        return DataPosition(consumed_samples, self._global_batch_size, self._micro_batch_size, microbatches)

    def _vocab_rows(self, prev: ParallelConfig, curr: ParallelConfig) -> int | None:
        """Rows of the vocabulary that both layouts have; None where padding plays no part."""
        sizes = [
            {rows for chunks in self._meta.stages(config) for rows in padded_vocabulary(chunks, config.tp)}
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


def _consumed(*args: Any, **kwargs: Any) -> Any:
    raise Mismatch(
        "this object belongs to a job that a change of layout has consumed; what to do: use those of the job that "
        "session.resize returned"
    )
