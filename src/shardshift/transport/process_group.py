"""Transport over a ``torch.distributed`` process group's point-to-point operations (gloo).

The group's rank is the device id. A group of its own is made from a store rather than taken from the world:
the world that a framework trains in is torn down and rebuilt by every change of layout, the group that moves
state is not. A raw group also keeps out of torch's registries, so that ``destroy_process_group`` of the
framework's world leaves it alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .protocol import Message, Pending, TransportError

_TAG = 0  # gloo matches messages of one tag in order, which is all that the protocol promises


class ProcessGroupTransport:
    """Point-to-point messages over one process group.

    Args:
        group: a registered or raw process group whose ranks are device ids.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    @classmethod
    def gloo(cls, store: dist.Store, device: int, devices: int, timeout_s: float) -> ProcessGroupTransport:
        """A transport between all ``devices`` of a job, over a gloo group of its own.

        Args:
            store: where the devices find one another; a prefix that nothing else uses.
            device: this side's id, ``0 <= device < devices``.
            devices: devices in all; every one of them must call this.
            timeout_s: for meeting, and the longest that a message may take.

        Raises:
            TransportError: if the devices did not all come within ``timeout_s``.
        """
        try:
            # The raw class is what dist.init_process_group makes too; only its stub lacks the base class.
            group = dist.ProcessGroupGloo(store, device, devices, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportError(f"device {device} did not meet the other {devices - 1}: {error}") from error
        return cls(group)  # type: ignore[arg-type]

    @property
    def device(self) -> int:
        """This side's device id."""
        return self._live().rank()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages of a round, receives first, so that senders find them posted."""
        group = self._live()
        try:
            works = [group.recv([m.payload], m.peer, _TAG) for m in recvs]
            works += [group.send([m.payload], m.peer, _TAG) for m in sends]
        except RuntimeError as error:
            raise TransportError(f"device {group.rank()}: {error}") from error
        return _PendingWorks(works, [*recvs, *sends], group.rank())

    def close(self) -> None:
        """Close the group's sockets; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _live(self) -> dist.ProcessGroup:
        if self._group is None:
            raise TransportError("the transport is closed")
        return self._group


class _PendingWorks:
    def __init__(self, works: list[dist.Work], messages: list[Message], device: int) -> None:
        self._works = works
        self._messages = messages  # keeps the buffers alive until gloo is done with them
        self._device = device

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for work, message in zip(self._works, self._messages, strict=True):
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                done = work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                raise TransportError(f"device {self._device} with device {message.peer}: {error}") from error
            if done is False:
                raise TransportError(f"device {self._device} with device {message.peer}: not complete")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-dim uint8 view of the same storage."""
    # Not reshape: of a tensor of one element it keeps a stride other than 1, at which the view is refused.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
