"""Control: how the processes of a job agree, over one long-lived store, and how they learn of a failure.

Every wait here is bounded and ends early when a failure is recorded, so no rank is left waiting for one that is
gone. The first failure to be recorded is the job's failure: whoever looks later reads the same ranks, phase and
reason, so all survivors raise one and the same ``PeerLost``.

Time in which the store itself does not answer counts for a second at most: others could not come, either.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from ..values import PeerLost
from .answering import close_store
from .failure import lost_standbys, record_failure, recorded_failure, stand_by
from .signs import Looks, any_beats, diagnose

_FIRST_PAUSE_S: Final = 0.0005
_SHORT_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.02
_SOON_S: Final = 0.5
_HEAR_S: Final = 0.01
"""Between two looks at whether the job has failed."""


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

    def close(self) -> None:
        """Nothing is asked any more."""
        close_store(self.store)

    def failure(self) -> PeerLost | None:
        """The job's failure, if one is recorded."""
        return recorded_failure(self.store)

    def publish(self, key: str, content: bytes) -> None:
        """Put a record where others can ``fetch`` it."""
        self.store.set(key, content)  # type: ignore[arg-type]  # the stub says str; bytes arrive as they are

    def stand_by(self, stands: bool) -> None:
        """Say that this process stands by, so that its loss hurts nobody; or that it is needed from now on."""
        stand_by(self.store, self.device, stands)

    def gone(self) -> set[int]:
        """The devices that were lost while they stood by."""
        return lost_standbys(self.store)

    def leave(self, devices: Collection[int]) -> None:
        """Say that this process needs the store no more.

        Device 0, which hosts the store where the launcher does not, waits until all have said so.

        Args:
            devices: of the job.
        """
        self.publish(_left(self.device), b"")
        if self.device == 0:
            staying = {*devices} - self.gone()
            with suppress(PeerLost):  # whoever is lost now is lost after the work was done
                self._await([_left(device) for device in staying], self.timeout_s)

    def fetch(self, key: str, giver: int, phase: str, timeout_s: float | None = None) -> bytes:
        """Wait for a record that the device ``giver`` publishes.

        Args:
            key: of the record.
            giver: who publishes it.
            phase: in the words of ``PeerLost``.
            timeout_s: how long to wait; None for as long as any agreement may take.

        Raises:
            PeerLost: if the job fails meanwhile, or nothing came in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._await([key], limit_s):
            raise record_failure(self.store, [giver], phase, f"did not give '{key}' within {limit_s:.0f} s")
        return self.store.get(key)

    def comes(self, key: str, timeout_s: float) -> bool:
        """Whether a record is there, at the latest after ``timeout_s``."""
        return self._await([key], timeout_s)

    def await_any(self, keys: Sequence[str]) -> str:
        """Wait, without a limit, until one of several records is there, and say which.

        Raises:
            PeerLost: if the job fails meanwhile.
        """
        for _ in self.looks(float("inf")):
            for key in keys:
                if self.store.check([key]):
                    return key
        raise AssertionError("a wait without a limit does not end")

    def gather(self, topic: str, members: Collection[int], content: bytes, phase: str) -> dict[int, bytes]:
        """Give a record and collect those of all members; a barrier among them.

        Of several that do not come, some may only be waiting for the one that is lost: who shows life is not named if
        another does not. To tell takes 3 s.

        Raises:
            PeerLost: if the job fails meanwhile, or a member did not come in time; it names which.
        """
        self.publish(_of(topic, self.device), content)
        if not self._await([_of(topic, member) for member in members], self.timeout_s):
            missing = [member for member in members if not self.store.check([_of(topic, member)])]
            if not missing:
                return self.collect(topic, members)  # the last one came while this one looked who had not
            reason = f"did not come to '{topic}' within {self.timeout_s:.0f} s"
            if len(missing) > 1 and any_beats(self.store, missing):
                raise diagnose(self.store, self.device, missing, phase, reason)
            raise record_failure(self.store, missing, phase, reason)
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
        return any(self.store.check(keys) for _ in self.looks(timeout_s))

    def looks(self, timeout_s: float) -> Iterator[None]:
        """When to look for what others do: at once, then after pauses that grow, at the last when the time is over.

        Looking rather than ``store.wait``, since one wait cannot end for either of two reasons, and c10d writes a
        warning for each wait that it ends by a timeout.
        """
        looks, pause_s, heard_s = Looks(), _FIRST_PAUSE_S, 0.0
        while (spent_s := looks.look()) < timeout_s:
            yield
            if spent_s >= heard_s:
                heard_s = spent_s + _HEAR_S
                if (lost := self.failure()) is not None:
                    yield  # what was there before the job failed still counts, on every rank alike
                    raise lost
            time.sleep(pause_s)
            # Soon, while others are likely to come any moment, as in a change; later it would cost them processor time.
            pause_s = min(pause_s * 1.5, _SHORT_PAUSE_S if spent_s < _SOON_S else _LONGEST_PAUSE_S)
        yield


def _of(topic: str, member: int) -> str:
    return f"{topic}/{member}"


def _left(device: int) -> str:
    return f"left/{device}"
