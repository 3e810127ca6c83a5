"""Processes for tests of ``migrate``: one job of forked ranks plays scenarios one after the other.

A job costs seconds to start and each change some tenths, so a file starts one job and its tests read what each scenario
of it told. A rank whose scenario fails leaves; the others then fail in theirs, and later ones are not played.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import shardshift as ss
from shardshift.elastic import LocalJob

TIMEOUT_S: Final = 60.0
"""Of everything that no test waits for."""
Scenario = Callable[["Rank"], None]


class Rank:
    """One rank of the world, and what scenarios need of the others.

    Attributes:
        index: its number.
        count: of ranks in the world.
        folder: that all ranks share.
    """

    def __init__(self, folder: Path) -> None:
        self.index, self.count, self.folder = dist.get_rank(), dist.get_world_size(), folder

    def all(self, value: Any) -> list[Any]:
        """What every rank says."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def of(self, rank: int, value: Any) -> Any:
        """What one rank says."""
        given = [value]
        dist.broadcast_object_list(given, src=rank)
        return given[0]

    def change(self, job: ss.fsdp.Job | None, build: Any, to: ss.Mesh, **options: Any) -> ss.fsdp.Job | None:
        """``migrate`` on the ranks that have a part in it."""
        if job is None and to.position(self.index) is None:
            return None
        return ss.migrate(job, build, to, **({"timeout_s": TIMEOUT_S} | options))

    def error(self, job: ss.fsdp.Job | None, build: Any, to: ss.Mesh, **options: Any) -> Exception | None:
        """The error of a change that must not be made; None on a rank that has no part in it."""
        if job is None and to.position(self.index) is None:
            return None
        try:
            self.change(job, build, to, **options)
        except Exception as error:
            return error
        raise AssertionError(f"rank {self.index} has changed to {to}")

    def mesh(self, to: ss.Mesh) -> Any:
        """Torch's mesh on some ranks, made by all; None on a rank outside.

        torch numbers groups, and ranks without a part in a change have counted fewer.
        """
        c10d._world.group_count = max(self.all(c10d._world.group_count))
        made = torch.distributed.DeviceMesh(
            "cpu", torch.tensor(to.ranks, dtype=torch.int).reshape(to.shape), mesh_dim_names=to.names
        )
        return made if made.get_coordinate() is not None else None


def world() -> None:
    """Enter the world of the launcher, as a training script does."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DTensor advises on the placements that a test asks for
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * TIMEOUT_S))


def _play(send: Callable[[Any], None], scenarios: Sequence[Scenario], folder: Path) -> None:
    world()
    rank = Rank(folder)
    for scenario in scenarios:
        torch.manual_seed(0)
        try:
            scenario(rank)
            dist.barrier()
        except BaseException:
            send((scenario.__name__, traceback.format_exc()))
            return
        send((scenario.__name__, None))
    dist.destroy_process_group()


class Played:
    """What ranks told of their scenarios."""

    def __init__(self, count: int, scenarios: Sequence[Scenario], folder: Path) -> None:
        self._count = count
        self._told: dict[str, dict[int, str | None]] = {}
        with LocalJob(count, _play, (tuple(scenarios), folder), timeout_s=2 * TIMEOUT_S) as job:
            for rank, (name, fault) in job.messages():
                self._told.setdefault(name, {})[rank] = fault

    def hold(self, scenario: Scenario) -> None:
        """Hold it that every rank came through a scenario."""
        told = self._told.get(scenario.__name__, {})
        faults = [f"rank {rank}:\n{fault}" for rank, fault in sorted(told.items()) if fault]
        assert not faults, "\n".join(faults)
        assert len(told) == self._count, f"told by ranks {sorted(told)} only: an earlier scenario failed"
