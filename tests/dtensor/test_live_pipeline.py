"""Pipeline stages of ``torch.distributed.pipelining``, with layers named over the whole model, to FSDP2 and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dtensor.models import HIDDEN, VOCABULARY, Block, adamw, begin, differing, whole
from tests.dtensor.ranks import Played, Rank
from tests.dtensor.test_live_walk import reloaded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardshift as ss

pytestmark = pytest.mark.patient

LAYERS = 4


class Staged(nn.Module):
    """The layers of one part of a pipeline, under their numbers in the whole model."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, HIDDEN) if part == 0 else None
        numbers = range(part * LAYERS // parts, (part + 1) * LAYERS // parts)
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})
        self.out = nn.Linear(HIDDEN, VOCABULARY) if part == parts - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.emb is None else self.emb(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.out is None else self.out(x)


def build(mesh: Any, device: str = "meta", chunks: int = 1) -> Any:
    """Axis pp: stages, of ``chunks`` parts each, dealt in turn; tp and dp as ever."""
    names = mesh.mesh_dim_names
    stages = mesh["pp"].size() if "pp" in names else 1
    stage = mesh.get_local_rank("pp") if "pp" in names else 0
    models = []
    for chunk in range(chunks):
        with torch.device(device):
            model = Staged(chunk * stages + stage, stages * chunks)
        if "tp" in names:
            for layer in model.layers.values():
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "dp" in names:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        models.append(model)
    optimizer = adamw([parameter for model in models for parameter in model.parameters()])
    return (models[0] if chunks == 1 else models), optimizer


def train(job: ss.fsdp.Job, steps: int, kind: Any = ScheduleGPipe) -> list[float]:
    """Losses, as the last stage has them."""
    mesh, model = job.device_mesh, job.models[0]
    assert mesh is not None
    place = job.mesh.coordinate(job.rank)
    stages = job.mesh.size("pp")
    last = place.get("pp", 0) == stages - 1
    schedule = None
    if stages > 1:
        stage = PipelineStage(model, place["pp"], stages, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = kind(stage, n_microbatches=2, loss_fn=_loss)
    found = []
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (4, 3), generator=torch.Generator().manual_seed(step))
        if schedule is None:
            losses = [_loss(model(tokens), tokens)]
            losses[0].backward()  # type: ignore[no-untyped-call]
        else:
            losses = []
            schedule.step(
                *([tokens] if place["pp"] == 0 else []), **({"target": tokens, "losses": losses} if last else {})
            )
        job.optimizer.step()
        job.optimizer.zero_grad()
        if last:
            found.append(sum(loss.item() for loss in losses) / len(losses))
    return found


def _loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def first(rank: Rank, to: ss.Mesh) -> ss.fsdp.Job:
    mesh = rank.mesh(to)
    model, optimizer = build(mesh, "cpu")
    begin(model)
    return ss.fsdp.Job(model, optimizer, mesh=mesh)


def state(rank: Rank, job: ss.fsdp.Job | None) -> dict[str, Any]:
    """The whole state of the job, of all stages."""
    own: dict[str, Any] = {}
    for model in job.models if job is not None else ():
        for name, parameter in model.named_parameters():
            assert job is not None
            of = {"": parameter, **job.optimizer.state.get(parameter, {})}
            own |= {f"{name}/{key}": whole(value) for key, value in of.items()}
    found: dict[str, Any] = {}
    for one in rank.all(own):
        assert (
            differing(
                {key: one[key] for key in one.keys() & found.keys()}, {k: found[k] for k in one.keys() & found.keys()}
            )
            == []
        )
        found |= one
    return found


def stages_become_one_job_without_a_pipeline_and_the_other_way_round(rank: Rank) -> None:
    job: ss.fsdp.Job | None = first(rank, ss.Mesh({"pp": 2, "dp": 2}))
    train(job, 2)  # type: ignore[arg-type]
    for number, (to, kind) in enumerate(
        [
            (ss.Mesh({"dp": 4}), ScheduleGPipe),
            (ss.Mesh({"pp": 2, "tp": 2}), Schedule1F1B),
            (ss.Mesh({"pp": 4}), ScheduleGPipe),
            (ss.Mesh({"pp": 2}, [3, 1]), Schedule1F1B),
            (ss.Mesh({"dp": 2, "tp": 2}), ScheduleGPipe),
            (ss.Mesh({"pp": 2, "dp": 2}, [1, 3, 2, 0]), Schedule1F1B),
        ]
    ):
        before = state(rank, job)
        other = (
            reloaded(rank, job, lambda mesh, device: build(mesh, device), to, f"pipeline_{number}")
            if number < 2
            else None
        )
        job = rank.change(job, build, to)
        assert differing(before, state(rank, job)) == []
        if job is not None:
            assert other is None or train(other, 2, kind) == train(job, 2, kind)
            train(job, 1, kind)


def parts_of_a_stage_are_several_modules(rank: Rank) -> None:
    job: ss.fsdp.Job | None = first(rank, ss.Mesh({"pp": 2, "dp": 2}))
    train(job, 1)  # type: ignore[arg-type]
    before = state(rank, job)

    def chunked(mesh: Any) -> Any:
        return build(mesh, chunks=2)

    for how, to in [(chunked, ss.Mesh({"pp": 2, "dp": 2})), (build, ss.Mesh({"dp": 3})), (chunked, ss.Mesh({"pp": 2}))]:
        said = ss.dry_run(job, how, to)
        job = rank.change(job, how, to)
        assert differing(before, state(rank, job)) == []
        if job is not None and said is not None:
            assert job.report is not None
            assert said.moved_bytes == job.report.moved_bytes
    dist.barrier()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.arange(3.0), persistent=False)


class Sharing(nn.Module):
    """Layers of a stage that all have one table and one gate, which trains."""

    def __init__(self, numbers: range, *, tied: bool = True) -> None:
        super().__init__()
        table, gate = Rotary(), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleDict()
        for number in numbers:
            layer = nn.ModuleDict({"own": nn.Linear(2, 2), "table": table, "gate": gate if tied else nn.Linear(6, 6)})
            self.layers[str(number)] = layer


def sharing(mesh: Any, device: str = "meta", *, tied: bool = True) -> Any:
    size = LAYERS // mesh["pp"].size()
    start = mesh.get_local_rank("pp") * size
    with torch.device(device):
        model = Sharing(range(start, start + size), tied=tied)
    fully_shard(model, mesh=mesh["dp"])
    return model, adamw(model.parameters())


def of_all_names(job: ss.fsdp.Job) -> dict[str, torch.Tensor]:
    """Tensors of this rank's stage under every name, with the optimizer's state."""
    (model,) = job.models
    found = {name: whole(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of = {"": parameter, **job.optimizer.state[parameter]}
        found |= {f"{name}/{key}": whole(value) for key, value in of.items()}
    return found


def what_layers_share_is_one_tensor_on_each_stage_that_has_it(rank: Rank) -> None:
    one = ss.Mesh({"pp": 1, "dp": 4})
    two, four = ss.Mesh({"pp": 2, "dp": 2}, [3, 1, 0, 2]), ss.Mesh({"pp": 4, "dp": 1})
    mesh = rank.mesh(one)
    model, optimizer = sharing(mesh, "cpu")
    begin(model)
    model.layers["0"]["table"].inv_freq.add_(0.5)
    model.layers["0"]["table"].eval()
    job: Any = ss.fsdp.Job(model, optimizer, mesh=mesh)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    expected = of_all_names(job)
    assert len(expected) == LAYERS * (1 + 4 * 4)
    for to in (two, four, one, four, two):
        ahead: Any = ss.dry_run(job, sharing, to)
        job = rank.change(job, sharing, to)
        assert ahead.moved_bytes == job.report.moved_bytes
        found = of_all_names(job)
        assert differing(found, {name: expected[name] for name in found}) == []
        layers = [*job.model.layers.values()]
        assert len(layers) == LAYERS // to.size("pp")
        assert all(layer["gate"].weight is layers[0]["gate"].weight for layer in layers)
        assert all(layer["table"].inv_freq is layers[0]["table"].inv_freq for layer in layers)
        assert [module.training for module in (job.model, layers[-1]["table"])] == [True, False]

    second = job.mesh.coordinate(rank.index)["pp"] == 1
    layer: Any = job.model.layers["2" if second else "0"]
    table, gate = layer["table"].inv_freq, layer["gate"].weight
    state, group = job.optimizer.state[gate], job.optimizer.param_groups[0]
    was = state["exp_avg"].to_local().clone()
    differ: Any
    for differ, said in (
        (lambda by: table.copy_(torch.arange(3.0) + 0.5 + by), "inv_freq"),
        (lambda by: state["step"].fill_(1 + by), "gate.weight"),
        (lambda by: state["exp_avg"].to_local().copy_(was + by), "exp_avg:layers.2.gate.weight"),
        (lambda by: group.update(weight_decay=0.25 + by), "weight_decay"),
    ):
        differ(float(second))
        error = rank.error(job, sharing, one)
        assert isinstance(error, ss.Mismatch), error
        assert said in str(error), error
        assert not job.is_consumed
        differ(0.0)

    def apart(mesh: Any) -> Any:
        return sharing(mesh, tied=False)

    for to in (one, two):
        assert "gate.weight are one tensor in the old job and two in the new one" in str(rank.error(job, apart, to))
    job = rank.change(job, apart, four)  # a layer a stage: nothing to tie
    assert rank.change(job, sharing, one) is not None


def what_one_stage_cuts_and_another_holds_whole_must_be_alike_or_is_made_so(rank: Rank) -> None:
    """A norm under one name on both stages: FSDP cuts it on the first, the second holds it whole."""
    stages, flat = ss.Mesh({"pp": 2, "dp": 2}), ss.Mesh({"dp": 4})

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.empty(8))

    def build(mesh: Any) -> Any:
        model = Norm()
        fully_shard(model, mesh=mesh["dp"])
        return model

    for values, options, found in (
        ((1.0, 1.0), {}, 1.0),
        ((1.0, 2.0), {"differing": "first"}, 1.0),
        ((1.0, 4.0), {"differing": "mean"}, 3.0),  # each element has three holders, two of the second stage
    ):
        mesh = rank.mesh(stages)
        stage = mesh.get_local_rank("pp")
        model: Any = build(mesh) if stage == 0 else Norm()
        nn.init.constant_(model.norm, values[stage])
        job: ss.fsdp.Job | None = ss.fsdp.Job(model, mesh=stages)
        if options:
            error = rank.error(job, build, flat)
            assert isinstance(error, ss.Mismatch)
            assert "param:norm[0:4]: devices 0 and 2 hold different bits" in str(error)
        job = rank.change(job, build, flat, **options)
        assert job is not None
        moved: Any = job.model
        assert whole(moved.norm).tolist() == [found] * 8


SCENARIOS = [
    what_layers_share_is_one_tensor_on_each_stage_that_has_it,
    stages_become_one_job_without_a_pipeline_and_the_other_way_round,
    parts_of_a_stage_are_several_modules,
    what_one_stage_cuts_and_another_holds_whole_must_be_alike_or_is_made_so,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(4, SCENARIOS, Path(tmp_path_factory.mktemp("pipeline")))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_four_ranks(played: Played, scenario: Any) -> None:
    played.hold(scenario)
