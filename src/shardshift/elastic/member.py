"""One process's membership in a job: who it is, how many there are, and the store through which they meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..values import Topology


@dataclass(frozen=True, slots=True)
class Member:
    """This process among the processes of the job.

    Attributes:
        store: long-lived store of the job.
        device: this process's id, also its device; the launcher's RANK.
        topology: which devices are on which node, of those that the job begins with.
    """

    store: dist.Store
    device: int
    topology: Topology

    @property
    def founders(self) -> range:
        """The devices that the job begins with; any other one joins it while it runs."""
        return range(self.topology.devices)

    @classmethod
    def from_launcher(cls, *, devices_per_node: int | None = None, timeout_s: float = 30.0) -> Member:
        """From what torchrun (or srun, or an operator) sets: RANK, WORLD_SIZE, MASTER_*.

        Args:
            devices_per_node: processes on each node; None for torchrun's LOCAL_WORLD_SIZE, or else all on one.
            timeout_s: how long to wait for the store.

        Raises:
            ValueError: if the variables are not set (from torch's own rendezvous).
            Infeasible: if WORLD_SIZE is not a multiple of ``devices_per_node``.
        """
        store, device, devices = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        # A launcher's nodes of unequal size are no grid: then one node, as if nothing were known.
        per_node = devices_per_node or (local if devices % local == 0 else devices)
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(job_store(store, attempt), device, Topology.of(devices, per_node))


def job_store(store: dist.Store, attempt: int = 0) -> dist.Store:
    """The part of a launcher's store that one attempt to run the job has to itself.

    torchrun's agent keeps its store when it starts workers again, with all that a failed attempt has left in it.
    """
    return dist.PrefixStore(f"shardshift/{attempt}", store)
