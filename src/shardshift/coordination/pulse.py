"""Pulse: a thread that shows this process to be alive, and notices peers that are not.

A killed process closes its sockets, so its neighbours notice at once, but not *who* died; a stopped one closes
nothing. Both stop counting up their beat in the store. The thread

1. counts up this process's beat every ``interval_s``;
2. watches the beats of the next few members after this one in ring order, so that a job of n processes costs
   the store O(n) reads, and each member is watched by several;
3. records a failure when a watched beat stands still for ``timeout_s``;
4. tells once of a failure that anybody has recorded, or that the store does not answer: the main thread may be waiting
   in a collective that never ends.

Detecting by communicator errors alone was rejected: a survivor learns from them that something broke, but hardly ever
which rank did. What a beat says is in ``signs``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed as dist

from ..transport import TransportError
from ..values import PeerLost
from .control import Control
from .failure import record_failure, recorded_failure
from .signs import INTERVAL_S, Beats, diagnose, show

_WATCHED: Final = 3
_BROKEN_LINK: Final = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "pair closure")


class Pulse:
    """Shows that this process lives; watches others.

    Args:
        store: a client of its own for the thread (a client is blocked while another thread waits in it).
        device: this process's id.
        timeout_s: how long a watched beat may stand still.
        phase: tells what this process is doing, for the record of a failure.
        failed: called once, in the thread, when a failure is recorded.
        store_lost: called once, in the thread, when the store does not answer any more.
    """

    def __init__(
        self,
        store: dist.Store,
        device: int,
        timeout_s: float,
        phase: Callable[[], str],
        failed: Callable[[], None] = lambda: None,
        store_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._phase = phase
        self._failed, self._store_lost = failed, store_lost
        self._members: tuple[int, ...] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardshift-pulse", daemon=True)

    def start(self) -> None:
        """Beat once, so that others find a beat to watch, then go on in the background."""
        show(self._store, self._device, 0)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The beat then stands still: call it when nobody watches this process any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def watch(self, members: Sequence[int]) -> None:
        """From now on these processes matter."""
        self._members = tuple(members)

    def _run(self) -> None:
        count, beats = 0, Beats(self._store)
        try:
            while not self._stop.wait(INTERVAL_S):
                count += 1
                show(self._store, self._device, count)
                beats.look(_next_in_ring(self._members, self._device))
                if silent := [device for device, still_s in beats.still_s().items() if still_s > self._timeout_s]:
                    reason = f"gave no sign of life for {self._timeout_s:.0f} s"
                    record_failure(self._store, silent, self._phase(), reason)
                if recorded_failure(self._store) is not None:
                    self._failed()
                    return
        except dist.DistError:
            if not self._stop.is_set():  # whoever uses the store raises for itself, but may be waiting for others
                self._store_lost()


def as_peer_lost(error: BaseException, control: Control, members: Sequence[int], phase: str) -> PeerLost | None:
    """The loss of a peer that shows as ``error`` on this rank; None if the error is this rank's own.

    gloo and NCCL raise plain ``RuntimeError``, so their errors are told by what they say of themselves.
    """
    if not isinstance(error, TransportError | RuntimeError):
        return None
    text = str(error)
    if not isinstance(error, TransportError | dist.DistError) and not any(sign in text for sign in _BROKEN_LINK):
        return None
    reason = text.partition("\n")[0]
    try:
        return diagnose(control.store, control.device, members, phase, reason)
    except dist.DistError as gone:
        return PeerLost((), phase, f"{reason}; and the job's store does not answer: {gone}")


def _next_in_ring(members: Sequence[int], device: int) -> list[int]:
    others = sorted(member for member in members if member != device)
    after = [member for member in others if member > device]
    return (after + others)[: min(_WATCHED, len(others))]
