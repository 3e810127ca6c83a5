"""The same change through a checkpoint: Megatron's ``dist_checkpointing``, made to run on CPU.

Its save starts helper processes: one manager per rank, which lives as long as the rank, and writers, forked for each
save. Megatron spawns the manager, which imports the main script anew and takes 4 to 8 s for eight ranks on two
cores. That has nothing to do with moving state: here the manager is forked before the rank has threads, and its
start-up is told apart from the save.
"""

from __future__ import annotations

from ..adapters.megatron import Job

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

import multiprocessing as mp
import time
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from ..elastic import die_with_parent

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def start_helpers() -> float:
    """Start the helper process that saving needs, before this process has threads; seconds that it took."""
    started_s = time.perf_counter()
    manager = SyncManager(ctx=mp.get_context("fork"))
    manager.start(die_with_parent)
    filesystem_async._results_queue = manager.Queue()  # in the place of what Megatron would spawn
    return time.perf_counter() - started_s


def save(job: Job, folder: Path) -> float:
    """Save the job; seconds that it took. Called by every rank of the job."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    started_s = time.perf_counter()
    dist_checkpointing.save(_sharded_state(job, loading=False), str(folder))
    dist.barrier()
    return time.perf_counter() - started_s


def load(job: Job, folder: Path) -> float:
    """Load a checkpoint of any layout into the job's model and optimizer; seconds that it took."""
    for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        part.init_state_fn(part.optimizer, part.config)
    dist.barrier()
    started_s = time.perf_counter()
    state = dist_checkpointing.load(_sharded_state(job, loading=True), str(folder))
    _module(job).load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    dist.barrier()
    return time.perf_counter() - started_s


def _sharded_state(job: Job, *, loading: bool) -> dict[str, Any]:
    model = _module(job).sharded_state_dict()
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_METADATA)
    return {"model": model, "optimizer": optimizer}


def _module(job: Job) -> Any:
    """The one model chunk of the demo's GPT, without its wrapper."""
    return job.model[0].module
