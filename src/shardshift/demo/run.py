"""The demo as a whole: the elastic run, each change again from saved state in fresh processes, and a fixed run.

1. Four processes, standing for a node of four devices, train and change layout four times, live. For the first change
   four more are started, as a second node would start them; in the last one four lose their role, and end.
2. For each change, fresh processes start in the new layout: they load a Megatron checkpoint of the moment before
   (for its time), then the oracle's plain tensors (for the truth), and train to the next change. Their losses must
   be those of the elastic run, bit for bit.
3. A run in the first layout throughout gives the curve to hold the elastic one against.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..elastic import LocalJob, ResizeReport
from ..elastic.agent.roster import NodeRecord, Roster
from ..engine.events import Event, Sink, nowhere
from ..report import DemoReport, Transition
from ..values import ParallelConfig
from . import worker
from .model import ModelShape, Recipe
from .worker import Changes, Task, joiners, train_elastic, train_fixed, train_from_saved

CONFIGS: Final = ("pp2tp2dp1", "pp4tp2dp1", "pp2tp2dp2", "pp2tp4dp1", "pp4tp1dp1")
DEVICES_PER_NODE: Final = 4

Progress = Callable[[str, int], None]
"""Called as ``progress(what, steps)`` when so many steps of a run are finished."""


def run_demo(
    steps: int,
    data: Path,
    *,
    timeout_s: float = 30.0,
    progress: Progress = lambda what, done: None,
    sink: Sink | None = None,
) -> DemoReport:
    """Run the whole demo.

    Args:
        steps: optimizer steps of the elastic run; at least one for each configuration.
        data: text file or folder.
        progress: told of each finished step.
        timeout_s: the longest that a collective may take.
        sink: takes the events of the elastic run's changes, of all devices; None: they are not sent at all.

    Returns:
        What came out.

    Raises:
        ShardshiftError: what a process met by itself; ``PeerLost`` if one died.
    """
    task = Task(Recipe(ModelShape(), steps=steps), data, DEVICES_PER_NODE, timeout_s, tells=sink is not None)
    at = [steps * number // len(CONFIGS) for number in range(1, len(CONFIGS))]
    changes: Changes = dict(zip(at, CONFIGS[1:], strict=True))
    with tempfile.TemporaryDirectory(prefix="shardshift-demo-") as name:
        folder = Path(name)
        elastic = _elastic(task, changes, folder, progress, sink or nowhere)
        transitions = [
            _again(task, elastic, iteration, until, folder, progress)
            for iteration, until in zip(at, [*at[1:], steps], strict=True)
        ]
        fixed = _losses(LocalJob(4, train_fixed, (task, CONFIGS[0]), timeout_s=timeout_s), "fixed", progress)
    return DemoReport(tuple(transitions), _in_order(elastic.losses), _in_order(fixed))


class _Elastic:
    """What the elastic run sent."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.helpers_s = 0.0
        self.save_s: dict[int, float] = {}
        self.reports: dict[int, list[ResizeReport]] = {}
        self.before: dict[int, set[int]] = {}
        self.after: dict[int, set[int]] = {}


def _elastic(task: Task, changes: Changes, folder: Path, progress: Progress, sink: Sink) -> _Elastic:
    found = _Elastic()
    first = ParallelConfig.parse(CONFIGS[0]).world_size
    growths = sorted(joiners(CONFIGS[0], changes).items())
    job = LocalJob(
        first,
        train_elastic,
        (task, CONFIGS[0], changes, folder),
        timeout_s=task.timeout_s,
        preload=[worker.__name__],
    )
    with job:
        nodes = _Nodes(job, first)
        for device, message in job.messages():
            match message:
                case ("began", int()):
                    # One growth after the other: the next processes are started when those before have a role.
                    if growths and device == (0 if growths[0][1].start == first else growths[0][1].start - 1):
                        nodes.join(growths.pop(0)[1])
                case ("loss", int(iteration), float(loss)):
                    found.losses[iteration] = loss
                    progress("elastic", 1)
                case ("helpers", float(seconds)):
                    found.helpers_s = max(found.helpers_s, seconds)
                case ("saved", int(iteration), float(seconds), int(pid)):
                    found.save_s[iteration] = max(found.save_s.get(iteration, 0.0), seconds)
                    found.before.setdefault(iteration, set()).add(pid)
                case ("changed", ResizeReport() as report, int(pid)):
                    found.reports.setdefault(report.iteration, []).append(report)
                    found.after.setdefault(report.iteration, set()).add(pid)
                case _ if isinstance(message, Event):
                    sink(message)
                case _:
                    raise AssertionError(f"unknown message {message!r}")
    return found


class _Nodes:
    """The part of the agents: starts processes of a node more, and says in the roster who is there.

    Args:
        job: the processes.
        first: how many there are from the start.
    """

    def __init__(self, job: LocalJob, first: int) -> None:
        self._job, self._roster = job, Roster(job.store)
        self._roster.begin(0)
        self._write(range(first))

    def join(self, devices: range) -> None:
        """Start them. They are forked, as importing megatron four times over would take the training's cores."""
        started = self._job.add(len(devices), forked=True)
        assert started == devices, (started, devices)
        self._write(devices)

    def _write(self, devices: range) -> None:
        pids = {device: self._job.pids[device] for device in devices}
        self._roster.write(NodeRecord(self._roster.next_slot(), "here", tuple(devices), pids, "here"))


def _again(task: Task, elastic: _Elastic, iteration: int, until: int, folder: Path, progress: Progress) -> Transition:
    """Make a change again, from saved state in fresh processes, and hold the elastic run against it."""
    reports = elastic.reports[iteration]
    curr = reports[0].curr
    build_s = load_s = 0.0
    exact, checkpoint_exact = False, True
    losses: dict[int, float] = {}
    job = LocalJob(
        curr.world_size, train_from_saved, (task, str(curr), iteration, until, folder), timeout_s=task.timeout_s
    )
    with job:
        for _, message in job.messages():
            match message:
                case ("loss", int(step), float(loss)):
                    losses[step] = loss
                    progress("again from saved state", 1)
                case ("loaded", float(build), float(load), bool(same)):
                    build_s, load_s = max(build_s, build), max(load_s, load)
                    checkpoint_exact = checkpoint_exact and same
                case ("compared", bool(same)):
                    exact = same
                case _:
                    raise AssertionError(f"unknown message {message!r}")
    before, after = elastic.before[iteration], elastic.after[iteration]
    expected = {step: loss for step, loss in elastic.losses.items() if iteration < step <= until}
    return Transition.of(
        reports,
        checkpoint_save_s=elastic.save_s[iteration],
        checkpoint_build_s=build_s,
        checkpoint_load_s=load_s,
        checkpoint_helpers_s=elastic.helpers_s,
        checkpoint_params_exact=checkpoint_exact,
        bit_exact=exact,
        same_losses_as_checkpoint=bool(losses) and losses == expected,
        pids_kept=len(before & after),
        joined=len(after - before),
        left=len(before - after),
    )


def _losses(job: LocalJob, what: str, progress: Progress) -> dict[int, float]:
    losses: dict[int, float] = {}
    with job:
        for _, message in job.messages():
            _, step, loss = message
            losses[step] = loss
            progress(what, 1)
    return losses


def _in_order(losses: dict[int, float]) -> tuple[float, ...]:
    return tuple(losses[step] for step in sorted(losses))
