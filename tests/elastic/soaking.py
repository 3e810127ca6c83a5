"""A soak: a job changes its layout over and over, every fifth time because a worker is killed and another one joins.

``python -m tests.elastic.soaking`` goes a hundred changes; the test goes some. The parent is what an agent would be: it
hosts the store, keeps the roster, posts requests on the board, kills and starts workers. Each tenth change leads to one
layout of all devices, where those that have lived since the last time count what they hold open. Moments have one
holder each, so losses are outlived by buddy copies. The job is a toy here; ``tests.megatron.soaking`` has a real one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from tests.elastic.toy import ToyAdapter, ToyJob
from torch.distributed import distributed_c10d as c10d

from shardshift import Member, PeerLost, session
from shardshift.elastic import LocalJob, Session
from shardshift.elastic.agent.roster import NodeRecord, Roster, Terms
from shardshift.elastic.launcher import Worker
from shardshift.elastic.operating.board import Board
from shardshift.elastic.operating.request import Request
from shardshift.values import ParallelConfig

TIMEOUT_S: Final = 20.0
STOP: Final = "stop"
TOY_LAYOUTS: Final = tuple(f"pp{pp}tp{tp}dp{dp}" for pp in (1, 2, 4) for tp in (1, 2, 3) for dp in (1, 2, 3))


@dataclass(frozen=True)
class Soak:
    """How long, and how large.

    Attributes:
        changes: of layout.
        devices: that train when all are there.
        kill_every: each so manyth change is a loss.
        seed: of what happens.
        layouts: that are changed to.
        spared: devices that are never killed, so that somebody has seen it all.
        forked: whether those who join come from the fork server; else each imports for itself, in 4 s.
    """

    changes: int = 100
    devices: int = 6
    kill_every: int = 5
    seed: int = 7
    layouts: tuple[str, ...] = TOY_LAYOUTS
    spared: tuple[int, ...] = ()
    forked: bool = False

    @property
    def whole(self) -> ParallelConfig:
        """The layout in which everything is counted."""
        return ParallelConfig(pp=2, dp=self.devices // 2)


@dataclass(frozen=True)
class Count:
    """What one worker holds after a change."""

    generation: int
    config: str
    fds: int
    threads: int
    groups: int
    rss_bytes: int
    exact: bool


@dataclass
class Found:
    """What came out: per device its counts, in order, and the devices that were killed."""

    counts: dict[int, list[Count]] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    generation: int = 0
    iteration: int = 0
    parent_rss_bytes: list[int] = field(default_factory=list)


def train(send: Callable[[Any], None], start: str) -> None:
    """One worker: trains, stands by, outlives losses, until the parent says stop."""
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    adapter = ToyAdapter(member.device, send)
    founders = len(member.founders)
    Roster(member.store).agree(Terms("soak", founders, 1, 1000))  # as an agent does before it starts workers
    how: dict[str, Any] = {"timeout_s": TIMEOUT_S, "policy": "keep", "survive": True, "layouts": "nearest"}
    with session(adapter, start, member=member, shard_copies=1, **how) as elastic:
        job, told = elastic.start(), -1
        while job is not None:
            try:
                if elastic.resize_due(job):
                    job = elastic.resize(job) or elastic.start()
                    continue
                if stops(member.store):
                    send(("done", job.iteration, job.exact()))
                    break
                step(elastic, job)
                if told != elastic._party.course.generation:
                    told = elastic._party.course.generation
                    send(count(told, str(job.config), exact=job.exact()))
            except (PeerLost, RuntimeError) as lost:
                job = elastic.recover(job, lost) or elastic.start()


def stops(store: dist.Store) -> bool:
    """Whether the lowest rank has heard from the parent: all alike."""
    heard = torch.tensor([int(dist.get_rank() == 0 and store.check([STOP]))])
    dist.all_reduce(heard)
    return bool(heard)


def step(elastic: Session[ToyJob], job: ToyJob) -> None:
    job.meet()
    with elastic.commit_step(job):
        tensors = list(job.tensors.values())
        for number, tensor in enumerate(tensors):
            if number == len(tensors) // 2:
                job.meet()
            tensor += 1


def count(generation: int, config: str, *, exact: bool) -> Count:
    """What this process holds now."""
    gc.collect()
    process = psutil.Process()
    return Count(
        generation,
        config,
        process.num_fds(),
        threading.active_count(),
        len(c10d._world.pg_map),
        process.memory_info().rss,
        exact,
    )


def unheard(device: int, message: Any) -> None:
    """What workers send besides counts, when there is nobody to hear it."""


class Parent:
    """Kills, starts, asks.

    Args:
        soak: how long, and how large.
        job: the workers.
        hear: told what they send besides counts; and, as ``("trains", generation)``, that all trained in a generation.
    """

    def __init__(self, soak: Soak, job: LocalJob, hear: Callable[[int, Any], None] = unheard) -> None:
        self.soak, self.job, self.found, self._hear = soak, job, Found(), hear
        self._random = random.Random(soak.seed)
        self._roster, self._board = Roster(job.store), Board(job.store)
        self._messages: Iterator[tuple[int, Any]] = job.messages()
        self.living = set(range(soak.devices))
        self.config = soak.whole
        self._slot = 0

    def go(self) -> Found:
        """All changes, one after the other."""
        self._trains(0)
        while self.found.generation < self.soak.changes:
            number = self.found.generation + 1
            if number % self.soak.kill_every == 0:
                self._kill()
                self._take_in()
            else:
                whole = number % 10 == 1
                self._ask(self.soak.whole if whole and self.config != self.soak.whole else self._another())
            self.found.parent_rss_bytes.append(psutil.Process().memory_info().rss)
        self.job.store.set(STOP, "")
        for device, message in self._messages:
            match message:
                case ("done", int(iteration), bool(exact)):
                    self.found.iteration = iteration
                    assert exact, f"device {device} ended with a wrong state"
                case _:
                    self._hear(device, message)
        return self.found

    def _another(self) -> ParallelConfig:
        known = [config for config in map(ParallelConfig.parse, self.soak.layouts) if config != self.config]
        return self._random.choice([config for config in known if 2 <= config.world_size <= self.soak.devices])

    def _ask(self, config: ParallelConfig) -> None:
        self._board.post(Request(to=config))
        self._trains(self.found.generation + 1)
        assert self.config == config, (self.config, config)

    def _kill(self) -> None:
        victim = self._random.choice(sorted(self._training.difference(self.soak.spared)))
        os.kill(self.job.pids[victim], signal.SIGKILL)
        self.living.discard(victim)
        self.found.killed.append(victim)
        self._trains(self.found.generation + 1)

    def _take_in(self) -> None:
        """A new worker; the job takes it in by itself where it makes it larger, else it stands by."""
        before = self.config.world_size
        (device,) = self.job.add(1, forked=self.soak.forked)
        self._slot += 1
        self._roster.next_slot()
        self.living.add(device)
        self._roster.write(NodeRecord(self._slot, "here", (device,), {}, "here"))
        if before < self.soak.devices:
            self._trains(self.found.generation + 1)

    def _trains(self, generation: int) -> None:
        """Wait until every rank of a generation has trained in it."""
        told: set[int] = set()
        for device, message in self._messages:
            if not isinstance(message, Count):
                self._hear(device, message)
                continue
            if message.generation < generation:
                continue
            assert message.generation == generation, message
            assert message.exact, f"device {device} holds a wrong state: {message}"
            self.found.counts.setdefault(device, []).append(message)
            told.add(device)
            config = ParallelConfig.parse(message.config)
            if len(told) == config.world_size:
                self._training, self.config, self.found.generation = told, config, generation
                self._hear(device, ("trains", generation))
                return
        raise AssertionError(f"the job ended before generation {generation}")


def soak(
    how: Soak,
    worker: Worker = train,
    args: Sequence[Any] = (),
    hear: Callable[[int, Any], None] = unheard,
    preload: Sequence[str] = (),
) -> Found:
    """Go through it all.

    Args:
        how: how long, and how large.
        worker: called as ``worker(send, layout, *args)``; sends a ``Count`` once it has trained in a generation.
        args: see ``worker``.
        hear: as ``Parent`` has it.
        preload: as ``LocalJob`` has it.
    """
    job = LocalJob(how.devices, worker, (str(how.whole), *args), timeout_s=TIMEOUT_S, survives=True, preload=preload)
    with job:
        roster = Roster(job.store)
        roster.begin(1)
        roster.write(NodeRecord(0, "here", tuple(range(how.devices)), {}, "here"))
        return Parent(how, job, hear).go()


def tell(how: Soak, found: Found) -> None:
    """Print what came out."""
    print(f"{found.generation} changes, {len(found.killed)} losses, {found.iteration} steps; all exact")
    for device, counts in sorted(found.counts.items()):
        whole = [one for one in counts if one.config == str(how.whole)]
        if len(whole) > 1:
            first, last = whole[1] if len(whole) > 2 else whole[0], whole[-1]
            slope = (last.rss_bytes - first.rss_bytes) / max(last.generation - first.generation, 1) / 2**20
            print(
                f"device {device}: changes {first.generation} to {last.generation}: files {first.fds} to {last.fds}, "
                f"threads {first.threads} to {last.threads}, groups {first.groups} to {last.groups}, "
                f"{slope:.3f} MiB a change"
            )


def main() -> None:
    how = Soak(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    tell(how, soak(how))


if __name__ == "__main__":
    main()
