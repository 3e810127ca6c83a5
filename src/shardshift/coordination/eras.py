"""Eras: the time from one loss to the next.

A failure is final for the era in which it is recorded: whoever looks later reads the same one. Survivors meet in the
next era, whose records lie under a prefix of their own, so nothing that the lost or the slow have left behind is read
again. An era knows who was lost before it: the launcher may hear late of a death that survivors have found already.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import torch.distributed as dist

from .answering import part_of

_CURRENT: Final = "era"
_LOST: Final = "lost"


def current_era(store: dist.Store) -> int:
    """The number of the job's present era, from 0."""
    return int(store.get(_CURRENT)) if store.check([_CURRENT]) else 0


def present_store(store: dist.Store) -> dist.Store:
    """What the job's present era has to itself."""
    return era_store(store, current_era(store))


def era_store(store: dist.Store, era: int) -> dist.Store:
    """The part of the job's store that an era has to itself."""
    return part_of(store, f"era/{era}")


def begin_era(store: dist.Store, after: int, lost: Iterable[int]) -> dist.Store:
    """Begin the era after another one, unless a fellow survivor has; every one of them calls this alike.

    Args:
        store: of the job.
        after: the era that has failed.
        lost: the devices that its failure names.

    Returns:
        The new era's store.
    """
    begun = era_store(store, after + 1)
    before = lost_before(era_store(store, after))
    begun.set(_LOST, json.dumps(sorted(before.union(lost))))
    store.compare_set(_CURRENT, str(after) if after else "", str(after + 1))
    return begun


def first_era(store: dist.Store, number: int, lost: Iterable[int]) -> None:
    """Lay down the era with which a store begins that takes the place of another one.

    Args:
        store: of the job, where nobody reads yet.
        number: of the era.
        lost: the devices that are lost, whoever knows of them.
    """
    era_store(store, number).set(_LOST, json.dumps(sorted({*lost})))
    store.set(_CURRENT, str(number))


def lost_before(store: dist.Store) -> set[int]:
    """The devices that were lost before an era; ``store`` is the era's."""
    return set(json.loads(store.get(_LOST))) if store.check([_LOST]) else set()
