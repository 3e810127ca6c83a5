"""megatron-core's ``dist_checkpointing``: the ``torch_dist`` format, saved fully in parallel, resharded when loaded.

It runs on CPU over gloo with two things put in place: the stand-ins for CUDA (``adapters/megatron/cpu.py``), and a
queue of this process for what its writers report, since Megatron would start a manager process for each rank. Tuned:
replicas share the writing and remember how (``FullyParallelSaveStrategyWrapper`` with ``do_cache_distribution``), plans
and metadata are cached from save to save, one writer a rank, no validation of who saves what.

Each save forks a writer per rank, and each writer syncs its file; neither is an option. Loading writes into the tensors
that it is given.
"""

from __future__ import annotations

from shardshift.adapters.megatron import RankLayout  # noqa: F401

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _processes import Action, Side
from _state import Locals
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from shardshift.values import PlacedLayout, Shard

from .common import Place, empty_folder


class MegatronDist:
    """Files in one folder; see the head of this module. Needs the default group to be all devices.

    Args:
        place: this rank's part.
        folder: an empty folder, which all ranks see.
        where: what kind of file system it is on, for the name.
    """

    def __init__(self, place: Place, folder: Path, where: str) -> None:
        self.name, self.moved_bytes = f"Megatron-Dist, {where}", dict[str, int]()
        self._place, self._folder = place, folder
        if place.device == 0:
            folder.mkdir(parents=True)
        filesystem_async._results_queue = queue.SimpleQueue()
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1, cached_metadata=True)
        # Without replicas there is nothing to share, and the first time costs every rank what all ranks hold.
        replicated = place.configs[0].dp > 1
        self._strategy: Any = (
            FullyParallelSaveStrategyWrapper(strategy, do_cache_distribution=True) if replicated else strategy
        )

    def phases(self) -> Mapping[str, Side]:
        """Save and load."""
        return {"save": self._prepare_save, "load": self._prepare_load}

    def clean(self) -> None:
        """Remove the files."""
        if self._place.device == 0:
            empty_folder(self._folder)

    def _prepare_save(self) -> Action:
        place = self._place
        state = sharded(place.device, place.plan.prev, place.sources)

        def save() -> None:
            dist_checkpointing.save(state, str(self._folder), self._strategy, validate_access_integrity=False)
            self.moved_bytes["save"] = sum(shard.nbytes for shard in place.saves().values())

        return save

    def _prepare_load(self) -> Action:
        place = self._place
        state = sharded(place.device, place.plan.curr, place.targets)

        def load() -> None:
            found = dist_checkpointing.load(state, str(self._folder), validate_access_integrity=False)
            for shard, target in place.targets.items():
                if found[_key(shard)].data_ptr() != target.data_ptr():
                    target.copy_(found[_key(shard)])
            self.moved_bytes["load"] = sum(shard.nbytes for shard in place.targets)

        return load


def sharded(device: int, layout: PlacedLayout, tensors: Locals) -> dict[str, Any]:
    """A device's tensors as Megatron's ``ShardedTensor``; of equal shards that of the lowest rank is the main one."""
    rank = layout.rank_of(device)
    if rank is None:
        return {}
    found: dict[str, Any] = {}
    lower = [set(layout.layout.shards(other)) for other in range(rank)]
    for shard in layout.shards_on(device):
        replica = sum(shard in held for held in lower)
        cuts = [
            (dim, offset // count, whole // count)
            for dim, (offset, count, whole) in enumerate(
                zip(shard.region.offsets, shard.region.shape, shard.tensor.shape, strict=True)
            )
            if count != whole
        ]
        local: torch.Tensor = tensors[shard]
        found[_key(shard)] = ShardedTensor.from_rank_offsets(_key(shard), local, *cuts, replica_id=replica)
    return found


def _key(shard: Shard) -> str:
    return f"{shard.tensor.kind.value}.{shard.tensor.name}"
