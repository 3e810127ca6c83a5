"""Sources: where each device gets the elements of its new shards.

1. The very same shard is held: refer to it.
2. Otherwise what the device holds of the shard, in shards of another shape, is copied locally.
3. The rest is cut along the prev shards that living devices hold, into pieces whose elements all have the same
   holders. Where held regions overlap (one whole copy, one sliced) each element still lies in one piece.
4. Each piece comes from one holder: one on the same node if there is one; then the one that has sent the fewest
   bytes so far; then the lowest id.
5. A piece without a holder is lost. All that is lost is gathered before the plan is refused.

Steps 1 to 3 depend on roles alone and are done once per (curr role, prev role) that meet on a device, whatever
the number of replicas. Choosing holders by hash or round robin was rejected: sizes differ, and what counts is
the busiest sender. (Chains in which new holders forward are another choice in step 4, over the same pieces.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..values import PlacedLayout, Region, Role, Shard, StateLost, Tensor, Topology, subtract_all
from .plan import Copy, Refer, Transfer

Holders: TypeAlias = tuple[tuple[int, Shard], ...]
"""Who could send a piece: (device, the shard of it that holds the piece)."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """Where everything comes from: the three lists of a plan, by ascending device, each in order of need."""

    refers: tuple[Refer, ...]
    copies: tuple[Copy, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class _Need:
    """What a device of one prev role needs to take one curr role, as tuples in the order of the plan's fields."""

    refers: tuple[Shard, ...]
    copies: tuple[tuple[Shard, Shard, Shard], ...]
    lacks: tuple[tuple[Shard, Shard, Holders], ...]


def source(
    prev: PlacedLayout, curr: PlacedLayout, *, topology: Topology | None = None, lost: Collection[int] = ()
) -> Sourced:
    """Find a source for every element of every shard of ``curr``.

    Args:
        prev: who holds what now.
        curr: who shall hold what.
        topology: which devices share a node; None means that all do.
        lost: devices of ``prev`` that are gone; they hold nothing.

    Raises:
        StateLost: naming every tensor and region that no living device holds.
    """
    holdings = _holdings(prev, lost)
    needs: dict[tuple[int, int | None], _Need] = {}
    refers: list[Refer] = []
    copies: list[Copy] = []
    transfers: list[Transfer] = []
    sent_bytes: Counter[int] = Counter()
    gone: dict[Tensor, list[Region]] = {}
    node = {device: topology.node_of(device) if topology else 0 for device in (*prev.devices, *curr.devices)}

    for device in sorted(curr.devices):
        curr_role = curr.layout.role_of_rank[curr.rank_of_device[device]]
        rank = None if device in lost else prev.rank_of_device.get(device)
        prev_role = None if rank is None else prev.layout.role_of_rank[rank]
        need = needs.get((curr_role, prev_role))
        if need is None:
            held = () if prev_role is None else prev.layout.roles[prev_role]
            need = needs[curr_role, prev_role] = _need(curr.layout.roles[curr_role], held, holdings)
        refers += [Refer(device, shard) for shard in need.refers]
        copies += [Copy(device, *three) for three in need.copies]

        for piece, target, holders in need.lacks:
            if not holders:
                gone.setdefault(piece.tensor, []).append(piece.region)
                continue
            # A device's own shards of a tensor never overlap, so it is a holder once, and its id breaks all ties.
            *_, sender, held_shard = min(
                (node[holder] != node[device], sent_bytes[holder], holder, shard) for holder, shard in holders
            )
            sent_bytes[sender] += piece.nbytes
            transfers.append(Transfer(sender, device, piece, held_shard, target))
    if gone:
        raise _state_lost(gone, lost)
    return Sourced(tuple(refers), tuple(copies), tuple(transfers))


class _Holding:
    """The distinct regions of one tensor that living devices hold, and who holds each."""

    def __init__(self, holders: dict[Shard, list[int]]) -> None:
        self.holders = list(holders.items())
        self.low = np.array([shard.region.offsets for shard in holders], dtype=np.int64)
        self.high = np.array([shard.region.stops for shard in holders], dtype=np.int64)

    def cut(self, region: Region) -> list[tuple[Region, Holders]]:
        """``region`` in disjoint pieces, each with all devices that hold the whole of it."""
        touching = np.flatnonzero(((self.low < region.stops) & (self.high > region.offsets)).all(axis=1))
        pieces: list[tuple[Region, Holders]] = [(region, ())]
        for shard, devices in (self.holders[i] for i in touching.tolist()):
            cut: list[tuple[Region, Holders]] = []
            for piece, known in pieces:
                if common := piece.intersect(shard.region):
                    cut.append((common, (*known, *((device, shard) for device in devices))))
                cut += [(rest, known) for rest in piece.subtract(shard.region)]
            pieces = cut
        return pieces


def _holdings(prev: PlacedLayout, lost: Collection[int]) -> dict[Tensor, _Holding]:
    living: dict[int, list[int]] = {}
    for device in sorted(set(prev.devices) - set(lost)):
        living.setdefault(prev.layout.role_of_rank[prev.rank_of_device[device]], []).append(device)
    holders: dict[Tensor, dict[Shard, list[int]]] = {}
    for role, devices in sorted(living.items()):
        for shard in prev.layout.roles[role]:
            holders.setdefault(shard.tensor, {}).setdefault(shard, []).extend(devices)
    return {tensor: _Holding(by_shard) for tensor, by_shard in holders.items()}


def _need(wanted: Role, held: Role, holdings: dict[Tensor, _Holding]) -> _Need:
    refers: list[Shard] = []
    copies: list[tuple[Shard, Shard, Shard]] = []
    lacks: list[tuple[Shard, Shard, Holders]] = []
    kept = set(held)
    local: dict[Tensor, list[Shard]] = {}
    for shard in held:
        local.setdefault(shard.tensor, []).append(shard)
    for target in wanted:
        if target in kept:
            refers.append(target)
            continue
        have: list[Region] = []
        for shard in local.get(target.tensor, ()):
            if common := target.region.intersect(shard.region):
                have.append(common)
                copies.append((Shard(target.tensor, common), shard, target))
        for missing in subtract_all(target.region, have):
            holding = holdings.get(target.tensor)
            for region, holders in holding.cut(missing) if holding else [(missing, ())]:
                piece = target if region == target.region else Shard(target.tensor, region)
                lacks.append((piece, target, holders))
    return _Need(tuple(refers), tuple(copies), tuple(lacks))


def _state_lost(gone: dict[Tensor, list[Region]], lost: Collection[int]) -> StateLost:
    lines = []
    for tensor, regions in gone.items():
        # Replicas and overlapping shards miss the same elements: each is named once.
        distinct: list[Region] = []
        for region in dict.fromkeys(regions):
            distinct += subtract_all(region, distinct)
        lines.append(f"{tensor} " + ", ".join(map(str, distinct)))
    cause = f"devices {sorted(lost)} are lost" if lost else "the old layout does not hold them"
    return StateLost(
        f"no living device holds these elements ({cause}): {'; '.join(lines)}; nothing was moved. "
        "What to do: bring one of their holders back, or restart from a checkpoint",
        [str(tensor) for tensor in gone],
    )
