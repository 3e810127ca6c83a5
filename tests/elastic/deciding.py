"""Who decides on another store, as a test waits for it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from shardshift.coordination.quorum import electorate_of, who_knows
from shardshift.elastic import job_store


def until_all_decide(port: int, voters: int) -> None:
    """Wait until so many decide, and each of them knows it."""
    store = job_store(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=10)))
    while True:
        known = electorate_of(store)
        if known is None or known[0].before is not None or len(known[0].voters) != voters:
            continue
        if who_knows(store, known[0]) == {*known[0].voters}:
            return
