"""What a change has consumed raises on use, says what to do, and holds no memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardshift.adapters.dtensor.retire import retire
from shardshift.values import Mismatch


def job() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"in": nn.Linear(2, 2)}), nn.ModuleList([nn.Dropout()]))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(torch.ones(2)),
        lambda model: model.forward(torch.ones(2)),
        lambda model: model.state_dict(),
        lambda model: list(model.parameters()),
        lambda model: model.training,
        lambda model: model.eval(),
        lambda model: model.to("cpu"),
        lambda model: model[0],
        lambda model: len(model),
        lambda model: list(model),
        lambda model: "in" in model,
        lambda model: setattr(model, "weight", 1),
        lambda model: setattr(model, "weight", nn.Parameter(torch.ones(1))),
        lambda model: copy.deepcopy(model),
        lambda model: pickle.dumps(model),
        lambda model: hasattr(model, "weight"),
    ],
)
def test_a_consumed_module_and_all_inside_raise_on_use(use: Callable[[Any], Any]) -> None:
    model, optimizer = job()
    inside = [*model.modules()]
    retire([model], [optimizer])
    for module in inside:
        with pytest.raises(Mismatch, match="this module was consumed by a change of layout; what to do: use the one"):
            use(module)


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.param_groups,
        lambda optimizer: optimizer.state,
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict({}),
        lambda optimizer: setattr(optimizer, "state", {}),
        lambda optimizer: copy.deepcopy(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    ],
)
def test_a_consumed_optimizer_raises_on_use(use: Callable[[Any], Any]) -> None:
    model, optimizer = job()
    retire([model], [optimizer])
    with pytest.raises(Mismatch, match="this optimizer was consumed by a change of layout; what to do: use the one"):
        use(optimizer)


def test_a_scheduler_of_a_consumed_optimizer_raises_on_its_next_step() -> None:
    model, optimizer = job()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    retire([model], [optimizer])
    with pytest.raises(Mismatch, match="consumed"):
        scheduler.step()


def test_a_debugger_and_a_set_can_still_look_at_them() -> None:
    model, optimizer = job()
    retire([model], [optimizer])
    assert repr(model) == "<module consumed by a change of layout>"
    assert repr(optimizer) == "<optimizer consumed by a change of layout>"
    assert len({model, optimizer}) == 2
    assert model == model
    assert model
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_what_they_held_is_given_back_though_their_names_are_kept() -> None:
    model, optimizer = job()
    first: Any = model[0]
    held = [first.weight, first.weight.grad, optimizer.state[first.weight]["exp_avg"]]
    watched = [weakref.ref(each) for each in held]
    del held, first
    retire([model], [optimizer])
    gc.collect()
    assert [each() for each in watched] == [None] * 3


def test_a_tensor_that_the_user_keeps_stays_what_it_was() -> None:
    model, optimizer = job()
    first: Any = model[0]
    weight = first.weight
    before = weight.detach().clone()
    retire([model], [optimizer])
    assert torch.equal(weight, before)


def test_wrappers_and_what_is_shared_are_retired_once() -> None:
    shared = nn.Linear(2, 2)
    one, other = nn.Sequential(shared), nn.ModuleList([shared, shared])
    compiled: Any = torch.compile(nn.Linear(2, 2))
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    retire([one, other, compiled, traced], [])
    for module in (one, other, shared, compiled, traced):
        with pytest.raises(Mismatch, match="consumed"):
            module(torch.ones(2))


def test_modules_with_slots_and_properties_of_their_own_are_retired() -> None:
    class Slotted(nn.Module):
        __slots__ = ("extra",)

        @property
        def weight(self) -> torch.Tensor:
            return torch.ones(1)

        def __len__(self) -> int:
            return 0

    module = Slotted()
    module.extra = torch.ones(3)
    retire([module], [])
    with pytest.raises(Mismatch, match="consumed"):
        _ = module.weight
    with pytest.raises(Mismatch, match="consumed"):
        module(1)
