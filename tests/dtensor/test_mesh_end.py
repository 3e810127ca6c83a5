"""How a process ends that has changed its mesh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import atexit, os
from pathlib import Path

def tell():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(sum("gloo" in name for name in names), flush=True)

atexit.register(tell)  # called last

import torch.distributed as dist
from tests.dtensor.test_one_rank import HERE, THERE, build, change, job, train

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = job()
for to in (THERE, HERE, THERE):
    found = change(found, build, to)
    train(found.model, found.optimizer)
tell()
dist.destroy_process_group()
del found
"""


def test_no_group_lives_until_the_interpreter_is_torn_down() -> None:
    """A thread of a group that takes the interpreter's lock then ends the process by SIGABRT, now and then."""
    argv = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 0
    assert after == 0
