"""An elastic job: a small GPT of megatron-core that trains on, whoever joins, leaves or is lost. Runs without GPUs.

Start it with ``shardshift run``; docs/elastic.md leads through it. Model, optimizer and data are the demo's and stand
for your own (docs/megatron.md says what is asked of them).
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from pathlib import Path

import torch

import shardshift as ss
from shardshift.adapters.megatron import Job
from shardshift.demo import model as mine
from shardshift.demo.text import Corpus, read_text
from shardshift.elastic.operating.board import Board
from shardshift.elastic.operating.log import EventLog, JsonLines
from shardshift.elastic.operating.sources import FileSource


def train(asked: argparse.Namespace) -> None:
    """The training loop."""
    recipe = mine.Recipe(mine.ModelShape(layers=4, hidden=64), steps=asked.steps)
    text = read_text(Path(__file__).parent)
    member = ss.Member.from_launcher(timeout_s=asked.timeout_s)
    events = EventLog(os.environ.get("SHARDSHIFT_JOB", "train"))
    with ss.session(
        mine.make_adapter(recipe, Corpus(text, recipe.shape.sequence_length, recipe.seed)),
        asked.layout,  # to begin with; devices that it does not need stand by
        member=member,
        resizes=FileSource(asked.watch, Board(member.store)),  # beside requests and nodes that join
        layouts="nearest",  # which layout on which devices: docs/policy.md
        timeout_s=asked.timeout_s,
        survive=True,  # go on after a loss
        shard_copies=asked.copies,
        sink=events,
    ) as session:
        job = session.start(initial=lambda job: mine.set_initial_weights(job, recipe.seed))
        while job and job.iteration < asked.steps:
            try:
                if session.resize_due(job):
                    job = change(session, job, events)
                    continue
                loss = mine.train_step(job)
                with session.commit_step(job):
                    mine.optimizer_step(job)
            except (ss.PeerLost, RuntimeError) as error:  # what torch raises where a peer is gone is a RuntimeError
                job = session.recover(job, error) or session.start()
                if job:
                    events.changed(session.reports[-1])
                continue
            events.at(iteration=job.iteration)
            if job.layout.rank == job.config.world_size - 1:
                print(f"step {job.iteration} in {job.config}: loss {loss:.4f}", flush=True)
            time.sleep(asked.pause)


def change(session: ss.Session[Job], job: Job, events: EventLog) -> Job | None:
    """The job in the layout that is due; as it was, if that is refused."""
    try:
        changed = session.resize(job) or session.start()  # without a role in the new layout: stand by
    except (ss.Infeasible, ss.Mismatch, ss.Unaccounted) as refused:  # the same on all ranks; nothing has moved
        print(f"refused, and trains on: {refused}", flush=True)
        return job
    if changed:
        events.changed(session.reports[-1])
    return changed


def main() -> None:
    """Read the options, set up the log, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="pp1")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps, so that they can be read")
    parser.add_argument("--watch", type=Path, default=Path("layout.txt"), help="a file that says which layout to have")
    parser.add_argument("--log", type=Path, help="folder for structured logs, a file a process")
    parser.add_argument("--copies", type=int, default=0, help="1: keep copies of what only one rank holds")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="whoever shows no life for so long is lost")
    asked = parser.parse_args()
    if asked.log:
        asked.log.mkdir(exist_ok=True)
        handler = logging.FileHandler(asked.log / f"device{os.environ['RANK']}.jsonl")
        handler.setFormatter(JsonLines())
        logging.getLogger("shardshift").addHandler(handler)
        logging.getLogger("shardshift").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    torch.set_num_threads(1)
    train(asked)


if __name__ == "__main__":
    main()
