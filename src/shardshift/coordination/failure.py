"""An era's failure: the first that anybody records in its store. Whoever looks later reads the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch.distributed as dist

from ..values import PeerLost, ShardshiftError
from .eras import lost_before

_FAILURE_KEY: Final = "failure"
_GONE_KEY: Final = "gone"
_DEAD_KEY: Final = "dead"


def recorded_failure(store: dist.Store) -> PeerLost | None:
    """The job's failure, if one is recorded."""
    return _opened(store.get(_FAILURE_KEY)) if store.check([_FAILURE_KEY]) else None


def record_failure(store: dist.Store, ranks: Iterable[int], phase: str, reason: str) -> PeerLost:
    """Record the job's failure, unless one is recorded already, and return the recorded one."""
    lost = PeerLost(ranks, phase, reason)
    return _opened(store.compare_set(_FAILURE_KEY, "", lost.to_wire()))


def record_loss(store: dist.Store, device: int, phase: str, reason: str) -> PeerLost | None:
    """Record that one device is lost: the era's failure, unless it stood by and nobody needs it, or is no news.

    A failure names those that were lost first. Whoever is lost after them, in the same era, is in ``known_dead``.
    """
    if device in lost_before(store):
        return None
    if stands_by(store, device):
        store.append(_GONE_KEY, f"{device},")  # type: ignore[attr-defined]  # the stub lacks it
        return None
    store.append(_DEAD_KEY, f"{device},")  # type: ignore[attr-defined]
    return record_failure(store, [device], phase, reason)


def tell_loss(present: Callable[[], int], of: Callable[[int], dist.Store], device: int, reason: str) -> PeerLost | None:
    """A launcher's part: record that a worker is lost, in whichever era is the present one by the time it is recorded.

    Args:
        present: gives the present era.
        of: gives the store of an era.
        device: that is lost.
        reason: how its process ended.
    """
    recorded, lost = None, None
    while recorded != (now := present()):  # survivors may go on to the next one meanwhile
        recorded, lost = now, record_loss(of(now), device, "run", reason)
    return lost


def lost_standbys(store: dist.Store) -> set[int]:
    """The devices that were lost while they stood by."""
    return _devices(store, _GONE_KEY)


def known_dead(store: dist.Store) -> set[int]:
    """The devices of which a launcher has said in an era that they are lost, apart from standbys."""
    return _devices(store, _DEAD_KEY)


def _devices(store: dist.Store, key: str) -> set[int]:
    return {int(device) for device in store.get(key).decode().split(",") if device} if store.check([key]) else set()


def stand_by(store: dist.Store, device: int, stands: bool) -> None:
    """Say that a device stands by, so that its loss hurts nobody; or that it is needed from now on."""
    if stands:
        store.set(_standby(device), "")
    else:
        store.delete_key(_standby(device))


def stands_by(store: dist.Store, device: int) -> bool:
    """Whether a device says of itself that it stands by."""
    return store.check([_standby(device)])


def dismiss(store: dist.Store, device: int) -> None:
    """Tell a device that stands by, or soon will, that it is not needed any more, since its node leaves."""
    store.set(dismissed(device), "")


def dismissed(device: int) -> str:
    """Key of the record that dismisses a device."""
    return f"dismissed/{device}"


def _standby(device: int) -> str:
    return f"standby/{device}"


def _opened(wire: bytes) -> PeerLost:
    error = ShardshiftError.from_wire(wire.decode())
    assert isinstance(error, PeerLost)
    return error
