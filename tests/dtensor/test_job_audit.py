"""Every tensor that a job of torch's own parallelism reaches is accounted for, or refused by its path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dtensor.worlds import one_rank, rank_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardshift as ss
from shardshift.adapters.claims import Fate
from shardshift.values import Mesh, Mismatch, Unaccounted

ALONE = Mesh({"dp": 1})


class Net(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep_gradients: bool = False) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if not keep_gradients:
        optimizer.zero_grad()


def job(model: nn.Module | None = None, extras: Any = None, **more: Any) -> ss.fsdp.Job:
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, **more)
    return ss.fsdp.Job(model, optimizer, extras, mesh=ALONE)


def fates(job: ss.fsdp.Job) -> dict[str, Fate]:
    return {entry.path: entry.fate for entry in ss.audit(job).entries}


def model_of(job: ss.fsdp.Job) -> Any:
    return job.models[0]


def numel(job: ss.fsdp.Job) -> int:
    return sum(parameter.numel() for parameter in job.models[0].parameters())


def test_parameters_buffers_and_moments_are_carried_and_steps_are_companions() -> None:
    found = job()
    audit = ss.audit(found)
    audit.check()
    assert audit.unknown == ()
    assert audit.bytes_by_fate[Fate.CARRIED] == 4 * (3 * numel(found) + 4 + 3)
    assert audit.bytes_by_fate[Fate.COMPANION] == 4 * 4
    assert fates(found)["model[0].mask"] is Fate.CARRIED


def test_gradients_that_are_there_are_carried() -> None:
    found = job(keep_gradients=True)
    assert ss.audit(found).bytes_by_fate[Fate.CARRIED] == 4 * (4 * numel(found) + 7)


def test_tensors_of_extras_and_of_param_groups_are_companions() -> None:
    class Average:
        def __init__(self) -> None:
            self.seen = torch.zeros(5)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

    found = job(extras={"average": Average()})
    found.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    audit = ss.audit(found)
    audit.check()
    assert audit.bytes_by_fate[Fate.COMPANION] == 4 * 4 + 4 * 5 + 4


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused_by_its_path() -> None:
    found = job()
    model_of(found).up.statistics = {"max": torch.ones(2)}
    audit = ss.audit(found)
    assert audit.unknown == ("model[0].up.statistics[max]",)
    with pytest.raises(Unaccounted, match=r"8 bytes that no rule covers: model\[0\]\.up\.statistics\[max\]"):
        audit.check()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        [torch.ones(2)],
        ({"x": torch.ones(2)},),
        torch.ones(2).numpy(),
        torch.Generator(),
        torch.ones(2).untyped_storage(),
    ],
)
def test_state_of_other_kinds_in_other_places_is_refused_too(value: Any) -> None:
    found = job()
    model_of(found).down.kept = value
    assert len(ss.audit(found).unknown) == 1
    other = job()
    other.optimizer.kept = value
    assert len(ss.audit(other).unknown) == 1


class Lookahead(torch.optim.Optimizer):
    """As it is commonly published: an optimizer around another, which keeps slow weights on itself."""

    def __init__(self, fast: torch.optim.Optimizer, *, shared: bool = True) -> None:
        self.fast, self.defaults = fast, fast.defaults
        self.param_groups = fast.param_groups if shared else [dict(group) for group in fast.param_groups]
        self.state = fast.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in fast.param_groups]

    def step(self, closure: Any = None) -> Any:
        return self.fast.step(closure)


def test_tensors_that_an_optimizer_keeps_on_itself_are_refused_with_what_to_do() -> None:
    """Only what records say of an optimizer goes along: settings of param groups, and its state."""
    found = job()
    found.optimizer.average = torch.zeros(3)
    with pytest.raises(Unaccounted, match=r"12 bytes .* optimizer\.average.* optimizer\.state\[parameter\].* an extra"):
        ss.audit(found).check()
    model = Net()
    ahead = Lookahead(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False))
    stepped(model, ahead)
    audit = ss.audit(ss.fsdp.Job(model, [ahead], mesh=ALONE))
    assert audit.unknown == tuple(f"optimizer[0].slow[0][{index}]" for index in range(4))
    assert audit.bytes_by_fate[Fate.COMPANION] == 4 * 4 + 4  # steps, and the rate that is in the outer one's groups
    ahead.slow.clear()
    ss.audit(ss.fsdp.Job(model, ahead, mesh=ALONE)).check()


def test_an_optimizer_inside_another_with_settings_of_its_own_is_refused() -> None:
    model = Net()
    ahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), shared=False)
    ahead.slow.clear()
    found = ss.audit(ss.fsdp.Job(model, ahead, mesh=ALONE))
    assert found.unknown == ("optimizer.fast",)
    with pytest.raises(Unaccounted, match="the very same param_groups and state"):
        found.check()


class Gives:
    """An extra that gives a tensor, or a copy of it."""

    def __init__(self, tensor: torch.Tensor, *, copies: bool = False) -> None:
        self.state: Any = lambda: tensor.clone() if copies else tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state().copy_(state_dict["tensor"])


@pytest.mark.parametrize("copies", [True, False])
def test_what_an_extra_gives_is_accounted_for_wherever_it_lies(copies: bool) -> None:
    average = torch.zeros(3)
    found = job(extras={"average": Gives(average, copies=copies)})
    found.optimizer.average = average
    assert ss.audit(found).unknown == (("optimizer.average",) if copies else ())


def test_what_an_extra_holds_is_its_own_affair_though_the_optimizer_holds_the_extra() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for extras, unknown in (
        ({"scaler": scaler}, ()),
        ({}, ("optimizer.scaler._scale", "optimizer.scaler._growth_tracker")),
    ):
        found = job(extras=extras)
        found.optimizer.scaler = scaler
        assert ss.audit(found).unknown == unknown


def test_views_of_what_is_carried_are_carried() -> None:
    found = job()
    model_of(found).up.first_row = model_of(found).up.weight.detach()[0]
    ss.audit(found).check()


def test_what_a_module_makes_anew_itself_is_rebuilt() -> None:
    class Cached(Net):
        def after_move(self) -> None:
            self.cache = -self.mean

    model = Cached()
    model.cache = -model.mean
    found = job(model)
    audit = ss.audit(found)
    audit.check()
    assert fates(found)["model[0].cache"] is Fate.REBUILT


def test_what_the_last_forward_left_goes_with_its_graph() -> None:
    found = job()
    model_of(found).last = model_of(found)(torch.ones(1, 4))
    ss.audit(found).check()


def test_tensors_on_the_meta_device_have_no_data_to_move_and_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(Mismatch, match=r"param:up\.weight, .* on the meta device, so it has no data"):
        ss.audit(ss.fsdp.Job(model, mesh=ALONE))


def test_fsdp_modules_are_accounted_for_in_the_state_between_steps() -> None:
    """Also after a forward without a backward, which leaves whole parameters standing."""
    with one_rank():
        model = Net()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        fully_shard(model.up, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters())
        stepped(model, optimizer, keep_gradients=True)
        found = ss.fsdp.Job(model, optimizer)
        expected = 4 * (4 * sum(parameter.numel() for parameter in model.parameters()) + 7)
        for _ in range(2):
            audit = ss.audit(found)
            audit.check()
            assert audit.bytes_by_fate[Fate.CARRIED] == expected
            with torch.no_grad():
                model(torch.ones(1, 4))
        assert found.mesh == Mesh({"dp": 1})


def test_dtensors_are_counted_by_what_lies_here() -> None:
    with rank_of({"dp": 2, "tp": 2}, 1) as mesh:
        model = Net()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
        held = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        found = ss.fsdp.Job(model, mesh=Mesh({"dp": 2, "tp": 2}, mesh.mesh.flatten().tolist()))
        audit = ss.audit(found)
        audit.check()
        assert len(held) == 2
        assert audit.bytes_by_fate[Fate.CARRIED] == 4 * (3 * 4 + 3 + 6 * 4 + 4 + 7)


def test_a_consumed_job_has_no_account() -> None:
    found = job()
    found.consume()
    with pytest.raises(Mismatch, match=r"this job \(dp 1 on rank 0, generation 0\) was consumed"):
        ss.audit(found)
    with pytest.raises(Mismatch, match="was consumed"):
        _ = found.model


def test_what_a_communication_hook_keeps_is_refused() -> None:
    """PowerSGD's errors are what gradients still owe: no module and no optimizer holds them."""
    with one_rank():
        model = nn.parallel.DistributedDataParallel(Net())
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            stepped(model, optimizer)
        assert state.error_dict
        audit = ss.audit(ss.fsdp.Job(model, optimizer))
        assert any(path.startswith("hooks[0]") and "error_dict" in path for path in audit.unknown)
        with pytest.raises(Unaccounted, match="error_dict"):
            audit.check()
