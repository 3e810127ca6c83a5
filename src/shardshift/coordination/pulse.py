"""Pulse: a thread that shows this process to be alive, and notices peers that are not.

A killed process closes its sockets, so its neighbours notice at once, but not *who* died; a stopped one closes
nothing. Both stop counting up their beat in the store. The thread

1. counts up this process's beat every ``interval_s``;
2. watches the beats of the next few members after this one in ring order, so that a job of n processes costs
   the store O(n) reads, and each member is watched by several;
3. records a failure when a watched beat stands still for ``timeout_s``.

``diagnose`` names the lost ranks after some operation has failed. Detecting by communicator errors alone was
rejected: a survivor learns from them that something broke, but hardly ever which rank did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed as dist

from ..transport import TransportError
from ..values import PeerLost
from .control import Control, record_failure

_INTERVAL_S: Final = 0.5
_VERDICT_S: Final = 3.0  # a beat that stands still for so long after a failed operation is a lost rank's
_WATCHED: Final = 3
_BROKEN_LINK: Final = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "pair closure")


class Pulse:
    """Shows that this process lives; watches others.

    Args:
        store: a client of its own for the thread (a client is blocked while another thread waits in it).
        device: this process's id.
        timeout_s: how long a watched beat may stand still.
        phase: tells what this process is doing, for the record of a failure.
    """

    def __init__(self, store: dist.Store, device: int, timeout_s: float, phase: Callable[[], str]) -> None:
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._phase = phase
        self._members: tuple[int, ...] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardshift-pulse", daemon=True)

    def start(self) -> None:
        """Beat once, so that others find a beat to watch, then go on in the background."""
        self._store.set(_beat(self._device), "0")
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
        count = 0
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            while not self._stop.wait(_INTERVAL_S):
                count += 1
                self._store.set(_beat(self._device), str(count))
                watched = _next_in_ring(self._members, self._device)
                seen = _observe(self._store, watched, seen)
                now_s = time.monotonic()
                if silent := [device for device, (_, since_s) in seen.items() if now_s - since_s > self._timeout_s]:
                    reason = f"gave no sign of life for {self._timeout_s:.0f} s"
                    record_failure(self._store, silent, self._phase(), reason)
                    return
        except dist.DistError:
            return  # the store is gone, so the job is over; whoever uses it raises for itself


def diagnose(control: Control, members: Sequence[int], phase: str, reason: str) -> PeerLost:
    """Find out who is lost, after an operation with peers has failed on this rank, and record it.

    1. If the job's failure is recorded (by the lost rank itself, the launcher or another survivor), that is it.
    2. Members whose beat stands still for 3 s, or that have never shown one, are lost.
    3. If all beats go on, those who have not met trouble themselves did not take part: they are named.
    """
    control.publish(_trouble(control.device), b"")
    others = [member for member in members if member != control.device]
    started_s = time.monotonic()
    seen = _observe(control.store, others, {})
    pause = threading.Event()
    while time.monotonic() - started_s < _VERDICT_S:
        if (lost := control.failure()) is not None:
            return lost
        pause.wait(_INTERVAL_S / 2)
        seen = _observe(control.store, others, seen)
    moved_s = started_s + _INTERVAL_S / 2
    silent = [device for device in others if device not in seen or seen[device][1] < moved_s]
    if not silent:
        silent = [device for device in others if not control.store.check([_trouble(device)])]
        reason = f"alive but did not take part; {reason}"
    return record_failure(control.store, silent, phase, reason)


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
        return diagnose(control, members, phase, reason)
    except dist.DistError as gone:
        return PeerLost((), phase, f"{reason}; and the job's store does not answer: {gone}")


def _observe(
    store: dist.Store, devices: Sequence[int], before: dict[int, tuple[bytes, float]]
) -> dict[int, tuple[bytes, float]]:
    """Per device its beat, and since when it stands at that."""
    now_s = time.monotonic()
    known = [device for device in devices if store.check([_beat(device)])]
    beats = store.multi_get([_beat(device) for device in known]) if known else []
    after = {device: (beat, now_s) for device, beat in zip(known, beats, strict=True)}
    return {
        device: before[device] if device in before and before[device][0] == beat else (beat, since_s)
        for device, (beat, since_s) in after.items()
    }


def _next_in_ring(members: Sequence[int], device: int) -> list[int]:
    others = sorted(member for member in members if member != device)
    after = [member for member in others if member > device]
    return (after + others)[: min(_WATCHED, len(others))]


def _beat(device: int) -> str:
    return f"beat/{device}"


def _trouble(device: int) -> str:
    return f"trouble/{device}"
