"""One GPT in two layouts over the same processes: the weights of one are known, the other is to be filled.

1. All ranks are one default group. ``parallel_state`` is initialised for the old layout and the model is built, then
   again for the new one: each model keeps the ``ProcessGroupCollection`` of its own layout, which is all that
   megatron-core's resharding asks of it (``resharding/refit.py``).
2. Each logical tensor is drawn whole from a seed of its own and cut by Megatron's attributes (``demo/held.py``), once
   for what the old model holds, once for what the new one must hold. So neither side's word is taken for what is right.
3. *The peer*: ``build_centralized_reshard_plan``, then ``execute_reshard_plan`` with its ``GlooCopyService``: what
   ``swap_model_weights`` does, with the plan's time apart. *Ours*: layouts from the adapter's ``Grid``, ``make_plan``,
   and the engine on the live tensors of the old model.

Our side writes into memory of its own and is compared with the new model that the peer has filled.
"""

from __future__ import annotations

from shardshift.adapters.megatron import RankLayout, world

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _processes import TIMEOUT_S, Rank
from engine import Engine
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from shardshift.adapters.megatron.grid import Grid
from shardshift.adapters.megatron.meta import MetaJobs, Wrap
from shardshift.adapters.megatron.names import named_tensors
from shardshift.demo import held
from shardshift.demo.model import ModelShape, Recipe, build_model, wrap
from shardshift.demo.oracle import same_bits
from shardshift.plan import Plan, make_plan
from shardshift.plan.summary import STAGING_BYTES
from shardshift.schedule import compile_program
from shardshift.transport import Transport
from shardshift.values import Kind, ParallelConfig, PlacedLayout, Shard

Chunks = Sequence[torch.nn.Module]
Build = Callable[[RankLayout], Chunks]


@dataclass(frozen=True, slots=True)
class Change:
    """A model and two layouts of it.

    Attributes:
        prev: the old configuration, of as many ranks as ``curr`` has: megatron-core lays out all ranks or none.
        curr: the new one.
        shape: the model.
        build: builds it, if not the demo's way.
    """

    prev: str
    curr: str
    shape: ModelShape
    build: Build | None = None

    @property
    def configs(self) -> tuple[ParallelConfig, ParallelConfig]:
        """Both configurations."""
        return ParallelConfig.parse(self.prev), ParallelConfig.parse(self.curr)

    def chunks(self, layout: RankLayout) -> Chunks:
        """The model of one rank."""
        return build_model(self.shape, layout) if self.build is None else self.build(layout)


def enter(rank: Rank) -> None:
    """Make all ranks torch's default group, over gloo."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.index, world_size=rank.count, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Models:
    """Both models on one rank, and where their tensors lie.

    Attributes:
        index: the rank.
        grids: what each rank of each layout holds, by our rules.
        source: the old model, filled.
        target: the new model, full of NaN.
        expected: per parameter of the new model (chunk, name) what it must be.
    """

    index: int
    grids: tuple[Grid, Grid]
    source: Chunks
    target: Chunks
    expected: dict[tuple[int, str], torch.Tensor]

    @classmethod
    def of(cls, change: Change, index: int) -> Models:
        """Build both on rank ``index`` of the world that ``enter`` entered. Collective over the ranks."""
        grids = grids_of(change)  # by imagining all ranks, before megatron-core's state is real
        prev, curr = change.configs
        source = _built(change, prev, index)
        for one in held.named(source):
            one.parameter.data.copy_(known(one, change.shape))
        target = _built(change, curr, index)
        expected = {
            (number, one.local_name): known(one, change.shape)
            for number, chunk in enumerate(target)
            for one in held.named([chunk])
        }
        models = cls(index, grids, source, target, expected)
        models.clear()
        return models

    def clear(self) -> None:
        """Fill the new model with NaN."""
        for chunk in self.target:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))

    def fill(self) -> None:
        """Fill the new model with what it must be: where the peer cannot."""
        for index, chunk in enumerate(self.target):
            for name, parameter in chunk.named_parameters():
                parameter.data.copy_(self.expected[index, name])

    def wrong(self) -> list[str]:
        """Parameters of the new model that are not what they must be."""
        return [
            name
            for index, chunk in enumerate(self.target)
            for name, parameter in chunk.named_parameters()
            if not same_bits(parameter.detach(), self.expected[index, name])
        ]

    def views(self, which: int) -> dict[Shard, torch.Tensor]:
        """The old (0) or new (1) model's tensors by shard."""
        grid, chunks = self.grids[which], (self.source, self.target)[which]
        live = {one.where: one.tensor for one in named_tensors(chunks, grid.config.expert_coordinate(self.index).ep)}
        slots = [slot for slot in grid.of_rank(self.index) if slot.kind in (Kind.PARAM, Kind.BUFFER)]
        return {shard: view for slot in slots for shard, view in slot.views(live[slot.where]).items()}

    def differing(self, found: Mapping[Shard, torch.Tensor]) -> list[str]:
        """Shards of the new layout in which what our engine gave is not what the new model holds."""
        return [str(shard) for shard, view in self.views(1).items() if not same_bits(found[shard], view)]

    def plan(self, *, same_ranks: bool) -> Plan:
        """Our plan.

        Args:
            same_ranks: whether device r runs rank r of the new layout too, as with the peer; else the plan decides.
        """
        prev, curr = (grid.layout for grid in self.grids)
        devices = tuple(range(prev.world_size))
        return make_plan(PlacedLayout(prev, devices), curr, devices=devices, placement=devices if same_ranks else None)

    def engine(self, plan: Plan) -> Engine:
        """Our side of a plan: sources are the old model's tensors, targets are memory that has been written to."""
        program = compile_program(plan, self.index, STAGING_BYTES)
        targets = {shard: torch.ones(shard.region.shape) for shard in program.allocate}
        return Engine(plan, program, self.views(0), targets)

    def peer_plan(self) -> Any:
        """The peer's plan. Collective over the ranks; what is refused is refused on rank 0, while the others wait."""
        source, target = self.source[0], self.target[0]  # as reshard_model_weights does: the first chunk alone
        config: Any = source.config
        return build_centralized_reshard_plan(source, target, num_experts=config.num_moe_experts)

    def peer_bytes(self, plan: Any) -> int:
        """What this rank receives from others by the peer's plan."""
        parameters = dict(self.target[0].named_parameters())
        return sum(
            parameters[op.param_name].data[op.my_slice].nbytes for op in plan.recv_ops if op.peer_rank != self.index
        )

    def peer_move(self, plan: Any, service: Any) -> None:
        """Fill the new model from the old one by the peer's plan. Collective over the ranks."""
        execute_reshard_plan(plan, self.source[0], self.target[0], service)


def hold(models: Models, engine: Engine, transport: Transport) -> None:
    """Move by our engine, and hold what it gives to the new model.

    Raises:
        AssertionError: naming shards in which they differ.
    """
    for target in engine.targets.values():
        target.fill_(float("nan"))
    found = engine.prepared(transport, engine.targets.__getitem__).run()
    if differing := models.differing(found):
        raise AssertionError(f"rank {models.index}: ours is not what the new model holds: {differing}")


def peer_service() -> Any:
    """The peer's transport, a gloo group of its own. Collective over the ranks."""
    return GlooCopyService()


def grids_of(change: Change) -> tuple[Grid, Grid]:
    """Our rules' view of both layouts: weights and buffers alone."""
    recipe = Recipe(change.shape)
    wrapped: Wrap = lambda chunks, layout: wrap(recipe, chunks)  # noqa: E731
    meta = MetaJobs(change.chunks, wrapped)
    rows = {change.shape.padded_vocab(config.tp) for config in (ParallelConfig(), *change.configs)}
    common = min(change.shape.padded_vocab(config.tp) for config in change.configs) if len(rows) > 1 else None
    prev, curr = (Grid(config, meta.stages(config), meta.wholes(), (), common) for config in change.configs)
    return prev, curr


def known(one: held.Named, shape: ModelShape) -> torch.Tensor:
    """The part of a logical tensor that a parameter is, in its dtype; padding of the vocabulary is zero.

    The logical tensor is drawn whole, by its name, so that all ranks of all layouts know the same.
    """
    whole = list(held.whole_shape(one))
    if one.name in (held.EMBEDDING, held.OUTPUT):
        whole[0] = shape.vocab_size
    generator = torch.Generator().manual_seed(zlib.crc32(one.name.encode()))
    return held.slice_of(torch.randn(whole, generator=generator), one.cut, one.parameter.shape).to(one.parameter.dtype)


def _built(change: Change, config: ParallelConfig, rank: int) -> Chunks:
    """The model in a layout, which stays ``parallel_state``'s until the next is built."""
    world.forget()
    world.initialize(config, TIMEOUT_S, gloo=False)
    model_parallel_cuda_manual_seed(1)
    return list(change.chunks(RankLayout(config, rank)))
