"""Megatron's way: each rank saves its shards, an offline script reshards the files, each rank loads its new file.

1. *save*: of each role the lowest rank writes its shards with ``torch.save``, as Megatron does where there is no
   distributed optimizer.
2. *reshard*: one process reads all files, joins the tensors and writes them cut anew, as Megatron's
   ``tools/checkpoint/convert.py`` does with its loader and saver. Files are mapped, so nothing is copied that is not
   needed; the start of that process is not in it.
3. *load*: each rank maps the file of its new role and copies it into its tensors.

*EasyCkpt* saves by a copy into host memory, which is written out while the job goes on; what follows is Megatron's
reshard and load, so only its save is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from _processes import Action, Side
from _state import Locals, dtype_of, warm

from shardshift.engine import names_of
from shardshift.values import Region, Tensor

from .common import Place, empty_folder, file_of, lowest, part


class Megatron:
    """Files in one folder; see the head of this module.

    Args:
        place: this rank's part.
        folder: an empty folder, which all ranks see.
        where: what kind of file system it is on, for the name.
    """

    def __init__(self, place: Place, folder: Path, where: str) -> None:
        self.name, self.moved_bytes = f"Megatron, {where}", dict[str, int]()
        self._place, self._old, self._new = place, folder / "old", folder / "new"
        if place.device == 0:
            for made in (self._old, self._new):
                made.mkdir(parents=True)

    def phases(self) -> Mapping[str, Side]:
        """Save, reshard, load."""
        return {"save": lambda: self._save, "reshard": self._prepare_reshard, "load": lambda: self._load}

    def clean(self) -> None:
        """Remove the files."""
        if self._place.device == 0:
            for folder in (self._old, self._new):
                empty_folder(folder)

    def _save(self) -> None:
        place, saved = self._place, self._place.saves()
        if saved:
            rank = place.plan.prev.rank_of(place.device)
            assert rank is not None
            role = place.plan.prev.layout.role_of_rank[rank]
            torch.save({name: place.sources[shard] for name, shard in saved.items()}, file_of(self._old, role))
        self.moved_bytes["save"] = sum(shard.nbytes for shard in saved.values())

    def _prepare_reshard(self) -> Action:
        self.moved_bytes["reshard"] = 0  # other ranks wait
        return self._reshard if self._place.device == 0 else lambda: None

    def _reshard(self) -> None:
        prev, curr = self._place.plan.prev.layout, self._place.plan.curr.layout
        whole: dict[Tensor, torch.Tensor] = {}
        nbytes = 0
        for rank, role in lowest(prev.role_of_rank).items():
            names = names_of(prev.shards(rank))
            for name, found in torch.load(file_of(self._old, role), mmap=True).items():
                tensor, region = names[name].tensor, names[name].region
                if tensor not in whole:
                    whole[tensor] = torch.empty(tensor.shape, dtype=found.dtype)
                part(whole[tensor], region, Region.whole(tensor.shape)).copy_(found)
                nbytes += found.nbytes
        for rank, role in lowest(curr.role_of_rank).items():
            cut = {
                # A clone, since a view would be saved with all that it is a view of.
                name: part(whole[shard.tensor], shard.region, Region.whole(shard.tensor.shape)).clone()
                for name, shard in names_of(curr.shards(rank)).items()
            }
            torch.save(cut, file_of(self._new, role))
            nbytes += sum(tensor.nbytes for tensor in cut.values())
        self.moved_bytes["reshard"] = nbytes

    def _load(self) -> None:
        place, curr = self._place, self._place.plan.curr
        rank = curr.rank_of(place.device)
        self.moved_bytes["load"] = 0
        if rank is None:
            return
        found = torch.load(file_of(self._new, curr.layout.role_of_rank[rank]), mmap=True)
        for name, shard in names_of(curr.shards_on(place.device)).items():
            place.targets[shard].copy_(found[name])
            self.moved_bytes["load"] += shard.nbytes


class EasyCkpt:
    """A copy into host memory that has been written to; see the head of this module."""

    def __init__(self, place: Place) -> None:
        self.name, self.moved_bytes = "EasyCkpt", dict[str, int]()
        self._sources = place.sources
        self._host: Locals = {shard: warm(shard) for shard in place.saves().values()}

    def phases(self) -> Mapping[str, Side]:
        """Save alone."""
        return {"save": lambda: self._save}

    def clean(self) -> None:
        """Nothing: the memory is kept, as EasyCkpt keeps it."""

    def _save(self) -> None:
        for shard, into in self._host.items():
            assert into.dtype == dtype_of(shard)
            into.copy_(self._sources[shard])
        self.moved_bytes["save"] = sum(shard.nbytes for shard in self._host)
