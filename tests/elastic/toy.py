"""A toy framework and its adapter: enough of a job to hold the session to its protocol, and faults to order.

The model is a few tensors, cut by pp (layers), tp (rows or columns) and dp (moments, flat); its world is a gloo
group. A step all-reduces over that world and adds 1 to every element, so each element is always its own id plus the
number of steps, whatever layouts the job went through.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from tests.unit.strategies import Model, Rule, even_split, grid_layout, inside

from shardshift import session
from shardshift.adapters import Place
from shardshift.adapters.sockets import Sockets
from shardshift.coordination import Control, era_store
from shardshift.elastic import LocalJob, Member, Script
from shardshift.elastic.session import Session
from shardshift.elastic.transition import Transition
from shardshift.engine.events import Event, RoundEnded
from shardshift.models.load import Load
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    ParallelConfig,
    PeerLost,
    Shard,
    ShardshiftError,
    Tensor,
)

GRACE_S: Final = 5.0
LAYERS: Final = 4


def _rule(name: str, layer: int | str, shape: tuple[int, ...], cut: int | str, kind: Kind = Kind.PARAM) -> Rule:
    return Rule(Tensor(kind, name, shape, "float64", 8), layer, cut)


MODEL: Final = Model(
    LAYERS,
    (
        _rule("embedding", "ends", (10, 3), 0),
        *(_rule(f"layers.{layer}.in", layer, (9, 6), 0) for layer in range(LAYERS)),
        *(_rule(f"layers.{layer}.out", layer, (6, 9), 1) for layer in range(LAYERS)),
        *(_rule(f"layers.{layer}.in", layer, (9, 6), "flat", Kind.EXP_AVG) for layer in range(LAYERS)),
        _rule("norm", "last", (5,), "replicated"),
    ),
)


REPLICATED: Final = Model(
    LAYERS,
    tuple(
        _rule(r.tensor.name, r.layer, r.tensor.shape, 0, r.tensor.kind) if r.cut == "flat" else r for r in MODEL.rules
    ),
)
"""The same with moments that every data parallel replica holds whole."""


class Unpicklable(Exception):
    """An exception that no pipe carries."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: None

    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


@dataclass(frozen=True)
class Fault:
    """What one device does at a place, once it has finished so many steps (-1: at any time)."""

    device: int
    where: str
    how: str
    iteration: int = -1


@dataclass
class ToyJob:
    config: ParallelConfig
    rank: int
    tensors: dict[Shard, torch.Tensor]
    iteration: int = 0
    retired: bool = False

    def meet(self) -> None:
        assert not self.retired
        count = torch.ones(1)
        dist.all_reduce(count)
        assert int(count) == self.config.world_size

    def step(self) -> None:
        self.meet()
        for tensor in self.tensors.values():
            tensor += 1

    def exact(self) -> bool:
        return all(torch.equal(tensor, logical(shard) + self.iteration) for shard, tensor in self.tensors.items())


def logical(shard: Shard) -> torch.Tensor:
    """The shard of the model before the first step."""
    first = 1000 * next(i for i, rule in enumerate(MODEL.rules) if rule.tensor == shard.tensor)
    numel = int(torch.Size(shard.tensor.shape).numel())
    return torch.arange(first, first + numel, dtype=torch.float64).reshape(shard.tensor.shape)[inside(shard.region)]


def layout_of(config: ParallelConfig, model: Model = MODEL) -> Layout:
    return grid_layout(model, config, even_split(LAYERS, config.pp))


@dataclass
class ToyAdapter:
    device: int
    send: Callable[[Any], None]
    faults: tuple[Fault, ...] = ()
    iteration: int = 0
    retired: int = 0
    built: int = 0
    count_at: tuple[int, ...] = ()
    model: Model = MODEL
    sockets: Sockets | None = None

    def at(self, where: str) -> None:
        """Commit this device's fault, if it has one here."""
        for fault in self.faults:
            if (fault.device, fault.where) == (self.device, where) and fault.iteration in (-1, self.iteration):
                self.send(("fault", time.monotonic()))
                self.commit(fault.how)

    def commit(self, how: str) -> None:
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError("ordered by the test")
            case "unpicklable":
                raise Unpicklable("ordered by the test")
            case "infeasible":
                raise Infeasible("ordered by the test")
            case _:
                raise AssertionError(how)

    def check(self, config: ParallelConfig) -> None:
        if config.tp == 7:
            raise Infeasible("nothing here is divisible by 7; what to do: choose another tp")

    def load(self, config: ParallelConfig, *, exact: bool = True) -> Load:
        raise Infeasible("a toy costs nothing")

    def start(self, place: Place) -> ToyJob:
        self.at("start")
        self._enter(place)
        role = self.layout_of(place.config).shards(place.rank)
        return ToyJob(place.config, place.rank, {shard: logical(shard).clone() for shard in role})

    def _enter(self, place: Place) -> None:
        self.built += 1
        self.sockets = Sockets()
        timeout = timedelta(seconds=place.timeout_s)
        # Names of groups count on where an attempt has failed, and not every rank made that attempt.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "gloo", store=place.store, rank=place.rank, world_size=place.config.world_size, timeout=timeout
        )
        self.sockets.note()

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, kinds: Sequence[str]) -> ToyChange:
        self.at("plan")
        if any((fault.device, fault.where) == (self.device, "digest") for fault in self.faults):
            return ToyChange(self, self.layout_of(prev), self.layout_of(ParallelConfig(dp=curr.world_size)))
        return ToyChange(self, self.layout_of(prev), self.layout_of(curr))

    def layout_of(self, config: ParallelConfig) -> Layout:
        return layout_of(config, self.model)

    def state_kinds(self, job: ToyJob) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def quiesce(self, job: ToyJob) -> None:
        self.at("quiesce")

    def companions(self, job: ToyJob) -> dict[str, bytes]:
        self.at("agree")
        return {"iteration": str(job.iteration).encode()} if job.rank == 0 else {}

    def advance(self, job: ToyJob) -> None:
        job.iteration += 1
        self.iteration = job.iteration

    def mark(self, job: ToyJob, *, settled: bool = True) -> None:
        pass

    def shards(self, job: ToyJob) -> dict[Shard, torch.Tensor]:
        return job.tensors

    def whole(self, job: ToyJob) -> bool:
        return True

    def sever(self, job: ToyJob) -> None:
        assert self.sockets is not None
        self.sockets.cut()

    def rewind(self, job: ToyJob, iteration: int) -> None:
        job.iteration = iteration
        self.iteration = iteration

    def alone(self, job: ToyJob, iteration: int) -> dict[str, bytes]:
        self.at("alone")
        return {f"alone/{job.rank}": str(iteration).encode()}

    def retire(self, job: ToyJob) -> None:
        self.at("retire")
        self.abandon(job)

    def abandon(self, job: ToyJob) -> None:
        assert not job.retired, "a job is retired once"
        job.retired = True
        self.retired += 1
        dist.destroy_process_group()


@dataclass
class ToyChange:
    adapter: ToyAdapter
    prev: Layout
    curr: Layout

    def check(self, rank: int) -> None:
        pass

    def shards(self, job: ToyJob) -> dict[Shard, torch.Tensor]:
        if any((fault.device, fault.where) == (self.adapter.device, "shards") for fault in self.adapter.faults):
            raise Mismatch(f"rank {job.rank} holds something else; ordered by the test")
        return job.tensors

    def of_kept(self, kept: Mapping[Shard, torch.Tensor]) -> Mapping[Shard, torch.Tensor]:
        return kept

    def moved(
        self, rank: int, tensors: Mapping[Shard, torch.Tensor], accepted: int
    ) -> tuple[dict[Shard, torch.Tensor], dict[str, bytes]]:
        self.adapter.at("moved")
        return dict(tensors), {f"alone/{rank}": str(accepted).encode()}

    def allocate(self, rank: int, shard: Shard) -> torch.Tensor:
        self.adapter.at("allocate")
        return torch.full(shard.region.shape, float("nan"), dtype=torch.float64)

    def enter_ahead(self, place: Place) -> None:
        self.adapter.at("enter_ahead")

    def leave_ahead(self) -> None:
        self.adapter.at("leave_ahead")

    def accept(self, rank: int, companions: Mapping[str, bytes]) -> int:
        self.adapter.at("accept")
        (iteration,) = {int(content) for content in companions.values()}
        return iteration

    def rebuild(self, place: Place, tensors: dict[Shard, torch.Tensor], accepted: int) -> ToyJob:
        self.adapter.at("rebuild")
        try:
            self.adapter._enter(place)
        except Exception:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.adapter.retired += 1
            raise
        job = ToyJob(place.config, place.rank, dict(tensors), accepted)
        assert set(job.tensors) == set(self.adapter.layout_of(place.config).shards(place.rank))
        self.adapter.iteration = job.iteration
        return job


@dataclass(frozen=True)
class Recipe:
    """One toy training."""

    start: str
    changes: dict[int, str]
    steps: int = 4
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 20.0
    policy: str = "keep"
    standby_dies: tuple[int, str] | None = None
    count_at: tuple[int, ...] = ()
    survive: bool = False
    sharded: bool = True
    checkpoint: bool = False
    shard_copies: int = 0


def let_standby_die(device: int, how: str, adapter: ToyAdapter) -> None:
    """Device ``device`` dies as soon as it stands by; the others hear of it before the tenth step."""
    await_any = Control.await_any

    def dies(self: Control, keys: Any) -> str:
        if self.device == device:
            adapter.commit(how)
        return await_any(self, keys)

    Control.await_any = dies  # type: ignore[method-assign]


def train(send: Callable[[Any], None], recipe: Recipe, join: Callable[[float], Member] | None = None) -> None:
    """The user's loop; tells ("refused", ...), ("done", ...), ("lost", ...), ("end", ...)."""
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=recipe.timeout_s) if join is None else join(recipe.timeout_s)
    adapter = ToyAdapter(
        member.device, send, recipe.faults, count_at=recipe.count_at, model=MODEL if recipe.sharded else REPLICATED
    )
    if recipe.standby_dies is not None:
        let_standby_die(*recipe.standby_dies, adapter)
    commit = Transition.commit

    def faulty_commit(self: Any, *args: Any) -> Any:
        adapter.at("commit")
        return commit(self, *args)

    Transition.commit = faulty_commit  # type: ignore[assignment, method-assign]
    try:
        with open_session(adapter, member, recipe) as elastic:
            job = elastic.start()
            while job and job.iteration < recipe.steps:
                if recipe.standby_dies and recipe.standby_dies[1] != "stop" and job.iteration == 10:
                    era_store(member.store, 0).wait(["gone"], timedelta(seconds=recipe.timeout_s))
                job = (
                    surviving_turn(send, adapter, elastic, job)
                    if recipe.survive
                    else one_turn(send, adapter, elastic, job)
                )
                job = job or elastic.start()
            if job:
                send(("done", job.iteration, str(job.config), job.exact()))
    except PeerLost as lost:
        send(("lost", lost.ranks, lost.phase, str(lost), time.monotonic()))
        raise
    send(("end", adapter.built, adapter.retired, len(elastic.reports)))


def faulty(adapter: ToyAdapter, how: str) -> bool:
    """Whether this device has a fault of a kind that strikes all the time."""
    return any(fault.how == how and fault.device == adapter.device for fault in adapter.faults)


def half_way(adapter: ToyAdapter, event: Event) -> None:
    """Let a fault strike in the middle of a move."""
    if isinstance(event, RoundEnded) and event.index == event.rounds // 2:
        adapter.at("move")


def load_checkpoint(job: ToyJob) -> None:
    """As it was written after the first step."""
    job.iteration = 1
    for shard, tensor in job.tensors.items():
        tensor.copy_(logical(shard) + 1)


def open_session(adapter: ToyAdapter, member: Member, recipe: Recipe) -> Session[ToyJob]:
    return session(
        adapter,
        recipe.start,
        resizes=Script({} if faulty(adapter, "no script") else recipe.changes),
        member=member,
        policy=recipe.policy,
        timeout_s=recipe.timeout_s,
        staging_bytes=200,
        survive=recipe.survive,
        shard_copies=recipe.shard_copies,
        layouts="nearest",
        checkpoint=load_checkpoint if recipe.checkpoint else None,
        sink=lambda event: half_way(adapter, event),
    )


def one_turn(send: Callable[[Any], None], adapter: ToyAdapter, elastic: Session[ToyJob], job: ToyJob) -> ToyJob | None:
    """A change of layout, if one is due, or a step."""
    if elastic.resize_due(job):
        try:
            return elastic.resize(job)
        except PeerLost:
            raise
        except ShardshiftError as error:
            send(("refused", type(error).__name__, str(error), job.exact()))
            return job
    adapter.at("train")
    if job.iteration in adapter.count_at:
        gc.collect()
        dist.barrier()  # whatever the last change closes is closed
        send(("open", job.iteration, psutil.Process().num_fds(), psutil.Process().num_threads()))
    job.step()
    if faulty(adapter, "drift"):
        job.iteration += 1
    try:
        with elastic.commit_step(job):
            adapter.at("step")
    except Mismatch as error:
        send(("refused", type(error).__name__, str(error), job.exact()))
        raise
    return job


def surviving_turn(
    send: Callable[[Any], None], adapter: ToyAdapter, elastic: Session[ToyJob], job: ToyJob
) -> ToyJob | None:
    """A change of layout or a step with faults in all of its places; after a loss, what is left goes on."""
    try:
        if elastic.resize_due(job):
            try:
                return elastic.resize(job)
            except Infeasible:
                return job  # too few devices are left
        adapter.at("forward")
        job.meet()
        with elastic.commit_step(job):
            adapter.at("gate passed")
            tensors = list(job.tensors.values())
            for number, tensor in enumerate(tensors):
                if number == len(tensors) // 2:
                    adapter.at("half")
                    job.meet()
                    adapter.at("norm")
                tensor += 1
            adapter.at("stepped")
            job.meet()
        adapter.at("committed")
    except (PeerLost, RuntimeError) as error:
        new = elastic.recover(job, error)
        report = elastic.reports[-1]
        send(("recovered", report.lost, report.iteration, str(report.curr), new is None or new.exact()))
        return new
    return job


@dataclass
class Outcome:
    """What came of a toy training: messages by device, and what the launcher raised."""

    messages: dict[int, list[tuple[Any, ...]]]
    error: ShardshiftError | None

    def told(self, kind: str) -> dict[int, list[tuple[Any, ...]]]:
        """Per device its messages of one kind, if it had any."""
        found = {
            device: [message[1:] for message in messages if message[0] == kind]
            for device, messages in self.messages.items()
        }
        return {device: messages for device, messages in sorted(found.items()) if messages}


def play(
    devices: int,
    recipe: Recipe,
    *,
    until_lost: int | None = None,
    join: Callable[[float], Member] | None = None,
) -> Outcome:
    """Run a toy training to its end, or until so many ranks have told of a loss."""
    outcome = Outcome({device: [] for device in range(devices)}, None)
    with running(devices, recipe, join) as job:
        try:
            for device, message in job.messages():
                outcome.messages[device].append(message)
                if until_lost is not None and len(outcome.told("lost")) == until_lost:
                    break
        except ShardshiftError as error:
            outcome.error = error
    return outcome


@contextlib.contextmanager
def running(devices: int, recipe: Recipe, join: Callable[[float], Member] | None = None) -> Iterator[LocalJob]:
    with LocalJob(
        devices,
        train,
        (recipe, join),
        timeout_s=recipe.timeout_s,
        survives=recipe.survive,
    ) as job:
        yield job
