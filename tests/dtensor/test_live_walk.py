"""Jobs that train, through changes of mesh and wrapping: every element, and the losses after a checkpoint's way.

Oracles: ``full_tensor``, ``DTensor.redistribute``, and ``torch.distributed.checkpoint`` onto the same new mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.dtensor.models import adamw, builder, differing, first, full, losses
from tests.dtensor.ranks import Played, Rank
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardshift as ss

pytestmark = pytest.mark.patient


def change_exactly(rank: Rank, job: ss.fsdp.Job | None, build: Any, to: ss.Mesh, **options: Any) -> Any:
    """A change after which every whole tensor is what it was before."""
    holds = rank.all(job is not None)
    before = rank.of(holds.index(True), full(job) if job is not None else None)
    job = rank.change(job, build, to, **options)
    if job is not None:
        assert job.report is not None
        assert job.report.least_moved_bytes <= job.report.moved_bytes <= job.report.state_bytes * len(to.ranks)
        assert differing(before, full(job)) == [], f"{job.report.prev} -> {to}"
    return job


def reloaded(rank: Rank, job: ss.fsdp.Job | None, build: Any, to: ss.Mesh, name: str) -> ss.fsdp.Job | None:
    """Another job on the new mesh, by way of a checkpoint of torch's own."""
    holders = [index for index, holds in enumerate(rank.all(job is not None)) if holds]
    folder = rank.folder / name
    old, new, mesh = dist.new_group(holders), dist.new_group(sorted(to.ranks)), rank.mesh(to)
    if job is not None:
        model, optimizer = get_state_dict(job.models[0], job.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=old)
    dist.barrier()
    found = first(build, mesh)
    if found is not None:
        model, optimizer = get_state_dict(found.models[0], found.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=new)
        set_state_dict(found.models[0], found.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return found


def every_element_survives_a_walk_through_all_wrappings(rank: Rank) -> None:
    build = builder()
    job = first(build, rank.mesh(ss.Mesh({"ddp": 1}, [0])))
    if job is not None:
        losses(job, 2)
    for index, to in enumerate(
        [
            ss.Mesh({"ddp": 2}, [0, 1]),
            ss.Mesh({"dp": 4}),
            ss.Mesh({"dp": 2, "tp": 2}),
            ss.Mesh({"rep": 2, "dp": 2}),
            ss.Mesh({"tp": 4}),
            ss.Mesh({"dp": 3}, [3, 1, 2]),
            ss.Mesh({"dp": 1}, [0]),
            ss.Mesh({"dp": 2, "tp": 2}, [3, 1, 0, 2]),
            ss.Mesh({"dp": 4}, [3, 2, 1, 0]),
            ss.Mesh({"dp": 4}, [3, 2, 1, 0]),
            ss.Mesh({"tp": 2}, [2, 0]),
            ss.Mesh({"ddp": 2}, [3, 1]),
            ss.Mesh({"plain": 1}, [2]),
        ]
    ):
        job = change_exactly(rank, job, build, to)
        if job is not None:
            assert (job.mesh, job.generation) == (to, index + 1)
            # After every other change gradients are left for the next one to carry.
            assert all(map(torch.isfinite, map(torch.tensor, losses(job, 1, zero=index % 2 == 0))))
            model: Any = job.model
            inner = getattr(model, "module", model)
            assert inner.out.weight is inner.emb.weight
            assert not inner.frozen.requires_grad


def losses_equal_those_after_a_checkpoint_on_the_same_mesh(rank: Rank) -> None:
    build = builder()
    job = first(build, rank.mesh(ss.Mesh({"dp": 4})))
    assert job is not None
    losses(job, 2)
    for number, to in enumerate(
        [ss.Mesh({"dp": 2, "tp": 2}), ss.Mesh({"dp": 3}, [1, 2, 3]), ss.Mesh({"rep": 2, "dp": 2}), ss.Mesh({"ddp": 2})]
    ):
        other = reloaded(rank, job, build, to, f"checkpoint_{number}")
        job = change_exactly(rank, job, build, to)
        if job is not None:
            assert other is not None
            assert differing(full(other), full(job)) == []
            expected, found = losses(other, 3), losses(job, 3)
            assert found == expected, f"{to}"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05)),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class Side(nn.Module):
    """One small layer for each optimizer, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 10) for _ in OPTIMIZERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides: torch.Tensor = sum(layer(x) for layer in self.layers)
        return sides


def side(mesh: Any, device: str = "meta") -> Any:
    with torch.device(device):
        model = Side()
    if "tp" in mesh.mesh_dim_names:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"])
    return model, [make(layer.parameters()) for layer, make in zip(model.layers, OPTIMIZERS.values(), strict=True)]


def steps(job: ss.fsdp.Job, count: int) -> None:
    model: Any = job.model
    for number in range(count):
        model(torch.linspace(-1, 1 + number, 12).reshape(2, 6)).square().mean().backward()
        for optimizer in job.optimizer:
            optimizer.step()
            optimizer.zero_grad()


def every_optimizer_steps_on_with_its_own_state(rank: Rank) -> None:
    stays, job = (first(side, rank.mesh(ss.Mesh({"dp": 4}))) for _ in range(2))
    assert stays is not None
    assert job is not None
    steps(stays, 2)
    steps(job, 2)
    for to in (ss.Mesh({"dp": 2, "tp": 2}), ss.Mesh({"dp": 3}, [3, 1, 0]), ss.Mesh({"dp": 4})):
        job = change_exactly(rank, job, side, to)
    assert differing(full(stays), full(job)) == []
    steps(stays, 2)
    steps(job, 2)
    assert differing(full(stays), full(job)) == []


def a_change_before_the_first_step_leaves_state_to_be_made(rank: Rank) -> None:
    build = builder()
    job = first(build, rank.mesh(ss.Mesh({"dp": 4})))
    to = ss.Mesh({"dp": 2, "tp": 2})
    other = first(build, rank.mesh(to))
    job = change_exactly(rank, job, build, to)
    assert not job.optimizer.state
    assert other is not None
    assert losses(job, 2) == losses(other, 2)
    # And the other way round: what build has stepped already is cleared, not kept.
    fresh = first(build, rank.mesh(ss.Mesh({"dp": 4})))

    def stepped(mesh: Any) -> Any:
        model, optimizer = build(mesh)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": torch.zeros_like(parameter)}
        return model, optimizer

    job = rank.change(fresh, stepped, ss.Mesh({"dp": 4}, [3, 2, 1, 0]))
    assert job is not None
    assert not job.optimizer.state


def sixteen_bit_parameters_and_mixed_precision_train_on(rank: Rank) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrappings: list[dict[str, Any]] = [
        {"policy": half, "reshard": False},
        {"policy": half},
        {"dtype": torch.bfloat16},
        {"reshard": False},
    ]
    for number, ways in enumerate(wrappings):
        build = builder(adamw, **ways)
        job = first(build, rank.mesh(ss.Mesh({"dp": 4})))
        assert job is not None
        losses(job, 1)
        with torch.no_grad():
            model: Any = job.model
            model(torch.zeros(1, 1, dtype=torch.int64))  # no backward: parameters are left whole
        to = ss.Mesh({"dp": 2, "tp": 2}) if "policy" not in ways else ss.Mesh({"dp": 3}, [2, 0, 1])
        other = None
        if "policy" in ways:
            to = ss.Mesh({"dp": 3}, [0, 1, 2])
            other = reloaded(rank, job, build, to, f"half_{number}")
        job = rank.change(job, build, to)
        if job is not None:
            assert all(isinstance(each, DTensor) for name, each in job.models[0].named_parameters() if name != "scale")
            found = losses(job, 2)
            assert other is None or found == losses(other, 2)


def a_change_of_placement_is_what_redistribute_gives(rank: Rank) -> None:
    mesh = rank.mesh(ss.Mesh({"a": 2, "b": 2}))

    class Holder(nn.Module):
        def __init__(self, placements: Any, on: Any, values: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(values, on, placements))

    values = torch.arange(7 * 5 * 3.0).reshape(7, 5, 3)
    ways = [(Shard(0), Shard(0)), (Shard(2), Replicate()), (Replicate(), Replicate()), (Shard(1), Shard(0))]
    job = ss.fsdp.Job(Holder(ways[-1], mesh, values), mesh=mesh)
    for placements in ways:
        weight: Any = job.model.weight  # type: ignore[union-attr]
        expected = weight.redistribute(placements=placements).to_local().clone()

        def build(on: Any, placements: Any = placements) -> Any:
            return Holder(placements, on, torch.empty(7, 5, 3))

        job = rank.change(job, build, ss.Mesh({"a": 2, "b": 2}))  # type: ignore[assignment]
        now: Any = job.model.weight  # type: ignore[union-attr]
        assert now.placements == placements
        assert torch.equal(now.to_local(), expected)


SCENARIOS = [
    every_element_survives_a_walk_through_all_wrappings,
    losses_equal_those_after_a_checkpoint_on_the_same_mesh,
    every_optimizer_steps_on_with_its_own_state,
    a_change_before_the_first_step_leaves_state_to_be_made,
    sixteen_bit_parameters_and_mixed_precision_train_on,
    a_change_of_placement_is_what_redistribute_gives,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(4, SCENARIOS, Path(tmp_path_factory.mktemp("walk")))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_four_ranks(played: Played, scenario: Any) -> None:
    played.hold(scenario)
