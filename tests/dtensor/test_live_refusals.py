"""A change that is refused leaves the job training; what ``dry_run`` says is what happens; nothing is left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dtensor.models import Net, adamw, builder, differing, first, full, losses, plain_names, wrapped
from tests.dtensor.ranks import TIMEOUT_S, Played, Rank
from torch.distributed import distributed_c10d as c10d

import shardshift as ss
from shardshift.engine import mover
from shardshift.values import Kind

pytestmark = pytest.mark.patient

FOUR = ss.Mesh({"dp": 4})
CROSSED = ss.Mesh({"dp": 2, "tp": 2})


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: None


def a_job_that_was_refused_a_change_trains_on_as_if_not_asked(rank: Rank) -> None:
    build = builder()
    stays, job = (first(build, rank.mesh(FOUR)) for _ in range(2))
    assert stays is not None
    assert job is not None
    assert losses(stays, 2) == losses(job, 2)
    state = torch.get_rng_state()

    def raises_on_one(mesh: Any) -> Any:
        torch.rand(3)
        if rank.index == 1:
            raise Unpicklable("this rank cannot")
        return build(mesh)

    def wider(mesh: Any) -> Any:
        model, _ = build(mesh)
        model.extra = torch.nn.Parameter(torch.empty(3))
        return model, adamw(model.parameters())

    def smaller(mesh: Any) -> Any:
        with torch.device("meta"):
            model: Any = Net()
        del model.bias
        model.bias = 0
        return wrapped(model, mesh), adamw(model.parameters())

    def waits_for_data(mesh: Any) -> Any:
        model, optimizer = build(mesh)
        model.table = torch.empty(3, device="meta")
        return model, optimizer

    def of_a_parameter_elsewhere(mesh: Any) -> Any:
        return build(mesh)[0], adamw([torch.nn.Parameter(torch.zeros(2))])

    own = job.model, job.optimizer
    for how, kind, said in [
        (raises_on_one, Exception, "this rank cannot"),
        (builder(lambda p: torch.optim.SGD(p, lr=0.1)), ss.Mismatch, "optimizers"),
        (wider, ss.ShardshiftError, "extra"),
        (smaller, ss.ShardshiftError, "bias"),
        (waits_for_data, ss.Unaccounted, "table"),
        (of_a_parameter_elsewhere, ss.Mismatch, "not in the new model"),
        (lambda _: own, ss.Mismatch, "objects of the old job"),
        (lambda _: (), ss.Mismatch, "build gave 0 values"),
        (lambda _: None, ss.Mismatch, "build gave a NoneType"),
    ]:
        for to in (CROSSED, ss.Mesh({"dp": 2}, [2, 1])):
            error = rank.error(job, how, to)
            assert isinstance(error, kind), error
            assert said in str(error), error
    assert "the world has 4" in str(rank.error(job, build, ss.Mesh({"dp": 5})))
    assert torch.equal(state, torch.get_rng_state())
    assert differing(full(stays), full(job)) == []
    assert losses(stays, 2) == losses(job, 2)
    job = rank.change(job, build, CROSSED)
    assert differing(full(stays), full(job)) == []  # type: ignore[arg-type]


def ranks_that_do_not_agree_on_the_change_are_told_so(rank: Rank) -> None:
    build = builder()
    job = first(build, rank.mesh(FOUR))
    error = rank.error(job, build, FOUR if rank.index == 2 else CROSSED)
    assert isinstance(error, ss.Mismatch)
    assert "same mesh" in str(error)
    error = rank.error(None if rank.index == 3 else job, build, CROSSED)
    assert isinstance(error, ss.Mismatch)
    assert "rank 3 is in the old mesh" in str(error)
    for name, others in ("cast", [False, True]), ("order", ["given", "least"]), ("differing", ["error", "first"]):
        error = rank.error(job, build, CROSSED, **{name: others[rank.index == 1]})
        assert isinstance(error, ss.Mismatch)
        assert f"rank 1 changes with {name}={others[1]!r}, rank 0 with {others[0]!r}" in str(error)
    losses(job, 1)  # type: ignore[arg-type]
    consumed, job = job, rank.change(job, build, CROSSED)
    assert consumed is not None
    assert isinstance(rank.error(consumed, build, FOUR), ss.Mismatch)
    # One rank brings the consumed job, the others the live one.
    error = rank.error(consumed if rank.index == 1 else job, build, FOUR)
    assert isinstance(error, ss.Mismatch)
    assert "consumed" in str(error)
    losses(job, 1)  # type: ignore[arg-type]


def old_objects_raise_and_tensors_held_elsewhere_stay(rank: Rank) -> None:
    build = builder(extras=lambda optimizer: {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)})
    job = first(build, rank.mesh(FOUR))
    assert job is not None
    model: Any = job.model
    optimizer, scheduler, layer = job.optimizer, job.extras["scheduler"], model.layers[0]
    weight: Any = plain_names(model)["layers.0.up.weight"]
    values = weight.detach().to_local().clone()
    new = rank.change(job, build, CROSSED)
    assert new is not None
    assert job.is_consumed
    for use in (
        lambda: job.model,
        lambda: job.optimizer,
        lambda: job.extras,
        lambda: ss.audit(job),
        lambda: model(torch.zeros(1, 1)),
        lambda: [*model.parameters()],
        lambda: layer.up,
        lambda: layer(torch.zeros(1)),
        lambda: model.state_dict(),
        lambda: optimizer.step(),
        lambda: optimizer.param_groups,
        lambda: optimizer.zero_grad(),
        lambda: scheduler.step(),
    ):
        with pytest.raises(ss.Mismatch, match="consumed"):
            use()
    assert "consumed" in repr(model) + repr(optimizer)
    assert torch.equal(weight.detach().to_local(), values)
    assert new.report is not None
    assert new.report.invalid


def what_dry_run_says_is_what_happens_and_it_disturbs_nothing(rank: Rank) -> None:
    build = builder()
    stays, job = (first(build, rank.mesh(FOUR)) for _ in range(2))
    assert stays is not None
    losses(stays, 1)
    losses(job, 1)  # type: ignore[arg-type]
    for to in (CROSSED, ss.Mesh({"dp": 2}, [2, 1]), ss.Mesh({"ddp": 4}), ss.Mesh({"rep": 2, "dp": 2}, [3, 0, 1, 2])):
        groups, state = list(c10d._world.pg_map), torch.get_rng_state()
        said = ss.dry_run(job, build, to)
        assert (said is None) == (job is None)
        assert list(c10d._world.pg_map) == groups
        assert torch.equal(state, torch.get_rng_state())
        if said is not None and job is not None:
            assert len(set(rank_digest(rank, said.digest))) == 1 if len(job.mesh.ranks) == 4 else True
            job.audit().check()
        job = rank.change(job, build, to)
        if job is not None and said is not None:
            assert job.report is not None
            assert (said.moved_bytes, said.kept_bytes) == (job.report.moved_bytes, job.report.kept_bytes)
            assert sum(sent for sent, _ in said.moved_bytes_of_rank.values()) == said.moved_bytes
            assert (said.state_bytes, said.least_moved_bytes) == (job.report.state_bytes, job.report.least_moved_bytes)
            assert str(ss.audit(job))
            assert str(said)
    if job is not None:
        assert differing(full(stays), full(job)) == []
    losses(stays, 1)


def rank_digest(rank: Rank, digest: str) -> list[str]:
    return rank.all(digest)


def the_least_order_moves_the_least(rank: Rank) -> None:
    build = builder()
    stays, job = (first(build, rank.mesh(FOUR)) for _ in range(2))
    losses(stays, 1)  # type: ignore[arg-type]
    losses(job, 1)  # type: ignore[arg-type]
    for to in (CROSSED, FOUR, ss.Mesh({"dp": 4}, [3, 2, 1, 0]), ss.Mesh({"dp": 3}, [3, 1, 0])):
        job = rank.change(job, build, to, order="least")
        if job is not None:
            assert job.report is not None
            assert job.report.moved_bytes == job.report.least_moved_bytes
            assert sorted(job.mesh.ranks) == sorted(to.ranks)
    job = rank.change(job, build, FOUR)
    assert differing(full(stays), full(job)) == []  # type: ignore[arg-type]


def twenty_changes_leave_no_thread_file_or_group_behind(rank: Rank) -> None:
    build = builder()
    job = first(build, rank.mesh(FOUR))
    losses(job, 1)  # type: ignore[arg-type]
    counts = []
    for number in range(20):
        job = rank.change(job, build, CROSSED if number % 2 else ss.Mesh({"dp": 3}, [2, 0, 3]))
        rank.all(None)
        if number % 2:
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), len(c10d._world.pg_map)))
    assert len({groups for _, _, groups in counts}) == 1, counts
    assert counts[-1][0] <= counts[1][0], counts
    assert counts[-1][1] <= counts[1][1], counts
    losses(job, 1)  # type: ignore[arg-type]


def a_rank_that_missed_two_changes_takes_part_in_the_third(rank: Rank) -> None:
    """It comes first, so only those two invitations are there: it does not take one of them."""
    build = builder()
    job = first(build, rank.mesh(ss.Mesh({"dp": 3})))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mover, "_MEETING_S", 0.5)  # a minute: nobody is meant to wait for who comes late
        for _ in range(2 if job is not None else 0):
            assert isinstance(rank.error(job, build, FOUR, timeout_s=0.5), ss.PeerLost)
    rank.all(None)
    if job is None:
        assert "rank 3 was not invited" in str(rank.error(job, build, FOUR, timeout_s=0.5))
    rank.all(None)
    job = rank.change(job, build, FOUR)
    losses(job, 1)  # type: ignore[arg-type]


def a_transfer_that_one_rank_cannot_take_writes_on_none(rank: Rank) -> None:
    emb, out = (
        ss.Shard(ss.Tensor(Kind.PARAM, name, (2,), "float32", 4), ss.Region((0,), (2,))) for name in ("emb", "out")
    )
    tied = torch.full((2,), torch.nan)
    for bad, says in (
        ({emb: torch.empty(2, device="meta"), out: torch.empty(2)}, "meta device"),
        ({emb: tied, out: tied}, "are one tensor in the targets"),
    ):
        targets = {each: torch.full((2,), torch.nan) for each in (emb, out)} if rank.index != 2 else bad
        sources = {emb: torch.ones(2), out: torch.zeros(2)} if rank.index < 2 else {}
        with pytest.raises(ss.Mismatch, match=says):
            ss.transfer(sources, targets, timeout_s=TIMEOUT_S)
        assert all(target.is_meta or target.isnan().all() for target in targets.values()) or rank.index == 2
        assert tied.isnan().all()


def a_failure_after_the_commit_is_one_error_and_consumes_the_old_job_everywhere(rank: Rank) -> None:
    """Last: no rank has a job to train on with."""
    build = builder()

    class Failing(torch.nn.Module):
        def after_move(self) -> None:
            raise RuntimeError("no tables today")

    def fails_on_one(mesh: Any) -> Any:
        model, optimizer = build(mesh)
        if rank.index == 2:
            model.tables = Failing()
        return model, optimizer

    job = first(build, rank.mesh(FOUR))
    assert job is not None
    model, optimizer = job.models[0], job.optimizer
    error = rank.error(job, fails_on_one, CROSSED)
    assert isinstance(error, ss.Mismatch)
    assert "rank 2: the change to dp 2" in str(error)
    assert "is committed" in str(error)
    assert "no tables today" in str(error)
    assert len(set(rank.all(str(error)))) == 1
    assert job.is_consumed
    for use in (lambda: model.parameters(), lambda: optimizer.step()):
        with pytest.raises(ss.Mismatch, match="consumed"):
            use()


SCENARIOS = [
    a_job_that_was_refused_a_change_trains_on_as_if_not_asked,
    ranks_that_do_not_agree_on_the_change_are_told_so,
    old_objects_raise_and_tensors_held_elsewhere_stay,
    what_dry_run_says_is_what_happens_and_it_disturbs_nothing,
    the_least_order_moves_the_least,
    twenty_changes_leave_no_thread_file_or_group_behind,
    a_rank_that_missed_two_changes_takes_part_in_the_third,
    a_transfer_that_one_rank_cannot_take_writes_on_none,
    a_failure_after_the_commit_is_one_error_and_consumes_the_old_job_everywhere,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(4, SCENARIOS, Path(tmp_path_factory.mktemp("refusals")))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_four_ranks(played: Played, scenario: Any) -> None:
    played.hold(scenario)
