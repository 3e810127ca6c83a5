"""Attacks on the engine: each test shows a fault that was found by attacking it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.strategies import equal_layers, even_grid
from tests.unit.together import coded, holds, state_on, together

import shardshift as ss
from shardshift.elastic import die_with_parent, start_fork_server
from shardshift.engine import Mover, names_of
from shardshift.engine.events import PhaseBegan, RoundEnded
from shardshift.transport import MemoryHub, Message, Pending, Transport, TransportError
from shardshift.transport.process_group import ProcessGroupTransport
from shardshift.values import (
    Kind,
    Layout,
    Mismatch,
    PeerLost,
    PlacedLayout,
    Region,
    Shard,
    ShardshiftError,
    Tensor,
    Unaccounted,
)

GRACE_S = 5.0
MODEL = equal_layers(4, width=24, numel=3000)
PREV, CURR = (PlacedLayout(even_grid(MODEL, text), (0, 1)) for text in ("pp2", "tp2"))
VALUES = coded(PREV)
POLICIES = ("keep", "release")


def named(name: str, shape: tuple[int, ...] = (4, 2), kind: Kind = Kind.PARAM) -> Tensor:
    return Tensor(kind, name, shape, "float32", 4)


def whole(tensor: Tensor) -> Shard:
    return Shard(tensor, Region.whole(tensor.shape))


def halves(tensor: Tensor) -> tuple[Shard, Shard]:
    return Shard(tensor, Region((0, 0), (2, 2))), Shard(tensor, Region((2, 0), (2, 2)))


def on(devices: tuple[int, ...], *roles: tuple[Shard, ...]) -> PlacedLayout:
    return PlacedLayout(Layout(roles, range(len(roles))), devices)


# State that is lost, or wrong


@pytest.mark.parametrize(
    ("one", "others"),
    [
        (whole(named("exp_avg:w")), (whole(named("w", kind=Kind.EXP_AVG)),)),
        (whole(named("buffer:w")), (whole(named("w", kind=Kind.BUFFER)), whole(named("w")))),
        (whole(named("w[0:2, 0:2]")), halves(named("w"))),
    ],
    ids=["kind", "buffer", "region"],
)
def test_tensors_that_would_have_one_name_are_told_apart_or_refused_but_none_is_lost(
    one: Shard, others: tuple[Shard, ...]
) -> None:
    prev, curr = on((0, 1), (one,), others), on((0, 1), (one, *others), ())
    given = {shard: torch.full(shard.region.shape, float(number)) for number, shard in enumerate((one, *others))}

    def work(mover: Mover) -> Any:
        state = {name: given[shard] for name, shard in names_of(prev.shards_on(mover.device)).items()}
        return mover.move(prev, curr, state)

    found = together((0, 1), work)[0]
    assert isinstance(found, ShardshiftError) or len(found) == len(given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("joins", [False, True], ids=["cut", "joined"])
def test_names_that_are_one_tensor_stay_one_where_their_shards_get_other_names(policy: Any, joins: bool) -> None:
    emb, head = named("emb"), named("head")
    apart = on((1,), (*halves(emb), *halves(head)))
    together_ = on((0,), (whole(emb), whole(head)))
    prev, curr = (apart, together_) if joins else (together_, apart)

    def work(mover: Mover) -> Any:
        one = torch.arange(8.0).view(4, 2)
        parts = {"[0:2, 0:2]": one[:2], "[2:4, 0:2]": one[2:]} if joins else {"": one}
        here = mover.device in prev.devices
        state = {name + part: tensor for part, tensor in parts.items() for name in ("emb", "head")} if here else {}
        return mover.move(prev, curr, state, policy=policy)

    state = together((0, 1), work)[curr.devices[0]]
    parts = [""] if joins else ["[0:2, 0:2]", "[2:4, 0:2]"]
    assert [state["emb" + part].data_ptr() == state["head" + part].data_ptr() for part in parts] == [True] * len(parts)


def test_a_tie_is_one_of_tensors_and_not_of_whatever_has_its_name_elsewhere() -> None:
    buffer, param, tied = named("w", kind=Kind.BUFFER), named("w"), named("v")
    # Where a device holds no parameter w, "w" is the buffer; where it does, "w" is the parameter.
    prev = on((0, 1), (whole(buffer), whole(tied)), (whole(param),))
    curr = on((0, 1), (), (whole(buffer), whole(param), whole(tied)))

    def work(mover: Mover) -> Any:
        zeros = torch.zeros(4, 2)
        return mover.move(prev, curr, {"w": zeros} if mover.device else {"w": zeros, "v": zeros})

    state = together((0, 1), work)[1]
    assert state["w"].data_ptr() != state["v"].data_ptr()
    assert state["buffer:w"].data_ptr() == state["v"].data_ptr()


def test_a_shard_that_has_not_changed_is_the_very_tensor_though_one_that_is_tied_to_it_arrives() -> None:
    prev = on((0, 1), (whole(named("a")), whole(named("b"))), (whole(named("b")),))
    curr = on((0, 1), (), (whole(named("a")), whole(named("b"))))

    def work(mover: Mover) -> Any:
        one = torch.ones(4, 2)
        state = {"b": one} if mover.device else {"a": one, "b": one}
        found = mover.move(prev, curr, state)
        return mover.device == 0 or (found["a"] is found["b"], found["b"] is one)

    assert together((0, 1), work)[1] == (True, True)


def test_an_interrupt_from_the_keyboard_in_a_releasing_move_leaves_what_to_resume_from() -> None:
    rounds: list[RoundEnded] = []

    def sink(event: object) -> None:
        if isinstance(event, RoundEnded) and event.device == 0:
            rounds.append(event)
            if len(rounds) == 2:
                raise KeyboardInterrupt

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, PREV, VALUES)
        try:
            mover.move(PREV, CURR, state, policy="release")
        except BaseException as error:
            return type(error), getattr(error, "journal", None) is not None or holds(mover.device, PREV, VALUES, state)
        return None

    found = together((0, 1), work, sink=sink, staging_bytes=20_000, timeout_s=1.0)
    assert found == {0: (KeyboardInterrupt, True), 1: (PeerLost, True)}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_closed_mover_says_so_and_takes_no_state(policy: Any) -> None:
    def work(mover: Mover) -> Any:
        mover.close()
        state = state_on(mover.device, PREV, VALUES)
        with pytest.raises(ShardshiftError, match="closed"):
            mover.move(PREV, CURR, state, policy=policy)
        return holds(mover.device, PREV, VALUES, state)

    assert together((0, 1), work) == {0: True, 1: True}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "made", [lambda: torch.empty(4, 2, device="meta"), lambda: torch.ones(4, 2).to_sparse()], ids=["meta", "sparse"]
)
def test_a_tensor_without_dense_memory_is_refused_by_name_before_anything_moves(
    policy: Any, made: Callable[[], torch.Tensor]
) -> None:
    prev, curr = on((0,), (whole(named("weight")),)), on((1,), (whole(named("weight")),))

    def work(mover: Mover) -> Any:
        state = {} if mover.device else {"weight": made()}
        try:
            return mover.move(prev, curr, state, policy=policy)
        except Exception as error:
            return type(error), str(error), error.journal if isinstance(error, ShardshiftError) else None, len(state)

    found = together((0, 1), work, timeout_s=1.0)
    assert found[0][:3] == found[1][:3]
    kind, text, journal, left = found[0]
    assert (kind, journal, left) == (Mismatch, None, 1)
    assert "weight" in text


# Hangs, and bounds that are broken


def _stopped_host(pipe: Connection, rank: int, path: str) -> None:
    die_with_parent()
    store = dist.FileStore(path, 3)
    if rank == 0:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.set("port", str(host.port))
        shared: dist.Store = host
    else:
        shared = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False, timeout=timedelta(seconds=60))

    def sink(event: object) -> None:
        if rank == 0 and isinstance(event, PhaseBegan) and event.phase == "agree":
            os.kill(os.getpid(), signal.SIGSTOP)

    layouts = [on(tuple(range(3)), *[(Shard(named("w", (6, 2)), r),) for r in cut]) for cut in _CUTS]
    try:
        with Mover(shared, rank, range(3), timeout_s=_LIMIT_S, sink=sink) as mover:
            pipe.send("open")
            mover.move(layouts[0], layouts[1], {"w": torch.ones(2, 2)})
        pipe.send("moved")
    except Exception as error:
        pipe.send(type(error).__name__)


_LIMIT_S = 3.0
_CUTS = (
    [Region((row, 0), (2, 2)) for row in (0, 2, 4)],
    [Region((row, 0), (2, 2)) for row in (4, 0, 2)],
)


def test_survivors_of_a_stopped_rank_that_hosts_the_store_raise_within_the_bound(tmp_path: Path) -> None:
    """As with ``init_process_group("gloo", init_method="tcp://...")``, where rank 0 hosts the store."""
    context = start_fork_server(["shardshift.engine", "tests.unit.test_attack_engine"])
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_stopped_host, args=(theirs, rank, str(tmp_path / "store")))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(60.0)
            assert pipe.recv() == "open"
        end_s = time.monotonic() + _LIMIT_S + GRACE_S
        found = [pipe.recv() if pipe.poll(max(end_s - time.monotonic(), 0.0)) else "hangs" for pipe in pipes[1:]]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    assert found == ["PeerLost", "PeerLost"]


def _opens_only(port: int) -> None:
    die_with_parent()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ProcessGroupTransport.gloo(store, 0, 2, 60.0)


def test_gloo_gives_up_on_a_peer_that_died_while_they_met_within_its_limit() -> None:
    """It takes five times as long: gloo has a limit for each of its tries to connect. 150 s by default."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    peer = start_fork_server(["shardshift.engine"]).Process(target=_opens_only, args=(store.port,))
    peer.start()
    try:
        store.wait(["0/0"], timedelta(seconds=60))  # its address
    finally:
        peer.kill()
        peer.join()
    errors: list[Exception] = []

    def open_() -> None:
        try:
            ProcessGroupTransport.gloo(store, 1, 2, 2.0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=open_, daemon=True)
    thread.start()
    thread.join(2.0 + GRACE_S)
    in_time = not thread.is_alive()
    thread.join()
    assert [type(error) for error in errors] == [TransportError]
    assert in_time


# Who is blamed


class Torn:
    """A hub's transport in which the link between devices 0 and 1 is broken, and nothing else."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.device = inner.device

    def takes_views(self, peer: int) -> bool:
        return self._inner.takes_views(peer)

    def post(self, sends: list[Message], recvs: list[Message]) -> Pending:
        for message in (*sends, *recvs):
            if {self.device, message.peer} == {0, 1}:
                raise TransportError(f"device {self.device} with device {message.peer}: Connection reset by peer")
        return self._inner.post(sends, recvs)

    def close(self) -> None:
        self._inner.close()


def test_devices_whose_links_all_work_are_not_the_ones_that_are_blamed_for_a_broken_link() -> None:
    tensors = [named(f"w{index}") for index in range(4)]
    prev, curr = (on(devices, *[(whole(tensor),) for tensor in tensors]) for devices in ((0, 1, 2, 3), (1, 0, 3, 2)))
    hub = MemoryHub(4)

    def work(mover: Mover) -> Any:
        return mover.move(prev, curr, {f"w{mover.device}": torch.ones(4, 2)})

    found = together(range(4), work, transport=lambda store, device, devices: Torn(hub.transport(device)))
    assert {type(error) for error in found.values()} == {PeerLost}
    assert not {2, 3} & {rank for error in found.values() for rank in error.ranks}


# What is left behind


def test_a_mover_that_is_closed_leaves_no_socket_to_the_garbage_collector() -> None:
    """Trainers switch the collector off; then a call of ``reshard`` leaves a connection on the rank and on the host."""

    def sockets() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    layout = on((0,), (whole(named("w")),))
    gc.collect()
    gc.disable()
    try:
        counts = []
        for number in range(4):
            with Mover(dist.PrefixStore(str(number), store), 0, (0,), transport="gloo") as mover:
                mover.move(layout, layout, {"w": torch.ones(4, 2)})
            del mover
            counts.append(sockets())
    finally:
        gc.enable()
    # The host sees a connection end a moment later than this end does, so one or two may be left of the last.
    assert counts[-1] - counts[0] < 3


# Messages


def test_a_rank_outside_the_group_is_told_so() -> None:
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises((ShardshiftError, RuntimeError, ValueError), match="group"):
        ss.reshard(PREV, CURR, {}, group)


@pytest.mark.parametrize("extra", [{3: torch.ones(1)}, {"layers.0": [1, 2]}], ids=["key", "value"])
def test_what_in_a_state_is_no_name_or_no_tensor_is_named(extra: Any) -> None:
    def work(mover: Mover) -> Any:
        state: Any = state_on(mover.device, PREV, VALUES)
        return mover.move(PREV, CURR, state if mover.device else state | extra)

    found = together((0, 1), work)
    assert {type(error) for error in found.values()} <= {Mismatch, Unaccounted}
    assert all(str(next(iter(extra))) in str(error) for error in found.values())


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_limit_of_no_time_is_refused_rather_than_blamed_on_peers(timeout_s: float) -> None:
    found = together((0, 1), lambda mover: None, timeout_s=timeout_s)
    assert {type(error) for error in found.values()} == {ss.Infeasible}
