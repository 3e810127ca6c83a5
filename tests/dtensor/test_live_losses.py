"""Ranks that die, or never come: every survivor raises ``PeerLost`` and holds the old state, and goes on from there.

One job of five ranks loses one after the other. What survivors hold is whole, so they go on as a smaller job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from tests.dtensor.models import builder, differing, first, full, losses
from tests.dtensor.ranks import Rank, world
from torch.distributed import distributed_c10d as c10d

import shardshift as ss
from shardshift.elastic import LocalJob
from shardshift.engine.events import RoundEnded

pytestmark = pytest.mark.alone

SHORT_S: Final = 4.0


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal:
    """An extra whose state kills."""

    def state_dict(self) -> dict[str, Any]:
        end()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def lost_in_change(job: ss.fsdp.Job, build: Any, to: ss.Mesh, **options: Any) -> str:
    """What a change that loses a rank says."""
    before = full(job)
    try:
        ss.migrate(job, build, to, timeout_s=SHORT_S, **options)
    except ss.PeerLost as error:
        assert differing(before, full(job)) == []
        assert not job.is_consumed
        return str(error)
    raise AssertionError("nobody was lost")


def whole_on(ranks: list[int], job: ss.fsdp.Job) -> ss.fsdp.Job:
    """The job of the survivors: their tensors are whole (DDP before, plain now)."""
    model: Any = job.model
    return ss.fsdp.Job(getattr(model, "module", model), job.optimizer, mesh=ss.Mesh({"plain": len(ranks)}, ranks))


def _lose_one_after_the_other(send: Callable[[Any], None], folder: Path) -> None:
    world()
    rank = Rank(folder)
    build = builder()
    job = first(build, rank.mesh(ss.Mesh({"ddp": 5})))
    assert job is not None
    losses(job, 1)
    expected = full(job)
    if rank.index == 4:
        job.extras["fatal"] = Fatal()
    send(("tell", lost_in_change(job, build, ss.Mesh({"plain": 5}))))

    def dies(_: Any) -> Any:
        end()

    job = whole_on([0, 1, 2, 3], job)
    send(("make", lost_in_change(job, dies if rank.index == 3 else build, ss.Mesh({"plain": 4}, [3, 2, 1, 0]))))

    # Sharded on three, so that a change has something to send.
    moved = ss.migrate(whole_on([0, 1, 2], job), build, ss.Mesh({"dp": 3}, [0, 1, 2]), timeout_s=60.0)
    assert moved is not None
    assert differing(expected, full(moved)) == []
    send(("went on", None))

    def at_a_round(event: Any) -> None:
        if isinstance(event, RoundEnded) and rank.index == 2:
            end()

    before = {name: parameter.to_local().clone() for name, parameter in _sharded(moved)}
    try:
        ss.migrate(moved, build, ss.Mesh({"dp": 3}, [2, 0, 1]), timeout_s=SHORT_S, sink=at_a_round, staging_bytes=4096)
    except ss.PeerLost as error:
        assert all(torch.equal(parameter.to_local(), before[name]) for name, parameter in _sharded(moved))
        assert not moved.is_consumed
        send(("move", str(error)))
    # What only the lost rank held is gone, and says so.
    rest = ss.fsdp.Job(moved.model, moved.optimizer, mesh=ss.Mesh({"dp": 2}, [0, 1]))
    try:
        ss.migrate(rest, build, ss.Mesh({"dp": 2}, [0, 1]), timeout_s=60.0)
    except ss.ShardshiftError as error:
        send(("gone", f"{type(error).__name__}: {error}"))
    # A joiner that never comes, and a rank of the old job that never does. All get a minute for the first meeting.
    mock.patch("shardshift.engine.mover._MEETING_S", 1.0).start()
    store = c10d._get_default_store()
    if rank.index == 0:
        store.wait(["not invited"])
        alone = ss.fsdp.Job(torch.nn.Linear(2, 2), mesh=ss.Mesh({"dp": 1}, [0]))
        try:
            ss.migrate(alone, lambda _: torch.nn.Linear(2, 2), ss.Mesh({"dp": 2}, [0, 1]), timeout_s=1.0)
        except ss.PeerLost as error:
            send(("never came", str(error)))
    else:
        try:
            ss.migrate(None, build, ss.Mesh({"dp": 1}, [1]), timeout_s=1.0)
        except ss.PeerLost as error:
            send(("not invited", str(error)))
        store.set("not invited", "")
    os._exit(0)  # the world's groups hold lost ranks; leaving them in an orderly way would wait


def _sharded(job: ss.fsdp.Job) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in job.models[0].named_parameters() if name != "scale"]


def test_survivors_of_each_loss_hold_the_old_state_and_go_on(tmp_path: Path) -> None:
    told: dict[str, dict[int, Any]] = {}
    with LocalJob(5, _lose_one_after_the_other, (tmp_path,), timeout_s=60.0, survives=True) as job:
        for rank, (word, text) in job.messages():
            told.setdefault(word, {})[rank] = text
    assert {word: sorted(of_rank) for word, of_rank in told.items()} == {
        "tell": [0, 1, 2, 3],
        "make": [0, 1, 2],
        "went on": [0, 1, 2],
        "move": [0, 1],
        "gone": [0, 1],
        "never came": [0],
        "not invited": [1],
    }
    for word, lost in (("tell", 4), ("make", 3), ("move", 2), ("never came", 1)):
        for text in told[word].values():
            assert f"lost rank {lost}" in text
    assert all(text.startswith("StateLost") for text in told["gone"].values())
