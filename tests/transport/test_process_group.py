from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport.conformance import FLAT, GRACE_S, IDS, LONG_S, survivors
from tests.transport.processes import faults_by_scenario

from shardshift.elastic import LocalJob, Member
from shardshift.transport import Message, ProcessGroupTransport, TransportError

CYCLES, SETTLED = 50, 10


def gloo(store: dist.Store, device: int) -> ProcessGroupTransport:
    return ProcessGroupTransport.gloo(store, device, IDS, LONG_S)


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str | None]]:
    return faults_by_scenario(gloo, FLAT)


@pytest.mark.parametrize("name", FLAT)
def test_it_keeps_the_contract_that(name: str, faults: dict[str, list[str | None]]) -> None:
    assert faults.get(name) == [None] * survivors(name)


def open_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def make_and_close(send: Any) -> None:
    member = Member.from_launcher(timeout_s=LONG_S)
    seen = []
    for cycle in range(CYCLES):
        store = dist.PrefixStore(str(cycle), member.store)
        transport = ProcessGroupTransport.gloo(store, member.device, 2, LONG_S)
        peer, payload = 1 - member.device, torch.ones(1000, dtype=torch.uint8)
        transport.post([Message.flat(peer, payload)], [Message.flat(peer, payload.clone())]).complete(LONG_S)
        transport.close()
        seen.append(open_descriptors())
    send(seen)


def test_closing_gives_descriptors_and_threads_back() -> None:
    with LocalJob(2, make_and_close, (), timeout_s=LONG_S) as job:
        for _, seen in job.messages():
            assert set(seen[SETTLED:]) == {seen[SETTLED]}


def test_devices_that_do_not_all_come_are_an_error_within_the_timeout() -> None:
    with pytest.raises(TransportError, match="device 0 did not meet the other 1"):
        ProcessGroupTransport.gloo(dist.HashStore(), 0, 2, 1.0)


def test_a_transport_of_one_device_needs_nobody() -> None:
    transport = ProcessGroupTransport.gloo(dist.HashStore(), 5, [5], GRACE_S)
    assert transport.device == 5
    transport.post([], []).complete(0.0)
    transport.close()


def test_an_id_that_is_missing_or_comes_twice_is_refused() -> None:
    for devices in ([0, 1], [2, 0, 2]):
        with pytest.raises(ValueError, match="device 2 is due once"):
            ProcessGroupTransport.gloo(dist.HashStore(), 2, devices, 1.0)


def test_a_message_that_is_not_flat_is_refused_rather_than_sent_wrong() -> None:
    transport = ProcessGroupTransport.gloo(dist.HashStore(), 0, 1, GRACE_S)
    strided = torch.zeros(8, dtype=torch.uint8)[::2]
    for parts in ((), (strided,), (torch.zeros(2),), (strided.contiguous(), strided.contiguous())):
        with pytest.raises(ValueError, match="not flat"):
            transport.post([Message(0, parts)], [])
    transport.close()
