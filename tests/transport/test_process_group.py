from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport.conformance import DEVICES, GRACE_S, LONG_S, SCENARIOS, End, play

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.transport import ProcessGroupTransport, TransportError, byte_view


def play_all(send: Any) -> None:
    """Every scenario over a group of its own, in one set of processes."""
    member = Member.from_launcher(timeout_s=LONG_S)
    control = Control(member.store, member.device, LONG_S)

    def leave() -> None:
        os._exit(0)  # as a killed process leaves: nothing is closed in an orderly way

    for name in SCENARIOS:
        store = dist.PrefixStore(name, member.store)
        transport = ProcessGroupTransport.gloo(store, member.device, DEVICES, LONG_S)

        def meet(word: str, name: str = name) -> None:
            control.gather(f"{name}/{word}", range(DEVICES), b"", "test")

        send((name, play(name, End(transport, meet, leave))))


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    with LocalJob(DEVICES, play_all, (), timeout_s=LONG_S, preload=["shardshift.elastic"]) as job:
        for _, (name, fault) in job.messages():
            found.setdefault(name, []).append(fault)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_keeps_the_contract_that(name: str, faults: dict[str, list[str | None]]) -> None:
    ends = DEVICES - 1 if "gone" in name else DEVICES
    assert faults.get(name) == [None] * ends


def test_devices_that_do_not_all_come_are_an_error_within_the_timeout() -> None:
    with pytest.raises(TransportError, match="device 0 did not meet the other 1"):
        ProcessGroupTransport.gloo(dist.HashStore(), 0, 2, 1.0)


def test_a_transport_of_one_device_needs_nobody() -> None:
    transport = ProcessGroupTransport.gloo(dist.HashStore(), 0, 1, GRACE_S)
    assert transport.device == 0
    transport.post([], []).wait(0.0)
    transport.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64])
def test_a_byte_view_shares_the_memory_of_its_tensor(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 3)):
        tensor = torch.zeros(shape, dtype=dtype)
        view = byte_view(tensor)
        assert view.data_ptr() == tensor.data_ptr()
        assert view.shape == (tensor.numel() * tensor.element_size(),)


def test_a_byte_view_of_one_element_does_not_mind_its_stride() -> None:
    column = torch.zeros(2, 3)[:1, 1]
    assert column.stride() == (3,)
    assert byte_view(column).data_ptr() == column.data_ptr()
