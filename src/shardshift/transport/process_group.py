"""Transport over a ``torch.distributed`` process group's point-to-point operations (gloo, tensors in host memory).

A group of its own is made from a store rather than taken from the world: the world that a framework trains in is torn
down and rebuilt by every change of layout, the group that moves state is not. A raw group also keeps out of torch's
registries, so that ``destroy_process_group`` of the framework's world leaves it alone.

Gloo moves bytes on a thread of its own as soon as both ends have posted, so rounds overlap by themselves and ``wait``
can say no less than ``complete``. A message has at most one part here, since gloo sends the wrong bytes of a strided
tensor without a word; and both ends must agree on its size, since gloo ends the process of a receiver that is sent more
than it has room for. NCCL has rules of its own: see ``nccl``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..values import Infeasible
from .protocol import Message, Pending, TransportError

T = TypeVar("T")

_TAG = 0  # gloo matches messages of one tag in order, which is all that the protocol promises
_LEAST_WAIT_S = 0.001


class ProcessGroupTransport:
    """Point-to-point messages over one process group.

    Args:
        group: a registered or raw process group; ``close`` shuts it down.
        devices: the device id of each rank of the group; None if they are its ranks.
    """

    def __init__(self, group: dist.ProcessGroup, devices: Sequence[int] | None = None) -> None:
        ids = range(group.size()) if devices is None else devices
        if len(ids) != group.size() or len(set(ids)) != len(ids):
            raise ValueError(f"the group has {group.size()} ranks, the devices are {list(ids)}; one id is due to each")
        self._group: dist.ProcessGroup | None = group
        self._ranks = {device: rank for rank, device in enumerate(ids)}
        self._device = ids[group.rank()]

    @classmethod
    def gloo(
        cls,
        store: dist.Store,
        device: int,
        devices: int | Sequence[int],
        timeout_s: float,
        *,
        address: str | None = None,
    ) -> ProcessGroupTransport:
        """A transport between devices, over a gloo group of its own.

        Args:
            store: where the devices find one another; a prefix that nothing else uses.
            device: this side's id.
            devices: the ids of all, in one order everywhere, or how many there are from 0 on; every one calls this.
            timeout_s: for meeting, and the longest that a message may take.
            address: of this host, in the network that the bytes are to go over; None for gloo's choice
                (GLOO_SOCKET_IFNAME, or the address of the host's name).

        Raises:
            Infeasible: if the address is none of this host's.
            TransportError: if the devices did not all come within ``timeout_s``.
        """
        ids, limit = device_ids(device, devices), timedelta(seconds=timeout_s)
        given: Any = limit  # gloo chooses its address itself
        if address is not None:
            given = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
            given._timeout = limit
            try:
                given._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            except RuntimeError as error:
                raise Infeasible(
                    f"device {device} cannot use address {address!r}: {str(error).splitlines()[0]}; what to do: give "
                    "an address of this host in the network that the state is to go over"
                ) from error

        def meet() -> Any:
            # The raw class is what dist.init_process_group makes too; only its stub lacks the base class.
            group = dist.ProcessGroupGloo(store, ids.index(device), len(ids), given)
            # One that closes at once would break the connecting of those that are not done with it.
            store.set(f"connected/{device}", "")
            store.wait([f"connected/{one}" for one in ids], limit)
            return group

        try:
            return cls(_within(timeout_s, meet), ids)
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(f"device {device} did not meet the other {len(ids) - 1}: {error}") from error

    @property
    def device(self) -> int:
        """This side's device id."""
        return self._device

    def takes_views(self, peer: int) -> bool:
        """No: messages are flat."""
        return False

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages of a round, receives first, so that senders find them posted."""
        group = self._group
        if group is None:
            raise TransportError("the transport is closed")
        works: list[tuple[dist.Work, Message]] = []
        try:
            for message in recvs:
                works.append((group.recv([flat_part(message)], self._ranks[message.peer], _TAG), message))
            for message in sends:
                works.append((group.send([flat_part(message)], self._ranks[message.peer], _TAG), message))
        except RuntimeError as error:
            raise TransportError(f"device {self._device}: {error}") from error
        return _PendingWorks(works, self._device)

    def close(self) -> None:
        """Close the group's sockets and end its thread; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def _within(limit_s: float, make: Callable[[], T]) -> T:
    """What ``make`` gives, in another thread, which is left to itself if it takes longer.

    gloo tries five times to connect with a peer that died after it had said where it is, each time for its whole limit.

    Raises:
        TimeoutError: if it takes longer.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((make(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, name="shardshift-meet", daemon=True).start()
    try:
        made, error = done.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"not within {limit_s:g} s") from None
    if error is not None:
        raise error
    return cast(T, made)


class _PendingWorks:
    def __init__(self, works: list[tuple[dist.Work, Message]], device: int) -> None:
        self._works = works  # with their messages, which keep the buffers alive until gloo is done with them
        self._device = device

    def wait(self, timeout_s: float) -> None:
        self.complete(timeout_s)

    def complete(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._works:  # what is done is forgotten: gloo would wait for it once more
            work, message = self._works[-1]
            left_s = max(deadline - time.monotonic(), _LEAST_WAIT_S)
            try:
                done = work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                raise TransportError(f"device {self._device} with device {message.peer}: {error}") from error
            if done is False:
                raise TransportError(f"device {self._device} with device {message.peer}: not complete")
            self._works.pop()


def device_ids(device: int, devices: int | Sequence[int]) -> tuple[int, ...]:
    """The ids of a transport's devices, of which one is this side's.

    Raises:
        ValueError: if an id comes twice, or this side's is not among them.
    """
    ids = tuple(range(devices)) if isinstance(devices, int) else tuple(devices)
    if device not in ids or len(set(ids)) != len(ids):
        raise ValueError(f"device {device} is due once among the devices {list(ids)}, each of which may come once")
    return ids


def flat_part(message: Message) -> torch.Tensor:
    """The one flat tensor of a message.

    Raises:
        ValueError: if the message is made for a transport that takes views.
    """
    if len(message.parts) != 1 or message.parts[0].dtype != torch.uint8 or not message.parts[0].is_contiguous():
        raise ValueError(f"the message with device {message.peer} is not flat; what to do: ask takes_views(peer) first")
    return message.parts[0]
