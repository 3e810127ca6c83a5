"""Runs real megatron-core jobs through changes of layout, and holds what comes out against plain arithmetic.

One ``LocalJob`` runs a scenario whole: the elastic run; after it, in the same processes, a fresh start from the
oracle's plain tensors for each change; and the same training without any change. The fork server has everything
imported, so that starting eight processes costs 0.2 s.

What may decide whether a change was exact knows nothing of shardshift's regions, layouts or plans: ``oracle`` joins
and slices by Megatron's attributes, and ``least_bytes`` counts single elements.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import linear_sum_assignment
from tests.megatron.counting import Counted, counted, lacking
from tests.megatron.training import Training, corpus_of, optimizer_step, train_step, training
from tests.megatron.training import make_adapter as make_training_adapter

from shardshift import Member, ParallelConfig, ResizeReport, Script, Session, session
from shardshift.adapters import Place
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo import held as megatron_says
from shardshift.demo import model as demo
from shardshift.demo import oracle
from shardshift.demo.model import ModelShape, Recipe, set_initial_weights
from shardshift.demo.text import Corpus
from shardshift.elastic import LocalJob

TIMEOUT_S = 30.0
# Megatron's routers compile functions with torch.compile, which takes 3 to 10 s in each process. Read as torch is
# imported, by the fork server.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

Send = Callable[[Any], None]
Records = list[dict[str, Any]]


def nothing(job: Job) -> None:
    """The hook that does nothing."""


def make_adapter(recipe: Recipe, corpus: Corpus) -> Adapter:
    """The adapter of the recipe's kind of job."""
    if isinstance(recipe, Training):
        return make_training_adapter(recipe, corpus)
    return demo.make_adapter(recipe, corpus)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A training job and its changes. Functions are module-level, so that they can be sent to processes.

    Attributes:
        recipe: model and training.
        start: configuration to begin with.
        changes: per iteration the configuration to change to.
        adapter: makes the adapter.
        prepare: called with the first job, weights set.
        before: called with the job before each change.
    """

    recipe: Recipe
    start: str
    changes: Mapping[int, str]
    adapter: Callable[[Recipe, Corpus], Adapter] = make_adapter
    prepare: Callable[[Job], None] = nothing
    before: Callable[[Job], None] = nothing

    @property
    def devices(self) -> int:
        """As many processes as the largest configuration needs."""
        return max(ParallelConfig.parse(config).world_size for config in (self.start, *self.changes.values()))

    def make(self) -> Adapter:
        """The adapter, on random text in the model's vocabulary."""
        return self.adapter(self.recipe, corpus_of(self.recipe))


def small(steps: int, *, batch: int = 4, micro: int = 1, **shape: Any) -> Recipe:
    """A recipe for a small GPT: by default 4 layers of hidden 16, 4 heads, vocabulary 50 padded by 4, batches of 4."""
    settings = {"layers": 4, "hidden": 16, "sequence_length": 8, "vocab_size": 50, "vocab_divisor": 4} | shape
    return Recipe(ModelShape(**settings), global_batch_size=batch, micro_batch_size=micro, steps=steps)


def walk(
    *configs: str, first: int = 2, every: int = 2, before: Callable[[Job], None] = nothing, **settings: Any
) -> Scenario:
    """A small ``training`` job that goes from configuration to configuration, some steps in each.

    Unless it is given, the global batch is the least from 4 on that every configuration can take: training is half of
    what such a job costs, and its micro-batches are nearly all of that.

    Args:
        configs: the first is where it begins.
        first: steps before the first change.
        every: steps between changes, and after the last.
        before: called with the job before each change.
        settings: of shape and training.
    """
    start, *others = configs
    changes = {first + every * number: config for number, config in enumerate(others)}
    job = training(first + every * len(others), **{"global_batch_size": _least_batch(configs)} | settings)
    return Scenario(job, start, changes, before=before)


def _least_batch(configs: Sequence[str]) -> int:
    """With chunks of stages, micro-batches come in whole rounds of the stages."""
    parsed = [ParallelConfig.parse(config) for config in configs]
    least = lcm(*(config.dp * (config.pp if config.vpp > 1 else 1) for config in parsed))
    return least * -(-4 // least)


@dataclass(slots=True)
class Outcome:
    """What a scenario gave.

    Attributes:
        devices: processes in all.
        losses: of the elastic run, by iteration.
        unmigrated: losses of the run without changes.
        fresh: per change the losses of the fresh start, up to the next change.
        reports: per change the reports of all who took part.
        before: per change what each rank held before: the oracle's record and ``snapshot``'s, by device.
        after: the same after it.
    """

    devices: int
    losses: dict[int, float] = field(default_factory=dict)
    unmigrated: dict[int, float] = field(default_factory=dict)
    fresh: dict[int, dict[int, float]] = field(default_factory=dict)
    reports: dict[int, list[ResizeReport]] = field(default_factory=dict)
    before: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    after: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)


def run_processes(devices: int, worker: Callable[..., None], *args: Any) -> list[tuple[int, Any]]:
    """Run ``worker(send, *args)`` in so many processes; everything that they sent, as (device, message)."""
    with LocalJob(devices, worker, args, timeout_s=TIMEOUT_S, preload=["shardshift.demo.worker"]) as job:
        return list(job.messages())


def run(scenario: Scenario, folder: Path, *, unmigrated: bool = False) -> Outcome:
    """Run a scenario whole."""
    found = Outcome(scenario.devices)
    for device, message in run_processes(scenario.devices, run_scenario, scenario, folder, unmigrated):
        match message:
            case ("loss", "elastic", int(iteration), float(loss)):
                found.losses[iteration] = loss
            case ("loss", "unmigrated", int(iteration), float(loss)):
                found.unmigrated[iteration] = loss
            case ("loss", int(change), int(iteration), float(loss)):
                found.fresh.setdefault(change, {})[iteration] = loss
            case ("before", int(change), dict(record)):
                found.before.setdefault(change, {})[device] = record | _file(folder, change, "before", record["rank"])
            case ("after", int(change), dict(record), report):
                found.after.setdefault(change, {})[device] = record | _file(folder, change, "after", record["rank"])
                found.reports.setdefault(change, []).append(report)
            case _:
                raise AssertionError(f"unknown message {message!r}")
    return found


def run_scenario(send: Send, scenario: Scenario, folder: Path, unmigrated: bool) -> None:
    """The worker of ``run``."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # the CPU's random stream stands in for the GPU's
    train_elastic(send, scenario, folder)
    bounds = [*sorted(scenario.changes), scenario.recipe.steps]
    for change, until in pairwise(bounds):
        train_fresh(send, scenario, folder, change, until)
    if unmigrated:
        adapter = scenario.make()
        job = start_alone(adapter, scenario.start, "unmigrated")
        if job is not None:
            initialise(scenario, job)
            train_alone(send, "unmigrated", adapter, job, scenario.recipe.steps)


def train_elastic(send: Send, scenario: Scenario, folder: Path) -> None:
    """Train through the changes, and write down the state around each."""
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        told = 0
        while job and job.iteration < scenario.recipe.steps:
            if len(elastic.reports) > told:
                told = len(elastic.reports)
                oracle.save_rank(job, _folder(folder, job.iteration, "after"))
                send(("after", job.iteration, snapshot(job), elastic.reports[-1]))
            if elastic.resize_due(job):
                scenario.before(job)
                # What Megatron would gather in the next forward is for the change to gather, not for the oracle.
                oracle.save_rank(job, _folder(folder, job.iteration, "before"), settled=False)
                send(("before", job.iteration, snapshot(job)))
                job = elastic.resize(job) or elastic.start()
                continue
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            _tell_loss(send, "elastic", job, loss)


def open_session(scenario: Scenario, name: str = "elastic") -> Session[Job]:
    """A session for the scenario on all processes."""
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    member = Member(dist.PrefixStore(name, member.store), member.device, member.topology)
    return session(
        scenario.make(), scenario.start, resizes=Script(scenario.changes), member=member, timeout_s=TIMEOUT_S
    )


def initialise(scenario: Scenario, job: Job) -> None:
    """Weights by logical name, then what the scenario wants."""
    set_initial_weights(job, scenario.recipe.seed)
    scenario.prepare(job)


def train_fresh(send: Send, scenario: Scenario, folder: Path, change: int, until: int) -> None:
    """Start in the layout after a change from the oracle's tensors of the state before it, and train on."""
    # Each process reads what all have written; ``run`` holds the same files to plain values.
    records = oracle.read_ranks(_folder(folder, change, "before"), weights_only=False)
    adapter = scenario.make()
    name = scenario.changes[change]
    job = start_alone(adapter, name, f"fresh/{change}", records[0]["consumed_samples"])
    if job is not None:
        scenario.prepare(job)
        number = 1 + sorted(scenario.changes).index(change)
        oracle.load_rank(job, records, oracle.assemble(records), change=number)
        train_alone(send, change, adapter, job, until)


def start_alone(adapter: Adapter, config: str, name: str, consumed_samples: int = 0) -> Job | None:
    """A job without a session, on the first processes; None on those that it does not need."""
    member, parsed = Member.from_launcher(timeout_s=TIMEOUT_S), ParallelConfig.parse(config)
    if member.device >= parsed.world_size:
        return None
    store = dist.PrefixStore(name, member.store)
    return adapter.start(Place(store, parsed, member.device, TIMEOUT_S), consumed_samples)


def train_alone(send: Send, run: str | int, adapter: Adapter, job: Job, until: int) -> None:
    """Train up to an iteration, then end the job."""
    while job.iteration < until:
        loss = train_step(job)
        optimizer_step(job)
        adapter.advance(job)
        _tell_loss(send, run, job, loss)
    dist.barrier()
    adapter.retire(job)


def snapshot(job: Job) -> dict[str, Any]:
    """What the oracle does not write: where tensors lie, the step of each parameter, who owns the memory."""
    pointers: dict[tuple[str, str], int] = {}
    steps: dict[str, float] = {}
    kept = megatron_says.owned(job.optimizer)
    for one in megatron_says.named(job.model):
        pointers["param", one.name] = one.parameter.data_ptr()
        own = kept.get(one.parameter)
        if own is None:
            continue
        if own.main.dtype != one.parameter.dtype:
            pointers[oracle.MASTER, one.name] = own.main.data_ptr()
        for kind, value in own.state.items():
            if kind == "step":
                steps[one.name] = float(value)
            elif value is not None:
                pointers[kind, one.name] = value.data_ptr()
    flat = any(hasattr(part, "gbuf_ranges") for part in megatron_says.parts(job.optimizer))
    return {"rank": job.layout.rank, "pointers": pointers, "steps": steps, "flat": flat}


def _tell_loss(send: Send, run: str | int, job: Job, loss: float | None) -> None:
    at = job.layout.coordinate
    if loss is not None and (at.tp, at.dp, at.cp) == (0, 0, 0):
        send(("loss", run, job.iteration, loss))


def _folder(folder: Path, change: int, when: str) -> Path:
    return folder / f"change{change}" / when


def _file(folder: Path, change: int, when: str, rank: int) -> dict[str, Any]:
    record: dict[str, Any] = torch.load(_folder(folder, change, when) / f"rank{rank}.pt", weights_only=True)
    return record


def check(scenario: Scenario, folder: Path) -> Outcome:
    """Run a scenario and hold each of its changes against everything that must hold."""
    outcome = run(scenario, folder)
    assert outcome.losses.keys() == set(range(1, scenario.recipe.steps + 1))
    for change in scenario.changes:
        check_change(outcome, change)
    return outcome


def check_change(outcome: Outcome, change: int) -> None:
    """Everything that must hold of one change: state, what goes along, bytes, storage, losses."""
    before, after = outcome.before[change], outcome.after[change]
    logical = [oracle.assemble(list(records.values())) for records in (before, after)]
    assert oracle.differences(*logical) == []
    assert not any(torch.isnan(tensor).any() for tensor in logical[1].values())
    check_companions(before, after)
    elements = counted(before, after, *logical)
    check_bytes(elements, after, outcome.devices, outcome.reports[change])
    assert len({report.digest for report in outcome.reports[change]}) == 1
    check_storage(elements, before, after)
    expected = outcome.fresh[change]
    assert expected
    found = {iteration: outcome.losses[iteration] for iteration in expected}
    assert found == expected, f"losses {found}, from the oracle's state {expected}"


def check_companions(before: Mapping[int, Any], after: Mapping[int, Any]) -> None:
    """Steps and settings of every parameter, loss scales, schedule, iteration and data position are as before."""
    for key in ("steps", "settings"):
        old = {name: value for record in before.values() for name, value in record[key].items()}
        for record in after.values():
            kept = {name: old[name] for name in record[key]}
            assert record[key] == kept, f"{key} of rank {record['rank']}: {record[key]}, not {kept}"
        assert {name for record in after.values() for name in record[key]} == old.keys()
    scalers = max((record["scalers"] for record in before.values()), key=len)
    for record in after.values():  # where the experts' optimizer is new, it goes on with the scale of the first
        expected = [scalers[min(i, len(scalers) - 1)] for i in range(len(record["scalers"]))]
        assert record["scalers"] == expected, f"loss scales {record['scalers']}, not {expected}"
    first, *others = [*before.values(), *after.values()]
    for key in ("scheduler", "iteration", "consumed_samples"):
        assert all(record[key] == first[key] for record in others), f"{key} differs"


def check_bytes(elements: Counted, after: Mapping[int, Any], devices: int, reports: Sequence[ResizeReport]) -> None:
    """Every report says what a count of single elements says, and that is the least of all pairings."""
    cost = lacking(elements, after, devices)
    least = int(cost[linear_sum_assignment(cost)].sum())
    for report in reports:
        placed = sum(int(cost[rank, device]) for rank, device in enumerate(report.devices))
        found = report.moved_bytes, report.least_moved_bytes, placed
        assert found == (least, least, least), f"moved, said to be least, lacking where placed: {found}, not {least}"


def check_storage(elements: Counted, before: Mapping[int, Any], after: Mapping[int, Any]) -> None:
    """What a device held already, in the same shape, lies where it lay.

    But for parameters and masters of the distributed optimizer, whose memory belongs to Megatron's buffers.
    """
    _, old, new = elements
    for device in before.keys() & after.keys():
        records = before[device], after[device]
        flat = any(record["flat"] for record in records)
        shapes = [
            {(kind, name): tensor.shape for name, _, found, _, _ in record["tensors"] for kind, tensor in found.items()}
            for record in records
        ]
        for key, mask in new[device].items():
            if key[0] == oracle.BUFFER or (flat and key[0] in ("param", oracle.MASTER)):
                continue
            if key in old[device] and np.array_equal(mask, old[device][key]) and shapes[0][key] == shapes[1][key]:
                assert after[device]["pointers"][key] == before[device]["pointers"][key], f"{key} was copied"
