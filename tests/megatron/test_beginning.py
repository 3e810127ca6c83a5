"""A job that begins from a checkpoint goes on in its data where the checkpoint was written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.megatron.harness import TIMEOUT_S, Send, run_processes
from tests.megatron.training import (
    Training,
    advance,
    corpus_of,
    leave_plain,
    make_adapter,
    optimizer_step,
    start_plain,
    train_step,
    training,
)

from shardshift import Member, ParallelConfig, session
from shardshift.adapters.megatron import Job
from shardshift.demo import oracle
from shardshift.demo.model import set_initial_weights

CONFIG = "pp1tp1dp2"


def begin_again(send: Send, recipe: Training, folder: Path) -> None:
    """Four steps without shardshift, saved after two; then a session that begins with what was saved."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    plain: Any = start_plain(
        recipe, dist.PrefixStore("plain", member.store), ParallelConfig.parse(CONFIG), member.device
    )
    set_initial_weights(plain, recipe.seed)
    while plain.iteration < 4:
        loss = train_step(plain)
        optimizer_step(plain)
        advance(plain)
        send(("plain", plain.iteration, loss))
        if plain.iteration == 2:
            oracle.save_rank(plain, folder, settled=False)
            dist.barrier()
    leave_plain()

    def load(job: Job) -> None:
        records = oracle.read_ranks(folder)
        oracle.load_rank(job, records, oracle.assemble(records))
        job.begin_at(2, 2 * recipe.global_batch_size)

    with session(make_adapter(recipe, corpus_of(recipe)), CONFIG, member=member, timeout_s=TIMEOUT_S) as elastic:
        job = elastic.start(load)
        assert job is not None
        send(("begins", job.iteration, job.position.consumed_samples))
        while job.iteration < 4:
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            send(("session", job.iteration, loss))


def test_the_next_batch_is_the_one_after_the_checkpoint(tmp_path: Path) -> None:
    recipe = training(4)
    told: dict[str, dict[int, set[float]]] = {}
    for _, (what, iteration, value) in run_processes(2, begin_again, recipe, tmp_path):
        told.setdefault(what, {}).setdefault(iteration, set()).add(value)
    assert told["begins"] == {2: {2 * recipe.global_batch_size}}
    assert told["session"] == {iteration: told["plain"][iteration] for iteration in (3, 4)}
