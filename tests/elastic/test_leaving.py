"""A node whose grace is shorter than the step in flight and a change: who goes at once, who waits, and a real one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.conftest import PRELOAD
from tests.elastic.test_joining import ROOT, Node, free_endpoint
from tests.elastic.toy import LAYERS, MODEL, ToyAdapter
from tests.unit.strategies import even_split, grid_layout

from shardshift import session
from shardshift.coordination import era_store
from shardshift.coordination.failure import record_failure
from shardshift.elastic import LocalJob, Member, Resize, job_store
from shardshift.elastic.agent.leaving import SPARE, UNMEASURED_S, Leaving, Outlook, way_to_leave
from shardshift.elastic.agent.roster import Stores
from shardshift.elastic.operating.answer import Answer
from shardshift.elastic.operating.board import STATUS_KEY, Board, BoardSource
from shardshift.elastic.operating.request import Request
from shardshift.elastic.status import EVERY_S
from shardshift.plan.holders import Holders, buddies_of
from shardshift.values import ParallelConfig, ShardshiftError

HOLD = ROOT / "tests/elastic/scripts/hold.py"
GRACE_S = 30.0
STATUS: dict[str, Any] = {
    "iteration": 10,
    "era": 0,
    "generation": 0,
    "step_s": 60.0,
    "pause_s": 1.0,
    "without": {"1": {"state": "held", "config": "pp2tp1dp1", "reason": "", "move_s": 0.5}},
}


def status(*, age_s: float = 0.0, **more: Any) -> dict[str, Any]:
    """The lead's record; ``state`` and ``config`` are those of node 1."""
    of_node = {name: more.pop(name) for name in ("state", "config") if name in more}
    record: dict[str, Any] = {**STATUS, "at_s": time.time() - age_s, **more}
    return record | {"without": {"1": STATUS["without"]["1"] | of_node}}


def outlook(**more: Any) -> Outlook:
    found = Outlook.read(status(**more), 1, time.time())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("how", "due", "way"),
    [
        # A step of a minute has just begun; a grace of 30 s.
        ({}, None, "at once"),
        ({"state": "checkpoint"}, None, "at once"),
        ({"state": "lost"}, None, "announced"),
        ({"config": ""}, None, "announced"),
        # It ends in 20 s; then the change may come at once, but not a step later.
        ({"age_s": 40.0}, None, "announced"),
        ({"age_s": 40.0}, 11, "announced"),
        ({"age_s": 40.0}, 12, "at once"),
        # It ends in 20 s, and a change takes 8 s, by experience and with something to spare.
        ({"age_s": 40.0, "pause_s": 8.0}, None, "at once"),
        ({"age_s": 40.0, "pause_s": 8.0, "state": "checkpoint"}, None, "announced"),
        # The change may have begun: it is not cut short, however little time is left.
        ({"age_s": 61.0, "pause_s": 100.0}, 11, "announced"),
        # Steps take a tenth of a second; but the one in flight is late by more than is left.
        ({"step_s": 0.1}, None, "announced"),
        ({"step_s": 0.1}, 12, "announced"),
        ({"step_s": 0.1, "age_s": 0.1 + EVERY_S}, None, "announced"),
        ({"step_s": 0.1, "age_s": 32.2}, None, "at once"),
    ],
)
def test_a_node_goes_at_once_if_its_grace_is_too_short_and_others_have_its_state(
    how: dict[str, Any], due: int | None, way: str
) -> None:
    assert way_to_leave(outlook(**how), due, GRACE_S) == way


def test_a_node_of_which_nobody_knows_what_its_going_would_mean_is_announced() -> None:
    for record in (status() | {"without": {}}, status(step_s=None)):
        assert Outlook.read(record, 1, time.time()) is None
    assert way_to_leave(None, None, 0.0) == "announced"


def test_a_pause_that_was_never_measured_is_the_move_and_a_margin() -> None:
    told = outlook(pause_s=None)
    assert told.pause_s == 0.5 + UNMEASURED_S
    assert told.done_in_s(None) == pytest.approx(60.0 + SPARE * 2.5, abs=0.5)


class Told:
    """Workers that are only told things."""

    def __init__(self) -> None:
        self.pids = {2: 100, 3: 101}
        self.told: list[signal.Signals] = []

    def tell(self, number: signal.Signals) -> None:
        self.told.append(number)


class OneNode:
    """Node 1 leaves a job whose store is here."""

    def __init__(self, slot: int = 1, store: dist.Store | None = None) -> None:
        self.store = dist.HashStore() if store is None else store
        self.lines: list[str] = []
        self.workers = Told()
        self.leaving = Leaving(slot, HashStores(self.store), grace_s=GRACE_S, say=self.lines.append)  # type: ignore[arg-type]

    def looks(self, record: dict[str, Any]) -> str | None:
        self.store.set(STATUS_KEY, json.dumps(record))
        if not self.leaving.begun:
            self.leaving.begin(self.workers, others=True)  # type: ignore[arg-type]
        return self.leaving.look(self.workers)  # type: ignore[arg-type]


class HashStores:
    current = Stores.current

    def __init__(self, store: dist.Store) -> None:
        self.job = store

    def era(self, number: int) -> dist.Store:
        return era_store(self.job, number)


def test_who_goes_at_once_says_why_to_its_own_and_to_the_others() -> None:
    node = OneNode()
    why = node.looks(status())
    assert why is not None
    assert "went at once" in why
    assert "30.0 s are left" in why
    assert node.leaving.at_once
    assert "node 1 goes at once" in node.lines[-1]
    assert "what they hold" in node.lines[-1]


def test_the_checkpoint_is_named_where_it_is_what_the_others_go_on_from() -> None:
    node = OneNode()
    assert node.looks(status(state="checkpoint")) is not None
    assert "last checkpoint" in node.lines[-1]


def test_a_record_of_another_era_or_layout_is_not_relied_on() -> None:
    node = OneNode()
    assert node.looks(status(era=1)) is None
    era = era_store(node.store, 0)
    course = {"config": "dp2", "devices": [0, 1], "generation": 1, "attempt": 1, "lost": []}
    era.set("course", json.dumps(course))
    assert node.looks(status()) is None
    assert node.looks(status(generation=1)) is not None


def test_after_a_loss_it_waits_until_the_others_have_recovered() -> None:
    node = OneNode()
    record_failure(era_store(node.store, 0), [5], "run", "was killed")
    assert node.looks(status()) is None
    assert not node.leaving.at_once


def test_two_nodes_that_hold_each_others_copies_do_not_go_together() -> None:
    first = OneNode()
    second = OneNode(2, first.store)
    both = status()
    both["without"]["2"] = both["without"]["1"]
    assert first.looks(both) is not None
    assert second.looks(both) is None
    first.store.set("era", "1")  # the others have begun to recover
    assert second.looks(both) is None
    assert second.looks(both | {"era": 1}) is not None


def test_a_job_that_has_refused_lets_nobody_go_at_once() -> None:
    node = OneNode()
    assert node.looks(status(config="")) is None
    Board(node.store).write(1, Answer("refused", "no layout for 2 devices"))
    assert node.looks(status()) is None
    assert node.workers.told == [signal.SIGTERM]
    assert "no layout for 2 devices" in node.lines[-2]


@pytest.mark.parametrize(
    ("within_s", "pause_s", "steps"), [(6.0, 0.0, 2), (6.0, 1.0, 1), (3.0, 1.0, 1), (2.9, 1.0, 0), (0.1, 0.0, 0)]
)
def test_a_leave_is_announced_as_far_ahead_as_its_grace_allows(within_s: float, pause_s: float, steps: int) -> None:
    store = dist.HashStore()
    board = Board(store)
    store.set(STATUS_KEY, json.dumps({"config": "dp4", "devices": [0, 1, 2, 3], "step_s": 1.0, "pause_s": pause_s}))
    board.post(Request(leave=(3,), within_s=within_s))
    source = BoardSource(board, lambda: range(4), lambda devices: ParallelConfig(dp=len(devices)))
    assert source.upcoming(10) == Resize(10 + steps, ParallelConfig(dp=3), (0, 1, 2))


class Late:
    """A source that says of a change only when the step is ending after which it is due."""

    alike = False

    def upcoming(self, iteration: int) -> Resize | None:
        return Resize(2, ParallelConfig(dp=3), (0, 1, 2)) if iteration == 2 else None

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        pass


def train_until_told_late(send: Callable[[Any], None]) -> None:
    member = Member.from_launcher(timeout_s=30.0)
    adapter = ToyAdapter(member.device, send)
    with session(adapter, "pp2dp2", resizes=Late(), member=member, policy="keep", timeout_s=30.0) as elastic:
        job = elastic.start()
        while job and job.iteration < 4:
            if elastic.resize_due(job):
                job = elastic.resize(job)
                continue
            job.step()
            with elastic.commit_step(job):
                pass
        send((job and (str(job.config), job.exact()), [report.iteration for report in elastic.reports]))


@pytest.mark.timeout(60)
def test_a_change_may_be_announced_while_the_step_ends_after_which_it_is_due() -> None:
    with LocalJob(4, train_until_told_late, (), timeout_s=30.0, preload=PRELOAD) as job:
        told = dict(job.messages())
    trains = (("pp1tp1dp3", True), [2])
    assert told == {0: trains, 1: trains, 2: trains, 3: (None, [2])}


@pytest.mark.parametrize("config", ["pp2dp2", "pp2tp2", "tp2dp2", "dp4"])
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_lost_with_some_ranks_is_what_no_other_rank_holds(config: str, copies: bool) -> None:
    """Held against sets of single elements."""
    parsed = ParallelConfig.parse(config)
    layout = grid_layout(MODEL, parsed, even_split(LAYERS, parsed.pp))
    buddies = buddies_of(range(4), 2) if copies else None
    held: dict[Any, set[int]] = {}
    for rank in range(4):
        for shard in layout.shards(rank):
            grid = np.indices(shard.region.shape).reshape(len(shard.region.shape), -1).T + shard.region.offsets
            for at in grid.tolist():
                held.setdefault((shard.tensor, *at), set()).add(rank)
    for buddy, ranks in [(buddies[rank], rank) for rank in range(4)] if buddies else []:
        for holders in held.values():
            if holders == {ranks}:
                holders.add(buddy)
    for lost in product([False, True], repeat=4):
        gone = {rank for rank, is_gone in enumerate(lost) if is_gone}
        kinds = {str(tensor.kind) for (tensor, *_), holders in held.items() if holders <= gone}
        assert {*Holders(layout).lost_with(gone, buddies)} == kinds, gone


@pytest.mark.timeout(120)
def test_a_node_that_is_told_to_leave_in_a_step_longer_than_its_grace_goes_at_once(tmp_path: Path) -> None:
    """The step waits in node 1 for what never comes; as the lead has it, steps take ten minutes."""
    endpoint = free_endpoint()
    host, _, port = endpoint.rpartition(":")
    options = ("--nnodes", "2:2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "--control", "none")
    stop = tmp_path / "stop"
    nodes: list[Node] = []
    try:
        nodes += [Node(tmp_path, *options, "--grace-s", "300", stop=stop, start="dp2", script=HOLD) for _ in range(2)]
        firsts = [node.says(" trains pp1tp1dp2 exact") for node in nodes]
        held, other = nodes if firsts[0].startswith("1:") else reversed(nodes)
        (tmp_path / "hold").touch()
        held.says("1: holds")
        store = job_store(dist.TCPStore(host, int(port), timeout=timedelta(seconds=20)))
        record = Board(store).status()
        assert record is not None
        store.set(STATUS_KEY, json.dumps(record | {"step_s": 600.0, "at_s": time.time()}))
        held.process.send_signal(signal.SIGTERM)
        held.says("goes at once", "what they hold of its state")
        assert held.end() == 0, "".join(held.lines)
        other.says("recovered exact")
        other.says("trains pp1tp1dp1 exact")
        stop.touch()
        assert other.end() == 0, "".join(other.lines)
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()
