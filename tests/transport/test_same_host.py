from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport.conformance import IDS, LONG_S, SCENARIOS, pattern, room, survivors
from tests.transport.processes import faults_by_scenario

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.transport import (
    MemoryHub,
    Message,
    SameHostTransport,
    TransportError,
    connect,
    probe,
)
from shardshift.transport.offers import Bounces
from shardshift.transport.wires import Arrival, Departure, Ticket, Wire
from shardshift.values import PeerLost

CYCLES, SETTLED = 50, 10


def same_host(store: dist.Store, device: int) -> SameHostTransport:
    transport = connect(store, device, IDS, LONG_S, kind="same-host")
    assert isinstance(transport, SameHostTransport)
    assert transport.direct_peers == {*IDS} - {device}, "the direct path does not work here"
    return transport


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str | None]]:
    return faults_by_scenario(same_host, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_keeps_the_contract_that(name: str, faults: dict[str, list[str | None]]) -> None:
    assert faults.get(name) == [None] * survivors(name)


def make_and_close(send: Any) -> None:
    member = Member.from_launcher(timeout_s=LONG_S)
    seen = []
    for cycle in range(CYCLES):
        transport = connect(dist.PrefixStore(str(cycle), member.store), member.device, 2, LONG_S)
        peer, payload = 1 - member.device, torch.ones(1000, dtype=torch.uint8)
        transport.post([Message.flat(peer, payload)], [Message.flat(peer, payload.clone())]).complete(LONG_S)
        transport.close()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    send(seen)


def test_closing_gives_descriptors_and_threads_back() -> None:
    with LocalJob(2, make_and_close, (), timeout_s=LONG_S) as job:
        for _, seen in job.messages():
            assert set(seen[SETTLED:]) == {seen[SETTLED]}


def stop_while_others_wait(send: Any) -> None:
    """Device 1 is stopped, not ended, while device 0 reads from it and then waits for more."""
    member = Member.from_launcher(timeout_s=LONG_S)
    control = Control(member.store, member.device, LONG_S)
    transport = connect(dist.PrefixStore("move", member.store), member.device, 2, LONG_S)
    if member.device == 1:
        transport.post([Message.flat(0, pattern(1, 1 << 20))], [])
        # What is posted leaves by the transport's thread, in order: with this byte here, the offer above is out. A
        # process that is stopped before its thread had a turn has offered nothing.
        transport.post([], [Message.flat(0, room(1))]).complete(LONG_S)
        control.gather("offered", range(2), str(os.getpid()).encode(), "test")
        signal.pause()
    transport.post([Message.flat(1, room(1))], [])
    pid = int(control.gather("offered", range(2), b"", "test")[1])
    os.kill(pid, signal.SIGSTOP)
    received = room(1 << 20)
    transport.post([], [Message.flat(1, received)]).complete(LONG_S)  # memory can be read all the same
    more = transport.post([], [Message.flat(1, room(1))])
    try:
        more.complete(1.0)
    except TransportError as error:
        send((torch.equal(received, pattern(1, 1 << 20)), str(error)))
    os.kill(pid, signal.SIGKILL)
    transport.close()


def test_a_peer_that_hangs_is_an_error_within_the_timeout() -> None:
    found: list[Any] = []
    job = LocalJob(2, stop_while_others_wait, (), timeout_s=LONG_S)
    with job, pytest.raises(PeerLost, match="signal 9"):
        found.extend(message for _, message in job.messages())
    assert found == [(True, "device 0 with device 1: not complete within 1.0 s")]


@pytest.fixture
def pair() -> Iterator[list[SameHostTransport]]:
    """Two ends in one process, which reads its own memory."""
    store, hub = dist.HashStore(), MemoryHub([4, 9])
    with ThreadPoolExecutor(2) as pool:
        making = [
            pool.submit(SameHostTransport.over, hub.transport(device), store, [4, 9], LONG_S) for device in (4, 9)
        ]
        ends = [one.result() for one in making]
    yield ends
    for end in ends:
        end.close()


def test_sizes_that_the_two_ends_do_not_agree_on_are_an_error_on_both(pair: list[SameHostTransport]) -> None:
    giving = pair[0].post([Message.flat(9, room(4))], [])
    with pytest.raises(TransportError, match="expected 5 bytes from device 4, got 4"):
        pair[1].post([], [Message.flat(4, room(5))]).complete(LONG_S)
    with pytest.raises(TransportError, match="device 4 with device 9"):
        giving.complete(LONG_S)
    with pytest.raises(TransportError, match="device 4 with device 9"):
        pair[0].post([Message.flat(9, room(4))], [])


def test_memory_that_the_sender_has_given_back_is_an_error(pair: list[SameHostTransport]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = 1 << 20
    target = room(size)  # now: what is allocated later might lie where the source lay
    address = libc.mmap(None, size, 3, 0x22, -1, 0)
    array = (ctypes.c_uint8 * size).from_address(address)
    pair[0].post([Message.flat(9, torch.frombuffer(array, dtype=torch.uint8))], [])
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    with pytest.raises(TransportError, match="cannot be read: process_vm_readv: EFAULT"):
        pair[1].post([], [Message.flat(4, target)]).complete(LONG_S)


def test_an_end_that_is_closed_is_closed_though_a_forked_process_holds_its_socket(
    pair: list[SameHostTransport],
) -> None:
    """A loader's worker, say. What is read after that may be anything."""
    source, target = pattern(1, 1 << 20), room(1 << 20)
    giving = pair[0].post([Message.flat(9, source)], [])
    worker = pair[0]._worker
    assert worker is not None
    held = os.dup(worker._wires[9].link.socket.fileno())
    pair[0].close()
    source.fill_(99)
    with pytest.raises(TransportError, match="device 9 with device 4: it has closed its end"):
        pair[1].post([], [Message.flat(4, target)]).complete(LONG_S)
    with pytest.raises(TransportError, match="was closed"):
        giving.complete(LONG_S)
    os.close(held)


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a link within this process, and nobody else who serves them."""
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = []
    for device, peer, end in zip((4, 9), (9, 4), sockets, strict=True):
        end.setblocking(False)
        link = probe.Link(peer, os.getpid(), os.pidfd_open(os.getpid()), end)
        ends.append(Wire(device, link, probe.MemoryReader(), Bounces()))
    yield ends[0], ends[1]
    for one in ends:
        one.fail("the test is over")


def landed_behind_a_full_socket(giving: Wire, taking: Wire) -> tuple[Ticket, int]:
    """A message whose bytes have landed, but whose acknowledgement has no room; and how much is in its way."""
    source, target, sent, received = pattern(1, 1 << 20), room(1 << 20), Ticket(1), Ticket(1)
    giving.give(Departure(Message.flat(9, source)), sent)
    giving.step()
    taking.ask(Arrival(Message.flat(4, target)), received)
    packets = 0
    with suppress(BlockingIOError):
        while True:
            taking.link.socket.send(bytes(1000))
            packets += 1
    taking.hear()
    taking.step()
    assert torch.equal(target, source)
    assert taking.blocked
    return received, packets


def test_a_message_is_complete_only_when_its_acknowledgement_is_on_its_way(wires: tuple[Wire, Wire]) -> None:
    """The sender may have given up while its memory was read, which only an acknowledgement finds out."""
    received, packets = landed_behind_a_full_socket(*wires)
    assert not received.done.is_set()
    for _ in range(packets):
        wires[0].link.socket.recv(1000)
    assert wires[1].due
    wires[1].step()
    assert received.done.is_set()
    assert not received.fault


def test_a_message_whose_acknowledgement_nobody_takes_has_failed(wires: tuple[Wire, Wire]) -> None:
    received, _ = landed_behind_a_full_socket(*wires)
    wires[0].fail("it has other things to do")
    with pytest.raises(TransportError, match="it has given up: it has other things to do"):
        wires[1].hear()
    wires[1].fail("it is gone")
    assert received.fault == "device 9 with device 4: it is gone"


def test_why_an_end_gives_up_is_said_at_the_other(
    pair: list[SameHostTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lost the right to be read sees no fault of its own."""

    def refuse(*_: object) -> int:
        raise PermissionError(1, "process_vm_readv: EPERM")

    monkeypatch.setattr(probe.MemoryReader, "read", refuse)
    giving = pair[0].post([Message.flat(9, room(1 << 20))], [])
    why = "the memory of device 4 cannot be read: process_vm_readv: EPERM"
    with pytest.raises(TransportError, match=f"device 9 with device 4: {why}"):
        pair[1].post([], [Message.flat(4, room(1 << 20))]).complete(LONG_S)
    with pytest.raises(TransportError, match=f"device 4 with device 9: it has given up: {why}"):
        giving.complete(LONG_S)


def test_a_message_that_cannot_be_worked_out_is_an_error_at_both_ends(
    pair: list[SameHostTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    giving = pair[0].post([Message.flat(9, room(1 << 20))], [])

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("no room for a table")

    monkeypatch.setattr("shardshift.transport.wires.segments", refuse)
    why = "MemoryError: no room for a table"
    with pytest.raises(TransportError, match=why):
        pair[1].post([], [Message.flat(4, room(1 << 20))]).complete(LONG_S)
    with pytest.raises(TransportError, match=f"device 4 with device 9: it has given up: {why}"):
        giving.complete(LONG_S)
    with pytest.raises(TransportError, match=why):
        pair[1].post([], [Message.flat(4, room(1))])


def test_a_message_to_a_peer_that_cannot_be_read_goes_over_the_inner_transport() -> None:
    hub = MemoryHub([4, 9], views=False)
    ends = [SameHostTransport(hub.transport(device), {}) for device in (4, 9)]
    assert not ends[0].takes_views(9)
    received = room(100)
    pending = ends[0].post([Message.flat(9, pattern(1, 100))], [])
    ends[1].post([], [Message.flat(4, received)]).complete(1.0)
    pending.complete(1.0)
    assert torch.equal(received, pattern(1, 100))
    for end in ends:
        end.close()


def refusal_of(record: dict[str, Any]) -> str:
    """What device 0 says if its only peer is as recorded, and refuses it too."""
    store, said = dist.HashStore(), list[str]()
    store.set("hello/1", json.dumps(record))
    store.set("verdict/1", json.dumps({"0": "Operation not permitted"}))
    transport = SameHostTransport.over(MemoryHub(2).transport(0), store, 2, LONG_S, said.append)
    assert not transport.takes_views(1)
    transport.close()
    (line,) = said
    return line.removeprefix("the direct path between processes of one host is not used with device 1: ")


@pytest.fixture
def me() -> Iterator[dict[str, Any]]:
    """A record as a peer in this very process would give it, whose token can be read."""
    token = ctypes.create_string_buffer(b"t" * 32, 32)
    store = dist.HashStore()
    probe.connect_links(store, 0, [0], LONG_S)
    yield json.loads(store.get("hello/0")) | {"address": ctypes.addressof(token), "token": token.raw.hex()}
    del token  # which lives as long as the test


@pytest.mark.parametrize(
    ("what_is_other", "said"),
    [
        ({"boot": "another"}, "another host"),
        ({"namespace": "pid:[1]"}, "another PID namespace"),
        ({"token": "00" * 32}, "reading its memory gave other bytes than it wrote"),
        ({"address": 4096}, "process_vm_readv: EFAULT"),
        ({"socket": b"\0nobody-listens-here".hex()}, "another network namespace"),
        ({"pid": 1 << 22}, "No such process"),
    ],
)
def test_why_a_peer_is_not_read_is_said(what_is_other: dict[str, Any], said: str, me: dict[str, Any]) -> None:
    assert refusal_of(me | what_is_other) == said


def test_a_peer_on_another_system_is_said() -> None:
    assert refusal_of({"unable": "darwin is not Linux"}) == "on its side, darwin is not Linux"


def test_what_the_kernel_refuses_is_said_with_the_scope(me: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "process_vm_readv: EPERM")

    monkeypatch.setattr(probe.MemoryReader, "read", refuse)
    monkeypatch.setattr(probe, "_scope", lambda: "2")
    assert refusal_of(me) == "process_vm_readv: EPERM (ptrace_scope 2)"


def test_a_peer_that_cannot_read_this_process_is_not_read_either(me: dict[str, Any]) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(1)
    assert refusal_of(me | {"socket": listener.getsockname().hex()}) == "on its side, Operation not permitted"
    listener.close()


def test_without_the_call_everything_goes_over_the_inner_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert refusal_of({"boot": "x", "namespace": "y"}) == "darwin is not Linux"


def test_reasons_are_grouped() -> None:
    assert probe.why_not({3: "another host", 1: "EPERM", 2: "another host"}).endswith(
        "not used with device 1: EPERM; devices 2, 3: another host"
    )
