"""One process's membership in a job: who it is, how many there are, and the store through which they meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ..values import Infeasible, ShardshiftError, Topology
from .reign import Following

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Member:
    """This process among the processes of the job.

    Attributes:
        store: long-lived store of the job.
        device: this process's id, also its device; the launcher's RANK.
        topology: which devices are on which node, of those that the job begins with.
        reign: the number of the store's reign; grows each time that another store has taken its place.
        next_store: gives for the number of a reign the number and the store of a later one (all of it, as a launcher
            has it), or raises ``ShardshiftError``; None if the job ends with its store. All survivors must be given the
            same one, with its era laid down (``coordination.first_era``).
    """

    store: dist.Store
    device: int
    topology: Topology
    reign: int = 0
    next_store: Callable[[int], tuple[int, dist.Store]] | None = None

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
            Infeasible: if the variables are not set, or WORLD_SIZE is not a multiple of ``devices_per_node``.
            ShardshiftError: if the store cannot be hosted or reached.
        """
        reign, following = 0, Following.from_launcher(timeout_s)
        if following is None:
            store, device, devices = _meet(timeout_s)
        else:
            reign, store = following.present()
            device, devices = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        # A launcher's nodes of unequal size are no grid: then one node, as if nothing were known.
        per_node = devices_per_node or (local if devices % local == 0 else devices)
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(job_store(store, attempt), device, Topology.of(devices, per_node), reign, following)

    @property
    def is_behind(self) -> bool:
        """Whether this process's agent has gone on with another store, also if this one answers still."""
        return isinstance(self.next_store, Following) and self.next_store.is_over(self.reign)

    def moved(self) -> Member:
        """This process in the store that has taken the place of its present one, which is lost.

        Raises:
            ShardshiftError: if there is none.
        """
        if self.next_store is None:
            raise ShardshiftError(
                "the job's store does not answer, and its launcher knows of no other; what to do: start the job again "
                "from its last checkpoint, under 'shardshift run', which outlives the host of its store"
            )
        reign, store = self.next_store(self.reign)
        return replace(self, store=job_store(store), reign=reign)


def _meet(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The launcher's store, this process's id, and how many there are, by torch's rendezvous."""
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise Infeasible(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, by which a launcher tells a process "
            "its place in the job; what to do: start the program with 'shardshift run' or torchrun, set all of "
            f"{', '.join(_VARIABLES)}, or give member="
        )
    try:
        store, device, devices = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except dist.DistError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        taken = "EADDRINUSE" in str(error)
        raise ShardshiftError(
            f"rank {os.environ['RANK']} cannot {'host' if taken else 'reach'} the job's store at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): {'the port is taken' if taken else f'nothing within {timeout_s:g} s'}; what "
            f"to do: {'choose a free port' if taken else 'look whether rank 0 runs there, and can be reached'}"
        ) from error
    return store, device, devices


def job_store(store: dist.Store, attempt: int = 0) -> dist.Store:
    """The part of a launcher's store that one attempt to run the job has to itself.

    torchrun's agent keeps its store when it starts workers again, with all that a failed attempt has left in it.
    """
    return dist.PrefixStore(f"shardshift/{attempt}", store)
