"""Who decides on another store, as a test waits for it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from shardshift.coordination.quorum import known_to_all
from shardshift.elastic import job_store


def until_all_decide(port: int, voters: int) -> None:
    """Wait until so many decide, and each of them knows it."""
    store = job_store(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=10)))
    while (known := known_to_all(store)) is None or len(known.voters) != voters:
        pass
