"""Copies that differ become one: what the lowest device holds, or the mean of all. Only where a caller asks for it.

1. As before any move, digests tell which shards differ (``replicas``), or which parts of shards, where devices hold
   other boxes that overlap. So every element of a part has the same holders.
2. Each copy of such a part is a logical tensor of its own for once, held whole by its device. A move brings the first
   of them, or all, to every device that holds the part; the mover does that as it does any other.
3. The mean is taken in fp32 (fp64 for fp64), in order of the devices, so that all come to the same bits, and cast to
   the shard's dtype.
4. What is less than a shard is put into a copy of it.

The old tensors are only read; what is given back is a state with new tensors in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from ..values import Infeasible, Layout, Mismatch, PlacedLayout, Region, Shard, Tensor
from .aliases import exact_aliases
from .named import by_shard, names_of
from .pieces import part_of
from .replicas import Copies, differing

if TYPE_CHECKING:
    from .mover import Mover

Differing: TypeAlias = Literal["error", "first", "mean"]
"""What becomes of copies that differ: refused, all as the lowest device has them, all their mean.

By the element: where boxes overlap in part, each part goes by those devices that hold it.
"""
WAYS: Final = ("error", "first", "mean")

Holders: TypeAlias = Mapping[str, Sequence[int]]
"""Per part of a shard, or whole shard, as text, the devices that hold it, ascending."""


def check_way(way: str) -> None:
    """Refuse a word that is none of ``Differing``.

    Raises:
        Infeasible: naming it.
    """
    if way not in WAYS:
        raise Infeasible(f"unknown differing {way!r}; what to do: use one of {', '.join(WAYS)}")


def reconciled(
    mover: Mover,
    layout: Callable[[], PlacedLayout],
    state: MutableMapping[str, torch.Tensor],
    way: Differing,
    lost: Collection[int] = (),
) -> MutableMapping[str, torch.Tensor]:
    """A state in which copies that differed are one. Called by every device of a mover, alike but for ``state``.

    Args:
        mover: moves the copies.
        layout: gives who holds what, or raises.
        state: this device's tensors by name, only read.
        way: ``first`` or ``mean``.
        lost: devices that are gone.

    Returns:
        The state itself if nothing differs; else one with new tensors for the shards that do, in whole or in part.

    Raises:
        Mismatch: on every device alike, if a state is not what the layout says, or has no mean.
        PeerLost: if a device is gone.
    """
    device, names, live = mover.device, dict[str, Shard](), dict[Shard, torch.Tensor]()
    copies: Copies | None = None
    ties: dict[str, tuple[str, ...]] = {}

    def digests() -> Mapping[str, Any]:
        nonlocal copies
        placed = layout()
        names.update(names_of(placed.shards_on(device)))
        live.update(by_shard(state, names))
        ties.update({name: group for group in exact_aliases(state) for name in group})
        copies = Copies(placed, device, lost)
        return copies.digests(live)

    suspects = differing(mover.exchange(digests))
    assert copies is not None  # an error of one's own has been raised
    if not suspects:
        return state
    details = copies.details(live, suspects)
    holders = holders_of(mover.exchange(lambda: details))
    parts = {str(part): part for key in suspects for part in copies.parts(key) if str(part) in holders}
    mine = [pair for key in suspects for pair in copies.groups.get(key, {}).items() if str(pair[0]) in holders]
    before, after = layouts(holders, parts, mover.devices, way)
    own = {copy_of(part, device): (part, shard) for part, shard in mine}
    given = {name: _packed(live, *own[copy]) for name, copy in names_of(before.shards_on(device)).items()}
    arrived = mover.move(before, after, given, policy="keep", compare_copies=False)
    by_copy = {copy: arrived[name] for name, copy in names_of(after.shards_on(device)).items()}
    name_of, new = {shard: name for name, shard in names.items()}, dict[str, torch.Tensor]()
    for part, shard in mine:
        of = [copy_of(part, other) for other in holders[str(part)]]
        tensor = joined([by_copy[copy] for copy in of if copy in by_copy])
        name = name_of[shard]
        if part != shard:
            whole = new[name] if name in new else live[shard].detach().clone()
            part_of(whole, part.region, shard.region).copy_(tensor)
            tensor = whole
        new.update(dict.fromkeys(ties.get(name, (name,)), tensor))  # names that are one tensor stay one
    return {**state, **new}


def _packed(live: Mapping[Shard, torch.Tensor], part: Shard, shard: Shard) -> torch.Tensor:
    """A part of a live tensor, the tensor itself if it is all of it; views that interleave may look shared."""
    return live[shard] if part == shard else part_of(live[shard].detach(), part.region, shard.region).contiguous()


def holders_of(details: Mapping[int, Mapping[str, int]]) -> Holders:
    """The shards and parts whose digests differ, and who holds them.

    Args:
        details: by device its ``Copies.details``.
    """
    found: dict[str, dict[int, int]] = {}
    for device, given in sorted(details.items()):
        for shard, digest in given.items():
            found.setdefault(shard, {})[device] = digest
    return {shard: tuple(of) for shard, of in sorted(found.items()) if len(set(of.values())) > 1}


def layouts(
    holders: Holders, parts: Mapping[str, Shard], devices: Sequence[int], way: Differing
) -> tuple[PlacedLayout, PlacedLayout]:
    """Before and after: each copy a tensor of its own, and every holder with the first or with all of them.

    Args:
        holders: of the parts that differ.
        parts: by their text.
        devices: of the mover; all of them get a rank.
        way: ``first`` or ``mean``.

    Raises:
        Mismatch: if a mean is asked for of what is no floating point number.
    """
    before: dict[int, list[Shard]] = {device: [] for device in devices}
    after: dict[int, list[Shard]] = {device: [] for device in devices}
    for name, of in holders.items():
        shard = parts[name]
        dtype: torch.dtype = getattr(torch, shard.tensor.dtype)
        if way == "mean" and not dtype.is_floating_point:
            raise Mismatch(
                f"{shard}: copies on devices {list(of)} differ, and {shard.tensor.dtype} has no mean; nothing was "
                "moved. What to do: use differing='first', or find out why they differ"
            )
        for device in of if way == "mean" else of[:1]:
            copy = copy_of(shard, device)
            before[device].append(copy)
            for other in of:
                after[other].append(copy)
    placed = [Layout([tuple(side[device]) for device in devices], range(len(devices))) for side in (before, after)]
    return PlacedLayout(placed[0], tuple(devices)), PlacedLayout(placed[1], tuple(devices))


def copy_of(shard: Shard, device: int) -> Shard:
    """A device's copy of a shard as a logical tensor of its own."""
    tensor = shard.tensor
    name = f"{tensor.name}{shard.region} of device {device}"
    shape = shard.region.shape
    return Shard(Tensor(tensor.kind, name, shape, tensor.dtype, tensor.itemsize), Region.whole(shape))


def joined(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of copies: of one itself, of several the mean."""
    if len(copies) == 1:
        return copies[0]
    wide = torch.float64 if copies[0].dtype == torch.float64 else torch.float32
    total = copies[0].to(wide, copy=True)
    for copy in copies[1:]:
        total += copy.to(wide)
    return (total / len(copies)).to(copies[0].dtype)
