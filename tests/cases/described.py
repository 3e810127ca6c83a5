"""State of described models whose elements say who they are, and moves that are looked at element by element.

Two oracles stand beside the layouts. ``Oracle`` of the model descriptions lays every rank out by itself, as Megatron
does; here it says what each device must hold, whatever the layouts say. And every array that arrives is compared with
the numbers of its region.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.cases.moves import Held
from tests.unit.strategies import inside
from tests.unit.test_models_describe import Job, Oracle

from shardshift.models import Catalogue, Model
from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.simulator import execute
from shardshift.values import Kind, Layout, ParallelConfig, PlacedLayout, Shard, Tensor, Topology

Numbers = NDArray[np.int64]

KINDS = (Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Side:
    """One side of a change: configuration, whether the optimizer is distributed, and layers per virtual stage."""

    config: str
    zero1: bool = False
    split: tuple[int, ...] | None = None

    @property
    def parsed(self) -> ParallelConfig:
        return ParallelConfig.parse(self.config)

    def of(self, catalogue: Catalogue) -> Layout:
        return catalogue.layout(self.parsed, zero1=self.zero1, split=self.split)

    def job(self, model: Model) -> Job:
        return Job(model, self.parsed, self.zero1, self.split, moments=True)


@dataclass(frozen=True)
class Case:
    """A change of a model from one side to the other.

    Attributes:
        model: the model.
        prev: before.
        curr: after.
        prev_devices: per old rank its device; None: as many as there are ranks.
        devices: those that may run a new rank; None: as many as are needed.
        topology: nodes, if any.
    """

    model: Model
    prev: Side
    curr: Side
    prev_devices: Sequence[int] | None = None
    devices: Sequence[int] | None = None
    topology: Topology | None = None

    def placed(self, catalogue: Catalogue) -> PlacedLayout:
        layout = self.prev.of(catalogue)
        return PlacedLayout(layout, tuple(self.prev_devices or range(layout.world_size)))

    def plan(self, catalogue: Catalogue, lost: Collection[int] = ()) -> Plan:
        """The plan; fresh devices with numbers of their own stand in for lost ones."""
        prev, curr = self.placed(catalogue), self.curr.of(catalogue)
        devices = list(self.devices or range(max(prev.layout.world_size, curr.world_size)))
        first = max(*prev.devices, *devices) + 1
        devices += range(first, first + len(lost))
        return make_plan(
            prev,
            curr,
            devices=[device for device in devices if device not in lost],
            topology=self.topology,
            lost=lost,
            group_size=self.curr.parsed.tp if self.topology else 1,
        )


def numbered(tensors: Sequence[Tensor]) -> dict[Tensor, Numbers]:
    """Every element of the whole state has a number of its own."""
    ends = np.cumsum([math.prod(tensor.shape) for tensor in tensors]).tolist()
    return {
        tensor: np.arange(end - math.prod(tensor.shape), end).reshape(tensor.shape)
        for tensor, end in zip(tensors, ends, strict=True)
    }


def live(tensors: Sequence[Tensor]) -> dict[Tensor, torch.Tensor]:
    """The same as real parameters and moments: the number is the bits of the element (of bf16, its lowest 16)."""
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return {
        tensor: torch.from_numpy(numbers).to(bits[dtype]).view(dtype)
        for tensor, numbers in numbered(tensors).items()
        for dtype in [getattr(torch, tensor.dtype)]
    }


def moved(plan: Plan, staging_bytes: int, lost: Collection[int] = ()) -> dict[int, dict[Shard, Any]]:
    """What each device holds after the plan, in numbers."""
    numbers = numbered(plan.curr.layout.tensors)
    state = {
        device: {shard: numbers[shard.tensor][inside(shard.region)].copy() for shard in plan.prev.shards_on(device)}
        for device in plan.prev.devices
        if device not in lost
    }
    return execute(compile_programs(plan, staging_bytes), state)


def check_arrived(case: Case, plan: Plan, held: Mapping[int, Mapping[Shard, Any]]) -> None:
    """Every device holds what Megatron would have given its rank, each element in its place, and no more."""
    numbers, oracle = numbered(plan.curr.layout.tensors), Oracle(case.curr.job(case.model))
    total = sum(array.size for array in oracle.numbers.values())
    for rank, device in enumerate(plan.curr.devices):
        for shard, array in held[device].items():
            np.testing.assert_array_equal(array, numbers[shard.tensor][inside(shard.region)], str(shard))
        for index, kind in enumerate(KINDS):
            found = [array.ravel() for shard, array in held[device].items() if shard.tensor.kind is kind]
            expected = oracle.owned(rank) if case.curr.zero1 and index else oracle.params(rank)
            np.testing.assert_array_equal(np.sort(np.concatenate([*found, expected[:0]])), index * total + expected)


def local(held: Held, device: int, name: str, kind: Kind = Kind.PARAM) -> torch.Tensor:
    """The one shard of a tensor on a device."""
    (found,) = [
        value for shard, value in held[device].items() if (shard.tensor.kind, shard.tensor.name) == (kind, name)
    ]
    return found


def holders(layout: Layout, name: str, kind: Kind = Kind.PARAM) -> list[int]:
    """The ranks that hold something of a tensor."""
    return [
        rank
        for rank in range(layout.world_size)
        if any((shard.tensor.kind, shard.tensor.name) == (kind, name) for shard in layout.shards(rank))
    ]
