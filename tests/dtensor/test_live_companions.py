"""What goes along with the tensors of a job that trains: extras, steps, param groups, random streams, dtypes, hooks."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dtensor.models import builder, differing, first, full, losses, plain_names
from tests.dtensor.ranks import Played, Rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

import shardshift as ss

pytestmark = pytest.mark.patient

FOUR = ss.Mesh({"dp": 4})
CROSSED = ss.Mesh({"dp": 2, "tp": 2}, [3, 1, 0, 2])


class Count:
    """A Stateful."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": torch.arange(self.value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        assert torch.equal(state_dict["seen"], torch.arange(self.value))


class Loader:
    """A data loader: 24 samples, dealt to the places of the data parallel axis in turn, 8 to a batch."""

    def __init__(self, place: int, places: int) -> None:
        self.place, self.places, self.done = place, places, 0

    def batch(self) -> list[int]:
        share = 8 // self.places
        found = [self.done * self.places + self.place * share + index for index in range(share)]
        self.done += share
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["place"] == self.place
        self.done = state_dict["done"]


def merged(states: list[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
    assert [state["place"] for state in states] == list(range(len(states)))
    if 8 % count:
        raise ss.Infeasible(f"8 samples do not divide among {count}")
    return {"place": index, "done": sum(state["done"] for state in states) // count}


def warm(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, parts, milestones=[3])


def rates_go_on_whether_build_gives_the_scheduler_or_not(rank: Rank) -> None:
    for make in (warm, lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))):
        gives = builder(extras=lambda optimizer, make=make: {"scheduler": make(optimizer)})  # type: ignore[misc]
        jobs = [first(gives, rank.mesh(FOUR)) for _ in range(3)]
        stays, given, kept = jobs
        assert stays is not None
        assert kept is not None
        for job in jobs:
            losses(job, 2)  # type: ignore[arg-type]
        scheduler = kept.extras["scheduler"]
        given = rank.change(given, gives, CROSSED)
        kept = rank.change(kept, builder(), CROSSED)
        assert given is not None
        assert kept is not None
        assert kept.extras["scheduler"] is scheduler
        for _ in range(3):
            losses(stays, 1)
            rates = [stays.optimizer.param_groups[0]["lr"]]
            for job in (given, kept):
                losses(job, 1)
                rates.append(job.optimizer.param_groups[0]["lr"])
            assert len(set(rates)) == 1
        assert differing(full(given), full(kept)) == []


def a_joiner_gets_every_extra_or_the_change_is_refused(rank: Rank) -> None:
    two, four = ss.Mesh({"dp": 2}), FOUR
    with_count = builder(extras=lambda _: {"count": Count(-1)})
    mesh = rank.mesh(two)
    job = first(with_count, mesh)
    if job is not None:
        job.extras["count"].value = 7
    error = rank.error(job, builder(), four)
    assert isinstance(error, ss.Infeasible)
    assert "'count'" in str(error)
    more = builder(extras=lambda _: {"count": Count(), "other": Count()})
    error = rank.error(job, more, four)
    assert isinstance(error, ss.Mismatch)
    assert "other" in str(error)
    job = rank.change(job, with_count, four)
    assert job is not None
    assert job.extras["count"].value == 7


def data_positions_are_merged_by_the_rule_that_is_given_and_refused_without(rank: Rank) -> None:
    """24 samples, global batch 8: 4 places -> 2 -> 3 (refused) -> 4."""

    def build(mesh: Any, device: str = "meta") -> Any:
        model, optimizer = builder()(mesh, device)
        loader = Loader(mesh.get_local_rank("dp"), mesh["dp"].size())
        return model, optimizer, {"data": ss.fsdp.PerRank(loader, merged)}

    made = first(builder(), rank.mesh(FOUR))
    assert made is not None
    plain = ss.fsdp.Job(made.model, made.optimizer, {"data": Loader(rank.index, 4)}, mesh=FOUR)
    batch = plain.extras["data"].batch()
    assert sorted(chain(*rank.all(batch))) == list(range(8))
    error = rank.error(plain, builder(), ss.Mesh({"dp": 2}))
    assert isinstance(error, ss.Infeasible)
    assert "'data'" in str(error)
    assert "PerRank" in str(error)
    job: ss.fsdp.Job | None = ss.fsdp.Job(
        plain.model, plain.optimizer, {"data": ss.fsdp.PerRank(plain.extras["data"], merged)}, mesh=FOUR
    )
    for number, (to, error_type) in enumerate(
        [(ss.Mesh({"dp": 2}, [2, 1]), None), (ss.Mesh({"dp": 3}), ss.Infeasible), (FOUR, None)]
    ):
        if error_type is not None:
            found = rank.error(job, build, to)
            assert found is None or isinstance(found, error_type)
            continue
        job = rank.change(job, build, to)
        got = job.extras["data"].extra.batch() if job is not None else []
        start = 8 + 8 * (number // 2)
        assert sorted(chain(*rank.all(got))) == list(range(start, start + 8))


def streams_follow_their_place_and_new_places_begin_streams_of_their_own(rank: Rank) -> None:
    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def expected(value: int) -> tuple[float, float, float]:
        seed(value)
        for _ in range(3):
            draw()
        return draw()

    fourth = [expected(10 + place) for place in range(4)]
    job = first(builder(), rank.mesh(FOUR))
    seed(10 + rank.index)
    for _ in range(3):
        draw()
    order = [2, 0, 3, 1]
    job = rank.change(job, builder(), ss.Mesh({"dp": 4}, order))
    assert draw() == fourth[order.index(rank.index)]
    # Alike along dp, one per place of tp: dp 4 -> dp 2 x tp 2 -> dp 4.
    seed(7)
    job = rank.change(job, builder(), ss.Mesh({"dp": 2, "tp": 2}))
    assert len(set(rank.all(draw()))) == 1
    seed(20 + rank.index % 2)
    job = rank.change(job, builder(), ss.Mesh({"dp": 1, "tp": 4}))
    drawn = rank.all(draw())
    assert len(set(drawn)) == 4
    seed(20)
    assert draw() == drawn[0]
    seed(21)
    assert draw() == drawn[1]


def each_parameter_keeps_the_settings_and_the_step_of_its_group(rank: Rank) -> None:
    """Groups in another order, one of them empty on some ranks, rates that a scheduler has set, a tensor among them."""

    def build(mesh: Any, device: str = "meta", flip: bool = True) -> Any:
        model, _ = builder()(mesh, device)
        named = plain_names(model)
        decay = [p for name, p in named.items() if "norm" not in name and name != "frozen"]
        groups = [
            {"params": decay, "lr": 1.0, "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if "norm" in name], "lr": 2.0, "weight_decay": 0.0},
            {"params": [named["frozen"]], "lr": torch.tensor(3.0)},
        ]
        return model, torch.optim.AdamW(groups[::-1] if flip else groups)

    job = first(lambda mesh, device: build(mesh, device, flip=False), rank.mesh(FOUR))
    assert job is not None
    optimizer = job.optimizer
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
        group["initial_lr"] = 1.0
    losses(job, 2)
    for state in optimizer.state.values():
        state["step"].fill_(2640)
    for to in (CROSSED, ss.Mesh({"dp": 3}), FOUR):
        job = rank.change(job, build, to)
        if job is None:
            continue
        names = {id(p): name for name, p in plain_names(job.models[0]).items()}
        for group in job.optimizer.param_groups:
            name = names[id(group["params"][0])]
            expected = (1.5, 0.01) if name == "frozen" else (1.0, 0.0) if "norm" in name else (0.5, 0.1)
            assert (float(group["lr"]), group["weight_decay"], group["initial_lr"]) == (*expected, 1.0)
        assert isinstance(job.optimizer.param_groups[0]["lr"], torch.Tensor)
        assert {float(state["step"]) for state in job.optimizer.state.values()} == {2640.0}


def steps_that_differ_between_ranks_are_refused(rank: Rank) -> None:
    job = first(builder(), rank.mesh(FOUR))
    assert job is not None
    losses(job, 1)
    if rank.index == 1:
        job.optimizer.state[plain_names(job.models[0])["emb.weight"]]["step"] += 1
    error = rank.error(job, builder(), CROSSED)
    assert isinstance(error, ss.Mismatch)
    assert "emb.weight" in str(error)
    assert "step" in str(error)


def what_ranks_hold_differently_beside_tensors_is_refused_with_the_ranks(rank: Rank) -> None:
    job = first(builder(), rank.mesh(FOUR))
    assert job is not None
    losses(job, 1)
    model: Any = job.models[0]
    (group,) = job.optimizer.param_groups
    lr, last = group["lr"], group["params"][-1]
    differ: Any
    back: Any
    for differ, back, said in (
        (lambda: model.layers[1].eval(), lambda: model.train(), "is in evaluation on rank 2"),
        (lambda: last.requires_grad_(False), lambda: last.requires_grad_(True), "is frozen (requires_grad) on rank 2"),
        (lambda: group["params"].pop(), lambda: group["params"].append(last), "is in no param group on rank 2"),
        (lambda: group.update(lr=lr * 2), lambda: group.update(lr=lr), "ranks 0 and 2 have"),
    ):
        if rank.index == 2:
            differ()
        error = rank.error(job, builder(), CROSSED)
        assert isinstance(error, ss.Mismatch)
        assert said in str(error)
        assert "nothing was moved" in str(error)
        back()
    job = rank.change(job, builder(), CROSSED)
    assert job is not None
    losses(job, 1)


def a_cast_is_refused_unless_asked_for_and_then_told(rank: Rank) -> None:
    half, single = builder(dtype=torch.bfloat16), builder()
    job = first(single, rank.mesh(FOUR))
    assert job is not None
    weight = plain_names(job.models[0])["layers.0.norm.weight"]
    with torch.no_grad():
        weight.fill_(1 + 2**-12)
    assert "bfloat16" in str(rank.error(job, half, CROSSED))
    job = rank.change(job, half, CROSSED, cast=True)
    assert job is not None
    assert job.report is not None
    values = full(job)["layers.0.norm.weight"]
    assert (values.dtype, set(values.tolist())) == (torch.bfloat16, {1.0})
    assert job.report.casts["param:layers.0.norm.weight"] == ("float32", "bfloat16")
    assert len(job.report.casts) == len([*job.models[0].parameters()]) + 1  # and the buffer of numbers
    assert "float32" in str(rank.error(job, single, FOUR))
    job = rank.change(job, single, FOUR, cast=True)
    assert job is not None
    assert full(job)["layers.0.norm.weight"].dtype == torch.float32


class Cached(nn.Module):
    """-exp(A_log), kept: no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(6))
        self.A = -torch.exp(self.A_log.detach())

    def after_move(self) -> None:
        whole: Any = self.A_log
        self.A = -torch.exp(whole.full_tensor().detach())


def what_is_derived_is_made_anew_on_every_rank(rank: Rank) -> None:
    def build(mesh: Any, device: str = "meta") -> Any:
        with torch.device(device):
            return fully_shard(Cached(), mesh=mesh)

    job = ss.fsdp.Job(build(rank.mesh(FOUR), "cpu"), mesh=FOUR)
    model: Any = job.model
    with torch.no_grad():
        model.A_log.fill_(2.0)
    job = rank.change(job, build, ss.Mesh({"dp": 4}, [1, 0, 3, 2]))  # type: ignore[assignment]
    model = job.model
    assert torch.equal(model.A, -torch.exp(torch.full((6,), 2.0)))


def weights_of_equal_value_that_are_not_tied_both_arrive(rank: Rank) -> None:
    apart = builder(tied=False)
    job = first(apart, rank.mesh(FOUR))
    assert job is not None
    with torch.no_grad():
        named: Any = plain_names(job.models[0])
        named["emb.weight"].fill_(1)
        named["out.weight"].fill_(2)
    for build in (builder(), builder(tied=True)):
        assert "emb.weight and out.weight" in str(rank.error(job, build, CROSSED))
    job = rank.change(job, apart, CROSSED)
    assert job is not None
    found = full(job)
    assert {float(found[name].mean()) for name in ("emb.weight", "out.weight")} == {1.0, 2.0}


def copies_that_differ_are_refused_unless_that_is_said(rank: Rank) -> None:
    job = first(builder(), rank.mesh(FOUR))
    assert job is not None
    dict(job.models[0].named_buffers())["mean"].fill_(rank.index)
    error = rank.error(job, builder(), CROSSED)
    assert isinstance(error, ss.Mismatch)
    assert "mean" in str(error)
    for to, options, found in (
        (CROSSED, {"compare_copies": False}, float(rank.index)),
        (FOUR, {"differing": "mean"}, 1.5),
        (CROSSED, {"differing": "first"}, 0.0),
    ):
        job = rank.change(job, builder(), to, **options)
        assert job is not None
        mean = dict(job.models[0].named_buffers())["mean"]
        assert set(mean.tolist()) == {found}
        mean.fill_(rank.index)


def shards_that_stay_are_not_copied_and_views_are_read_as_they_are(rank: Rank) -> None:
    """A column of a larger tensor, a transposed matrix and an unchanged shard."""

    class Views(nn.Module):
        def __init__(self, *, odd: bool) -> None:
            super().__init__()
            base = torch.arange(16.0).reshape(4, 4)
            self.a = nn.Parameter(base.t() if odd else torch.empty(4, 4))
            self.b = nn.Parameter(base.clone()[:, 0] if odd else torch.empty(4))
            self.c = nn.Parameter(torch.arange(5.0))

    job: ss.fsdp.Job | None = None
    if rank.index < 2:
        job = ss.fsdp.Job(Views(odd=True), mesh=ss.Mesh({"dp": 2}))
    held = [p.data_ptr() for p in job.models[0].parameters()] if job is not None else []
    job = rank.change(job, lambda _: Views(odd=False), ss.Mesh({"dp": 4}))
    assert job is not None
    model: Any = job.model
    assert torch.equal(model.a, torch.arange(16.0).reshape(4, 4).t())
    assert torch.equal(model.b, torch.tensor([0.0, 4.0, 8.0, 12.0]))
    assert torch.equal(model.c, torch.arange(5.0))
    if held:
        assert model.c.data_ptr() == held[2]


def what_build_sets_and_hooks_on_parameters_stays_on_them(rank: Rank) -> None:
    def build(mesh: Any) -> Any:
        model, optimizer = builder()(mesh)
        weight: Any = plain_names(model)["layers.0.up.weight"]
        weight.group = "matrix"
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
        return model, optimizer

    seen: list[bool] = []
    job = rank.change(first(builder(), rank.mesh(FOUR)), build, ss.Mesh({"tp": 2}, [2, 1]))
    if job is None:
        return
    losses(job, 1)
    assert seen == [True]
    weight: Any = plain_names(job.models[0])["layers.0.up.weight"]
    assert weight.group == "matrix"
    assert weight.requires_grad


SCENARIOS = [
    rates_go_on_whether_build_gives_the_scheduler_or_not,
    a_joiner_gets_every_extra_or_the_change_is_refused,
    data_positions_are_merged_by_the_rule_that_is_given_and_refused_without,
    streams_follow_their_place_and_new_places_begin_streams_of_their_own,
    each_parameter_keeps_the_settings_and_the_step_of_its_group,
    steps_that_differ_between_ranks_are_refused,
    what_ranks_hold_differently_beside_tensors_is_refused_with_the_ranks,
    a_cast_is_refused_unless_asked_for_and_then_told,
    what_is_derived_is_made_anew_on_every_rank,
    weights_of_equal_value_that_are_not_tied_both_arrive,
    copies_that_differ_are_refused_unless_that_is_said,
    shards_that_stay_are_not_copied_and_views_are_read_as_they_are,
    what_build_sets_and_hooks_on_parameters_stays_on_them,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(4, SCENARIOS, Path(tmp_path_factory.mktemp("companions")))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_four_ranks(played: Played, scenario: Any) -> None:
    played.hold(scenario)
