"""One change of configuration of a Megatron job: live tensors to shards, and shards back to a live job.

Whatever the live job holds that would not arrive is refused in ``shards``, which every rank calls before anything
moves. ``rebuild`` runs after the commit, so all that could be wrong must have been found by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch

from ...values import Kind, Layout, Mismatch, Region, Shard, Unaccounted
from ..account import Audit
from ..protocol import Place
from ..reach import Reached, reach
from . import carry, extras, microbatches, scaler, world
from . import optimizer as optim
from .ahead import Ahead, Standing
from .audit import audit, roots
from .build import materialise, set_buffers, set_parameters
from .features import features, refuse
from .grid import Grid
from .job import Job, RankLayout, unwrapped
from .meta import BuildModel
from .names import VOCABULARY, Where, named_modules, named_tensors, reduced_by_experts
from .optimizer import Holding
from .quiesce import unheard
from .records import Companions, JobRecord
from .slots import Slot

Assemble = Callable[[Sequence[torch.nn.Module], RankLayout, JobRecord], Job]
"""Makes a job of model chunks with real parameters, at the iteration that the record says."""


@dataclass(frozen=True, slots=True)
class Live:
    """The tensors of a live job by their place in it.

    Attributes:
        tensors: parameters and buffers.
        names: their logical names.
        holdings: per parameter what the optimizer keeps of it.
    """

    tensors: Mapping[Where, torch.Tensor]
    names: Mapping[Where, str]
    holdings: Mapping[Where, Holding]

    @classmethod
    def of(cls, job: Job) -> Live:
        """What a job holds now.

        Raises:
            Unaccounted: if its optimizer is not known, or trains what is not in the model.
        """
        named = list(named_tensors(unwrapped(job.model), job.layout.expert_coordinate.ep))
        kept = optim.holdings(job.optimizer)
        places = {one.tensor: one.where for one in named}
        if strangers := [parameter for parameter in kept if parameter not in places]:
            shapes = sorted(str(tuple(parameter.shape)) for parameter in strangers)
            raise Unaccounted(
                f"rank {job.layout.rank} ({job.layout.coordinate}): the optimizer trains parameters of shapes "
                f"{', '.join(shapes)} that are not in the model; nothing was moved. What to do: make them part of what "
                "build_model gives",
                shapes,
            )
        return cls(
            {one.where: one.tensor for one in named},
            {one.where: one.name for one in named},
            {places[parameter]: holding for parameter, holding in kept.items()},
        )

    def find(self, slot: Slot) -> torch.Tensor | None:
        """The live tensor of a slot; None if there is none."""
        match slot.kind:
            case Kind.PARAM | Kind.BUFFER:
                return self.tensors.get(slot.where)
            case Kind.MASTER:
                return self.holdings[slot.where].master if slot.where in self.holdings else None
            case _:
                found: torch.Tensor | None = (
                    self.holdings[slot.where].state.get(slot.kind) if slot.where in self.holdings else None
                )
                return found

    def own_names(self, layout: RankLayout) -> set[str]:
        """Logical names of parameters whose group and step this rank tells: replicas leave that to the first."""
        at, among = layout.coordinate, layout.expert_coordinate
        return {
            self.names[where]
            for where, holding in self.holdings.items()
            if holding.flat is not None
            or (among.edp == 0 if reduced_by_experts(self.tensors[where]) else (at.dp, at.cp) == (0, 0))
        }

    def names_of_keys(self) -> dict[torch.Tensor, str]:
        """Per tensor that torch's optimizers know the logical name of its parameter."""
        return {holding.key: self.names[where] for where, holding in self.holdings.items()}


class MegatronChange:
    """One change of configuration of a Megatron job; made by ``Adapter.change``."""

    def __init__(
        self,
        prev: Grid,
        curr: Grid,
        *,
        build_model: BuildModel,
        assemble: Assemble,
        batch_sizes: tuple[int, int],
        extra_state: extras.Differing = "error",
        after_move: Callable[[Job], None] | None = None,
        curr_rows: int | None = None,
        say: Callable[[str], None] = unheard,
        standing: Standing | None = None,
    ) -> None:
        self._batch_sizes = batch_sizes
        self._extra_state, self._after_move = extra_state, after_move
        self._curr_rows, self._say = curr_rows, say
        self._standing = standing or Standing()
        self._ahead: Ahead | None = None
        self._prev, self._curr = prev, curr
        self._build_model, self._assemble = build_model, assemble
        self._slot_of: dict[int, dict[Shard, Slot]] = {}
        self._declaring = _declaring(prev), _declaring(curr)  # here, and not in the pause
        self.prev: Layout = prev.layout
        self.curr: Layout = curr.layout

    def check(self, rank: int) -> None:
        """Refuse a model that differs between ranks of a stage: the layout knows that of the first alone.

        Raises:
            Mismatch: naming the parameters.
        """
        config, layout = self._curr.config, RankLayout(self._curr.config, rank)
        if rank == config.rank(pp=layout.coordinate.pp, tp=0):
            return
        with world.virtual_rank(config, rank), world.on_meta():
            chunks = unwrapped(self._build_model(layout))
        built = {one.where: tuple(one.tensor.shape) for one in named_tensors(chunks) if one.is_parameter}
        declared = {slot.where: slot.shape for slot in self._curr.of_rank(rank) if slot.kind is Kind.PARAM}
        if differing := sorted({at[1] for at in built.keys() | declared.keys() if built.get(at) != declared.get(at)}):
            raise Mismatch(
                f"rank {rank} ({layout.coordinate}) of {config}: build_model gives {', '.join(differing)} otherwise "
                "than on the first rank of its stage; nothing was moved. What to do: build one model on all of them"
            )

    def shards(self, job: Job) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard.

        Raises:
            Mismatch: if they are not what ``build_model`` and ``wrap`` give on the meta device.
            Unaccounted: if the job holds state beside them that no rule covers.
        """
        where = f"rank {job.layout.rank} ({job.layout.coordinate})"
        microbatches.check(job.position, self._curr.config.dp, self._prev.config.dp)
        extras.refuse_one_sided(extras.capture(carry.keeping(job)), *self._declaring)
        carry.refuse_scheduler_lost(job, all(stage.schedules for stage in self._curr.stages))
        live, slots = Live.of(job), self._prev.of_rank(job.layout.rank)
        expected = _expected(self._prev, job.layout)
        _compare(live.tensors, slots, expected, f"nothing was moved: the live model of {where}")
        if left := sorted({*optim.kinds_of(job.optimizer)} - {*self._prev.kinds}):
            raise Mismatch(
                f"{where}: the optimizer has {', '.join(left)} here, the lead of the job has none; nothing was moved. "
                "What to do: change layout after an optimizer step of all ranks"
            )
        found: dict[Shard, torch.Tensor] = {}
        for slot in slots:
            local = live.find(slot)
            if local is None:
                raise Mismatch(
                    f"{slot.name} on {where}: other ranks have {slot.kind}, this has not; nothing was moved. What to "
                    "do: change layout after an optimizer step of all ranks, and use one kind of optimizer for all "
                    "parameters"
                )
            if not local.is_contiguous():
                raise Mismatch(
                    f"{slot.kind} of {slot.name} on {where} is not contiguous (strides {local.stride()}); nothing was "
                    "moved. What to do: make it contiguous where it is made"
                )
            holding = live.holdings.get(slot.where)
            flat = None if holding is None or slot.kind in (Kind.PARAM, Kind.BUFFER) else holding.flat
            if (tuple(local.shape), local.dtype, flat) != (slot.shape, slot.dtype, slot.flat):
                raise Mismatch(
                    f"{slot.kind} of {slot.name} on {where}: shape {tuple(local.shape)}, {local.dtype} and range {flat}"
                    f" live; shape {slot.shape}, {slot.dtype} and range {slot.flat} as build_model and wrap give it on "
                    "the meta device; nothing was moved. What to do: let wrap make the same buckets and dtypes each "
                    "time (make its DistributedDataParallelConfig anew: Megatron writes into it)"
                )
            found |= slot.views(local)
        reached = reach(roots(job))
        refuse(features(reached))
        audit_of(job, self._prev, live, reached).check()
        job.reached = reached
        return found

    def of_kept(self, kept: Mapping[Shard, torch.Tensor]) -> dict[Shard, torch.Tensor]:
        """Shards of ``prev`` as views of tensors that were kept by shard of the old layout alone (``Adapter.shards``).

        They differ in rows of the padded vocabulary that only the old layout has, of weights and optimizer state.
        """
        logical = {(tensor.kind, tensor.name): tensor for tensor in self.prev.tensors}
        found: dict[Shard, torch.Tensor] = {}
        for shard, data in kept.items():
            tensor = logical.get((shard.tensor.kind, shard.tensor.name))
            if tensor is None or tensor.shape == shard.tensor.shape:
                found[shard] = data
                continue
            inside = shard.region.intersect(Region.whole(tensor.shape))
            if inside is not None and inside.numel:
                for dim, (start, origin, size) in enumerate(
                    zip(inside.offsets, shard.region.offsets, inside.shape, strict=True)
                ):
                    data = data.narrow(dim, start - origin, size)
                found[Shard(tensor, inside)] = data
        return found

    def moved(
        self, rank: int, tensors: Mapping[Shard, torch.Tensor], accepted: Companions
    ) -> tuple[dict[Shard, torch.Tensor], dict[str, bytes]]:
        """What a rank of ``curr`` has once all have committed, whether or not its job gets built: for a second loss.

        Args:
            rank: the virtual rank.
            tensors: as for ``rebuild``, which has not been called yet.
            accepted: what ``accept`` gave.

        Returns:
            Tensors by shard of the new layout alone, as ``Adapter.shards`` will give them, and records as
            ``Adapter.alone`` will.
        """
        found, curr = dict(tensors), self._curr
        if curr.vocab_rows != self._curr_rows:
            own = replace(curr, vocab_rows=self._curr_rows, _made={})
            for slot, wider in zip(curr.of_rank(rank), own.of_rank(rank), strict=True):
                if slot.name in VOCABULARY:
                    local = slot.join(tensors)
                    for piece in slot.pieces:
                        del found[piece.shard]
                    found |= wider.views(local)
        return found, accepted.as_given_by(curr.config, rank)

    def allocate(self, rank: int, shard: Shard) -> torch.Tensor:
        """Memory for a shard of a new rank; padding around it is zero."""
        if rank not in self._slot_of:
            self._slot_of[rank] = {piece.shard: slot for slot in self._curr.of_rank(rank) for piece in slot.pieces}
        return self._slot_of[rank][shard].allocate(shard)

    def accept(self, rank: int, companions: Mapping[str, bytes]) -> Companions:
        """Read the records of all ranks, or of the survivors of a loss, and hold them against one another."""
        carried = Companions.read(companions, self._prev.config, self._extra_state)
        carried.check(self._curr.config, self._curr.groups_of(rank))
        self._check_batch(carried.job)
        if lost := carried.streams.lost:
            self._say(
                f"random streams that were lost with their ranks begin anew, from derived seeds: {', '.join(lost[:8])}"
                + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
            )
        scaler.check(carried.scalers, {kind for stage in self._curr.stages for kind in stage.scalers})
        return carried

    def _check_batch(self, job: JobRecord) -> None:
        """Refuse a process that was started with other batch sizes than the job's."""
        theirs, ours = (job.global_batch_size, job.micro_batch_size), self._batch_sizes
        if job.microbatches is None and theirs != ours:
            raise Mismatch(
                f"(global batch, micro-batch) are {theirs} in the job, {ours} in the adapter of a process that the new "
                "layout needs; nothing was moved. What to do: start every process with the same arguments"
            )

    def enter_ahead(self, place: Place) -> None:
        """Make the new generation's world, and build the model in it, beside the job that still trains."""
        self._ahead = self._standing.make(place, lambda: self._build_on_meta(RankLayout(place.config, place.rank)))

    def leave_ahead(self) -> None:
        """Give that back: the change is not made."""
        self._standing.close()

    def rebuild(self, place: Place, tensors: dict[Shard, torch.Tensor], accepted: Companions) -> Job:
        """Enter the new generation's world and build the job there around the tensors, which are taken out."""
        ahead = self._standing.take(self._ahead)
        if ahead is not None:
            sockets, chunks = ahead.sockets, ahead.chunks
            ahead.install()
        else:
            sockets, chunks = world.enter(place), None
        with world.given_up(sockets):
            job = self._build(place, tensors, accepted, chunks)
        if ahead is None or ahead.has_grown:
            sockets.note()
        job.sockets = sockets
        return job

    def _build_on_meta(self, layout: RankLayout) -> list[torch.nn.Module]:
        with world.undisturbed_rng():
            megatron_random.model_parallel_cuda_manual_seed(0)  # building may want the streams to exist
            with world.on_meta():
                return list(self._build_model(layout))

    def _build(
        self,
        place: Place,
        tensors: dict[Shard, torch.Tensor],
        accepted: Companions,
        chunks: Sequence[torch.nn.Module] | None,
    ) -> Job:
        layout, slots = RankLayout(place.config, place.rank), self._curr.of_rank(place.rank)
        if chunks is None:
            chunks = self._build_on_meta(layout)
        local: dict[Kind, dict[Where, torch.Tensor]] = {}
        for slot in slots:
            local.setdefault(slot.kind, {})[slot.where] = slot.join(tensors)
        tensors.clear()
        parameters, buffers = local.pop(Kind.PARAM, {}), local.pop(Kind.BUFFER, {})
        materialise(unwrapped(chunks), parameters | buffers)
        # Where dtypes are mixed, wrapping may cast all down and some up again (Float16Module): those are written anew.
        # Nothing holds the others: where Megatron copies parameters into its own buffer, each goes once it is copied.
        narrowest = min((tensor.itemsize for tensor in parameters.values()), default=0)
        wide = {where: tensor for where, tensor in parameters.items() if tensor.itemsize > narrowest}
        del parameters
        microbatches.renew(accepted.job.consumed_samples, layout, accepted.job.microbatches)
        job = self._assemble(chunks, layout, accepted.job.next_generation())
        set_buffers(unwrapped(chunks), buffers)  # wrapping may have cast them
        live = Live.of(job)
        _compare(
            live.tensors,
            slots,
            _expected(self._curr, layout),
            f"the model that rank {place.rank} ({layout.coordinate}) has built in the new world",
        )
        set_parameters(live.tensors, wide)
        self._restore(live, local, accepted)
        carry.restore(job, accepted, live.names_of_keys(), self._after_move)
        return job

    def _restore(self, live: Live, local: Mapping[Kind, Mapping[Where, torch.Tensor]], accepted: Companions) -> None:
        """Put optimizer state in place."""
        masters = local.get(Kind.MASTER, {})
        for where, holding in live.holdings.items():
            kinds = [kind for kind in optim.STATE if where in local.get(kind, {})]
            state: dict[str, Any] = {kind.value: local[kind][where] for kind in kinds}
            step = accepted.groups.step(live.names[where])
            if state and step is not None:
                state = {"step": step, **state}
            optim.restore(holding, masters.get(where), state)


def audit_of(job: Job, grid: Grid, live: Live, reached: Reached) -> Audit:
    """Hold what a job reaches against what a grid carries of it, and against what is built on the meta device."""
    carried: dict[str, torch.Tensor] = {}
    for slot in grid.of_rank(job.layout.rank):
        tensor = live.find(slot)
        if tensor is not None:
            carried[f"{slot.kind} {slot.name}"] = tensor
    return audit(job, carried, grid.stages[job.layout.coordinate.pp].derived, reached)


def _declaring(grid: Grid) -> frozenset[str]:
    """Modules of a layout that may have extra state, whatever rank they are on."""
    return frozenset(
        name
        for stage in grid.stages
        for ep in range(grid.config.ep)
        for name in extras.declaring(named_modules(stage.chunks, ep))
    )


def _expected(grid: Grid, layout: RankLayout) -> dict[Where, bool]:
    """Per parameter or buffer of a rank whether it requires gradients, as it was built on the meta device."""
    return {local.named.where: local.named.tensor.requires_grad for local in grid.stages[layout.coordinate.pp].locals}


def _compare(
    live: Mapping[Where, torch.Tensor], slots: Sequence[Slot], expected: Mapping[Where, bool], what: str
) -> None:
    """Refuse parameters and buffers that are not what was built on the meta device."""
    declared = {slot.where: slot for slot in slots if slot.kind in (Kind.PARAM, Kind.BUFFER)}
    # A buffer that was built with data is derived, unless it is persistent: then it is declared.
    strange = {
        where for where, tensor in live.items() if where not in declared and isinstance(tensor, torch.nn.Parameter)
    }
    differing = sorted(name for _, name in (declared.keys() - live.keys()) | strange)
    for where in live.keys() & declared.keys():
        tensor, slot = live[where], declared[where]
        of_live = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        of_meta = (slot.shape, slot.dtype, expected[where])
        if of_live != of_meta:
            differing.append(f"{slot.name} (shape, dtype, requires_grad: {of_live}, not {of_meta})")
    if differing:
        raise Mismatch(
            f"{what} is not the one that build_model and wrap give on the meta device: {', '.join(differing)}. What to "
            "do: let them build what is trained, from the layout alone, and freeze parameters in build_model"
        )
