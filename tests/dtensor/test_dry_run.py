"""What a change would come to, from one real rank to imagined ones: nothing moves, and the job trains on."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.dtensor.worlds import one_rank
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardshift as ss
from shardshift.values import Infeasible, Mesh, Mismatch, Unaccounted


class Net(nn.Module):
    def __init__(self, out: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, out), nn.Linear(out, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.down(self.up(x))
        return grown


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Net()
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp" in mesh.mesh_dim_names:
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters())


def job(*, steps: int = 1) -> ss.fsdp.Job:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return ss.fsdp.Job(model, optimizer)


def _numpys() -> Any:
    state: Any = np.random.get_state()
    return state[1].tolist()


ELEMENTS = 5 * 7 + 7 + 7 * 5
STATE_BYTES = 3 * 4 * ELEMENTS


def test_one_rank_to_sharded_ones_sends_what_it_will_not_keep() -> None:
    """Each element goes to one rank; rank 0 keeps its chunks: 2 of 7 rows twice and 2 elements, 2 of 5 rows."""
    with one_rank():
        found = ss.dry_run(job(), build, Mesh({"dp": 4}))
        assert found is not None
        own = 3 * 4 * (2 * 5 + 2 + 2 * 7)
        assert (found.state_bytes, found.moved_bytes, found.kept_bytes) == (STATE_BYTES, STATE_BYTES - own, 0)
        assert found.moved_bytes_of_rank[0] == (STATE_BYTES - own, 0)
        assert sum(received for _, received in found.moved_bytes_of_rank.values()) == found.moved_bytes
        assert found.least_moved_bytes <= found.moved_bytes


@pytest.mark.parametrize(
    "to",
    [
        Mesh({"dp": 2, "tp": 2}),
        Mesh({"tp": 3}, [5, 0, 2]),
        Mesh({"dp": 2}, [3, 4]),
        Mesh({"dp": 1}),
        Mesh({"dp": 3, "tp": 2}),
    ],
)
def test_rank_0_sends_what_others_will_hold_and_keeps_what_it_can(to: Mesh) -> None:
    with one_rank():
        found = ss.dry_run(job(), build, to)
    assert found is not None
    received = sum(received for _, received in found.moved_bytes_of_rank.values())
    assert received == found.moved_bytes == sum(sent for sent, _ in found.moved_bytes_of_rank.values())
    assert found.moved_bytes_of_rank[0] == (found.moved_bytes, 0)
    if to.ranks == (0,):
        assert (found.moved_bytes, found.kept_bytes) == (0, STATE_BYTES)
    if 0 not in to.ranks:  # each element goes to one place
        assert (found.moved_bytes, found.kept_bytes) == (STATE_BYTES, 0)
    assert found.least_moved_bytes <= found.moved_bytes
    assert set(found.peak_bytes_of_rank) == {0, *to.ranks}
    assert max(found.peak_bytes_of_rank.values()) >= STATE_BYTES


def test_it_says_so_in_words_and_in_json() -> None:
    with one_rank():
        found = ss.dry_run(job(), build, Mesh({"dp": 4}))
    assert f"state   {STATE_BYTES:>16,} bytes" in str(found)
    assert "dp 1 on rank 0 -> dp 4 on ranks 0-3" in str(found)
    assert found is not None
    again = json.loads(json.dumps(found.to_json()))
    assert again["moved_bytes"] == found.moved_bytes
    assert again["digest"] == found.digest


def test_nothing_is_disturbed() -> None:
    """Groups, random streams, parameters, and the next step's loss are as if nobody had asked."""
    with one_rank():
        torch.manual_seed(1)
        asked, other = job(), None
        torch.manual_seed(1)
        other = job()
        groups, count = dict(c10d._world.pg_map), c10d._world.group_count
        streams = torch.get_rng_state(), random.getstate(), _numpys()
        before = {name: value.data_ptr() for name, value in asked.models[0].state_dict().items()}
        for to in (Mesh({"dp": 4}), Mesh({"dp": 2, "tp": 2})):
            ss.dry_run(asked, build, to)
        assert (dict(c10d._world.pg_map), c10d._world.group_count) == (groups, count)
        assert torch.equal(torch.get_rng_state(), streams[0])
        assert (random.getstate(), _numpys()) == streams[1:]
        assert {name: value.data_ptr() for name, value in asked.models[0].state_dict().items()} == before
        assert not asked.is_consumed
        losses = []
        for each in (asked, other):
            loss = each.models[0](torch.ones(2, 5)).sum()
            loss.backward()
            each.optimizer.step()
            losses.append((loss.item(), each.models[0](torch.ones(2, 5)).sum().item()))
        assert losses[0] == losses[1]
        assert dist.get_world_size() == 1


def test_the_same_question_has_the_same_answer() -> None:
    with one_rank():
        asked = job()
        found = [ss.dry_run(asked, build, Mesh({"dp": 2, "tp": 2})) for _ in range(2)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].digest == found[1].digest


def test_a_job_before_its_first_step_has_no_moments() -> None:
    with one_rank():
        found = ss.dry_run(job(steps=0), build, Mesh({"dp": 4}))
        assert found is not None
        assert found.state_bytes == STATE_BYTES // 3


def test_a_rank_without_a_job_is_told_nothing() -> None:
    assert ss.dry_run(None, build, Mesh({"dp": 4})) is None


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (lambda: Net(8), Mismatch, "shape"),
        (lambda: Net().bfloat16(), Mismatch, r"is float32 in the old job and bfloat16 in the new one; .* cast=True"),
        (lambda: nn.ModuleDict({"net": Net()}), Unaccounted, r"net\.up\.weight|up\.weight"),
        (lambda: nn.Sequential(Net(), nn.LayerNorm(2)), Unaccounted, "weight"),
    ],
)
def test_what_migrate_would_refuse_is_refused(model: Any, error: type[Exception], says: str) -> None:
    def other(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            made = model()
        return made, torch.optim.AdamW(made.parameters())

    with one_rank(), pytest.raises(error, match=says):
        ss.dry_run(job(), other, Mesh({"dp": 1}))


def test_a_cast_that_is_asked_for_is_planned_in_the_old_dtype() -> None:
    def half(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Net().bfloat16()
        return model, torch.optim.AdamW(model.parameters())

    with one_rank():
        found = ss.dry_run(job(), half, Mesh({"dp": 1}), cast=True)
        assert found is not None
        assert (found.state_bytes, found.moved_bytes) == (STATE_BYTES, 0)


def test_a_mesh_without_axes_is_refused() -> None:
    with one_rank(), pytest.raises(Infeasible, match="the new mesh has no axis"):
        ss.dry_run(job(), build, Mesh({}))
