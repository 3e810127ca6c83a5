"""Which state of an optimizer follows its parameter, what goes along by value, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dtensor.worlds import dtensor, numbered, rank_of
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardshift.adapters.dtensor.live import (
    gradients_of,
    held_by,
    optimizers_in,
    state_of,
)
from shardshift.values import Kind, Mismatch, Unaccounted


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    loss: Any = sum((parameter * parameter).sum() for parameter in model.parameters())
    loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "kinds", "values"),
    [
        (lambda p: torch.optim.AdamW(p), {"exp_avg", "exp_avg_sq"}, {"step"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
        (lambda p: torch.optim.NAdam(p), {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
        (
            lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
            {"square_avg", "momentum_buffer", "grad_avg"},
            {"step"},
        ),
        (lambda p: torch.optim.Adagrad(p), {"sum"}, {"step"}),
        (lambda p: torch.optim.Adadelta(p), {"square_avg", "acc_delta"}, {"step"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set(), set()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}, set()),
        (lambda p: torch.optim.ASGD(p), {"ax"}, {"step", "eta", "mu"}),
        (lambda p: torch.optim.Rprop(p), {"prev", "step_size"}, {"step"}),
    ],
)
def test_torchs_optimizers_keep_tensors_that_follow_the_parameter_and_numbers(
    make: Callable[..., torch.optim.Optimizer], kinds: set[str], values: set[str]
) -> None:
    model = nn.Linear(3, 2)
    held = held_by([model])
    fresh = make(model.parameters())
    assert {each.kind.value for each in state_of([fresh], held)[0]} <= kinds  # made before the first step by some
    state, scalars = state_of([stepped(model, fresh)], held)
    for name in ("weight", "bias"):
        assert {each.kind.value for each in state if each.name == name} == kinds
        assert set(scalars.get(name, {})) == values
    shapes = {each.name: each.shape for each in held.tensors}
    assert all(each.shape == shapes[each.name] for each in state)


class Keeping(torch.optim.SGD):
    """An optimizer that keeps what a test gives it."""

    def __init__(self, model: nn.Module, **state: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            self.state[parameter].update(state)


def test_texts_none_and_numbers_go_along_by_value() -> None:
    model = nn.Linear(2, 2, bias=False)
    given = {"mode": "fast", "none": None, "count": 3, "done": True, "history": [1.0, None], "scale": torch.tensor(2.0)}
    state, scalars = state_of([Keeping(model, **given)], held_by([model]))
    assert state == []
    assert scalars == {"weight": given}


def test_a_parameter_of_no_dims_has_moments_of_none_and_a_step() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.ones(()))})
    state, scalars = state_of([stepped(model, torch.optim.AdamW(model.parameters()))], held_by([model]))
    assert [(each.kind, each.shape) for each in state] == [(Kind.EXP_AVG, ()), (Kind.EXP_AVG_SQ, ())]
    assert set(scalars["scale"]) == {"step"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"row_var": torch.ones(4, 1)}, r"row_var:weight has shape \(4, 1\); its parameter has global shape \(4, 6\)"),
        ({"scales": torch.ones(6)}, r"scales:weight has shape \(6,\)"),
        ({"codes": torch.ones(24, dtype=torch.int8)}, r"codes:weight has shape \(24,\)"),
        ({"turned": torch.ones(6, 4)}, r"turned:weight has shape \(6, 4\)"),
        ({0: torch.ones(4, 6)}, "under 0, which is no name"),
        ({"a-b": torch.ones(4, 6)}, "under 'a-b', which is no name"),
        ({"grad": torch.ones(4, 6)}, "under 'grad', which is no name"),
        ({"param": torch.ones(4, 6)}, "under 'param', which is no name"),
        ({"old_dirs": [torch.ones(24)]}, "old_dirs:weight is a list with tensors in it"),
        ({"nested": {"x": (torch.ones(4, 6), 1)}}, "nested:weight is a dict with tensors in it"),
    ],
)
def test_state_that_follows_no_rule_is_refused_by_name(given: dict[Any, Any], says: str) -> None:
    """Factored moments, scales and codes of quantised blocks, histories: nobody can say how they are cut."""
    model = nn.Linear(6, 4, bias=False)
    optimizer = Keeping(model)
    optimizer.state[model.weight].update(given)
    with pytest.raises(Unaccounted, match=says) as caught:
        state_of([optimizer], held_by([model]))
    assert "weight" in caught.value.args[0]


def test_adafactor_is_refused_by_the_name_of_its_factors() -> None:
    model = nn.Linear(6, 4)
    optimizer = stepped(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(Unaccounted, match="row_var:weight has shape"):
        state_of([optimizer], held_by([model]))


def test_lbfgs_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(Unaccounted):
        state_of([optimizer], held_by([model]))


def sharded_linear(mesh: Any) -> nn.Linear:
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(dtensor(numbered((8, 4)).float(), mesh, [Shard(0)]))
    return model


def test_plain_state_of_the_local_shape_is_cut_as_its_parameter_and_of_another_is_refused() -> None:
    with rank_of({"dp": 2}, 1) as mesh:
        model = sharded_linear(mesh)
        held = held_by([model])
        (weight,) = held.tensors
        state, _ = state_of([Keeping(model, exp_avg=torch.ones(4, 4))], held)
        assert [(each.shape, each.cuts, each.mesh) for each in state] == [((8, 4), weight.cuts, mesh)]
        codes = torch.ones(4, 4, dtype=torch.int8)
        with pytest.raises(
            Unaccounted, match=r"scale:weight has shape \(4, 1\); .* \(8, 4\) and \(4, 4\) on this rank"
        ):
            state_of([Keeping(model, codes=codes, scale=torch.ones(4, 1))], held)
        with pytest.raises(Unaccounted, match=r"whole:weight has shape \(8, 4\)"):
            state_of([Keeping(model, whole=torch.ones(8, 4))], held)


def test_state_in_dtensors_is_cut_as_it_says_itself() -> None:
    with rank_of({"dp": 2}, 0) as mesh:
        model = sharded_linear(mesh)
        moment = dtensor(numbered((8, 4)), mesh, [Shard(1)])
        (found,), _ = state_of([Keeping(model, exp_avg=moment)], held_by([model]))
        assert (found.cuts[0].dim, found.local.shape) == (1, (8, 2))
        with pytest.raises(Unaccounted, match=r"exp_avg:weight has shape \(8, 2\)"):
            state_of([Keeping(model, exp_avg=dtensor(numbered((8, 2)), mesh, [Shard(0)]))], held_by([model]))


def test_a_step_in_a_dtensor_goes_by_value_unless_it_is_partial() -> None:
    with rank_of({"dp": 2}, 0) as mesh:
        model = sharded_linear(mesh)
        step = DTensor.from_local(torch.tensor(7.0), mesh, [Replicate()], run_check=False)
        _, scalars = state_of([Keeping(model, step=step)], held_by([model]))
        assert type(scalars["weight"]["step"]) is torch.Tensor
        assert scalars["weight"]["step"] == 7
        summand = DTensor.from_local(torch.tensor(7.0), mesh, [Partial()], run_check=False)
        with pytest.raises(Unaccounted, match="step:weight is a sum of what ranks hold"):
            state_of([Keeping(model, step=summand)], held_by([model]))


def test_a_partial_gradient_is_refused_with_advice() -> None:
    with rank_of({"dp": 2}, 0) as mesh:
        model = nn.Module()
        weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
        model.register_parameter("w", weight)
        weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(Mismatch, match=r"grad:w is partial .*optimizer\.zero_grad"):
            gradients_of(held_by([model]))


def test_gradients_that_are_there_are_held_as_their_parameters() -> None:
    model = nn.Linear(2, 2)
    held = held_by([model])
    assert gradients_of(held) == []
    model.weight.grad = torch.ones(2, 2)
    assert [str(each) for each in gradients_of(held)] == ["grad:weight"]


def test_state_of_a_parameter_that_is_not_in_the_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        Unaccounted, match=r"AdamW keeps state of a parameter \(shape \(3,\)\) that is not in the model"
    ):
        state_of([_of_another()], held_by([model]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["shared"] = {"x": 1}  # type: ignore[index]
    with pytest.raises(Unaccounted, match=r"SGD keeps state of a parameter \('shared'\)"):
        state_of([optimizer], held_by([model]))


def _of_another() -> torch.optim.Optimizer:
    other = nn.ParameterList([nn.Parameter(torch.ones(3))])
    return stepped(other, torch.optim.AdamW(other.parameters()))


def test_two_optimizers_that_keep_one_state_are_refused_and_one_named_twice_counts_once() -> None:
    model = nn.Linear(2, 2)
    one, other = (stepped(model, torch.optim.AdamW(model.parameters())) for _ in range(2))
    assert len(state_of(optimizers_in([one, one]), held_by([model]))[0]) == 4
    with pytest.raises(Unaccounted, match=r"two optimizers keep .* of weight"):
        state_of(optimizers_in([one, other]), held_by([model]))


def test_optimizers_are_found_in_lists_and_containers() -> None:
    model = nn.Linear(2, 2)
    one, other = torch.optim.SGD([model.weight], lr=1), torch.optim.SGD([model.bias], lr=1)

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizers = [one, other]
            super().__init__(model.parameters(), {})

    assert optimizers_in(None) == ()
    assert optimizers_in(one) == (one,)
    assert optimizers_in([one, (other,)]) == optimizers_in(Container()) == (one, other)
    for strange in ({"a": one}, "adam", [one, object()]):
        with pytest.raises(Unaccounted, match=r"is no torch\.optim\.Optimizer"):
            optimizers_in(strange)


def test_groups_may_be_several_and_empty_and_state_not_there_yet() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "lr": 1.0},
        {"params": [], "lr": 2.0},
        {"params": [model.bias]},
    ]
    optimizer = torch.optim.AdamW(groups)
    assert state_of([optimizer], held_by([model])) == ([], {})
