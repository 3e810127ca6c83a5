"""A restart: torchrun starts the new layout's processes, which import torch, meet, and load what the old ones saved.

1. *save* is that of ``checkpoint``, of whose files one set is kept.
2. *start*: from torchrun's beginning until the last process runs its first line; *import*; *meet*: torch's default
   group; *load*: as ``checkpoint`` loads, but with the metadata read and memory that is new. Each part is from the last
   process's end of the one before.

What a job has to do beside that is left out: to end the old processes, import the framework, build model and optimizer
and their groups (``elastic`` has all of it, with Megatron). The old processes are gone when this is timed. One run.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from _state import coded, dtype_of

from shardshift.plan import Plan
from shardshift.transport.views import byte_view
from shardshift.values import ParallelConfig, Shard

from .checkpoint import cut_of, logical, mesh_of

NAME: Final = "torchrun restart"
SCRIPT: Final = Path(__file__).parents[1] / "_fresh.py"
_PARTS: Final = (("start", "began"), ("import", "imported"), ("meet", "met"), ("load", "loaded"))
_LIMIT_S: Final = 300.0


def checkpoint_of(folder: Path) -> Path:
    """Where the checkpoint of a restart has to lie."""
    return folder / "checkpoint"


def restarted(plan: Plan, curr: ParallelConfig, folder: Path) -> dict[str, float]:
    """Milliseconds by part, without the save. What was loaded is checked.

    Args:
        plan: rank r of its new layout is rank r of the job.
        curr: the new configuration.
        folder: with the checkpoint.

    Raises:
        RuntimeError: with what it printed, if the job failed.
        AssertionError: if what it loaded is wrong.
    """
    layout = plan.curr.layout
    for rank in range(layout.world_size):
        tensors = [
            (name, shard.tensor.dtype, shard.region.shape, shard.tensor.shape, cut_of(shard))
            for name, shard in logical(layout.shards(rank)).items()
        ]
        (folder / f"{rank}.pkl").write_bytes(pickle.dumps((mesh_of(curr, rank), tensors)))
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(layout.world_size)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder)]
    began_s = time.perf_counter()
    with subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            printed, _ = job.communicate(timeout=_LIMIT_S)
        except BaseException:
            job.terminate()  # torchrun ends its processes
            raise
    if job.returncode:
        raise RuntimeError(f"torchrun ended with {job.returncode}:\n{printed[-4000:]}")
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(layout.world_size)]
    _check(plan, [sums for _, sums in told])
    ends_s = [began_s, *(max(times[what] for times, _ in told) for _, what in _PARTS)]
    return {part: (end - start) * 1e3 for (part, _), (start, end) in zip(_PARTS, pairwise(ends_s), strict=True)}


def _check(plan: Plan, found: list[dict[str, int]]) -> None:
    right: dict[Shard, int] = {}
    for rank, sums in enumerate(found):
        for name, shard in logical(plan.curr.layout.shards(rank)).items():
            if not shard.nbytes:
                continue
            if shard not in right:
                tensor = coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard)))
                right[shard] = zlib.crc32(byte_view(tensor).numpy().data)
            assert sums[name] == right[shard], f"{NAME}: rank {rank}: {shard} is wrong"
