"""Transport over NCCL, for tensors on GPUs. Unverified with more than one GPU: ``shardshift selftest --backend nccl``.

What is written here follows NCCL's rules and the code of torch 2.6 to 2.13; a group of one rank and the handling of
streams can be tried on one GPU, sending cannot. The rules:

1. The communicator is made when the transport is (``eager_connect_single_device``), not at the first message, where it
   would be made pair by pair while others wait.
2. All messages of a round are one batch between ``_start_coalescing`` and ``_end_coalescing`` on that communicator;
   a send or receive outside of a batch would make a communicator for its pair. Payloads are uint8.
3. ``wait`` orders the current stream after the batch. ``complete`` records an event behind that and polls it: only then
   have the bytes landed, and only polling can be given up after a time.
4. Two communicators that are in flight on one device at once may wait for each other for ever. So the first round after
   a pause waits until the device is idle, which ends whatever training has launched; and whoever uses this transport
   completes all rounds before anything else communicates on the device.
5. A communicator with messages under way is aborted, never destroyed: destroying waits for peers that may be gone.

NCCL's own watchdog must not end the process when a peer is lost, which is its default: ``require_settings``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ..values import Infeasible
from .process_group import device_ids, flat_part
from .protocol import Message, Pending, TransportError

_TAG: Final = 0
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3

SETTINGS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0", "2"), "the watchdog ends the process when a peer is lost"),
    "TORCH_NCCL_ENABLE_MONITORING": (("0",), "the monitor ends the process when the watchdog waits for a lost peer"),
}
"""Per environment variable of torch the values that will do, and what its default does to a survivor."""


def require_settings(environment: Mapping[str, str]) -> None:
    """Refuse settings with which survivors of a lost peer would be ended by torch.

    Raises:
        Infeasible: naming every variable and the value that it needs.
    """
    wrong = [
        f"{name} is {environment.get(name, 'not set')}: then {harm}; set it to {values[-1]}"
        for name, (values, harm) in SETTINGS.items()
        if environment.get(name) not in values
    ]
    if wrong:
        raise Infeasible(f"{'. '.join(wrong)}. What to do: set them before the process starts")


class NcclTransport:
    """Point-to-point messages over one NCCL communicator. Used from one thread.

    Args:
        group: a ``ProcessGroupNCCL`` of its own, made eagerly; ``close`` shuts it down.
        devices: the device id of each rank of the group.
        cuda: this process's GPU.
    """

    def __init__(self, group: Any, devices: Sequence[int], cuda: torch.device) -> None:
        self._group: Any = group
        self._ranks = {device: rank for rank, device in enumerate(devices)}
        self._device: int = devices[group.rank()]
        self._cuda = cuda
        self._under_way = 0

    @classmethod
    def connect(
        cls,
        store: dist.Store,
        device: int,
        devices: int | Sequence[int],
        timeout_s: float,
        *,
        environment: Mapping[str, str] = os.environ,
    ) -> NcclTransport:
        """A transport between devices, over a communicator of its own on this process's current GPU.

        Args:
            store: where the devices find one another; a prefix that nothing else uses.
            device: this side's id.
            devices: the ids of all, in one order everywhere, or how many there are from 0 on; every one calls this.
            timeout_s: for meeting.
            environment: where torch's settings are looked up.

        Raises:
            Infeasible: if there is no GPU, this torch has no NCCL, or a setting would end survivors.
            TransportError: if the devices did not all come.
        """
        ids = device_ids(device, devices)
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise Infeasible("NCCL needs a GPU and a torch built with it; what to do: use gloo for tensors on CPU")
        require_settings(environment)
        cuda = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            group = dist.ProcessGroupNCCL(store, ids.index(device), len(ids), options)
            group.eager_connect_single_device(cuda)
        except RuntimeError as error:
            raise TransportError(f"device {device} did not meet the other {len(ids) - 1}: {error}") from error
        return cls(group, ids, cuda)

    @property
    def device(self) -> int:
        """This side's device id."""
        return self._device

    def takes_views(self, peer: int) -> bool:
        """No: messages are flat."""
        return False

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Launch all messages of a round as one batch, behind what the current stream has been given before.

        With no other round under way, waits for what this process has launched on its GPU; for no peer.
        """
        group = self._group
        if group is None:
            raise TransportError("the transport is closed")
        sends = [message for message in sends if message.nbytes]
        recvs = [message for message in recvs if message.nbytes]
        if not sends and not recvs:
            return _PendingBatch(self, None, ())
        if not self._under_way:
            torch.cuda.synchronize(self._cuda)
        try:
            with torch.cuda.device(self._cuda):
                group._start_coalescing()
                for message in recvs:
                    group.recv([flat_part(message)], self._ranks[message.peer], _TAG)
                for message in sends:
                    group.send([flat_part(message)], self._ranks[message.peer], _TAG)
                work = group._end_coalescing()
        except RuntimeError as error:
            raise TransportError(f"device {self._device}: {error}") from error
        self._under_way += 1
        return _PendingBatch(self, work, (*sends, *recvs))

    def close(self) -> None:
        """Give the communicator back; a second call does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._under_way:
            group.abort()
        else:
            group.shutdown()

    def _landed(self) -> None:
        self._under_way -= 1


class _PendingBatch:
    def __init__(self, transport: NcclTransport, work: Any, messages: tuple[Message, ...]) -> None:
        self._transport, self._work = transport, work
        self._messages = messages  # the caching allocator must not give their memory away
        self._event: Any = None  # torch's stubs of streams and events are untyped

    def wait(self, timeout_s: float) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()  # orders the current stream and returns at once
        except RuntimeError as error:
            raise self._failed(str(error)) from error

    def complete(self, timeout_s: float) -> None:
        if self._work is None:
            return
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        try:
            if self._event is None:
                # A stream of its own, so that the caller's is not held up.
                side: Any = torch.cuda.Stream(self._transport._cuda)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(side):
                    self._work.wait()
                    self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._event.record(side)
            while not self._event.query():
                if time.monotonic() >= deadline:
                    raise self._failed(f"not complete within {timeout_s:.1f} s")
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        except RuntimeError as error:  # an asynchronous error of NCCL or CUDA
            raise self._failed(str(error)) from error
        self._work, self._messages = None, ()
        self._transport._landed()

    def _failed(self, what: str) -> TransportError:
        peers = sorted({message.peer for message in self._messages})
        return TransportError(f"device {self._transport.device} with devices {peers}: {what}")
