"""Control: how the processes of a job agree, over one long-lived store, and how they learn of a failure.

Every wait here is bounded and ends early when a failure is recorded, so no rank is left waiting for one that is
gone. The first failure to be recorded is the job's failure: whoever looks later reads the same ranks, phase and
reason, so all survivors raise one and the same ``PeerLost``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from ..values import PeerLost, ShardshiftError

FAILURE_KEY: Final = "failure"
_GONE_KEY: Final = "gone"
_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02


def record_failure(store: dist.Store, ranks: Iterable[int], phase: str, reason: str) -> PeerLost:
    """Record the job's failure, unless one is recorded already, and return the recorded one."""
    lost = PeerLost(ranks, phase, reason)
    first = store.compare_set(FAILURE_KEY, "", lost.to_wire())
    return _failure(first)


def record_loss(store: dist.Store, device: int, phase: str, reason: str) -> PeerLost | None:
    """Record that one device is lost: the job's failure, unless it stood by and nobody needs it."""
    if store.check([_standby(device)]):
        store.append(_GONE_KEY, f"{device},")  # type: ignore[attr-defined]  # the stub lacks it
        return None
    return record_failure(store, [device], phase, reason)


def stands_by(store: dist.Store, device: int) -> bool:
    """Whether a device says of itself that it stands by."""
    return store.check([_standby(device)])


def _of(topic: str, member: int) -> str:
    return f"{topic}/{member}"


def _standby(device: int) -> str:
    return f"standby/{device}"


def _left(device: int) -> str:
    return f"left/{device}"


def _failure(wire: bytes) -> PeerLost:
    error = ShardshiftError.from_wire(wire.decode())
    assert isinstance(error, PeerLost)
    return error


class Control:
    """One process's end of the job's control plane.

    Args:
        store: shared by all processes of the job and by nothing else; used from one thread.
        device: this process's id.
        timeout_s: the longest that any agreement may take.
    """

    def __init__(self, store: dist.Store, device: int, timeout_s: float) -> None:
        self.store = store
        self.device = device
        self.timeout_s = timeout_s

    def failure(self) -> PeerLost | None:
        """The job's failure, if one is recorded."""
        return _failure(self.store.get(FAILURE_KEY)) if self.store.check([FAILURE_KEY]) else None

    def publish(self, key: str, content: bytes) -> None:
        """Put a record where others can ``fetch`` it."""
        self.store.set(key, content)  # type: ignore[arg-type]  # the stub says str; bytes arrive as they are

    def stand_by(self, stands: bool) -> None:
        """Say that this process stands by, so that its loss hurts nobody; or that it is needed from now on."""
        if stands:
            self.publish(_standby(self.device), b"")
        else:
            self.store.delete_key(_standby(self.device))

    def gone(self) -> set[int]:
        """The devices that were lost while they stood by."""
        if not self.store.check([_GONE_KEY]):
            return set()
        return {int(device) for device in self.store.get(_GONE_KEY).decode().split(",") if device}

    def leave(self, devices: int) -> None:
        """Say that this process needs the store no more.

        Device 0, which hosts the store where the launcher does not, waits until all have said so.

        Args:
            devices: processes of the job.
        """
        self.publish(_left(self.device), b"")
        if self.device == 0:
            staying = set(range(devices)) - self.gone()
            with suppress(PeerLost):  # whoever is lost now is lost after the work was done
                self._await([_left(device) for device in staying], self.timeout_s)

    def fetch(self, key: str, giver: int, phase: str) -> bytes:
        """Wait for a record that the device ``giver`` publishes.

        Raises:
            PeerLost: if the job fails meanwhile, or nothing came in time.
        """
        if not self._await([key], self.timeout_s):
            raise record_failure(self.store, [giver], phase, f"did not give '{key}' within {self.timeout_s:.0f} s")
        return self.store.get(key)

    def await_any(self, keys: Sequence[str]) -> str:
        """Wait, without a limit, until one of several records is there, and say which.

        Raises:
            PeerLost: if the job fails meanwhile.
        """
        for _ in self._looks(float("inf")):
            for key in keys:
                if self.store.check([key]):
                    return key
        raise AssertionError("a wait without a limit does not end")

    def gather(self, topic: str, members: Collection[int], content: bytes, phase: str) -> dict[int, bytes]:
        """Give a record and collect those of all members; a barrier among them.

        Raises:
            PeerLost: if the job fails meanwhile, or a member did not come in time; it names which.
        """
        self.publish(_of(topic, self.device), content)
        if not self._await([_of(topic, member) for member in members], self.timeout_s):
            missing = [member for member in members if not self.store.check([_of(topic, member)])]
            raise record_failure(self.store, missing, phase, f"did not come to '{topic}' within {self.timeout_s:.0f} s")
        return self.collect(topic, members)

    def collect(self, topic: str, members: Collection[int]) -> dict[int, bytes]:
        """The records of ``gather``, which are all there."""
        return dict(zip(members, self.store.multi_get([_of(topic, member) for member in members]), strict=True))

    def decide(self, key: str, proposal: bytes) -> bytes:
        """Propose a decision and learn which one was made: the first that anybody proposed."""
        made: bytes = self.store.compare_set(key, "", proposal.decode())
        return made

    def _await(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys are there, at the latest after ``timeout_s``."""
        return any(self.store.check(keys) for _ in self._looks(timeout_s))

    def _looks(self, timeout_s: float) -> Iterator[None]:
        """When to look again: at once, then after pauses that grow, at the last when the time is over.

        Looking rather than ``store.wait``, since one wait cannot end for either of two reasons, and c10d writes a
        warning for each wait that it ends by a timeout.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while time.monotonic() < deadline:
            lost = self.failure()
            yield  # after the failure was read: what was there before the job failed still counts, on every rank alike
            if lost is not None:
                raise lost
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        yield
