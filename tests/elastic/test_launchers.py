"""The library side works under any launcher that sets RANK, WORLD_SIZE and MASTER_*; torchrun: cases/test_restart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os

import torch
import shardshift as ss
from tests.elastic import toy

torch.set_num_threads(1)
adapter = toy.ToyAdapter(int(os.environ["RANK"]), lambda message: None)
with ss.session(adapter, "pp1tp2dp1", resizes=ss.Script({2: "pp2tp1dp1"}), timeout_s=30) as session:
    job = session.start()
    while job and job.iteration < 4:
        if session.resize_due(job):
            job = session.resize(job) or session.start()
            continue
        with session.commit_step(job):
            job.step()
    assert job is None or job.exact()
    # One write, so that lines of several processes do not mix.
    os.write(1, f"finished {job.config if job else 'standing by'}\\n".encode())
"""
ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", **more}


def test_where_rank_0_hosts_the_store_it_leaves_last() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    told = sorted(stdout.strip() for stdout, _ in outputs)
    assert told == ["finished pp2tp1dp1", "finished pp2tp1dp1", "finished standing by"]
