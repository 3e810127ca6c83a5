"""Megatron jobs of benchmarks that look at something while a layout changes; fresh processes import this by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from _memory import Watch, resident_bytes, trim

from shardshift import Member, Script, session
from shardshift.demo import checkpoint, oracle
from shardshift.demo.model import ModelShape, Recipe, optimizer_step, set_initial_weights, train_step
from shardshift.demo.text import default_source
from shardshift.demo.worker import Task, _quiet, _send_loss, state_folder
from shardshift.elastic import LocalJob
from shardshift.values import ParallelConfig

Send = Callable[[Any], None]
WORKER: Final = "shardshift.demo.worker"
TIMEOUT_S: Final = 120.0


def profile_job(
    shape: ModelShape, prev: str, curr: str, steps: int
) -> tuple[list[tuple[float, dict[str, int]]], float, int]:
    """Train, change layout, train on, and read rank 0's memory meanwhile.

    Returns:
        What was seen, resident bytes less those before the job was built; at how many seconds the change began; and the
        resident bytes at the end, once the C library has been told to give back what is free.
    """
    devices = max(ParallelConfig.parse(config).world_size for config in (prev, curr))
    task = Task(Recipe(shape, steps=2 * steps), default_source(), devices, TIMEOUT_S)
    seen: list[tuple[float, dict[str, int]]] = []
    changed_s, trimmed_bytes = 0.0, 0
    with LocalJob(devices, profiled, (task, prev, curr), timeout_s=TIMEOUT_S, preload=[WORKER]) as job:
        for _, message in job.messages():
            seen, changed_s, trimmed_bytes = message
    return seen, changed_s, trimmed_bytes


def train_live(send: Send, task: Task, start: str, at: int, curr: str, folder: Path) -> None:
    """One process of a job that changes layout once, at iteration ``at``, and sends its losses.

    Around the change, outside of it, the state is written for ``train_from_saved``: as the oracle's tensors before and
    after, and as a Megatron checkpoint.
    """
    _quiet()
    checkpoint.start_helpers()
    recipe, adapter = task.recipe, task.adapter()
    member = Member.from_launcher(devices_per_node=task.devices_per_node, timeout_s=task.timeout_s)
    state = state_folder(folder, at)
    with session(
        adapter, start, resizes=Script({at: curr}), member=member, prefer="bytes", timeout_s=task.timeout_s
    ) as elastic:
        job = elastic.start(lambda job: set_initial_weights(job, recipe.seed))
        saved = False
        while job and job.iteration < recipe.steps:
            if elastic.resize_due(job):
                oracle.save_rank(job, state / "before")
                checkpoint.save(job, state / "checkpoint")
                job = elastic.resize(job) or elastic.start()
                continue
            if job.generation and not saved:
                oracle.save_rank(job, state / "after")
                saved = True
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            _send_loss(send, job, loss)


def profiled(send: Send, task: Task, prev: str, curr: str) -> None:
    """One process of the job that ``profile_job`` looks at."""
    _quiet()
    recipe, adapter = task.recipe, task.adapter()
    member = Member.from_launcher(devices_per_node=task.devices_per_node, timeout_s=task.timeout_s)
    half = recipe.steps // 2
    empty_bytes = resident_bytes()
    watch = Watch({"resident": lambda: resident_bytes() - empty_bytes}, every_s=0.005)
    changed_s = 0.0
    with (
        watch,
        session(
            adapter, prev, resizes=Script({half: curr}), member=member, prefer="bytes", timeout_s=task.timeout_s
        ) as elastic,
    ):
        job = elastic.start(lambda job: set_initial_weights(job, recipe.seed))
        while job and job.iteration < recipe.steps:
            if elastic.resize_due(job):
                changed_s = watch.seen[-1][0]
                job = elastic.resize(job) or elastic.start()
                continue
            train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
        dist.barrier()
        seen = list(watch.seen)
        gc.collect()
        trim()
        trimmed_bytes = resident_bytes() - empty_bytes
        dist.barrier()
    if member.device == 0:
        send((seen, changed_s, trimmed_bytes))
