"""torch.distributed.checkpoint with DTensor state: a distributed save, and a load that reshards as it reads.

A tensor is a ``DTensor`` over its stage's mesh of (dp, tp): cut along the dim that the layout cuts, replicated over dp.
Meshes have no groups of their own; the checkpoint asks them for coordinates alone. Tuned as the documentation advises:

1. Save: replicas share the writing (``dedup_save_to_lowest_rank=False``), the plan is cached
   (``enable_plan_caching``: from the second save on ranks exchange only whether theirs has changed), one thread a rank,
   since ranks are more than cores, files are not synced where they lie in memory.
2. Load: no collectives (``no_dist``): a rank can find all that it needs by itself. The metadata is read once and kept,
   which a restarted process could not do. The page cache is warm, and tensors are read into memory that has been
   written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _processes import Side
from _state import Locals
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Cut

from shardshift.engine import names_of
from shardshift.values import ParallelConfig, PlacedLayout, Shard

from .common import Place, empty_folder


class TorchCheckpoint:
    """Files in one folder; see the head of this module. Needs the default group to be all devices.

    Args:
        place: this rank's part.
        folder: where to save; all ranks see it.
        where: what kind of file system it is on, for the name.
        sync: whether files are synced.
    """

    def __init__(self, place: Place, folder: Path, where: str, *, sync: bool) -> None:
        self.name, self.moved_bytes = f"torch checkpoint, {where}", dict[str, int]()
        self._folder, self._first = folder, place.device == 0
        plan, (prev, curr) = place.plan, place.configs
        self._group: Any = dist.new_group(sorted(plan.prev.devices))
        self._source, self._target = place.device in plan.prev.devices, place.device in plan.curr.devices
        self._saved = distributed(place.device, plan.prev, prev, place.sources)
        self._loaded: dict[str, Any] = dict(distributed(place.device, plan.curr, curr, place.targets))
        self._saved_bytes = sum(shard.nbytes for shard in place.saves().values())
        self._loaded_bytes = sum(shard.nbytes for shard in place.targets)
        # Caches lie at the class, by the name of the planner's class.
        planner = type(f"Planner{where}", (dcp.DefaultSavePlanner,), {})
        self._planner = planner(dedup_save_to_lowest_rank=False, enable_plan_caching=True)
        self._writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=sync)
        self._reader = _Reader(folder)

    def phases(self) -> Mapping[str, Side]:
        """Save and load."""
        return {"save": lambda: self._save, "load": lambda: self._load}

    def clean(self) -> None:
        """Remove the files."""
        if self._first:
            empty_folder(self._folder)

    def keep(self, folder: Path) -> None:
        """Save once more, where it stays."""
        if self._source:
            dcp.save(self._saved, checkpoint_id=folder, process_group=self._group)

    def _save(self) -> None:
        if self._source:
            dcp.save(self._saved, storage_writer=self._writer, planner=self._planner, process_group=self._group)
        self.moved_bytes["save"] = self._saved_bytes

    def _load(self) -> None:
        if self._target:
            dcp.load(self._loaded, storage_reader=self._reader, no_dist=True)
        self.moved_bytes["load"] = self._loaded_bytes


class _Reader(dcp.FileSystemReader):
    """Reads metadata once."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


def distributed(device: int, layout: PlacedLayout, config: ParallelConfig, tensors: Locals) -> dict[str, DTensor]:
    """A device's tensors as DTensors that share their memory, by the name of the logical tensor."""
    rank = layout.rank_of(device)
    if rank is None:
        return {}
    devices = torch.tensor([[layout.devices[one] for one in row] for row in mesh_of(config, rank)])
    mesh = DeviceMesh("cpu", devices, mesh_dim_names=("dp", "tp"), _init_backend=False)
    named = logical(layout.shards_on(device))
    return {name: _distributed(mesh, shard, tensors[shard]) for name, shard in named.items()}


def mesh_of(config: ParallelConfig, rank: int) -> list[list[int]]:
    """The ranks of a rank's stage, by dp and tp."""
    stage = config.coordinate(rank).pp
    return [[config.rank(pp=stage, tp=tp, dp=dp) for tp in range(config.tp)] for dp in range(config.dp)]


def logical(shards: Iterable[Shard]) -> dict[str, Shard]:
    """Shards by the name that their logical tensor has in a checkpoint."""
    return {f"{shard.tensor.kind.value}.{shard.tensor.name}": shard for shard in names_of(shards).values()}


def cut_of(shard: Shard) -> int | None:
    """The dim along which a tensor is cut; None if it is whole."""
    both = zip(shard.tensor.shape, shard.region.shape, strict=True)
    return next((dim for dim, (whole, mine) in enumerate(both) if whole != mine), None)


def _distributed(mesh: DeviceMesh, shard: Shard, local: torch.Tensor) -> DTensor:
    shape, dim = torch.Size(shard.tensor.shape), cut_of(shard)
    placements: list[Placement] = [Replicate(), Replicate() if dim is None else Cut(dim)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
