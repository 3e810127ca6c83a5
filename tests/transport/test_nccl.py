"""What can be tried of NCCL without a second GPU: settings, batches against a recorded group, streams, one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardshift.transport import Message, NcclTransport, TransportError
from shardshift.transport.nccl import SETTINGS, require_settings
from shardshift.values import Infeasible

RIGHT = {name: values[-1] for name, (values, _) in SETTINGS.items()}


def test_settings_that_leave_survivors_alive_are_accepted() -> None:
    require_settings(RIGHT)
    require_settings(RIGHT | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_would_end_survivors_is_named_with_what_it_should_be(name: str) -> None:
    for environment in (RIGHT | {name: "1"}, {key: value for key, value in RIGHT.items() if key != name}):
        with pytest.raises(Infeasible, match=rf"^{name} is (1|not set): .* set it to {RIGHT[name]}\. What to do"):
            require_settings(environment)


class Recorder:
    """A group that writes down what is asked of it."""

    def __init__(self, fault: str = "") -> None:
        self.calls: list[Any] = []
        self.fault = fault

    def rank(self) -> int:
        return 1

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Recorder:
        self.calls.append("end")
        return self

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        if self.fault:
            raise RuntimeError(self.fault)
        self.calls.append(("send", rank, tensors[0].numel(), tensors[0].dtype))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("recv", rank, tensors[0].numel(), tensors[0].dtype))

    def wait(self) -> None:
        self.calls.append("wait")

    def abort(self) -> None:
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class NoCuda:
    """torch.cuda for a machine without a GPU: events are done after so many questions."""

    def __init__(self, questions: int) -> None:
        self.synchronized = 0
        self.left = questions

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Nothing:
            def __init__(self, *_: object) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        cuda = self

        class Event:
            def record(self, stream: object) -> None: ...

            def query(self) -> bool:
                cuda.left -= 1
                return cuda.left < 0

        for name in ("device", "stream", "Stream"):
            monkeypatch.setattr(torch.cuda, name, Nothing)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _synchronize(self, device: torch.device) -> None:
        self.synchronized += 1


def flat(peer: int, nbytes: int) -> Message:
    return Message.flat(peer, torch.zeros(nbytes, dtype=torch.uint8))


def test_a_round_is_one_batch_of_bytes_to_the_ranks_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, group = NoCuda(3), Recorder()
    cuda.install(monkeypatch)
    transport = NcclTransport(group, (4, 0, 9), torch.device("cuda", 0))
    assert transport.device == 0
    pending = transport.post([flat(9, 5), flat(4, 0), flat(4, 3)], [flat(4, 7)])
    kinds = torch.uint8
    assert group.calls == ["start", ("recv", 0, 7, kinds), ("send", 2, 5, kinds), ("send", 0, 3, kinds), "end"]
    pending.wait(1.0)
    pending.complete(1.0)
    assert cuda.left < 0, "it did not ask until the event was done"
    pending.complete(0.0)
    transport.close()
    assert group.calls[-1] == "shutdown"


def test_only_the_first_round_after_a_pause_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = NoCuda(0)
    cuda.install(monkeypatch)
    transport = NcclTransport(Recorder(), (0, 1), torch.device("cuda", 0))
    rounds = [transport.post([flat(0, 1)], []) for _ in range(3)]
    assert cuda.synchronized == 1
    for pending in rounds:
        pending.complete(1.0)
    transport.post([], []).complete(0.0)
    assert cuda.synchronized == 1
    transport.post([flat(0, 1)], [])
    assert cuda.synchronized == 2


def test_a_round_that_is_late_is_an_error_and_its_communicator_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    NoCuda(1_000_000).install(monkeypatch)
    group = Recorder()
    transport = NcclTransport(group, (0, 1), torch.device("cuda", 0))
    pending = transport.post([], [flat(0, 1)])
    with pytest.raises(TransportError, match=r"device 1 with devices \[0\]: not complete within 0\.0 s"):
        pending.complete(0.0)
    transport.close()
    transport.close()
    assert group.calls.count("abort") == 1
    assert "shutdown" not in group.calls
    with pytest.raises(TransportError, match="closed"):
        transport.post([], [])


def test_an_error_of_the_group_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    NoCuda(0).install(monkeypatch)
    transport = NcclTransport(Recorder("remote process exited"), (0, 1), torch.device("cuda", 0))
    with pytest.raises(TransportError, match="device 1: remote process exited"):
        transport.post([flat(0, 1)], [])


@pytest.mark.gpu
def test_on_a_gpu_a_group_of_one_rank_is_made_eagerly_and_closed() -> None:
    transport = NcclTransport.connect(dist.HashStore(), 3, [3], 30.0, environment=RIGHT)
    payload = torch.arange(1 << 20, device="cuda").to(torch.uint8)
    landed = torch.zeros_like(payload)
    busy: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(busy):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        payload.add_(1)  # the message comes after what its stream was given before
        pending = transport.post([Message.flat(3, payload)], [Message.flat(3, landed)])
        pending.complete(30.0)
    assert torch.equal(landed, payload)
    transport.close()
