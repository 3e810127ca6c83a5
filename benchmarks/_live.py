"""Jobs of the elastic benchmark: the demo's training, whose layout changes on schedule, by joiners or by a loss.

Each process sends what it does as (what, ...) with times of ``time.perf_counter``, which all processes of a machine
share on Linux. A module of its own, and not the benchmark itself: fresh processes import it by name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch.distributed as dist

from shardshift import Member, ParallelConfig, PeerLost, Resize, ShardshiftError, session
from shardshift.adapters.megatron import Job
from shardshift.coordination import era_store, stands_by
from shardshift.demo.model import Recipe, optimizer_step, set_initial_weights, train_step
from shardshift.demo.worker import Task, _quiet
from shardshift.elastic import LocalJob, ResizeReport, Session
from shardshift.elastic.resize import AHEAD

Send = Callable[[Any], None]
WORKER: Final = "shardshift.demo.worker"


@dataclass(frozen=True, slots=True)
class Course:
    """What a job goes through.

    Attributes:
        task: the training.
        configs: the layouts, one after the other.
        steps: of each layout.
        devices: processes that it begins with.
        joiners: processes that are started once it trains; the first change waits until they stand by.
        victim: the rank that is killed after ``steps`` steps of the only layout; None: none, and no undo copy is kept.
    """

    task: Task
    configs: tuple[str, ...]
    steps: int
    devices: int
    joiners: int = 0
    victim: int | None = None


@dataclass(slots=True)
class Seen:
    """What the processes of a job told.

    Attributes:
        steps: by (generation, iteration that it led to) the (start, end) of a step on each rank.
        changes: by generation what each rank tells of the change that led to it: (device, its report, seconds in
            ``resize`` or ``recover``).
        cpu_s: by generation the processor seconds of each rank that stays, all threads, in the change that led to it.
        struck_s: when the victim was killed.
        noticed_s: when each survivor knew.
        joining: per joiner when it was started, and when it stood by.
    """

    steps: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    changes: dict[int, list[tuple[int, ResizeReport, float]]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)
    struck_s: float = 0.0
    noticed_s: list[float] = field(default_factory=list)
    joining: dict[int, tuple[float, float]] = field(default_factory=dict)


class _Source:
    """Each layout for so many steps; the first change only when all joiners stand by.

    What it knows it has from the job, so whoever leads goes on where another has left off.
    """

    alike = False

    def __init__(self, course: Course, store: dist.Store) -> None:
        self._course, self._store = course, store
        self._every = tuple(range(course.devices + course.joiners))
        self.generation = self.changed_at = 0
        self._announced: tuple[int, Resize] | None = None

    def upcoming(self, iteration: int) -> Resize | None:
        """See ``ResizeSource``."""
        number = self.generation + 1
        if number >= len(self._course.configs):
            return None
        if self._announced is None or self._announced[0] != number:
            if self.generation == 0 and not self._all_stand_by():
                return None
            due = max(self.changed_at + self._course.steps, iteration + AHEAD)
            if iteration + AHEAD < due:  # not earlier: planning it would lengthen the first step after the last change
                return None
            config = ParallelConfig.parse(self._course.configs[number])
            self._announced = number, Resize(due, config, self._every)
        return self._announced[1]

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """See ``ResizeSource``."""
        if refusal is not None:
            raise refusal

    def _all_stand_by(self) -> bool:
        joiners = self._every[self._course.devices :]
        return all(stands_by(era_store(self._store, 0), device) for device in joiners)


def watch(course: Course) -> Seen:
    """Run a job, and gather what its processes tell."""
    seen = Seen()
    survives = course.victim is not None
    job = LocalJob(
        course.devices, live, (course,), timeout_s=course.task.timeout_s, preload=[WORKER], survives=survives
    )
    waiting = bool(course.joiners)
    with job:
        for device, message in job.messages():
            match message:
                case ("step", int(generation), int(iteration), float(start), float(end)):
                    seen.steps.setdefault((generation, iteration), []).append((start, end))
                    if waiting and iteration > course.steps // 2:  # the first steps are slower than others
                        waiting = False
                        now_s = time.perf_counter()
                        seen.joining = dict.fromkeys(job.add(course.joiners), (now_s, now_s))
                case ("stands by", float(at)):
                    seen.joining[device] = (seen.joining[device][0], at)
                case ("changed", int(generation), ResizeReport() as report, float(seconds)):
                    seen.changes.setdefault(generation, []).append((device, report, seconds))
                case ("cpu", int(generation), float(seconds)):
                    seen.cpu_s.setdefault(generation, []).append(seconds)
                case ("struck", float(at)):
                    seen.struck_s = at
                case ("noticed", float(at)):
                    seen.noticed_s.append(at)
                case _:
                    raise AssertionError(f"unknown message {message!r}")
    return seen


def live(send: Send, course: Course) -> None:
    """One process of a job that ``watch`` watches."""
    _quiet()
    task, adapter = course.task, course.task.adapter()
    member = Member.from_launcher(devices_per_node=task.devices_per_node, timeout_s=task.timeout_s)
    source, survives = _Source(course, member.store), course.victim is not None
    with session(
        adapter,
        course.configs[0],
        resizes=source,
        member=member,
        prefer="bytes",
        timeout_s=task.timeout_s,
        survive=survives,
        layouts="nearest",
    ) as elastic:
        if member.device not in member.founders:
            send(("stands by", time.perf_counter()))
        job = elastic.start(lambda job: set_initial_weights(job, task.recipe.seed))
        last = 2 if survives else len(course.configs)
        began_s = time.perf_counter()
        told = 0
        while job:
            if job.generation != told:
                send(("changed", job.generation, elastic.reports[-1], time.perf_counter() - began_s))
                told = source.generation = job.generation
                source.changed_at = job.iteration
            if job.generation == last - 1 and job.iteration >= source.changed_at + course.steps:
                break
            try:
                began_s = time.perf_counter()
                if elastic.resize_due(job):
                    cpu_s = time.process_time()
                    job = elastic.resize(job)
                    if job:
                        send(("cpu", job.generation, time.process_time() - cpu_s))
                    job = job or elastic.start()
                    continue
                _strike(send, course, job)
                train_step(job)
                with elastic.commit_step(job):
                    optimizer_step(job)
                send(("step", job.generation, job.iteration, began_s, time.perf_counter()))
            except (PeerLost, RuntimeError) as lost:
                began_s = time.perf_counter()
                send(("noticed", began_s))
                job = elastic.recover(job, lost) or elastic.start()


def _strike(send: Send, course: Course, job: Job) -> None:
    if course.victim == job.layout.rank and (job.generation, job.iteration) == (0, course.steps):
        send(("struck", time.perf_counter()))
        os.kill(os.getpid(), signal.SIGKILL)


SIDES: Final = ("bare", "gate", "gate and undo copy")


def weigh(task: Task, config: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step without a gate, with one, and with an undo copy as well, by turns in one job.

    Returns:
        Per side the seconds of each step, from the first rank's start to the last one's end; under ``bytes`` those of
        the undo copy on each rank, under ``copy`` the seconds that it took, on the slowest rank.
    """
    devices = ParallelConfig.parse(config).world_size
    told: dict[str, list[list[float]]] = {}
    with LocalJob(devices, _weighed, (task, config, rounds), timeout_s=task.timeout_s, preload=[WORKER]) as job:
        for _, (what, *numbers) in job.messages():
            told.setdefault(what, []).append(numbers)
    found: dict[str, list[float]] = {"bytes": [nbytes for (nbytes,) in told["bytes"]]}
    found["copy"] = [max(seconds) for seconds in _by_turn(told["copy"])]
    for side in SIDES:
        turns: dict[float, list[list[float]]] = {}
        for number, start, end in told[side]:
            turns.setdefault(number, []).append([start, end])
        found[side] = [max(end for _, end in turn) - min(start for start, _ in turn) for turn in turns.values()]
    return found


def _by_turn(told: Iterable[Sequence[float]]) -> Iterable[list[float]]:
    turns: dict[float, list[float]] = {}
    for number, seconds in told:
        turns.setdefault(number, []).append(seconds)
    return turns.values()


def _weighed(send: Send, task: Task, config: str, rounds: int) -> None:
    """One process of a job whose steps are weighed."""
    _quiet()
    adapter = task.adapter()
    member = Member.from_launcher(timeout_s=task.timeout_s)
    with session(adapter, config, member=member, timeout_s=task.timeout_s, survive=True) as elastic:
        job = elastic.start(lambda job: set_initial_weights(job, task.recipe.seed))
        assert job is not None
        copies_s = _timed_copies(elastic)
        surviving = elastic._settings
        for number in range(-2, rounds):  # two rounds untimed: optimizer state and the copy's memory are made in them
            for side in SIDES:
                # A session cannot be told to survive now and then; the benchmark changes what its steps look at.
                elastic._settings = replace(surviving, survive=side == SIDES[2])
                dist.barrier()
                start_s = time.perf_counter()
                train_step(job)
                if side == SIDES[0]:
                    optimizer_step(job)
                    adapter.advance(job)
                else:
                    with elastic.commit_step(job):
                        optimizer_step(job)
                if number >= 0:
                    send((side, number, start_s, time.perf_counter()))
            if number >= 0:
                send(("copy", number, copies_s[-1]))
        send(("bytes", elastic._undo.nbytes))


def _timed_copies(elastic: Session[Job]) -> list[float]:
    """Seconds of each undo copy from now on."""
    seconds: list[float] = []
    take = elastic._undo.take

    def timed(*args: Any) -> None:
        start_s = time.perf_counter()
        take(*args)
        seconds.append(time.perf_counter() - start_s)

    elastic._undo.take = timed  # type: ignore[assignment, method-assign]
    return seconds


def with_batch(task: Task, samples: int) -> Task:
    """The same training with another global batch: a step takes longer, a change of layout does not."""
    recipe: Recipe = replace(task.recipe, global_batch_size=samples)
    return replace(task, recipe=recipe)
