"""``shardshift selftest``: whether a transport does what the engine needs, on this machine, in under a minute.

Local processes play what a move asks of a transport, with bytes that say where they belong: messages in order, of all
sizes, both ways, several rounds under way, strided parts; then a small state really moves between layouts. It is how
NCCL can be tried where there are several GPUs, which shardshift's own tests have not had.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..coordination import Control
from ..elastic import LocalJob, Member
from ..engine import Event, Mover, Sink, names_of, nowhere
from ..models import Catalogue, Model
from ..report.console import print_whole
from ..report.links import Link, LinkMeter, links_table
from ..report.trace import tracing
from ..transport import Message, Transport, connect
from ..transport.nccl import SETTINGS
from ..values import Infeasible, PlacedLayout, Shard, ShardshiftError

BACKENDS: Final = ("gloo", "nccl")
_TIMEOUT_S: Final = 15.0
_PAIR_BYTES: Final = 32 << 20
_PAIR_RUNS: Final = 3
_STAGING_BYTES: Final = 1 << 20
_ODD: Final = 2654435761
_PERIOD: Final = 4_093  # a prime: bytes that land a page or a block further on are wrong there


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what should be so.
        fault: what was not; empty if all was well.
        seconds: how long it took.
    """

    name: str
    fault: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast one device sends to another while all others rest, in bytes per second."""

    source: int
    target: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a self-test found.

    Attributes:
        backend: gloo or nccl.
        devices: how many processes.
        checks: what was tried, in order.
        bandwidth: per ordered pair.
        notices: paths that were not taken, and why.
        links: what the moves of the last check sent over each pair, and in what time.
    """

    backend: str
    devices: int
    checks: tuple[Check, ...]
    bandwidth: tuple[Bandwidth, ...] = ()
    notices: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not any(check.fault for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"passed": self.passed, **asdict(self)}


def run_and_print(
    backend: str, devices: int | None, *, same_host: bool, as_json: bool, trace: Path | None = None
) -> bool:
    """Run the self-test and print what was found; whether all was well.

    Args:
        backend: see ``run_selftest``.
        devices: likewise.
        same_host: likewise.
        as_json: whether stdout gets JSON, and stderr the tables.
        trace: file for a Perfetto trace of the moves; None for no trace.

    Raises:
        Infeasible: if this machine cannot run it, or the trace cannot be written.
    """
    with tracing(trace) if trace else nullcontext(nowhere) as sink:
        outcome = run_selftest(backend, devices, same_host=same_host, sink=sink)
    console = Console(stderr=as_json, highlight=False)
    table = Table("checked", "", "seconds", title=f"{outcome.backend}, {outcome.devices} processes")
    for check in outcome.checks:
        table.add_row(check.name, check.fault or "ok", f"{check.seconds:.2f}")
    print_whole(console, table)
    if outcome.bandwidth:
        rates = Table("GB/s from \\ to", *(str(device) for device in range(outcome.devices)))
        of = {(one.source, one.target): f"{one.bytes_per_s / 1e9:.2f}" for one in outcome.bandwidth}
        for source in range(outcome.devices):
            rates.add_row(str(source), *(of.get((source, target), "-") for target in range(outcome.devices)))
        print_whole(console, rates)
    if outcome.links:
        console.print("bytes by link in the moves of the last check, in rounds of at most 1 MiB:", soft_wrap=True)
        print_whole(console, links_table(outcome.links))
    for notice in outcome.notices:
        console.print(notice, markup=False, soft_wrap=True)
    if trace:
        console.print(f"wrote {trace}; https://ui.perfetto.dev opens it", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(outcome.to_json()))
    return outcome.passed


def run_selftest(backend: str, devices: int | None = None, *, same_host: bool = True, sink: Sink = nowhere) -> Outcome:
    """Run the self-test in processes of its own.

    Args:
        backend: ``gloo`` or ``nccl``.
        devices: processes; None for 4, or with NCCL one for each GPU.
        same_host: whether processes on one host may read one another's memory (gloo only).
        sink: takes the events of the moves, of all devices.

    Raises:
        Infeasible: if this machine cannot run it.
    """
    if backend not in BACKENDS:
        raise Infeasible(f"there is no backend {backend!r}; what to do: use one of {', '.join(BACKENDS)}")
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    count = devices or (gpus if backend == "nccl" else 4)
    if backend == "nccl" and (gpus < 2 or count > gpus):
        raise Infeasible(
            f"nccl was asked for {max(count, 2)} processes with a GPU each, this machine has {gpus}; what to do: run "
            "it where there are two or more, or use --backend gloo"
        )
    if count < 2:
        raise Infeasible(f"{count} process has nobody to send to; what to do: ask for 2 or more")
    kind = "nccl" if backend == "nccl" else "same-host" if same_host else "gloo"
    heard = _Heard(sink)
    try:
        with LocalJob(count, _worker, (kind,), timeout_s=_TIMEOUT_S, preload=["shardshift.elastic.opening"]) as job:
            for device, message in job.messages():
                heard.take(device, message)
    except ShardshiftError as error:
        if not any(check.fault for check in heard.checks.values()):
            heard.take(0, Check("all processes come to the end", str(error), 0.0))
    return Outcome(
        backend,
        count,
        tuple(heard.checks.values()),
        tuple(heard.bandwidth),
        tuple(dict.fromkeys(heard.notices)),
        heard.meter.links(),
    )


@dataclass(slots=True)
class _Heard:
    """What the processes have said so far; a check is as bad as it was on the worst of them."""

    sink: Sink = nowhere
    meter: LinkMeter = field(default_factory=LinkMeter)
    checks: dict[str, Check] = field(default_factory=dict)
    bandwidth: list[Bandwidth] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def take(self, device: int, message: Check | Bandwidth | Event | str) -> None:
        if isinstance(message, Event):
            self.meter(message)
            self.sink(message)
        elif isinstance(message, Bandwidth):
            self.bandwidth.append(message)
        elif isinstance(message, str):
            self.notices.append(f"device {device}: {message}")
        else:
            before = self.checks.get(message.name, replace(message, seconds=0.0))
            faults = list(dict.fromkeys(fault for fault in (before.fault, message.fault) if fault))
            seconds = max(before.seconds, message.seconds)
            self.checks[message.name] = Check(message.name, "; ".join(faults), seconds)


@dataclass(frozen=True, slots=True)
class _End:
    transport: Transport
    devices: int
    memory: torch.device

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.devices) if peer != self.transport.device]

    def pattern(self, seed: int, nbytes: int) -> torch.Tensor:
        """Bytes that say where they come from."""
        index = torch.arange(_PERIOD)
        block = ((index * 31 + index // 251 + seed * 101) % 256).to(torch.uint8)
        return block.repeat(nbytes // _PERIOD + 1)[:nbytes].to(self.memory)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=self.memory)

    def swap(self, nbytes: int, seed: int = 0) -> Callable[[], None]:
        """Send every peer a message and ask one of it; returns what waits for them and looks at them."""
        me, rooms = self.transport.device, {peer: self.room(nbytes) for peer in self.others}
        pending = self.transport.post(
            [Message.flat(peer, self.pattern(seed + me * 64 + peer, nbytes)) for peer in self.others],
            [Message.flat(peer, room) for peer, room in rooms.items()],
        )

        def finish() -> None:
            pending.complete(_TIMEOUT_S)
            for peer, room in rooms.items():
                _require(torch.equal(room, self.pattern(seed + peer * 64 + me, nbytes)), f"{nbytes} bytes from {peer}")

        return finish


def _worker(send: Callable[[object], None], kind: str) -> None:
    torch.set_num_threads(1)  # more of them wait for one another where processes outnumber cores
    if kind == "nccl":
        os.environ.update({name: values[-1] for name, (values, _) in SETTINGS.items()})
        torch.cuda.set_device(int(os.environ["RANK"]))
    memory = torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")
    member = Member.from_launcher(timeout_s=_TIMEOUT_S)
    count, control = member.topology.devices, Control(member.store, member.device, _TIMEOUT_S)

    def say(text: str) -> None:
        send(text)

    with _checked(send, "all processes meet"):
        store = dist.PrefixStore("selftest", member.store)
        transport = connect(store, member.device, count, _TIMEOUT_S, kind=kind, say=say)
    try:
        end = _End(transport, count, memory)
        for name, check in _CHECKS.items():
            with _checked(send, name):
                check(end)
        with _checked(send, "each pair by itself, for its bandwidth"):
            for source in range(count):
                for target in range(count):
                    if source != target:
                        control.gather(f"pair/{source}/{target}", range(count), b"", "selftest")
                        _measure(end, source, target, send)
            control.gather("measured", range(count), b"", "selftest")
    finally:
        transport.close()
    with (
        _checked(send, "a state moves between layouts and is right, bit for bit"),
        Mover(
            dist.PrefixStore("mover", member.store),
            member.device,
            range(count),
            transport=kind,
            staging_bytes=_STAGING_BYTES,
            timeout_s=_TIMEOUT_S,
            memory=memory,
            sink=send,
        ) as mover,
    ):
        _move_around(mover, count, memory)


@contextmanager
def _checked(send: Callable[[object], None], name: str) -> Iterator[None]:
    """Tell how a check went; one that failed ends the process, since the others are in another place then."""
    began_s = time.perf_counter()
    try:
        yield
    except Exception as error:
        send(Check(name, f"{type(error).__name__}: {error}", time.perf_counter() - began_s))
        raise
    send(Check(name, "", time.perf_counter() - began_s))


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(f"wrong bytes: {what}")


def _in_order(end: _End) -> None:
    for finish in [end.swap(64, seed) for seed in range(20)]:
        finish()


def _of_all_sizes(end: _End) -> None:
    for nbytes in (0, 1, 7, 4097, 65_536, 1 << 20, (5 << 20) + 3):
        end.swap(nbytes)()


def _rounds_under_way(end: _End) -> None:
    for finish in [end.swap((1 << 20) + 4096 * step if step % 2 else 100, step) for step in range(6)]:
        finish()


def _strided(end: _End) -> None:
    """Columns out of one matrix and into another; packed where the transport takes no views, as the engine does."""
    me, rows, width = end.transport.device, 512, 4096
    mine = end.pattern(me, rows * width * 2).view(rows, 2 * width)[:, width // 2 : width // 2 + width]
    into = {peer: end.room(rows * width * 2).view(rows, 2, width)[:, 1] for peer in end.others}
    flat = {peer: end.room(rows * width) for peer in end.others if not end.transport.takes_views(peer)}
    end.transport.post(
        [Message.flat(p, mine.reshape(-1)) if p in flat else Message(p, (mine[:9], mine[9:])) for p in end.others],
        [Message.flat(p, flat[p]) if p in flat else Message(p, (view,)) for p, view in into.items()],
    ).complete(_TIMEOUT_S)
    for peer, view in into.items():
        if peer in flat:
            view.copy_(flat[peer].view(rows, width))
        sent = end.pattern(peer, rows * width * 2).view(rows, 2 * width)[:, width // 2 : width // 2 + width]
        _require(torch.equal(view, sent), f"strided, from {peer}")


_CHECKS: Final[dict[str, Callable[[_End], None]]] = {
    "messages of a pair arrive in order": _in_order,
    "messages of 0 bytes to 5 MiB arrive whole, both ways at once": _of_all_sizes,
    "several rounds may be under way": _rounds_under_way,
    "strided tensors arrive in place": _strided,
}


def _measure(end: _End, source: int, target: int, send: Callable[[object], None]) -> None:
    me, best_s = end.transport.device, float("inf")
    if me not in (source, target):
        return
    payload = end.pattern(1, _PAIR_BYTES) if me == source else end.room(_PAIR_BYTES)
    for _ in range(_PAIR_RUNS):
        began_s = time.perf_counter()
        if me == source:
            end.transport.post([Message.flat(target, payload)], []).complete(_TIMEOUT_S)
        else:
            end.transport.post([], [Message.flat(source, payload)]).complete(_TIMEOUT_S)
        best_s = min(best_s, time.perf_counter() - began_s)
    if me == source:
        send(Bandwidth(source, target, _PAIR_BYTES / best_s))


def _move_around(mover: Mover, devices: int, memory: torch.device) -> None:
    """From a pipeline to tensor parallelism to replicas and back; every element says which it is."""
    model = Model.from_dimensions(layers=devices, hidden=64 * devices, heads=devices, vocab=64 * devices, positions=64)
    catalogue = Catalogue.of(model)
    layouts = [
        catalogue.layout(config)
        for config in (
            f"pp{devices}tp1dp1",
            f"pp1tp{devices}dp1",
            f"pp1tp1dp{devices}",
            f"pp{devices}tp1dp1",
        )
    ]
    placed = [PlacedLayout(layout, tuple(range(devices))) for layout in layouts]
    state = {name: _value(shard, memory) for name, shard in names_of(placed[0].shards_on(mover.device)).items()}
    for before, after in pairwise(placed):
        state = mover.move(before, after, state)
        for name, shard in names_of(after.shards_on(mover.device)).items():
            _require(torch.equal(state[name], _value(shard, memory)), f"{shard}")


def _value(shard: Shard, memory: torch.device) -> torch.Tensor:
    """The elements of a shard: each a number of its place in the whole tensor, and of the tensor's name."""
    index = torch.zeros(shard.region.shape, dtype=torch.int64)
    for dim, (offset, size) in enumerate(zip(shard.region.offsets, shard.region.shape, strict=True)):
        along = torch.arange(offset, offset + size)
        index = index * shard.tensor.shape[dim] + along.view(-1, *[1] * (len(shard.region.shape) - dim - 1))
    seed = sum(map(ord, str(shard.tensor)))
    dtype: torch.dtype = getattr(torch, shard.tensor.dtype)
    return ((index * _ODD + seed) % 251).to(dtype).to(memory)
