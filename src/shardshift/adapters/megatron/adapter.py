"""The Megatron-core adapter: a live job to a layout, and tensors in a new layout back to a live job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch

from ...values import Infeasible, Kind, Layout, Mismatch, ParallelConfig, Shard, Tensor
from ..protocol import Place
from . import optimizer as optim
from . import rng, world
from .build import BuildModel, MetaModels, materialise, refuse_unknown
from .companions import Companions, JobRecord, RankRecord
from .job import DataPosition, Job, Parts, RankLayout
from .slots import Slot, named_parameters, padded_vocabulary

Wrapped = tuple[Sequence[torch.nn.Module], Any, Any]
Wrap = Callable[[Sequence[torch.nn.Module], RankLayout], Wrapped]
MakeData = Callable[[RankLayout, DataPosition], Iterator[Any]]


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
        """Refuse a configuration that the model or the batch cannot take, and say why."""
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
                f"{config}: the ffn size {model.ffn_hidden_size} is not divisible by tp {config.tp}; what to do: "
                "choose a tp that divides it"
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
        return self._job(chunks, layout, iteration=0, consumed_samples=consumed_samples, generation=0)

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, moments: bool) -> MegatronChange:
        """Both layouts of a change."""
        rows = self._vocab_rows(prev, curr)
        return MegatronChange(self, self._meta.slots(prev, rows), self._meta.slots(curr, rows), prev, curr, moments)

    def has_moments(self, job: Job) -> bool:
        """Whether the optimizer has made its moments."""
        return bool(optim.moments(job.optimizer))

    def companions(self, job: Job) -> dict[str, bytes]:
        """This rank's records; none from a DP replica that is not the first."""
        at = job.layout.coordinate
        if at.dp:
            return {}
        names = {parameter: name for name, _, parameter in named_parameters(unwrapped(job.model))}
        states = optim.moments(job.optimizer)
        groups = list(optim.groups(job.optimizer))
        record = RankRecord(
            coordinate=(at.pp, at.tp),
            steps={names[p]: state["step"] for p, state in states.items() if "step" in state},
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

        def consumed(*args: Any, **kwargs: Any) -> Any:
            raise Mismatch("this object belongs to a job that a change of layout has consumed")

        for chunk in parts.model:
            chunk.forward = consumed  # type: ignore[method-assign]
            for parameter in chunk.parameters():
                parameter.data = parameter.data.new_empty(0)
                parameter.grad = None
                parameter.__dict__.clear()  # main_grad: a view of the gradient buffer
        parts.optimizer.step = consumed
        for base in optim.base_optimizers(parts.optimizer):
            base.state.clear()
        world.leave()

    def _job(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: RankLayout,
        *,
        iteration: int,
        consumed_samples: int,
        generation: int,
    ) -> Job:
        model, optimizer, scheduler = self._wrap(chunks, layout)
        position = self._position(layout.config, consumed_samples)
        data = None if self._data is None else self._data(layout, position)
        return Job(Parts(list(model), optimizer, scheduler, data), layout, iteration, position, generation)

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


class MegatronChange:
    """One change of configuration of a Megatron job; made by ``Adapter.change``."""

    def __init__(
        self,
        adapter: Adapter,
        prev_slots: Mapping[tuple[int, int], Sequence[Slot]],
        curr_slots: Mapping[tuple[int, int], Sequence[Slot]],
        prev: ParallelConfig,
        curr: ParallelConfig,
        moments: bool,
    ) -> None:
        self._adapter = adapter
        self._prev_slots, self._curr_slots = prev_slots, curr_slots
        self._prev_config, self._curr_config = prev, curr
        self._kinds = (Kind.PARAM, *optim.MOMENTS) if moments else (Kind.PARAM,)
        self.prev: Layout = self._layout(prev, prev_slots)
        self.curr: Layout = self._layout(curr, curr_slots)

    def shards(self, job: Job) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard."""
        at = job.layout.coordinate
        parameters = {local_name: parameter for _, local_name, parameter in named_parameters(unwrapped(job.model))}
        states = optim.moments(job.optimizer)
        expected = {slot.local_name: slot for slot in self._prev_slots[at.pp, at.tp]}
        if parameters.keys() != expected.keys():
            differing = sorted(name for _, name in parameters.keys() ^ expected.keys())
            raise Mismatch(
                f"rank {job.layout.rank} ({at}): the live model and the one that build_model gives on the meta device "
                f"differ in {differing}; nothing was moved. What to do: let build_model build what was trained"
            )
        found: dict[Shard, torch.Tensor] = {}
        for local_name, slot in expected.items():
            parameter = parameters[local_name]
            if tuple(parameter.shape) != slot.local_shape:
                raise Mismatch(
                    f"{slot.name} on rank {job.layout.rank} ({at}): shape {tuple(parameter.shape)} live, "
                    f"{slot.local_shape} as build_model gives it; nothing was moved"
                )
            for kind in self._kinds_of(slot):
                local = parameter.detach() if kind is Kind.PARAM else states.get(parameter, {}).get(kind)
                if local is None:
                    raise Mismatch(f"{slot.name} on rank {job.layout.rank} ({at}): other ranks have {kind}, this has not")
                found[_shard(kind, slot)] = slot.view(local)
        return found

    def allocate(self, rank: int, shard: Shard) -> torch.Tensor:
        """Memory for a shard of a new rank, zero, padding around it included."""
        slot = self._slots_of(rank)[shard.tensor.name]
        return slot.view(slot.empty())

    def rebuild(self, place: Place, tensors: Mapping[Shard, torch.Tensor], companions: Mapping[str, bytes]) -> Job:
        """Enter the new generation's world and build the job there around the tensors."""
        carried = Companions.read(companions)
        world.enter(place)
        layout = RankLayout(place.config, place.rank)
        with world.undisturbed_rng():
            megatron_random.model_parallel_cuda_manual_seed(0)  # building may want the streams to exist
            with world.on_meta():
                chunks = list(self._adapter._build_model(layout))
        refuse_unknown(chunks)
        by_name = self._slots_of(place.rank)
        local = {
            (kind, slot.local_name): slot.local(tensors[_shard(kind, slot)])
            for slot in by_name.values()
            for kind in self._kinds_of(slot)
        }
        materialise(chunks, {name: tensor for (kind, name), tensor in local.items() if kind is Kind.PARAM})
        named = list(named_parameters(chunks))
        job = self._adapter._job(
            chunks,
            layout,
            iteration=carried.job.iteration,
            consumed_samples=carried.job.consumed_samples,
            generation=carried.job.generation + 1,
        )
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for name, local_name, parameter in named:
            moments = {kind.value: local[kind, local_name] for kind in optim.MOMENTS if (kind, local_name) in local}
            if moments:
                step = carried.step(name)
                states[parameter] = moments if step is None else {"step": step, **moments}
        optim.restore(job.optimizer, states)
        if job.scheduler is not None and carried.job.scheduler is not None:
            job.scheduler.load_state_dict(carried.job.scheduler)
        names = {parameter: name for name, _, parameter in named}
        for group in optim.groups(job.optimizer):
            group.update(carried.group_settings(names[parameter] for parameter in group["params"]) or {})
        rng.restore(carried.streams, layout.coordinate)
        return job

    def _slots_of(self, rank: int) -> dict[str, Slot]:
        at = self._curr_config.coordinate(rank)
        return {slot.name: slot for slot in self._curr_slots[at.pp, at.tp]}

    def _kinds_of(self, slot: Slot) -> Sequence[Kind]:
        return self._kinds if slot.trainable else (Kind.PARAM,)

    def _layout(self, config: ParallelConfig, by_coordinate: Mapping[tuple[int, int], Sequence[Slot]]) -> Layout:
        index = {at: number for number, at in enumerate(by_coordinate)}
        roles = tuple(
            tuple(_shard(kind, slot) for kind in self._kinds for slot in slots if kind in self._kinds_of(slot))
            for slots in by_coordinate.values()
        )
        ranks = (config.coordinate(rank) for rank in range(config.world_size))
        return Layout(roles, tuple(index[at.pp, at.tp] for at in ranks))


def unwrapped(model: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The model chunks inside their wrappers (DistributedDataParallel, Float16Module)."""
    chunks = []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


def _shard(kind: Kind, slot: Slot) -> Shard:
    dtype = str(slot.dtype).removeprefix("torch.")
    return Shard(Tensor(kind, slot.name, slot.global_shape, dtype, slot.dtype.itemsize), slot.region)
