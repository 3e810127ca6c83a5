from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.transport.conformance import DEVICES, LONG_S, SCENARIOS, End, play

from shardshift.transport import MemoryHub, Message, TransportError


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_keeps_the_contract_that(name: str) -> None:
    hub, lock = MemoryHub(DEVICES), threading.Lock()
    barriers: defaultdict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(DEVICES, timeout=LONG_S))

    def meet(word: str) -> None:
        with lock:
            barrier = barriers[word]
        barrier.wait()

    def run(device: int) -> str | None:
        return play(name, End(hub.transport(device), meet, lambda: hub.cut(device)))

    with ThreadPoolExecutor(DEVICES) as pool:
        assert [fault for fault in pool.map(run, range(DEVICES)) if fault] == []


def test_what_the_sender_writes_after_sending_does_not_show_at_the_receiver() -> None:
    hub = MemoryHub(2)
    payload, received = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    hub.transport(0).post([Message(1, payload)], []).wait(0.0)
    payload.zero_()
    hub.transport(1).post([], [Message(0, received)]).wait(1.0)
    assert received.tolist() == [1, 1, 1, 1]


def test_cutting_a_device_ends_the_wait_of_a_peer_that_waits_already() -> None:
    hub = MemoryHub(2)
    pending = hub.transport(0).post([], [Message(1, torch.zeros(1, dtype=torch.uint8))])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.wait, 60.0)
        hub.cut(1)
        with pytest.raises(TransportError, match="device 1 is gone"):
            waiting.result(timeout=30)
    with pytest.raises(TransportError, match="device 1 is gone"):
        hub.transport(0).post([Message(1, torch.zeros(1, dtype=torch.uint8))], [])


def test_a_size_that_the_two_ends_do_not_agree_on_is_an_error() -> None:
    hub = MemoryHub(2)
    hub.transport(0).post([Message(1, torch.zeros(4, dtype=torch.uint8))], [])
    with pytest.raises(TransportError, match="expected 5 bytes from device 0, got 4"):
        hub.transport(1).post([], [Message(0, torch.zeros(5, dtype=torch.uint8))]).wait(1.0)


def test_a_device_outside_the_hub_is_refused() -> None:
    with pytest.raises(ValueError, match="not among the 2"):
        MemoryHub(2).transport(2)
