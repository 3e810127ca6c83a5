"""What runs in the demo's processes: the elastic run, a run started from a saved state, and a fixed run.

The elastic run goes on while its launcher starts processes, as agents of nodes do: a process that joins stands by until
a change gives it a role, one that a change leaves without a role ends. Before a change is announced that needs more
processes than there are, the others wait until those stand by, so that it is due at the same step in every run; with
some steps before it, they are there by then.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import session
from ..adapters import Place
from ..adapters.megatron import Adapter, Job
from ..coordination import present_store, stands_by
from ..elastic import Member, Resize, ResizeReport
from ..elastic.agent.roster import Roster, Terms
from ..elastic.resize import AHEAD
from ..engine.events import nowhere, phase
from ..values import ParallelConfig, PeerLost, ShardshiftError
from . import checkpoint, oracle
from .model import Recipe, make_adapter, optimizer_step, set_initial_weights, train_step
from .text import Corpus, read_text

Send = Callable[[Any], None]
Changes = dict[int, str]
"""Per iteration the configuration to change to."""


JOIN_S = 120.0
"""For so long those that train wait for those that join."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Task:
    """What all of the demo's runs share.

    Attributes:
        recipe: model and training.
        data: text file or folder.
        devices_per_node: processes that stand for one node.
        timeout_s: the longest that a collective may take.
        tells: whether the elastic run sends the events of its changes, each as a message.
    """

    recipe: Recipe
    data: Path
    devices_per_node: int
    timeout_s: float
    tells: bool = False

    def adapter(self) -> Adapter:
        """The adapter of this training."""
        corpus = Corpus(read_text(self.data), self.recipe.shape.sequence_length, self.recipe.seed)
        return make_adapter(self.recipe, corpus)


class Announced:
    """The changes as a ``ResizeSource`` that is asked on the lead: each is announced ``AHEAD`` steps before it is due.

    Unlike ``Script``, which announces all of them at once: then plans would be made before there are joiners.
    """

    alike = False

    def __init__(self, changes: Changes) -> None:
        self._resizes = [Resize(at, ParallelConfig.parse(config)) for at, config in sorted(changes.items())]

    def upcoming(self, iteration: int) -> Resize | None:
        """See ``ResizeSource``."""
        return next((one for one in self._resizes if iteration <= one.iteration <= iteration + AHEAD), None)

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Each change has one time."""


def joiners(start: str, changes: Changes) -> dict[int, range]:
    """Per iteration of a change that needs more processes than train, the devices that join for it."""
    train = known = ParallelConfig.parse(start).world_size
    found: dict[int, range] = {}
    for at, config in sorted(changes.items()):
        needed = ParallelConfig.parse(config).world_size
        if needed > train:
            found[at] = range(known, known + needed - train)
            known = found[at].stop
        train = needed
    return found


def train_elastic(send: Send, task: Task, start: str, changes: Changes, folder: Path) -> None:
    """The main job: train, and change layout where the script says; one call in each process.

    At each change it also writes the state before and after for the oracle, and a Megatron checkpoint, all of it
    outside the measured pause.
    """
    _quiet()
    send(("helpers", checkpoint.start_helpers()))
    recipe, adapter = task.recipe, task.adapter()
    per_node = task.devices_per_node
    member = Member.from_launcher(devices_per_node=per_node, timeout_s=task.timeout_s)
    founders = len(member.founders) // per_node
    Roster(member.store).agree(Terms("demo", per_node, founders, founders + len(changes)))  # an agent's part elsewhere
    waits = {max(at - AHEAD, 1) - 1: devices for at, devices in joiners(start, changes).items()}
    sink = send if task.tells else nowhere
    with session(
        adapter,
        start,
        resizes=Announced(changes),
        member=member,
        prefer="bytes",  # the nodes are pretended, and the demo shows the least movement
        timeout_s=task.timeout_s,
        grow=False,
        sink=sink,
    ) as elastic:
        job = elastic.start(lambda job: set_initial_weights(job, recipe.seed))
        if job:
            send(("began", os.getpid()))
            if elastic.reports:
                _after_change(send, job, elastic.reports[-1], folder)
        while job and job.iteration < recipe.steps:
            if elastic.resize_due(job):
                state = state_folder(folder, job.iteration)
                oracle.save_rank(job, state / "before")
                send(("saved", job.iteration, checkpoint.save(job, state / "checkpoint"), os.getpid()))
                with phase(sink, member.device, f"to {changes[job.iteration]}"):
                    job = elastic.resize(job)
                if job:
                    _after_change(send, job, elastic.reports[-1], folder)
                continue  # without a role in the new layout: this process ends
            if job.iteration in waits:
                _await_joiners(member, waits.pop(job.iteration))
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            _send_loss(send, job, loss)


def train_from_saved(send: Send, task: Task, config: str, iteration: int, until: int, folder: Path) -> None:
    """Start in fresh processes from the state saved before a change, in the layout after it, and train on.

    First the Megatron checkpoint is loaded, for its time; then the oracle's state replaces it, and training goes on
    from that. One of the processes compares the whole state before the change with the one after.
    """
    _quiet()
    adapter = task.adapter()
    state = state_folder(folder, iteration)
    records = oracle.read_ranks(state / "before")
    logical = oracle.assemble(records)
    job, build_s = _start(task, adapter, config, records[0]["consumed_samples"])
    load_s = checkpoint.load(job, state / "checkpoint")
    exact = oracle.holds(job, logical)
    send(("loaded", build_s, load_s, exact))
    oracle.load_rank(job, records, logical)
    if job.layout.rank == 0:
        send(("compared", oracle.same_state(logical, oracle.assemble(oracle.read_ranks(state / "after")))))
    _train(send, adapter, job, until)


def train_fixed(send: Send, task: Task, config: str) -> None:
    """The same training without any change of layout."""
    _quiet()
    adapter = task.adapter()
    job, _ = _start(task, adapter, config, 0)
    set_initial_weights(job, task.recipe.seed)
    _train(send, adapter, job, task.recipe.steps)


def state_folder(folder: Path, iteration: int) -> Path:
    """Where the states around the change at an iteration are."""
    return folder / f"change{iteration}"


def _quiet() -> None:
    """One thread a process, of which there are more than cores; no warnings of megatron's and torch's own making."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _start(task: Task, adapter: Adapter, config: str, consumed_samples: int) -> tuple[Job, float]:
    """A job of one layout on all processes, without a session; and the seconds that groups and model took."""
    member = Member.from_launcher(timeout_s=task.timeout_s)
    store = dist.PrefixStore("world", member.store)
    started_s = time.perf_counter()
    job = adapter.start(Place(store, ParallelConfig.parse(config), member.device, task.timeout_s), consumed_samples)
    dist.barrier()
    return job, time.perf_counter() - started_s


def _train(send: Send, adapter: Adapter, job: Job, until: int) -> None:
    while job.iteration < until:
        loss = train_step(job)
        optimizer_step(job)
        adapter.advance(job)
        _send_loss(send, job, loss)
    dist.barrier()
    adapter.retire(job)


def _send_loss(send: Send, job: Job, loss: float | None) -> None:
    at = job.layout.coordinate
    if loss is not None and at.tp == 0 and at.dp == 0:
        send(("loss", job.iteration, loss))


def _after_change(send: Send, job: Job, report: ResizeReport, folder: Path) -> None:
    oracle.save_rank(job, state_folder(folder, report.iteration) / "after")
    send(("changed", report, os.getpid()))


def _await_joiners(member: Member, devices: range) -> None:
    """Wait between two steps until processes that join stand by.

    Raises:
        PeerLost: if some do not come; then the launcher has said so already, if they died.
    """
    roster, until_s = Roster(member.store), time.monotonic() + JOIN_S
    while missing := {*devices} - {*roster.devices_here()} or {
        device for device in devices if not stands_by(present_store(member.store), device)
    }:
        if time.monotonic() > until_s:
            raise PeerLost(sorted(missing), "join", f"did not stand by within {JOIN_S:.0f} s")
        time.sleep(_LOOK_S)
