"""A job of forked processes that move a state, one of which may be ended or stopped at a place: what the others tell.

The state's every element says who it is, so what a survivor holds can be held against what it should be.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

import torch
import torch.distributed as dist
from _processes import end, fork
from _state import coded, dtype_of

from shardshift.elastic import die_with_parent
from shardshift.engine import Event, Interrupted, Mover, names_of
from shardshift.engine.events import FencePassed, PhaseBegan, RoundEnded
from shardshift.models import Catalogue, Model
from shardshift.transport import Message, Pending, SameHostTransport, Transport, connect
from shardshift.values import Infeasible, Layout, PeerLost, PlacedLayout, Region, Shard, ShardshiftError, StateLost

TIMEOUT_S: Final = 5.0
MEETING: Final = timedelta(seconds=60)
"""For all processes to be there, which is not what is tried: on a busy machine some come late."""
BOUND_S: Final = TIMEOUT_S + 5.0
"""Within which every survivor has to raise."""
MODEL: Final = Model.from_dimensions(layers=4, hidden=64, heads=4, vocab=128, positions=32)


@dataclass(frozen=True, slots=True)
class Case:
    """What is moved, and what may be lost.

    Attributes:
        prev: configuration before.
        curr: configuration after.
        policy: ``keep`` or ``release``.
        redundant: whether every byte has two holders before and after, so that no single loss may cost one.
        staging_bytes: of a device; so that there are 4 to 8 rounds.
    """

    prev: str
    curr: str
    policy: str
    redundant: bool
    staging_bytes: int = 768 << 10

    def __str__(self) -> str:
        holders = "two holders" if self.redundant else "single holders"
        return f"{self.prev} to {self.curr}, {self.policy}, {holders}"

    @property
    def layouts(self) -> tuple[PlacedLayout, PlacedLayout]:
        """Before and after, rank r on device r."""
        catalogue = Catalogue.of(MODEL)
        before, after = (catalogue.layout(config) for config in (self.prev, self.curr))
        return tuple(PlacedLayout(one, tuple(range(one.world_size))) for one in (before, after))  # type: ignore[return-value]

    @property
    def devices(self) -> int:
        """Processes of the job."""
        return max(len(layout.devices) for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to whom.

    Attributes:
        victim: the device; -1: nothing happens.
        place: ``round``: after its round of that number; ``post``: right after it has posted so many batches of
            messages; ``fence``: before it comes to that fence; ``passed``: after that fence.
        number: which.
        stops: whether it is stopped, and not killed.
        transport: over which the job moves: ``gloo``, or ``same-host``, where a rank may go while it is read from.
    """

    victim: int
    place: str
    number: int
    stops: bool = False
    transport: str = "gloo"


@dataclass
class Account:
    """What one survivor tells.

    Attributes:
        device: which.
        outcome: ``committed``, or how the move ended for it.
        raised_s: when it raised; on the clock of all processes.
        named: whom the error named.
        wrong: what was not bit-exact, or not as it should be.
        lost: names of the tensors that ``StateLost`` named.
        held: (tensor, region) of all that it held when the move was interrupted.
        direction: which way it was resumed.
    """

    device: int
    outcome: str = "committed"
    raised_s: float = 0.0
    named: tuple[int, ...] = ()
    wrong: list[str] = field(default_factory=list)
    lost: tuple[str, ...] = ()
    held: list[tuple[str, Region]] = field(default_factory=list)
    direction: str = ""


class Victim:
    """Counts what a device does, and ends it where the fault says."""

    def __init__(self, device: int, fault: Fault, struck: Any) -> None:
        self.seen: Counter[str] = Counter()
        self._fault = fault if fault.victim == device else None
        self._struck = struck
        self._kind = fault.transport

    def reach(self, place: str) -> None:
        """The device is at a place of this kind once more."""
        number = self.seen[place]
        self.seen[place] += 1
        fault = self._fault
        if fault is not None and (fault.place, fault.number) == (place, number):
            self._struck[0] = time.perf_counter()
            os.kill(os.getpid(), signal.SIGSTOP if fault.stops else signal.SIGKILL)

    def sink(self, event: Event) -> None:
        """Hear of the events of a move."""
        match event:
            case RoundEnded():
                self.reach("round")
            case PhaseBegan(phase="fence" | "commit"):
                self.reach("fence")
            case FencePassed():
                self.reach("passed")
            case _:
                pass

    def wires(self, store: dist.Store, device: int, devices: Sequence[int]) -> Transport:
        """A transport that tells of what is posted."""
        made = connect(store, device, devices, MEETING.total_seconds(), kind=self._kind)
        return _ToldAhead(made, self) if isinstance(made, SameHostTransport) else _Told(made, self)


class _Told:
    """Another transport, and a word to the victim after each post."""

    def __init__(self, inner: Transport, victim: Victim) -> None:
        self._inner, self._victim = inner, victim

    @property
    def device(self) -> int:
        return self._inner.device

    def takes_views(self, peer: int) -> bool:
        return self._inner.takes_views(peer)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        pending = self._inner.post(sends, recvs)
        self._victim.reach("post")
        return pending

    def close(self) -> None:
        self._inner.close()


class _ToldAhead(_Told):
    """The same, of one that foresees."""

    def __init__(self, inner: SameHostTransport, victim: Victim) -> None:
        super().__init__(inner, victim)
        self._near = inner

    def foresee(self, message: Message, *, arrives: bool) -> Message:
        return self._near.foresee(message, arrives=arrives)


def accounts_of(case: Case, fault: Fault) -> tuple[dict[int, Account], dict[int, Counter[str]], float]:
    """Run a job; what the survivors tell, where each device has been, and when the fault struck."""
    shared = mmap.mmap(-1, 16)
    struck: Any = memoryview(shared).cast("d")  # of floats, which the stub does not say; and the store's port
    pids: list[int] = []
    pipes: dict[Connection, int] = {}
    accounts: dict[int, Account] = {}
    seen: dict[int, Counter[str]] = {}
    try:
        for device in range(case.devices):
            ours, theirs = Pipe(duplex=False)
            pid = fork()
            if not pid:
                _child(case, fault, device, struck, theirs)
            theirs.close()
            pids.append(pid)
            pipes[ours] = device
        # After the forks: a lock that the store's thread holds would stay locked in a child.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MEETING)
        struck[1] = store.port
        deadline, waiting = time.monotonic() + 4 * BOUND_S, dict(pipes)
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0)):
                assert isinstance(pipe, Connection)
                device = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionError):
                    accounts[device], seen[device] = pickle.loads(pipe.recv_bytes())
            if set(waiting.values()) <= {fault.victim}:
                break
    finally:
        end(pids, pipes)
        when_s = struck[0]
        struck.release()
        shared.close()
    accounts.pop(fault.victim, None)
    return accounts, seen, when_s


def _child(case: Case, fault: Fault, device: int, struck: Any, pipe: Connection) -> None:
    """The life of one process; never returns."""
    try:
        die_with_parent()
        torch.set_num_threads(1)
        victim, account = Victim(device, fault, struck), Account(device)
        while not struck[1]:
            time.sleep(0.001)
        port = int(struck[1])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=MEETING)
        try:
            _live(case, fault, device, store, victim, account)
        except Exception as error:
            account.wrong.append(f"{type(error).__name__}: {error}")
        pipe.send_bytes(pickle.dumps((account, victim.seen)))
    finally:
        while True:  # the parent ends all
            signal.pause()


def _live(case: Case, fault: Fault, device: int, store: dist.Store, victim: Victim, account: Account) -> None:
    before, after = case.layouts
    state = _state(before, device)
    with Mover(
        store,
        device,
        range(case.devices),
        transport=victim.wires,
        staging_bytes=case.staging_bytes,
        timeout_s=TIMEOUT_S,
        sink=victim.sink,
    ) as mover:
        try:
            found = mover.move(before, after, state, policy=case.policy)  # type: ignore[arg-type]
        except PeerLost as lost:
            account.raised_s, account.named, account.outcome = time.perf_counter(), lost.ranks, "raised"
            _go_on(case, fault.victim, mover, lost, state, account)
        else:
            _hold(account, after, device, found)


def _go_on(
    case: Case, victim: int, mover: Mover, lost: PeerLost, state: dict[str, torch.Tensor], account: Account
) -> None:
    before, after = case.layouts
    mover.exclude([victim])
    if case.policy == "keep":
        account.direction = "kept"
        if lost.journal is not None:
            account.wrong.append("a journal, though nothing was released")
        _hold(account, before, mover.device, state)
        less = _without(after, victim)
        try:
            found = mover.move(before, less, state, lost=[victim], policy="keep")
        except ShardshiftError as error:
            if case.redundant:
                raise
            account.direction = f"kept, then {type(error).__name__}"
            return
        _hold(account, less, mover.device, found)
        return
    journal = lost.journal
    if not isinstance(journal, Interrupted):
        raise RuntimeError(f"no journal: {lost}") from lost
    account.held = [(str(shard.tensor), shard.region) for shard in journal.journal.held()]
    try:
        resumed = mover.resume(journal)
    except StateLost as error:
        account.outcome, account.lost = "state lost", tuple(sorted(error.names))
        return
    except Infeasible:  # all is there, in no layout: bring it into one
        role = tuple(Shard(tensor, Region.whole(tensor.shape)) for tensor in before.layout.tensors)
        whole = PlacedLayout(Layout((role,), (0,) * len(mover.devices)), mover.devices)
        resumed = mover.resume(journal, to=whole)
    account.direction = resumed.direction
    _hold(account, resumed.layout, mover.device, resumed.state)
    everywhere = {shard.tensor for device in mover.devices for shard in resumed.layout.shards_on(device)}
    if everywhere != set(before.layout.tensors):
        account.wrong.append("the layout that was resumed does not hold every tensor")


def _state(layout: PlacedLayout, device: int) -> dict[str, torch.Tensor]:
    shards = names_of(layout.shards_on(device))
    return {
        name: coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard))) for name, shard in shards.items()
    }


def _hold(account: Account, layout: PlacedLayout, device: int, state: dict[str, torch.Tensor]) -> None:
    """Hold what a device has against what it should have."""
    wanted = _state(layout, device)
    if wanted.keys() != state.keys():
        account.wrong.append(f"names: {sorted(wanted.keys() ^ state.keys())}")
        return
    for name, tensor in wanted.items():
        if not torch.equal(tensor.view(torch.uint8), state[name].contiguous().view(torch.uint8)):
            account.wrong.append(f"{name} is not bit-exact")


def _without(layout: PlacedLayout, lost: int) -> PlacedLayout:
    """A layout less one device."""
    ranks = [rank for rank, device in enumerate(layout.devices) if device != lost]
    roles = tuple(layout.layout.shards(rank) for rank in ranks)
    return PlacedLayout(Layout(roles, tuple(range(len(ranks)))), tuple(layout.devices[rank] for rank in ranks))
