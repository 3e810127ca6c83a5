"""Ties: tensors that are one in memory (a tied embedding under two names) stay one, and those that are two stay two.

Layouts know tensors, not memory. So each device says which of its tensors are one; what is one somewhere must be one
wherever a device has both, before and after. Both travel, since layouts list both; where they arrive they are compared,
and one of them is dropped. Empty shards are in no memory: they neither tie tensors nor part them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from ..plan import Plan
from ..values import Mismatch, Region, Shard, Tensor
from .aliases import exact_aliases
from .checksum import checksum

Ties: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""Groups of tensors that stand for one."""


def tied_here(sources: Mapping[Shard, torch.Tensor]) -> Ties:
    """The tensors of one device that are one.

    Raises:
        Mismatch: if tensors share memory in part: elements of some shards, or shards of other regions.
    """
    filled = {shard: tensor for shard, tensor in sources.items() if shard.region.numel}
    regions: dict[Tensor, set[Region]] = {}
    for shard in filled:
        regions.setdefault(shard.tensor, set()).add(shard.region)
    shared: dict[tuple[Tensor, ...], set[Region]] = {}
    for group in exact_aliases(filled):
        tensors, (region, *others) = tuple(shard.tensor for shard in group), {shard.region for shard in group}
        if others:
            raise _in_part(group[0].tensor, group[1].tensor)
        shared.setdefault(tensors, set()).add(region)
    for tensors, common in shared.items():
        if any(regions[tensor] != common for tensor in tensors):
            raise _in_part(tensors[0], tensors[1])
    return tuple(shared)


def agreed_ties(plan: Plan, records: Mapping[int, Mapping[str, Any]]) -> Ties:
    """What is one in the whole job.

    Args:
        plan: the plan.
        records: by device what it says of itself; ``ties`` are groups of numbers in the old layout's tensors.

    Raises:
        Mismatch: if a device holds two of a group as tensors of their own, or the new layout cuts them differently.
    """
    tensors = plan.prev.layout.tensors
    said = {device: [{tensors[number] for number in group} for group in one["ties"]] for device, one in records.items()}
    joined: list[set[Tensor]] = []
    for group in (group for _, groups in sorted(said.items()) for group in groups):
        touching = [other for other in joined if not other.isdisjoint(group)]
        joined = [other for other in joined if other not in touching] + [group.union(*touching)]
    for one in joined:
        names = ", ".join(sorted(map(str, one)))
        for device, groups in sorted(said.items()):
            held = {shard.tensor for shard in plan.prev.shards_on(device) if shard.region.numel} & one
            if len(held) > 1 and not any(held <= group for group in groups):
                raise Mismatch(
                    f"device {device} holds {', '.join(sorted(map(str, held)))} as tensors of their own, another "
                    "device as one; nothing was moved. What to do: tie them on all devices, or on none"
                )
        for device in plan.curr.devices:
            filled = [shard for shard in plan.curr.shards_on(device) if shard.region.numel]
            cuts = {tensor: [shard.region for shard in filled if shard.tensor == tensor] for tensor in one}
            if len({tuple(cut) for cut in cuts.values() if cut}) > 1:
                raise Mismatch(
                    f"{names} are one tensor, but the new layout gives device {device} different regions of them; "
                    "nothing was moved. What to do: cut tied tensors alike"
                )
    return tuple(tuple(sorted(one)) for one in sorted(joined, key=min))


def check_ties(ties: Ties, targets: Mapping[Shard, torch.Tensor]) -> None:
    """Before a commit: what is to be one has arrived as equal tensors.

    Raises:
        Mismatch: naming two that differ.
    """
    for group in ties:
        for one, other in pairs(group, targets):
            if not same(targets[one], targets[other]):
                raise Mismatch(
                    f"{one} and {other} are one tensor on one device, and other devices hold different bits under the "
                    "two names; nothing was committed. What to do: make them equal, or untie them everywhere"
                )


def tie(ties: Ties, targets: MutableMapping[Shard, torch.Tensor], kept: Collection[Shard]) -> None:
    """Make one of what stands for one; ``kept`` are shards whose tensors have not changed, and stay."""
    for group in ties:
        for alike in _alike(group, tuple(targets)):
            first = next((shard for shard in alike if shard in kept), alike[0])
            for shard in alike:
                targets[shard] = targets[first]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or have the same bits."""
    return one is other or checksum(one) == checksum(other)


def pairs(group: Collection[Tensor], shards: Iterable[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Shards of one region of tensors that stand for one, two by two."""
    for alike in _alike(group, shards):
        yield from pairwise(alike)


def _alike(group: Collection[Tensor], shards: Iterable[Shard]) -> Iterable[list[Shard]]:
    by_region: dict[Region, list[Shard]] = {}
    for shard in shards:
        if shard.tensor in group:
            by_region.setdefault(shard.region, []).append(shard)
    return by_region.values()


def _in_part(one: Tensor, other: Tensor) -> Mismatch:
    return Mismatch(
        f"{one} and {other} share memory in some of their shards, or in other regions; moved one by one they would "
        "part, so nothing was moved. What to do: tie whole tensors that are cut alike, or give copies"
    )
