"""One process of a scripted Megatron job, what may happen to it, and the keys in the store that it is told by."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from tests.megatron.harness import Scenario, initialise
from tests.megatron.ledger import Noting, Send, noting_adapter, tell_step
from tests.megatron.losing import Doom, Fault
from tests.megatron.training import Training, optimizer_step, train_step

from shardshift import Member, ParallelConfig, PeerLost, session
from shardshift.adapters.megatron import Job
from shardshift.demo import oracle
from shardshift.elastic import Session
from shardshift.elastic.agent.roster import Roster, Terms
from shardshift.elastic.member import job_store

TIMEOUT_S: Final = 30.0
HOUR: Final = timedelta(hours=1)
STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class To:
    """A change of layout on who is there."""

    layout: str


@dataclass(frozen=True, slots=True)
class Join:
    """A new process stands by, and the layout needs it."""

    layout: str


@dataclass(frozen=True, slots=True)
class Leave:
    """One that trains is announced to leave; when it stands by, it is dismissed and ends."""

    who: Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class Kill:
    """One that trains is killed: at a place of the step, as ``losing.Doom`` knows them, or "standing" between two."""

    who: Literal["first", "last"]
    where: str


Event = To | Join | Leave | Kill

IN_STEP: Final = Kill("last", "copied")
"""Only where parameters are copied from masters, as in 16 bits."""
SCRIPT: Final[tuple[Event, ...]] = (
    To("pp1tp2dp3"),
    Kill("last", "gate"),
    Join("pp2tp1dp3"),
    To("pp1tp1dp6"),
    Leave("first"),
    Join("pp1tp2dp3"),
    IN_STEP,
    To("pp2tp2dp1"),
    Join("pp2tp1dp3"),
    Leave("last"),
    Kill("first", "standing"),
    Leave("last"),
)
"""Twelve changes, three of each kind. "first" is the lead; in the step of a kill one more process stands by."""


@dataclass(frozen=True, slots=True)
class Play:
    """A job and its script.

    Attributes:
        recipe: model and training.
        start: configuration to begin with; all its processes are there from the start.
        script: what happens.
        between: steps in each layout, besides those that a change is announced ahead.
        shard_copies: as the session has it.
        forked: whether joiners come from the fork server, which spares 4 s of importing for each.
    """

    recipe: Training
    start: str = "pp2tp1dp3"
    script: tuple[Event, ...] = SCRIPT
    between: int = 1
    shard_copies: int = 0
    forked: bool = False

    @property
    def founders(self) -> int:
        """Processes at the start."""
        return ParallelConfig.parse(self.start).world_size


def act(send: Send, play: Play, folder: Path) -> None:
    """One process of the job."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    granting = _own_store()  # a wait would hold up the beats that this process shows in the member's
    if member.device not in member.founders:
        granting.wait([come_key(member.device)], HOUR)
    Roster(member.store).agree(Terms("script", 1, play.founders, 1000))
    adapter, corpus = noting_adapter(play.recipe)
    doom = Doom(member.device, (), doomed=True)
    how: dict[str, Any] = {"timeout_s": TIMEOUT_S, "policy": "keep", "survive": True, "layouts": "nearest"}
    with session(
        adapter, play.start, member=member, grow=False, sink=doom.hear, shard_copies=play.shard_copies, **how
    ) as elastic:
        go_through(send, play, folder, elastic, corpus, doom, granting)
    send("left")


def go_through(
    send: Send, play: Play, folder: Path, elastic: Session[Job], corpus: Noting, doom: Doom, granting: dist.Store
) -> None:
    """The user's loop."""
    job, told = elastic.start(lambda job: initialise(Scenario(play.recipe, play.start, {}), job)), -1
    while job is not None:
        new, told = job.generation != told, job.generation
        oracle.save_rank(job, checkpoint(folder, told, job.iteration), settled=new)
        if new:
            send(("job", told, job.iteration, job.layout.rank, str(job.config)))
        try:
            if elastic.resize_due(job):
                job = elastic.resize(job) or elastic.start()
                continue
            send(("stands", told, job.iteration))
            granting.wait([go_key(job.iteration)], HOUR)
            if granting.get(go_key(job.iteration)).decode() == STOP:
                return
            device = os.environ["RANK"]
            if granting.check([doom_key(device)]):
                doom.add(Fault(int(device), granting.get(doom_key(device)).decode(), job.iteration))
            doom.iteration = job.iteration
            corpus.drawn.clear()
            loss = train_step(job)
            doom.at("gate")
            with elastic.commit_step(job):
                doom.at("passed")
                optimizer_step(job)
            send(tell_step(job, loss, corpus))
        except (PeerLost, RuntimeError) as lost:
            job = elastic.recover(job, lost) or elastic.start()


def _own_store() -> dist.Store:
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return job_store(dist.TCPStore(*at, is_master=False, timeout=HOUR))


def checkpoint(folder: Path, generation: int, iteration: int) -> Path:
    """Where ranks write what they hold after so many steps."""
    return folder / f"{generation}-{iteration}"


def go_key(iteration: int) -> str:
    """Set when the step after so many may be taken; to ``STOP`` when that is the end."""
    return f"go/{iteration}"


def come_key(device: int) -> str:
    """Set when a joiner may come."""
    return f"come/{device}"


def doom_key(device: int | str) -> str:
    """Set to the place of the next step at which a device ends."""
    return f"doom/{device}"
