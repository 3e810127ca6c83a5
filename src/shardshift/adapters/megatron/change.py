"""One change of configuration of a Megatron job: live tensors to shards, and shards back to a live job.

Whatever the live job holds that would not arrive is refused in ``shards``, which every rank calls before anything
moves. ``rebuild`` runs after the commit, so all that could be wrong must have been found by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch

from ...values import Kind, Layout, Mismatch, ParallelConfig, Shard, Tensor, Unaccounted
from ..protocol import Place
from . import microbatches, rng, world
from . import optimizer as optim
from .build import BuildModel, materialise, refuse_unknown
from .companions import Companions, JobRecord
from .job import Job, RankLayout, unwrapped
from .slots import Slot, named_parameters

Assemble = Callable[[Sequence[torch.nn.Module], RankLayout, JobRecord], Job]
"""Makes a job of model chunks with real parameters, at the iteration that the record says."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A configuration, and the slots of each of its (pp, tp) coordinates."""

    config: ParallelConfig
    slots: Mapping[tuple[int, int], Sequence[Slot]]

    def of_rank(self, rank: int) -> Sequence[Slot]:
        """The slots of a virtual rank, in order of the forward."""
        at = self.config.coordinate(rank)
        return self.slots[at.pp, at.tp]


class MegatronChange:
    """One change of configuration of a Megatron job; made by ``Adapter.change``."""

    def __init__(self, prev: Grid, curr: Grid, *, moments: bool, build_model: BuildModel, assemble: Assemble) -> None:
        self._prev, self._curr = prev, curr
        self._build_model, self._assemble = build_model, assemble
        self._kinds = (Kind.PARAM, *optim.MOMENTS) if moments else (Kind.PARAM,)
        self._slots_by_name: dict[int, dict[str, Slot]] = {}
        self.prev: Layout = self._layout(prev)
        self.curr: Layout = self._layout(curr)

    def shards(self, job: Job) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard.

        Raises:
            Mismatch: if they are not what ``build_model`` gives on the meta device.
            Unaccounted: if the job holds state beside them that no rule covers.
        """
        where = f"rank {job.layout.rank} ({job.layout.coordinate})"
        chunks, slots = unwrapped(job.model), self._prev.of_rank(job.layout.rank)
        microbatches.check(job.position)
        refuse_unknown(chunks)
        parameters = {local_name: parameter for _, local_name, parameter in named_parameters(chunks)}
        _compare(parameters, slots, f"{where}: the live model; nothing was moved")
        if strangers := set(optim.trained(job.optimizer)).difference(parameters.values()):
            shapes = sorted(str(tuple(parameter.shape)) for parameter in strangers)
            raise Unaccounted(
                f"{where}: the optimizer trains parameters of shapes {', '.join(shapes)} that are not in the model; "
                "nothing was moved. What to do: make them part of what build_model gives",
                shapes,
            )
        states = optim.moments(job.optimizer)
        found: dict[Shard, torch.Tensor] = {}
        for slot in slots:
            parameter = parameters[slot.local_name]
            state = states.get(parameter, {})
            for kind in self._kinds_of(slot):
                local = parameter.detach() if kind is Kind.PARAM else state.get(kind)
                if local is None:
                    raise Mismatch(f"{slot.name} on {where}: other ranks have {kind}, this has not; nothing was moved")
                if (tuple(local.shape), local.dtype) != (slot.local_shape, slot.dtype):
                    raise Mismatch(
                        f"{kind} of {slot.name} on {where}: shape {tuple(local.shape)} and {local.dtype} live, shape "
                        f"{slot.local_shape} and {slot.dtype} as build_model gives the parameter; nothing was moved"
                    )
                found[_shard(kind, slot)] = slot.view(local)
            if left := sorted(state.keys() & {*optim.MOMENTS} - {*self._kinds_of(slot)}):
                raise Mismatch(
                    f"{slot.name} on {where}: this rank has {', '.join(left)}, the lead of the job has none; nothing "
                    "was moved. What to do: change layout after an optimizer step of all ranks"
                )
        return found

    def allocate(self, rank: int, shard: Shard) -> torch.Tensor:
        """Memory for a shard of a new rank; padding around it is zero."""
        if rank not in self._slots_by_name:
            self._slots_by_name[rank] = {slot.name: slot for slot in self._curr.of_rank(rank)}
        slot = self._slots_by_name[rank][shard.tensor.name]
        return slot.view(slot.empty())

    def accept(self, rank: int, companions: Mapping[str, bytes]) -> Companions:
        """Read the records of all ranks, and hold them against one another."""
        carried = Companions.read(companions)
        for slot in self._curr.of_rank(rank):
            carried.step(slot.name)
            carried.group_settings([slot.name])
        return carried

    def rebuild(self, place: Place, tensors: Mapping[Shard, torch.Tensor], accepted: Companions) -> Job:
        """Enter the new generation's world and build the job there around the tensors."""
        world.enter(place)
        layout, slots = RankLayout(place.config, place.rank), self._curr.of_rank(place.rank)
        with world.undisturbed_rng():
            megatron_random.model_parallel_cuda_manual_seed(0)  # building may want the streams to exist
            with world.on_meta():
                chunks = list(self._build_model(layout))
        refuse_unknown(chunks)
        built = {local_name: parameter for _, local_name, parameter in named_parameters(chunks)}
        _compare(built, slots, f"rank {place.rank} ({layout.coordinate}): the model built in the new world")

        local = {
            (kind, slot.local_name): slot.local(tensors[_shard(kind, slot)])
            for slot in slots
            for kind in self._kinds_of(slot)
        }
        materialise(chunks, {name: tensor for (kind, name), tensor in local.items() if kind is Kind.PARAM})
        job = self._assemble(chunks, layout, accepted.job.next_generation())
        names = {parameter: (name, local_name) for name, local_name, parameter in named_parameters(chunks)}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, (name, local_name) in names.items():
            moments = {kind.value: local[kind, local_name] for kind in optim.MOMENTS if (kind, local_name) in local}
            if moments:
                step = accepted.step(name)
                states[parameter] = moments if step is None else {"step": step, **moments}
        optim.restore(job.optimizer, states)
        if job.scheduler is not None and accepted.job.scheduler is not None:
            optim.restore_scheduler(job.scheduler, accepted.job.scheduler)
        for group in optim.groups(job.optimizer):  # after the scheduler, which sets lr and weight decay
            group.update(accepted.group_settings(names[parameter][0] for parameter in group["params"]) or {})
        microbatches.follow(job.position, layout)
        rng.restore(accepted.streams, layout.coordinate)
        return job

    def _kinds_of(self, slot: Slot) -> Sequence[Kind]:
        return self._kinds if slot.trainable else (Kind.PARAM,)

    def _layout(self, grid: Grid) -> Layout:
        index = {at: number for number, at in enumerate(grid.slots)}
        roles = tuple(
            tuple(_shard(kind, slot) for kind in self._kinds for slot in slots if kind in self._kinds_of(slot))
            for slots in grid.slots.values()
        )
        ranks = (grid.config.coordinate(rank) for rank in range(grid.config.world_size))
        return Layout(roles, tuple(index[at.pp, at.tp] for at in ranks))


def _compare(parameters: Mapping[tuple[int, str], torch.nn.Parameter], slots: Sequence[Slot], what: str) -> None:
    """Refuse parameters that are not what ``build_model`` gives on the meta device."""
    expected = {slot.local_name: slot for slot in slots}
    differing = sorted(name for _, name in parameters.keys() ^ expected.keys())
    for local_name in parameters.keys() & expected.keys():
        parameter, slot = parameters[local_name], expected[local_name]
        of_live = (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        of_meta = (slot.local_shape, slot.dtype, slot.trainable)
        if of_live != of_meta:
            differing.append(f"{slot.name} (shape, dtype, requires_grad: {of_live}, not {of_meta})")
    if differing:
        raise Mismatch(
            f"{what} is not the one that build_model gives on the meta device: {', '.join(differing)}. What to do: let "
            "build_model build what is trained, from its layout's pp and tp alone, and freeze parameters in it"
        )


def _shard(kind: Kind, slot: Slot) -> Shard:
    dtype = str(slot.dtype).removeprefix("torch.")
    return Shard(Tensor(kind, slot.name, slot.global_shape, dtype, slot.dtype.itemsize), slot.region)
