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
    assert len(ss.audit(other).unknown) <= 1  # a plain tensor of an optimizer's own is a setting


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
