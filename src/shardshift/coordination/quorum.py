"""Quorum: an era of a job that has agents goes on only with a majority of them behind it.

The host of the store writes who decides (the *electorate*) into the store, and each agent that finds a new era there
assents to it. Survivors of a loss wait for a quorum of assents before they go on: on the side of a network partition
that has the store but not the majority, they do not come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import torch.distributed as dist

from .ballot import Electorate
from .eras import era_store

_ELECTORATE: Final = "electorate"

Addresses = Mapping[int, tuple[str, int]]


def electorate_of(job: dist.Store) -> tuple[Electorate, Addresses] | None:
    """Who decides, and where they are asked; None if that was not laid down yet, or there are no agents."""
    if not job.check([_ELECTORATE]):
        return None
    record = json.loads(job.get(_ELECTORATE))
    addresses = {int(voter): (host, port) for voter, (host, port) in record["addresses"].items()}
    return Electorate.from_json(record["electorate"]), addresses


def write_electorate(job: dist.Store, electorate: Electorate, addresses: Addresses) -> None:
    """Lay down who decides, and where they, and others who are to learn of it, are asked; the host's part."""
    told = {str(one): address for one, address in addresses.items()}
    job.set(_ELECTORATE, json.dumps({"electorate": electorate.to_json(), "addresses": told}))


def say_known(job: dist.Store, voter: int, version: int) -> None:
    """Say that a voter knows a version of the electorate."""
    job.set(_known(voter), str(version))


def who_knows(job: dist.Store, electorate: Electorate) -> set[int]:
    """The voters that know this version of the electorate, or a newer one."""
    told = [one for one in electorate.everyone if job.check([_known(one)])]
    return {one for one in told if int(job.get(_known(one))) >= electorate.version}


def known_to_all(job: dist.Store) -> Electorate | None:
    """The electorate, if it is settled and each of its voters knows it."""
    known = electorate_of(job)
    if known is None or known[0].before is not None:
        return None
    return known[0] if who_knows(job, known[0]) == {*known[0].voters} else None


def assent(era: dist.Store, voter: int) -> None:
    """Let an era be."""
    era.set(_assent(voter), "")


def is_formed(job: dist.Store, era: int) -> bool:
    """Whether a quorum assents to an era; without agents there is none to ask."""
    known = electorate_of(job)
    if known is None:
        return True
    store = era_store(job, era)
    return known[0].passes([one for one in known[0].everyone if store.check([_assent(one)])])


def _known(voter: int) -> str:
    return f"{_ELECTORATE}/known/{voter}"


def _assent(voter: int) -> str:
    return f"assent/{voter}"
