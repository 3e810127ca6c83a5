"""One real Megatron job through a script of changes: plain ones, joins, announced leaves and kills.

``python -m tests.megatron.scripted`` goes through the script with several jobs and more steps; the test does it once.
The parent is what an agent would be: it keeps the roster, posts requests on the board, starts, dismisses and kills
workers. It also grants steps: workers wait before one that is not granted, so that all happens at known iterations.

1. ``perform`` runs the job. Every rank writes down what it holds between any two steps (``demo.oracle``), and tells of
   each step loss, rates and the samples that it drew; a step that was lost is told again by the next generation.
2. ``ledger.train_afresh`` is the truth: for each change other processes start in its layout from the checkpoint of the
   moment before it, and train the same steps. Which change they stand for they know for new random streams alone.
3. ``check`` holds both to each other, bit for bit: state over each change, and losses, rates and samples of each rank
   and step; samples and rates of the whole course also to what they would be had nothing ever happened.

Rejected: comparing with a job that never changes. Sums in another order make other losses, so that only says "near".
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from tests.megatron.acting import (
    HOUR,
    IN_STEP,
    SCRIPT,
    STOP,
    TIMEOUT_S,
    Event,
    Join,
    Kill,
    Leave,
    Play,
    To,
    act,
    checkpoint,
    come_key,
    doom_key,
    go_key,
)
from tests.megatron.ledger import Ledger, Segment, Step, read, train_afresh
from tests.megatron.losing import WORKER
from tests.megatron.training import training

from shardshift import ParallelConfig
from shardshift.coordination import current_era, dismiss, era_store
from shardshift.demo import oracle
from shardshift.elastic import LocalJob
from shardshift.elastic.agent.roster import NodeRecord, Roster
from shardshift.elastic.operating.board import Board
from shardshift.elastic.operating.request import Request
from shardshift.elastic.resize import AHEAD


@dataclass(frozen=True, slots=True)
class Made:
    """A change that was made.

    Attributes:
        event: what led to it.
        generation: its number.
        iteration: steps finished when it was made.
        layout: the new one.
        devices: those that train in it, by rank.
    """

    event: Event
    generation: int
    iteration: int
    layout: str
    devices: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What a play gave.

    Attributes:
        changes: in order.
        ledger: of the job's steps.
        fresh: of the steps of jobs that started from checkpoints; generations are those that they stand for.
        left: devices that ended in peace.
        killed: devices that were killed.
        taken_again: per kill how many steps that all had finished were taken again, besides the one in flight.
    """

    changes: list[Made] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    fresh: Ledger = field(default_factory=Ledger)
    left: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    taken_again: list[int] = field(default_factory=list)


class Director:
    """Carries out a script.

    Args:
        play: the job and its script.
        job: its processes, those that will join among them.
    """

    def __init__(self, play: Play, job: LocalJob) -> None:
        self._play, self._job, self.outcome = play, job, Outcome()
        self._messages: Iterator[tuple[int, Any]] = job.messages()
        self._roster, self._board = Roster(job.store), Board(job.store)
        self._arrived: dict[int, dict[int, tuple[int, int, str]]] = {}
        self._standing: dict[tuple[int, int], set[int]] = {}
        self._generation = self._granted = 0
        self._joiners = iter(range(play.founders, play.founders + joiners(play)))

    def go(self) -> Outcome:
        """All of it, and the end."""
        self._settle()
        for event in self._play.script:
            self._grant(self._play.between)
            self._settle()
            self._carry_out(event)
            _, iteration, layout = next(iter(self._arrived[self._generation].values()))
            self.outcome.changes.append(Made(event, self._generation, iteration, layout, self._devices))
        self._grant(self._play.between)
        self._settle()
        self._job.store.set(go_key(self._granted), STOP)
        self._until(lambda: False)
        return self.outcome

    def _carry_out(self, event: Event) -> None:
        match event:
            case To(layout):
                self._ask(Request(to=ParallelConfig.parse(layout)))
            case Join(layout):
                self._take_in(next(self._joiners))
                self._ask(Request(to=ParallelConfig.parse(layout)))
            case Leave(who):
                device = self._one(who)
                self._roster.write(NodeRecord(device, "here", (device,), {}, "leaving"))
                self._ask(Request(leave=(device,)))
                dismiss(self._era(), device)
                self._until(lambda: device in self.outcome.left)
                self._roster.write(NodeRecord(device, "here", (), {}, "left"))
            case Kill(who, where):
                self._kill(self._one(who), where)

    def _ask(self, request: Request) -> None:
        """Ask, and let it train until the change is due: the lead hears of it in the next step."""
        self._board.post(request)
        self._grant(AHEAD + 1)
        self._generation += 1
        self._settle()

    def _take_in(self, device: int) -> None:
        self._roster.next_slot()
        self._roster.write(NodeRecord(device, "here", (device,), {}, "here"))
        self._job.store.set(come_key(device), "")
        self._era().wait([f"standby/{device}"], HOUR)

    def _kill(self, device: int, where: str) -> None:
        before = self._granted
        if where == "standing":
            os.kill(self._job.pids[device], signal.SIGKILL)
        else:
            self._job.store.set(doom_key(device), where)
        self._grant(2)  # who is done with the first does not wait for it, but meets the loss in the second
        self.outcome.killed.append(device)
        self._generation += 1
        self._settle()
        self.outcome.taken_again.append(before - next(iter(self._arrived[self._generation].values()))[1])

    def _one(self, who: str) -> int:
        return min(self._devices) if who == "first" else max(self._devices)

    @property
    def _devices(self) -> tuple[int, ...]:
        """Those that train, by rank."""
        arrived = self._arrived[self._generation]
        return tuple(sorted(arrived, key=lambda device: arrived[device][0]))

    def _era(self) -> dist.Store:
        return era_store(self._job.store, current_era(self._job.store))

    def _grant(self, steps: int) -> None:
        for iteration in range(self._granted, self._granted + steps):
            self._job.store.set(go_key(iteration), "")
        self._granted += steps

    def _settle(self) -> None:
        """Wait until all ranks of the present generation wait for a step to be granted."""
        self._until(self._settled)

    def _settled(self) -> bool:
        arrived = self._arrived.get(self._generation, {})
        if not arrived:
            return False
        _, _, layout = next(iter(arrived.values()))
        standing = self._standing.get((self._generation, self._granted), set())
        return len(standing) == ParallelConfig.parse(layout).world_size

    def _until(self, holds: Callable[[], bool]) -> None:
        """Take note of what workers send until something holds, or all have ended."""
        while not holds():
            item = next(self._messages, None)
            if item is None:
                return
            device, message = item
            match message:
                case Step():
                    self.outcome.ledger.note(message)
                case ("job", int(generation), int(iteration), int(rank), str(layout)):
                    self._arrived.setdefault(generation, {})[device] = rank, iteration, layout
                case ("stands", int(generation), int(iteration)):
                    self._standing.setdefault((generation, iteration), set()).add(device)
                case "left":
                    self.outcome.left.append(device)
                case _:
                    raise AssertionError(message)


def joiners(play: Play) -> int:
    """Processes that join."""
    return sum(isinstance(event, Join) for event in play.script)


def perform(play: Play, folder: Path) -> Outcome:
    """Run the job through its script. Joiners are started at once, so that they import while the others train."""
    with LocalJob(play.founders, act, (play, folder), timeout_s=TIMEOUT_S, survives=True, preload=[WORKER]) as job:
        roster = Roster(job.store)
        roster.begin(play.founders)
        for device in range(play.founders):
            roster.write(NodeRecord(device, "here", (device,), {}, "here"))
        job.add(joiners(play), forked=play.forked)
        return Director(play, job).go()


def check(play: Play, folder: Path) -> Outcome:
    """Perform, start afresh from each checkpoint, and hold all to all that must hold."""
    outcome = perform(play, folder)
    told = outcome.ledger.steps
    segments = []
    for change in outcome.changes:
        place = checkpoint(folder, change.generation - 1, change.iteration)
        before, after = (read(one) for one in (place, checkpoint(folder, change.generation, change.iteration)))
        assert before, f"{change}: not all ranks have written what they held before it"
        wrong = oracle.differences(oracle.assemble(before), oracle.assemble(after))
        assert wrong == [], f"{change}: {wrong[:5]}"
        until = max(iteration for generation, iteration in told if generation == change.generation)
        segments.append(Segment(change.generation, change.layout, until, place))
    many = max(ParallelConfig.parse(segment.layout).world_size for segment in segments)
    with LocalJob(many, train_afresh, (play.recipe, tuple(segments)), timeout_s=TIMEOUT_S, preload=[WORKER]) as job:
        for _, step in job.messages():
            outcome.fresh.note(step)
    course = outcome.ledger.course()
    for (generation, iteration), found in told.items():
        if generation:
            expected = outcome.fresh.steps[generation, iteration]
            if generation != course[iteration]:  # a step that was lost: some ranks had finished it
                expected = {at: step for at, step in expected.items() if at in found}
            assert found == expected, f"step {iteration} after change {generation}: {found}, afresh {expected}"
    outcome.ledger.check_samples(play.recipe.global_batch_size)
    if play.recipe.precision != "fp16":  # there the schedule skips steps whose gradients overflow
        outcome.ledger.check_rates(play.recipe)
    return outcome


BATCH: Final[dict[str, Any]] = {"global_batch_size": 6, "dropout": 0.1}
PLAYS: Final[dict[str, Play]] = {
    "bf16, ZeRO-1, overlaps": Play(
        training(80, distributed=True, precision="bf16", overlap=True, bucket_size=600, **BATCH), shard_copies=1
    ),
    "fp32": Play(
        training(80, **BATCH), script=tuple(Kill("last", "passed") if one == IN_STEP else one for one in SCRIPT)
    ),
    "fp16, ZeRO-1": Play(training(80, distributed=True, precision="fp16", loss_scale=2.0**10, **BATCH), shard_copies=1),
}


def main() -> None:
    """Every play, with some steps more in each layout than in the test."""
    for name, play in PLAYS.items():
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        began_s = time.perf_counter()
        try:
            outcome = check(replace(play, between=int(sys.argv[1]) if len(sys.argv) > 1 else 3), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(
            f"{name}: {len(outcome.changes)} changes, {joiners(play)} joins, {len(outcome.killed)} kills (steps that "
            f"all had finished and took again: {outcome.taken_again}), {max(outcome.ledger.course())} steps; "
            f"{sum(map(len, outcome.fresh.steps.values()))} steps of ranks as from checkpoints, bit for bit; "
            f"{time.perf_counter() - began_s:.0f} s",
            flush=True,
        )
        for change in outcome.changes:
            print(f"  {change.iteration:3}: {change.event} -> {change.layout} on {change.devices}", flush=True)


if __name__ == "__main__":
    from tests.megatron import scripted  # functions that processes can find by name

    scripted.main()
