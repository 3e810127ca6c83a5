"""Signs of life: the beats that processes count up in the store, and who is lost by what they show.

A beat that stands still is a lost process's only if the store has answered all the while. When the store stands still,
nobody's beat moves: its host may be busy, or c10d may be asking a slow name server for the name of each client, which
was seen to take 5 s. So time is counted in *looks*: between two of them passes what has passed, but at most
``_LOOK_S``. Whoever was stopped itself blames nobody for the time, either.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch.distributed as dist

from ..values import PeerLost
from .failure import record_failure, recorded_failure

INTERVAL_S: Final = 0.5
"""Between two beats."""
_VERDICT_S: Final = 3.0  # a beat that stands still for so long after a failed operation is a lost rank's
_MOVED_S: Final = INTERVAL_S / 2
_LOOK_S: Final = 1.0
_WITH: Final = re.compile(r"with device (\d+)")
"""What a transport's error says of the other end."""


class Looks:
    """A clock that runs while one looks, and stands while one cannot."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """Look; the seconds that have been spent so far."""
        now_s = time.monotonic()
        self.spent_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        return self.spent_s


class Beats:
    """What one process sees of the beats of others.

    Args:
        store: where they are.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._looks = Looks()
        self._seen: dict[int, tuple[bytes, float]] = {}

    def look(self, devices: Sequence[int]) -> float:
        """Look at the beats of some devices, and forget others; the seconds spent with looking."""
        known = [device for device in devices if self._store.check([_beat(device)])]
        beats = self._store.multi_get([_beat(device) for device in known]) if known else []
        now_s = self._looks.look()  # after the store has answered
        before, self._seen = self._seen, {}
        for device, beat in zip(known, beats, strict=True):
            same = device in before and before[device][0] == beat
            self._seen[device] = before[device] if same else (beat, now_s)
        return now_s

    def still_s(self) -> dict[int, float]:
        """For how long each beat has stood still; those that have not been shown are not there."""
        return {device: self._looks.spent_s - since_s for device, (_, since_s) in self._seen.items()}


def show(store: dist.Store, device: int, count: int) -> None:
    """Count one's own beat up."""
    store.set(_beat(device), str(count))


def any_beats(store: dist.Store, devices: Collection[int]) -> bool:
    """Whether some of these devices have shown a beat."""
    return any(store.check([_beat(device)]) for device in devices)


def diagnose(store: dist.Store, device: int, members: Collection[int], phase: str, reason: str) -> PeerLost:
    """Find out who is lost, after an operation with peers has failed on this rank, and record it.

    1. If the job's failure is recorded (by the lost rank itself, the launcher or another survivor), that is it.
    2. Members whose beat stands still for 3 s, or that have never shown one, are lost.
    3. If all beats go on, somebody did not take part, or a link is broken. Of those with whom others say that they have
       trouble, who has met none itself is named; if all have, they are; if nobody says with whom, all without trouble.

    Args:
        store: of the job.
        device: this rank.
        members: who may be behind it.
        phase: in the words of ``PeerLost``.
        reason: how it showed here.
    """
    store.set(_trouble(device), " ".join(_WITH.findall(reason)))
    others = [member for member in members if member != device]
    beats = Beats(store)
    looked_s, first_s = 0.0, beats.look(others)
    for _ in _pauses():
        if (lost := recorded_failure(store)) is not None:
            return lost
        looked_s = beats.look(others) - first_s
        if looked_s >= _VERDICT_S:
            break
    still_s = beats.still_s()
    silent = [one for one in others if still_s.get(one, looked_s) > looked_s - _MOVED_S]
    if not silent:
        silent = _to_blame(store, device, others)
        reason = f"alive but did not take part; {reason}"
    return record_failure(store, silent, phase, reason)


def _to_blame(store: dist.Store, device: int, others: Sequence[int]) -> list[int]:
    """Who is behind trouble while all are alive; see ``diagnose``."""
    troubled = [one for one in (*others, device) if store.check([_trouble(one)])]
    accused = {int(peer) for one in troubled for peer in store.get(_trouble(one)).decode().split()} & {*others}
    calm = [one for one in others if one not in troubled]
    return sorted(accused.difference(troubled) or accused) or calm or list(others)


def _pauses() -> Iterator[None]:
    pause = threading.Event()
    while not pause.wait(INTERVAL_S / 2):
        yield


def _beat(device: int) -> str:
    return f"beat/{device}"


def _trouble(device: int) -> str:
    return f"trouble/{device}"
