"""Megatron jobs that lose ranks, in the user's own loop; and the same training with the same changes and no loss.

A loss is ordered by a ``Fault``: this device ends itself (or stops) at this place of the step after so many. What the
survivors make of it is a change of layout between two steps, so a calm run that makes the same change there is the
truth for everything that comes after: state, random streams, samples, learning rate, losses.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.megatron import training as trained
from tests.megatron.harness import Scenario, initialise, make_adapter
from tests.megatron.training import Training, corpus_of, optimizer_step, train_step

from shardshift import Member, ParallelConfig, PeerLost, Resize, ShardshiftError, session
from shardshift.adapters.megatron import Job
from shardshift.adapters.megatron.change import MegatronChange
from shardshift.demo import oracle
from shardshift.elastic import LocalJob, Session
from shardshift.elastic.transition import Transition
from shardshift.engine.events import Event, RoundEnded

# isort: split

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

TIMEOUT_S = 20.0
WORKER = "shardshift.demo.worker"
ANY = -1
Send = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One device's end.

    Attributes:
        device: which; ``ANY`` for every one that trains, but for device 0.
        where: the place, as ``Doom`` and ``go_through`` know them.
        iteration: finished steps when it comes there; for ``ANY`` the generation.
        how: the signal.
    """

    device: int
    where: str
    iteration: int
    how: int = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Run:
    """A training run.

    Attributes:
        recipe: model and training.
        start: configuration to begin with.
        devices: processes.
        faults: the losses.
        changes: (iteration, configuration) of each change that is asked for, in order.
        settings: of the session.
        counts: whether threads and descriptors are counted, after each turn of the loop.
        timeout_s: of the session; how long it takes until one that has stopped is missed.
    """

    recipe: Training
    start: str
    devices: int
    faults: tuple[Fault, ...] = ()
    changes: tuple[tuple[int, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts: bool = False
    timeout_s: float = TIMEOUT_S


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        recovered: per device what each recovery told: who was lost, where it went on and as what.
        jobs: per generation (device, rank, iteration, configuration) of each rank.
        losses: by (generation, iteration).
        ends: devices that came to the end of training.
        errors: per device the error that ended it.
        counts: per device (generation, threads, descriptors), after each turn of the loop.
    """

    recovered: dict[int, list[tuple[tuple[int, ...], int, str]]] = field(default_factory=dict)
    jobs: dict[int, list[tuple[int, int, int, str]]] = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    errors: dict[int, ShardshiftError] = field(default_factory=dict)
    counts: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def hear(self, device: int, message: Any) -> None:
        """Take note of what a worker sends."""
        match message:
            case ("recovered", *what):
                self.recovered.setdefault(device, []).append((what[0], what[1], what[2]))
            case ("job", int(generation), *what):
                self.jobs.setdefault(generation, []).append((device, what[0], what[1], what[2]))
            case ("loss", int(generation), int(iteration), float(loss)):
                assert self.losses.setdefault((generation, iteration), loss) == loss, "replicas disagree"
            case ("count", *numbers):
                self.counts.setdefault(device, []).append((numbers[0], numbers[1], numbers[2]))
            case ("error", wire):
                self.errors[device] = ShardshiftError.from_wire(wire)
            case "end":
                self.ends.add(device)
            case _:
                raise AssertionError(message)


def play(run: Run, folder: Path) -> Outcome:
    """A run, until all have ended that no signal has stopped."""
    outcome, last = Outcome(), survivors(run) if any(fault.how == signal.SIGSTOP for fault in run.faults) else None
    with LocalJob(
        run.devices, worker, (run, folder), timeout_s=run.timeout_s, preload=[WORKER], survives=bool(run.faults)
    ) as job:
        for device, message in job.messages():
            outcome.hear(device, message)
            if last is not None and last <= outcome.ends | outcome.errors.keys():
                break  # one that has stopped does not end
    return outcome


def survivors(run: Run) -> set[int]:
    """The devices that no fault names."""
    return {*range(run.devices)} - {fault.device for fault in run.faults}


class Walk:
    """One change after the other, of which several may come at one iteration.

    One that keeps the configuration, as a recovery may, moves it off the lowest device that it is on.

    Attributes:
        made: how many are over, and
        on: the devices that the job is on now; the loop says so.
    """

    alike = True

    def __init__(self, run: Run) -> None:
        self.made = 0
        self.on: tuple[int, ...] = ()
        self._changes, self._devices = run.changes, range(run.devices)

    def upcoming(self, iteration: int) -> Resize | None:
        if self.made >= len(self._changes):
            return None
        at, config = self._changes[self.made]
        stays = self.made > 0 and self._changes[self.made - 1][1] == config
        usable = tuple(device for device in self._devices if device != min(self.on)) if stays else None
        return Resize(at, ParallelConfig.parse(config), usable)

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        pass


class Doom:
    """This process's end, at its place; the places inside of Megatron and of a change are found by replacing functions.

    Args:
        device: of this process.
        faults: of all processes.
        doomed: whether more may come.

    Attributes:
        iteration: finished steps of the job.
        generation: of the job.
    """

    def __init__(self, device: int, faults: Sequence[Fault], *, doomed: bool = False) -> None:
        self._faults = [fault for fault in faults if fault.device in ((device, ANY) if device else (0,))]
        self.iteration = self.generation = 0
        if not self._faults and not doomed:
            return
        batches = iter(range(10**6))
        self._put(trained, "_forward", lambda: self.at("forward") if next(batches) % 2 else None)
        self._put(ChainedOptimizer, "step_with_ready_grads", lambda: self.at("normed"))
        for kind in (Float16OptimizerWithFloat16Params, DistributedOptimizer):
            self._put(kind, "_copy_main_params_to_model_params", lambda: self.at("uncopied"), lambda: self.at("copied"))
        self._put(_ParamAndGradBucketGroup, "finish_param_sync", after=lambda: self.at("gathered"))
        self._put(Transition, "commit", lambda: self.at("commit"), lambda: self.at("commited"))
        self._put(MegatronChange, "_build", lambda: self.at("build"))

    def add(self, fault: Fault) -> None:
        """Meet one more, of this device."""
        self._faults.append(fault)

    def at(self, where: str) -> None:
        """Come to a place."""
        for fault in self._faults:
            now = self.generation if fault.device == ANY else self.iteration
            if (fault.where, fault.iteration) == (where, now):
                os.kill(os.getpid(), fault.how)

    def hear(self, event: Event) -> None:
        """A move is half over."""
        if isinstance(event, RoundEnded) and event.index == event.rounds // 2:
            self.at("move")

    def _put(
        self, owner: Any, name: str, before: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None
    ) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            before()
            result = real(*args, **kwargs)
            after()
            return result

        setattr(owner, name, called)


def worker(send: Send, run: Run, folder: Path) -> None:
    """One process of a run."""
    torch.set_num_threads(1)
    if run.counts:
        gc.disable()  # as training loops do: nothing may depend on it
    logging.getLogger("megatron").setLevel(logging.ERROR)
    member = Member.from_launcher(timeout_s=run.timeout_s)
    doom = Doom(member.device, run.faults)
    walk = Walk(run)
    try:
        with session(
            make_adapter(run.recipe, corpus_of(run.recipe)),
            run.start,
            member=member,
            resizes=walk,
            timeout_s=run.timeout_s,
            survive=bool(run.faults),
            sink=doom.hear,
            **({"layouts": "nearest"} | dict(run.settings)),
        ) as elastic:
            go_through(send, run, folder, elastic, walk, doom)
    except ShardshiftError as error:
        send(("error", error.to_wire()))
        return
    send("end")


def go_through(send: Send, run: Run, folder: Path, elastic: Session[Job], walk: Walk, doom: Doom) -> None:
    """The user's loop."""
    job = elastic.start(lambda job: initialise(Scenario(run.recipe, run.start, {}), job))
    if job is not None and job.generation == 0:
        job.counters["tokens"] = 0
    told = 0
    while job and job.iteration < run.recipe.steps:
        if job.generation > told:
            told = walk.made = job.generation
            walk.on = elastic.reports[-1].devices
            send(("job", told, job.layout.rank, job.iteration, str(job.config)))
            save(job, folder / f"after{told}")
        doom.iteration, doom.generation = job.iteration, job.generation
        try:
            if elastic.resize_due(job):
                save(job, folder / f"before{job.generation + 1}", settled=False)
                job = elastic.resize(job) or elastic.start()
                continue
            loss = train_step(job)
            doom.at("gate")
            with elastic.commit_step(job):
                doom.at("passed")
                optimizer_step(job)
            doom.iteration = job.iteration
            doom.at("committed")
            job.counters["tokens"] += 8  # by the loop, after the step; as what it draws there
            np.random.random()
            tell_loss(send, job, loss)
        except (PeerLost, RuntimeError) as lost:
            job = elastic.recover(job, lost)
            last = elastic.reports[-1]
            send(("recovered", last.lost, last.iteration, str(last.curr)))
            job = job or elastic.start()
        if run.counts and job:
            send(("count", job.generation, *count()))
    if job is not None:
        save(job, folder / "end")


def count() -> tuple[int, int]:
    """Threads and descriptors of this process, once those are gone that are on their way out."""
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def tell_loss(send: Send, job: Job, loss: float | None) -> None:
    at = job.layout.coordinate
    if loss is not None and (at.tp, at.cp) == (0, 0):
        send(("loss", job.generation, job.iteration, loss))


def save(job: Job, folder: Path, *, settled: bool = True) -> None:
    """What the oracle writes, and what it does not."""
    oracle.save_rank(job, folder, settled=settled)
    more = {
        "counters": job.counters,
        "position": str(job.position),
        "generation": job.generation,
        "own streams": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # type: ignore[index]
    }
    torch.save(more, folder / f"more{job.layout.rank}.pt")
