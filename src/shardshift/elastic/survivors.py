"""What survivors of a loss hold together: the step to go on from, and who gives the buddy copies of the lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..plan.holders import Holders
from ..values import Infeasible, Layout, Role, Shard, StateLost, Tensor


def check_copies(shard_copies: int, *, survive: bool, transport: str) -> None:
    """Refuse what cannot be.

    Raises:
        Infeasible: if there are to be other than 0 or 1 copies, or copies that nothing would use or carry.
    """
    if shard_copies not in (0, 1):
        raise Infeasible(f"shard_copies is {shard_copies!r}; what to do: 0 for no copies, or 1 for one on a buddy")
    if shard_copies and not survive:
        raise Infeasible("shard_copies=1 is of use after a loss only; what to do: give survive=True, or no copies")
    if shard_copies and transport == "nccl":
        raise Infeasible("copies lie in host memory, which nccl cannot reach; what to do: use transport 'auto' or gloo")


@dataclass(frozen=True, slots=True)
class Offer:
    """What one survivor can give after a loss.

    Attributes:
        iterations: the steps of which it holds its own state.
        copies: per ward the steps of which it holds that one's lonely shards.
    """

    iterations: Sequence[int]
    copies: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """For a control record."""
        return {"iterations": list(self.iterations), "copies": [[ward, list(at)] for ward, at in self.copies.items()]}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Offer:
        """The inverse of ``fields``."""
        return cls(fields["iterations"], dict(fields["copies"]))


def choose(
    offers: Mapping[int, Offer], lost: Collection[int], lonely: Callable[[int], Mapping[int, Sequence[str]]]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The newest step that all survivors hold, and of which there are copies of what the lost held alone.

    Args:
        offers: per survivor.
        lost: the devices that are gone.
        lonely: gives for a step the names of what lost devices held alone, of those that did.

    Returns:
        The step, and per lost device that has a copy (lost device, device that gives it).

    Raises:
        StateLost: if there is no such step; naming who is lost and what nobody holds.
    """
    common = set.intersection(*(set(offer.iterations) for offer in offers.values()))
    if not common:
        held = {device: list(offer.iterations) for device, offer in offers.items()}
        raise StateLost(
            f"the survivors hold no common step: {held} (device: finished steps). What to do: restart the job from its "
            "last checkpoint",
            ["step"],
        )
    bare: dict[int, Sequence[str]] = {}
    for iteration in sorted(common, reverse=True):
        givers = {
            ward: device
            for device, offer in sorted(offers.items())
            for ward, at in offer.copies.items()
            if ward in lost and iteration in at
        }
        needed = lonely(iteration)
        if needed.keys() <= givers.keys():
            return iteration, tuple(sorted((ward, giver) for ward, giver in givers.items() if ward in needed))
        bare = {ward: names for ward, names in needed.items() if ward not in givers}
    names = list(dict.fromkeys(name for held in bare.values() for name in held))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise StateLost(
        f"devices {sorted(bare)} are lost, and no survivor keeps a copy (their buddies are lost too) of what they held "
        f"alone: {shown}. What to do: restart the job from its last checkpoint; a rank and its buddy are on different "
        "nodes if the job runs on several",
        names,
    )


def with_copies(layout: Layout, devices: Sequence[int], given: Collection[tuple[int, int]]) -> Layout:
    """The layout of what survivors hold, copies included.

    Args:
        layout: of all, as before the loss.
        devices: per rank its device.
        given: (lost device, device that gives its copies).
    """
    if not given:
        return layout
    wards: dict[int, list[int]] = {}
    for ward, buddy in given:
        wards.setdefault(devices.index(buddy), []).append(devices.index(ward))
    return Holders(layout).with_copies(wards)


def fitted(role: Role, held: Mapping[Shard, torch.Tensor]) -> dict[Shard, torch.Tensor]:
    """Tensors of exactly the shards of a role, as views where only a larger shard is held; what is not, is left out."""
    of_tensor: dict[Tensor, list[Shard]] = {}
    for shard in held:
        of_tensor.setdefault(shard.tensor, []).append(shard)
    found: dict[Shard, torch.Tensor] = {}
    for shard in role:
        if shard in held:
            found[shard] = held[shard]
            continue
        outer = next((one for one in of_tensor.get(shard.tensor, ()) if one.region.contains(shard.region)), None)
        if outer is not None:
            inside = shard.region.relative_to(outer.region)
            index = tuple(slice(a, b) for a, b in zip(inside.offsets, inside.stops, strict=True))
            found[shard] = held[outer][index]
    return found
