"""After a crash in the middle of a change: survivors hold the old state, and a restart goes on past the leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.test_failures import Failing
from tests.elastic.toy import Fault, Recipe, ToyAdapter, open_session

from shardshift.elastic import LocalJob, Member, transition
from shardshift.engine import Journal
from shardshift.transport import Transport
from shardshift.values import PeerLost, ShardshiftError

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


def fail_half_way() -> None:
    """Let this process raise in the middle of a move, what cannot be pickled."""
    run_program: Any = transition.run_program  # type: ignore[attr-defined]

    def failing(journal: Journal, transport: Transport, **options: Any) -> Any:
        return run_program(journal, Failing(transport, 4), **options)

    transition.run_program = failing  # type: ignore[attr-defined]


def train_until_lost(send: Any, recipe: Recipe, how: str) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=recipe.timeout_s)
    if how == "raise" and member.device == 2:
        fail_half_way()
    adapter = ToyAdapter(member.device, send, recipe.faults)
    with open_session(adapter, member, recipe) as elastic:
        job = elastic.start()
        while job and job.iteration < recipe.steps:
            before = job
            if elastic.resize_due(job):
                try:
                    job = elastic.resize(job) or elastic.start()
                except PeerLost as lost:
                    send(("lost", lost.ranks, before.exact(), before.iteration, str(before.config)))
                    raise
                continue
            job.step()
            with elastic.commit_step(job):
                pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_survivors_of_a_crash_in_a_move_hold_the_whole_old_state_and_configuration(how: str) -> None:
    faults = (Fault(2, "move", how),) if how == "kill" else ()
    recipe = Recipe("pp2tp2", {2: "tp4"}, faults=faults, timeout_s=TIMEOUT_S)
    told: dict[int, Any] = {}
    with LocalJob(4, train_until_lost, (recipe, how), timeout_s=TIMEOUT_S) as job:
        try:
            for device, message in job.messages():
                if message[0] == "lost":
                    told[device] = message[1:]
                if len(told) == 3:
                    break
        except ShardshiftError:  # what the launcher says of worker 2; it is the survivors' word that is asked for
            pass
    assert told == dict.fromkeys((0, 1, 3), ((2,), True, 2, "pp2tp2dp1"))


PROGRAM = """
import os

import torch
import shardshift as ss
from tests.elastic import toy

torch.set_num_threads(1)
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
faults = (toy.Fault(1, "move", "exit"),) if attempt == 0 else ()
adapter = toy.ToyAdapter(rank, lambda message: None, faults)
moved = lambda event: toy.half_way(adapter, event)
changes = ss.Script({1: "tp3", 2: "pp2tp1dp1"})
settings = dict(resizes=changes, timeout_s=20, staging_bytes=200, sink=moved)
with ss.session(adapter, "pp1tp2dp1", **settings) as session:
    job = session.start()
    while job and job.iteration < 3:
        if session.resize_due(job):
            job = session.resize(job) or session.start()
            continue
        with session.commit_step(job):
            job.step()
    assert job is None or job.exact()
    os.write(1, f"attempt {attempt} finished {job.config if job else 'standing by'}\\n".encode())
"""


@pytest.mark.timeout(100)
def test_a_job_that_torchrun_starts_again_after_a_crash_in_a_change_makes_the_next_ones(tmp_path: Path) -> None:
    """The store lives on in torchrun's agent, with all that the first attempt left in it.

    Its second attempt is also what shows that a job runs under torchrun.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--nproc-per-node", "3", "--max-restarts", "1", "--monitor-interval", "0.1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("attempt")) == [
        "attempt 1 finished pp2tp1dp1",
        "attempt 1 finished pp2tp1dp1",
        "attempt 1 finished standing by",
    ]
