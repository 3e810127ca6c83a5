"""A change of one real rank alone: what the new job is made of, when extras are loaded, and what the old one leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.dtensor.worlds import one_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardshift as ss
from shardshift.adapters.dtensor.live import STEP

HERE, THERE = ss.Mesh({"dp": 1}), ss.Mesh({"fsdp": 1})


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with one_rank():
        yield


def net(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, device: str = "meta") -> Any:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step that leaves its gradients."""
    optimizer.zero_grad()
    model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


def job(extras: Any = None, dtype: torch.dtype = torch.float32) -> ss.fsdp.Job:
    model = net(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), dtype, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return ss.fsdp.Job(model, optimizer, extras)


def build(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Any:
    model = net(mesh, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def change(job: ss.fsdp.Job, how: Any, to: ss.Mesh = THERE, **options: Any) -> ss.fsdp.Job:
    found = ss.migrate(job, how, to, **options)
    assert found is not None
    return found


def test_gradients_that_build_has_left_are_gone() -> None:
    def trained(_: DeviceMesh) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        return model, optimizer

    before = job()
    before.optimizer.zero_grad()
    after = change(before, trained)
    assert [parameter.grad for parameter in after.models[0].parameters()] == [None] * 4


def test_a_job_with_moments_and_gradients_steps_on_after_a_cast() -> None:
    before = job()
    expected = {name: p.grad.full_tensor().bfloat16() for name, p in before.models[0].named_parameters()}  # type: ignore[union-attr]
    after = change(before, lambda mesh: build(mesh, torch.bfloat16), cast=True)
    named: Any = dict(after.models[0].named_parameters())
    assert all(torch.equal(named[name].grad.full_tensor(), gradient) for name, gradient in expected.items())
    assert {value.dtype for state in after.optimizer.state.values() for key, value in state.items() if key != STEP} == {
        torch.bfloat16
    }
    after.optimizer.step()
    train(after.models[0], after.optimizer)
    assert {float(state[STEP]) for state in after.optimizer.state.values()} == {3.0}
    assert after.report is not None
    assert after.report.casts == {f"param:{name}": ("float32", "bfloat16") for name in expected}


class Mastered(torch.optim.SGD):
    """Keeps an fp32 copy of each parameter."""

    def keep(self) -> torch.optim.Optimizer:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["master"] = parameter.detach().float() + 2**-12
        return self


def test_fp32_state_of_a_16_bit_parameter_says_that_it_is_fp32() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = net(mesh, torch.bfloat16, "cpu")
    optimizer = Mastered(model.parameters(), lr=1.0).keep()
    expected = [optimizer.state[parameter]["master"].full_tensor() for parameter in model.parameters()]

    def mastered(mesh: DeviceMesh) -> Any:
        model = net(mesh, torch.bfloat16)
        return model, Mastered(model.parameters(), lr=1.0)

    after = change(ss.fsdp.Job(model, optimizer), mastered)
    masters = [after.optimizer.state[parameter]["master"] for parameter in after.models[0].parameters()]
    for master, was in zip(masters, expected, strict=True):
        assert isinstance(master, DTensor)
        meta = master._spec.tensor_meta
        assert meta is not None
        assert {master.dtype, master.to_local().dtype, meta.dtype} == {torch.float32}
        assert torch.equal(master.full_tensor(), was)


class Position:
    """An extra that knows how often it was loaded."""

    def __init__(self) -> None:
        self.at, self.loaded = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at, self.loaded = state_dict["at"], self.loaded + 1


def test_an_extra_of_the_old_job_that_build_gives_again_is_loaded_after_the_commit_only() -> None:
    position = Position()
    before = job({"position": position})
    position.at = 5
    with pytest.raises(ss.Mismatch, match="float32 in the old job and bfloat16"):
        change(before, lambda mesh: (*build(mesh, torch.bfloat16), {"position": position}))
    assert position.loaded == 0
    after = change(before, lambda mesh: (*build(mesh), {"position": position}))
    assert after.extras["position"] is position
    assert (position.at, position.loaded) == (5, 1)


class Averaging(torch.optim.AdamW):
    """Keeps a count of its steps in a tensor of its own."""

    def __init__(self, parameters: Any, device: str = "cpu") -> None:
        super().__init__(parameters, lr=0.1)
        self.average = torch.zeros(3, device=device)

    def step(self, closure: Any = None) -> Any:
        self.average += 1
        return super().step(closure)


class OfTheOptimizer:
    """An extra that gives what the optimizer keeps on itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.optimizer.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.average.copy_(state_dict["average"])


def test_what_an_optimizer_keeps_on_itself_goes_along_as_an_extra_and_not_without() -> None:
    def averaging(mesh: DeviceMesh, device: str = "cpu", *, gives: bool = False) -> Any:
        model = net(mesh)
        optimizer = Averaging(model.parameters(), device)
        return (model, optimizer, {"average": OfTheOptimizer(optimizer)}) if gives else (model, optimizer)

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = net(mesh, device="cpu")
    optimizer = Averaging(model.parameters())
    train(model, optimizer)
    with pytest.raises(ss.Unaccounted, match=r"optimizer\.average"):
        change(ss.fsdp.Job(model, optimizer), averaging)
    now = ss.fsdp.Job(model, optimizer, {"average": OfTheOptimizer(optimizer)})
    with pytest.raises(ss.Unaccounted, match=r"optimizer\.average of the new job is on the meta device"):
        change(now, lambda mesh: averaging(mesh, "meta"))
    for steps, (to, gives) in enumerate([(THERE, True), (HERE, False), (THERE, True)], 2):
        now = change(now, lambda mesh, gives=gives: averaging(mesh, gives=gives), to)
        train(now.models[0], now.optimizer)
        assert now.optimizer.average.tolist() == [steps] * 3
        assert now.extras["average"].optimizer is now.optimizer


def test_a_build_that_gives_the_old_job_is_refused_and_leaves_its_mesh() -> None:
    before = job()
    mesh = before.device_mesh
    with pytest.raises(ss.Mismatch, match="build gave the old job"):
        change(before, lambda _: before)
    assert (before.mesh, before.device_mesh) == (HERE, mesh)
    train(before.models[0], before.optimizer)
    assert change(before, build).mesh == THERE


def test_modules_that_nobody_takes_over_are_refused_by_a_change_and_when_asked() -> None:
    before = job()
    before.models[0].add_module("dropout", nn.Dropout().eval())
    for ask in (ss.dry_run, ss.migrate):
        with pytest.raises(ss.Unaccounted, match=r"dropout of the old job .* is in evaluation"):
            ask(before, build, THERE)


def test_what_fsdp2_held_is_given_back_without_the_garbage_collector() -> None:
    """torchtitan turns it off. After a cast none of the old memory is the new job's."""
    before = job()
    held: list[Any] = [each for parameter in before.models[0].parameters() for each in (parameter, parameter.grad)]
    held += [before.optimizer.state[parameter]["exp_avg"] for parameter in before.models[0].parameters()]
    watched = [StorageWeakRef(each.to_local().untyped_storage()) for each in held]  # type: ignore[no-untyped-call]
    del held
    gc.collect()
    gc.disable()
    try:
        after = change(before, lambda mesh: build(mesh, torch.bfloat16), cast=True)
        assert [each.expired() for each in watched] == [True] * 12  # type: ignore[no-untyped-call]
    finally:
        gc.enable()
    train(after.models[0], after.optimizer)
