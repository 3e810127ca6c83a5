"""Runs real megatron-core jobs through changes of layout, and holds what comes out against plain arithmetic.

One ``LocalJob`` runs a scenario whole: the elastic run; after it, in the same processes, a fresh start from the
oracle's plain tensors for each change; and the same training without any change. The fork server has everything
imported, so that starting eight processes costs 0.2 s.

What may decide whether a change was exact knows nothing of shardshift's regions, layouts or plans: ``oracle`` joins
and slices by Megatron's attributes, and ``least_bytes`` counts single elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from shardshift import Member, ParallelConfig, ResizeReport, Script, Session, session
from shardshift.adapters import Place
from shardshift.adapters.megatron import Adapter, Job
from shardshift.demo import oracle
from shardshift.demo.model import ModelShape, Recipe, make_adapter, optimizer_step, set_initial_weights, train_step
from shardshift.demo.text import Corpus
from shardshift.elastic import LocalJob

TIMEOUT_S = 30.0

Send = Callable[[Any], None]
Records = list[dict[str, Any]]


def nothing(job: Job) -> None:
    """The hook that does nothing."""


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
        shape = self.recipe.shape
        text = np.random.default_rng(7).integers(0, min(shape.vocab_size, 256), 4000, dtype=np.uint8).tobytes()
        return self.adapter(self.recipe, Corpus(text, shape.sequence_length, self.recipe.seed))


def small(steps: int, *, batch: int = 8, micro: int = 1, **shape: Any) -> Recipe:
    """A recipe for a small GPT: by default 4 layers of hidden 16, 4 heads, vocabulary 50 padded by 4."""
    settings = {"layers": 4, "hidden": 16, "sequence_length": 8, "vocab_size": 50, "vocab_divisor": 4} | shape
    return Recipe(ModelShape(**settings), global_batch_size=batch, micro_batch_size=micro, steps=steps)


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
                oracle.save_rank(job, _folder(folder, job.iteration, "before"))
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
    records = oracle.read_ranks(_folder(folder, change, "before"))
    adapter = scenario.make()
    name = scenario.changes[change]
    job = start_alone(adapter, name, f"fresh/{change}", records[0]["consumed_samples"])
    if job is not None:
        scenario.prepare(job)
        oracle.load_rank(job, records, oracle.assemble(records))
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
    """What the oracle does not write: where tensors lie, and per parameter its step and group settings."""
    pointers: dict[tuple[str, str], int] = {}
    settings: dict[str, dict[str, Any]] = {}
    steps: dict[str, float] = {}
    parts = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    bases = [part.optimizer for part in parts if part.optimizer is not None]
    for _, parameter, name in oracle.named_logical(job.model):
        pointers["param", name] = parameter.data_ptr()
        for base in bases:
            for kind, value in base.state.get(parameter, {}).items():
                if kind == "step":
                    steps[name] = float(value)
                else:
                    pointers[kind, name] = value.data_ptr()
            for group in base.param_groups:
                if any(parameter is other for other in group["params"]):
                    settings[name] = {key: value for key, value in group.items() if key != "params"}
    return {"rank": job.layout.rank, "pointers": pointers, "settings": settings, "steps": steps}


def _tell_loss(send: Send, run: str | int, job: Job, loss: float | None) -> None:
    at = job.layout.coordinate
    if loss is not None and at.tp == 0 and at.dp == 0:
        send(("loss", run, job.iteration, loss))


def _folder(folder: Path, change: int, when: str) -> Path:
    return folder / f"change{change}" / when


def _file(folder: Path, change: int, when: str, rank: int) -> dict[str, Any]:
    record: dict[str, Any] = torch.load(_folder(folder, change, when) / f"rank{rank}.pt", weights_only=True)
    return record


def check_change(outcome: Outcome, change: int) -> None:
    """Everything that must hold of one change: state, what goes along, bytes, storage, losses."""
    before, after = outcome.before[change], outcome.after[change]
    logical = [oracle.assemble(list(records.values())) for records in (before, after)]
    assert oracle.same_state(*logical)
    assert not any(torch.isnan(tensor).any() for tensor in logical[1].values())
    check_companions(before, after)
    check_bytes(before, after, outcome.devices, outcome.reports[change])
    assert len({report.digest for report in outcome.reports[change]}) == 1
    check_storage(before, after)
    expected = outcome.fresh[change]
    assert expected
    assert {iteration: outcome.losses[iteration] for iteration in expected} == expected


def check_companions(before: Mapping[int, Any], after: Mapping[int, Any]) -> None:
    """Steps and settings of every parameter, schedule, iteration and data position are as before."""
    for key in ("steps", "settings"):
        old = {name: value for record in before.values() for name, value in record[key].items()}
        for record in after.values():
            assert record[key] == {name: old[name] for name in record[key]}
        assert {name for record in after.values() for name in record[key]} == old.keys()
    first, *others = [*before.values(), *after.values()]
    for key in ("scheduler", "iteration", "consumed_samples"):
        assert all(record[key] == first[key] for record in others)


def check_bytes(
    before: Mapping[int, Any], after: Mapping[int, Any], devices: int, reports: Sequence[ResizeReport]
) -> None:
    """Every report says what a count of single elements says, and that is the least of all pairings."""
    cost = lacking(before, after, devices)
    least = int(cost[linear_sum_assignment(cost)].sum())
    for report in reports:
        placed = sum(int(cost[rank, device]) for rank, device in enumerate(report.devices))
        assert (report.moved_bytes, report.least_moved_bytes, placed) == (least, least, least)


def check_storage(before: Mapping[int, Any], after: Mapping[int, Any]) -> None:
    """What a device held already, in the same shape, lies where it lay."""
    _, old, new = masks(before, after)
    for device in before.keys() & after.keys():
        shapes = [
            {
                (kind, name): tensor.shape
                for name, _, found, _ in record[device]["tensors"]
                for kind, tensor in found.items()
            }
            for record in (before, after)
        ]
        for key, mask in new[device].items():
            if key in old[device] and np.array_equal(mask, old[device][key]) and shapes[0][key] == shapes[1][key]:
                assert after[device]["pointers"][key] == before[device]["pointers"][key], f"{key} was copied"


def lacking(before: Mapping[int, Any], after: Mapping[int, Any], devices: int) -> NDArray[np.int64]:
    """Bytes that device j lacks of what new rank i holds, shape (ranks, devices), counted element by element."""
    itemsize, old, new = masks(before, after)
    by_rank = {after[device]["rank"]: held for device, held in new.items()}
    return np.array(
        [
            [
                sum(
                    int((mask & ~old[device][key] if device in old and key in old[device] else mask).sum())
                    * itemsize[key]
                    for key, mask in by_rank[rank].items()
                )
                for device in range(devices)
            ]
            for rank in range(len(by_rank))
        ],
        dtype=np.int64,
    )


Masks = dict[int, dict[tuple[str, str], NDArray[np.bool_]]]


def masks(before: Mapping[int, Any], after: Mapping[int, Any]) -> tuple[dict[tuple[str, str], int], Masks, Masks]:
    """Per device and tensor which elements of the whole tensor it holds; rows that only one layout has left out."""
    itemsize: dict[tuple[str, str], int] = {}
    wholes: list[dict[tuple[str, str], tuple[int, ...]]] = []
    for records in (before, after):
        logical = oracle.assemble(list(records.values()))
        itemsize |= {key: tensor.element_size() for key, tensor in logical.items()}
        wholes.append({key: tuple(tensor.shape) for key, tensor in logical.items()})
    rows = {key: min(shape[0], wholes[1][key][0]) for key, shape in wholes[0].items()}
    found = []
    for records, shapes in zip((before, after), wholes, strict=True):
        ways = 1 + max(record["coordinate"][1] for record in records.values())
        by_device: Masks = {}
        for device, record in records.items():
            by_device[device] = {}
            for name, cut, tensors, _ in record["tensors"]:
                for kind in tensors:
                    shape = shapes[kind, name]
                    mask = np.ones(shape, dtype=bool)
                    if cut is not None:
                        dim, stride = cut
                        mask = np.zeros(shape, dtype=bool)
                        slices = np.split(np.arange(shape[dim]), stride * ways)
                        for held in slices[record["coordinate"][1] :: ways]:
                            mask[(slice(None),) * dim + (held,)] = True
                    by_device[device][kind, name] = mask[: rows[kind, name]]
        found.append(by_device)
    return itemsize, found[0], found[1]
