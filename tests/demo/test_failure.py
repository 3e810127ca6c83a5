"""A rank of the real training job that dies or hangs ends the job with one clear error, and leaves no process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from shardshift.demo import worker
from shardshift.demo.model import ModelShape, Recipe
from shardshift.elastic import LocalJob
from shardshift.values import PeerLost

TIMEOUT_S = 6.0
VICTIM = 2


@pytest.mark.parametrize(("how", "reason"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "")])
def test_a_rank_that_is_lost_while_training_ends_the_job(how: signal.Signals, reason: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 64)
    recipe = Recipe(ModelShape(layers=4, hidden=32, sequence_length=32), steps=10_000)
    task = worker.Task(recipe, text, 3, TIMEOUT_S)
    changes: worker.Changes = {}
    arguments = (task, "pp2tp2dp1", changes, tmp_path / "states")
    with LocalJob(6, worker.train_elastic, arguments, timeout_s=TIMEOUT_S, preload=[worker.__name__]) as job:
        processes = [psutil.Process(pid) for pid in job.pids.values()]
        messages = job.messages()
        assert any(message[:2] == ("loss", 3) for _, message in messages)
        os.kill(job.pids[VICTIM], how)
        hit_s = time.monotonic()
        with pytest.raises(PeerLost) as raised:
            list(messages)
        assert time.monotonic() - hit_s < TIMEOUT_S + 5, "which is what timeout_s promises"
    assert raised.value.ranks == (VICTIM,)
    assert reason in str(raised.value)
    assert "what to do" in str(raised.value).lower()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
