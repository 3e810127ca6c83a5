"""Playing the conformance suite in processes, each scenario over a transport of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from tests.transport.conformance import IDS, LONG_S, End, play

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.transport import Transport

Make = Callable[[dist.Store, int], Transport]


def _play_all(send: Any, make: Make, names: tuple[str, ...]) -> None:
    member = Member.from_launcher(timeout_s=LONG_S)
    control = Control(member.store, member.device, LONG_S)

    def leave() -> None:
        os._exit(0)  # as a killed process leaves: nothing is closed in an orderly way

    for name in names:
        transport = make(dist.PrefixStore(name, member.store), IDS[member.device])

        def meet(word: str, name: str = name) -> None:
            control.gather(f"{name}/{word}", range(len(IDS)), b"", "test")

        send((name, play(name, End(transport, meet, leave))))


def faults_by_scenario(make: Make, names: Iterable[str]) -> dict[str, list[str | None]]:
    """Per scenario what each end tells.

    Args:
        make: a module-level function that gives a device its transport.
        names: of scenarios; one that ends a process comes last.
    """
    found: dict[str, list[str | None]] = {}
    with LocalJob(len(IDS), _play_all, (make, tuple(names)), timeout_s=LONG_S) as job:
        for _, (name, fault) in job.messages():
            found.setdefault(name, []).append(fault)
    return found
