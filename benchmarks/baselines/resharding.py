"""megatron-core's ``resharding``: the weights of a live model go into a second one of another layout, over gloo.

It is made for a trainer and an inference engine, and moves weights alone: no masters, no moments. What it is given:

1. *A world that both layouts fill.* Every rank is in both models, so the smaller layout has as many DP replicas as make
   up the difference. Where the ranks are no multiple, it cannot do the change (``obstacle``).
2. *Models of Megatron*: the demo's GPT at the benchmark's sizes, in bf16, with an output layer of its own, since a tied
   one is refused (``peer``). They are described on the meta device and get memory that is not initialised but known:
   each logical tensor is drawn from a seed and cut by Megatron's attributes.
3. *Warmth*: the plan is made beforehand, and connections stand.

It runs in processes of its own: Megatron's groups have threads that wake every 10 ms, which others would pay for.
"""

from __future__ import annotations

from shardshift.adapters.megatron import RankLayout, world

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import torch
from _peer import known, peer_service
from _processes import TIMEOUT_S, Rank, Side, Spans, run_ranks
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan

from shardshift.demo import held
from shardshift.demo.model import ModelShape, build_model
from shardshift.demo.oracle import same_bits
from shardshift.values import ParallelConfig

from .common import Meter, enter, gate_of, median_ms

NAME: Final = "megatron-core resharding, weights only"
PHASE: Final = "move"
_DTYPE: Final = torch.bfloat16


def obstacle(configs: Sequence[ParallelConfig]) -> str | None:
    """Why it cannot do a change between two layouts; None if it can."""
    size = max(config.world_size for config in configs)
    odd = [str(config) for config in configs if size % (config.pp * config.tp)]
    return f"{' and '.join(odd)} cannot fill {size} ranks with replicas, which it needs" if odd else None


class Resharding:
    """Both models on one rank, filled.

    Args:
        rank: this process; the default group is all of them.
        configs: the old and the new layout, each of which fills the world.
        shape: of the model.
    """

    def __init__(self, rank: Rank, configs: Sequence[ParallelConfig], shape: ModelShape) -> None:
        self.name, self.moved_bytes = NAME, dict[str, int]()
        self._index, self._shape = rank.index, shape
        prev, curr = configs
        self._source = _built(shape, prev, rank.index)
        for one in held.named([self._source]):  # as long as Megatron's groups are those of this layout
            one.parameter.data.copy_(known(one, shape))
        self._target = _built(shape, curr, rank.index)
        self._plan: Any = build_centralized_reshard_plan(self._source, self._target)
        self._service = peer_service()
        self._received_bytes = sum(
            self._target.get_parameter(op.param_name).data[op.my_slice].nbytes
            for op in self._plan.recv_ops
            if op.peer_rank != rank.index
        )

    def phases(self) -> Mapping[str, Side]:
        """The move alone."""
        return {PHASE: lambda: self._move}

    def clean(self) -> None:
        """Nothing: the second model is kept."""

    def check(self) -> None:
        """Hold the new model to what it must be.

        Raises:
            AssertionError: naming parameters that are wrong.
        """
        named = list(held.named([self._target]))
        wrong = [one.name for one in named if not same_bits(one.parameter.detach(), known(one, self._shape))]
        assert not wrong, f"{NAME}: rank {self._index}: {wrong[:3]} are wrong"

    def _move(self) -> None:
        execute_reshard_plan(self._plan, self._source, self._target, self._service)
        self.moved_bytes[PHASE] = self._received_bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """What a change of the weights took.

    Attributes:
        milliseconds: the median of the runs.
        moved_bytes: between processes, over all ranks.
    """

    milliseconds: float
    moved_bytes: int


def resharded(configs: Sequence[ParallelConfig], shape: ModelShape, runs: int) -> Weights:
    """Move the weights between two layouts to which there is no ``obstacle``, in processes of its own.

    Raises:
        RuntimeError: with what megatron-core says, if it refuses the change, or the result is wrong.
    """
    size = max(config.world_size for config in configs)
    filled = [replace(config, dp=size // (config.pp * config.tp)) for config in configs]
    gate = gate_of(size)
    found = run_ranks(size, partial(_measured, configs=filled, shape=shape, gate=gate, runs=runs))
    name = f"{NAME}: {PHASE}"
    return Weights(median_ms([spans for spans, _ in found], name), sum(nbytes for _, nbytes in found))


def _measured(
    rank: Rank, configs: Sequence[ParallelConfig], shape: ModelShape, gate: Barrier, runs: int
) -> tuple[Spans, int]:
    enter(rank, rank.count)
    baseline = Resharding(rank, configs, shape)
    meter = Meter(gate)
    meter.measure({f"{baseline.name}: {name}": side for name, side in baseline.phases().items()}, runs)
    baseline.check()
    return meter.spans, baseline.moved_bytes[PHASE]


def _built(shape: ModelShape, config: ParallelConfig, rank: int) -> Any:
    """The model of one rank in a layout, with memory; its groups are the layout's."""
    world.forget()
    world.initialize(config, TIMEOUT_S, gloo=False)
    with torch.device("meta"):
        (model,) = build_model(shape, RankLayout(config, rank))
    for module in model.modules():
        for name, described in list(module.named_parameters(recurse=False)):
            real = torch.nn.Parameter(torch.zeros(described.shape, dtype=_DTYPE), requires_grad=False)
            real.__dict__.update(described.__dict__)  # Megatron's attributes, which say how it is cut
            module.register_parameter(name, real)
    return model
