"""Layouts: which rank holds which shards of which logical tensors.

A layout speaks of *roles*, not of ranks: two data parallel replicas of one (pp, tp) coordinate hold the same
shards, so they share one role. Costs and pairings are computed between roles, of which a job of a hundred
thousand ranks has some hundred.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias

from .errors import Mismatch
from .region import Region, overlapping


class Kind(StrEnum):
    """What a logical tensor is (the paper's workload types, section III-D)."""

    PARAM = "param"
    MASTER = "fp32_master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, order=True)
class Tensor:
    """A logical tensor: whole, unsharded, without padding.

    Attributes:
        kind: what it is; together with ``name`` it identifies the tensor.
        name: the parameter's name with global layer numbers, e.g. ``decoder.layers.7.mlp.linear_fc1.weight``.
        shape: the global shape in elements; a fused matrix has one more dim for its segments.
        dtype: torch's name of the element type without ``torch.``, e.g. ``bfloat16``.
        itemsize: bytes of one element.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Region.whole(self.shape).numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A region of a logical tensor that some rank holds as one (possibly strided) local tensor.

    Raises:
        Mismatch: if the region does not lie within the tensor.
    """

    tensor: Tensor
    region: Region

    def __post_init__(self) -> None:
        whole = Region.whole(self.tensor.shape)
        if len(self.region.shape) != len(whole.shape) or any(
            stop > size for stop, size in zip(self.region.stops, whole.shape, strict=True)
        ):
            raise Mismatch(f"shard {self.region} is not inside {self.tensor} of global shape {self.tensor.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.region.numel * self.tensor.itemsize

    def __str__(self) -> str:
        return f"{self.tensor}{self.region}"


Role: TypeAlias = tuple[Shard, ...]
"""What a rank holds, in order of need: what the next forward reads first comes first."""


@dataclass(frozen=True)
class Layout:
    """Roles, and the role of each virtual rank.

    Attributes:
        roles: per role its shards, in order of need.
        role_of_rank: per virtual rank the index of its role.

    Raises:
        Mismatch: if two shards of one role overlap, if tensors of one name differ, or if a role index is out
            of range.
    """

    roles: tuple[Role, ...]
    role_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= role < len(self.roles) for role in self.role_of_rank):
            raise Mismatch(f"a rank names a role outside 0..{len(self.roles) - 1}: {self.role_of_rank}")
        seen: dict[tuple[Kind, str], Tensor] = {}
        for index, role in enumerate(self.roles):
            by_tensor: dict[Tensor, list[Region]] = {}
            for shard in role:
                tensor = seen.setdefault((shard.tensor.kind, shard.tensor.name), shard.tensor)
                if tensor != shard.tensor:
                    raise Mismatch(
                        f"{tensor}: role {index} describes it as {shard.tensor}, another role as {tensor}; "
                        "every rank must declare the same global shape and dtype"
                    )
                by_tensor.setdefault(shard.tensor, []).append(shard.region)
            for tensor, regions in by_tensor.items():
                if len(regions) > 1 and (pair := overlapping(regions)):
                    raise Mismatch(f"{tensor}: role {index} holds {pair[0]} and {pair[1]}, which overlap")

    @property
    def world_size(self) -> int:
        """Virtual ranks."""
        return len(self.role_of_rank)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every logical tensor, in order of first appearance."""
        return tuple(dict.fromkeys(shard.tensor for role in self.roles for shard in role))

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole logical state, each tensor counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def shards(self, rank: int) -> Role:
        """What a virtual rank holds."""
        return self.roles[self.role_of_rank[rank]]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives an equal layout."""
        index = {tensor: i for i, tensor in enumerate(self.tensors)}
        return {
            "tensors": [[t.kind, t.name, list(t.shape), t.dtype, t.itemsize] for t in self.tensors],
            "roles": [
                [[index[s.tensor], list(s.region.offsets), list(s.region.shape)] for s in role] for role in self.roles
            ],
            "role_of_rank": list(self.role_of_rank),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Layout:
        """The layout that ``to_json`` described."""
        tensors = [
            Tensor(Kind(kind), name, tuple(shape), dtype, itemsize)
            for kind, name, shape, dtype, itemsize in record["tensors"]
        ]
        roles = tuple(
            tuple(Shard(tensors[i], Region(tuple(offsets), tuple(shape))) for i, offsets, shape in role)
            for role in record["roles"]
        )
        return cls(roles, tuple(record["role_of_rank"]))


@dataclass(frozen=True)
class PlacedLayout:
    """A layout on devices: virtual rank r runs on ``devices[r]``.

    Raises:
        Mismatch: if the number of devices is not the number of ranks, or a device appears twice.
    """

    layout: Layout
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.world_size:
            raise Mismatch(f"{self.layout.world_size} ranks cannot be placed on {len(self.devices)} devices")
        if len(set(self.devices)) != len(self.devices):
            raise Mismatch(f"a device is named twice in {self.devices}")

    @cached_property
    def rank_of_device(self) -> dict[int, int]:
        """Virtual rank by device."""
        return {device: rank for rank, device in enumerate(self.devices)}

    def shards_on(self, device: int) -> Role:
        """What a device holds; nothing, if it has no rank."""
        rank = self.rank_of_device.get(device)
        return () if rank is None else self.layout.shards(rank)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"layout": self.layout.to_json(), "devices": list(self.devices)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PlacedLayout:
        """The inverse of ``to_json``."""
        return cls(Layout.from_json(record["layout"]), tuple(record["devices"]))


def digest(record: Sequence[Any] | Mapping[str, Any]) -> str:
    """A short fingerprint of JSON values that is the same in every process and for every hash seed."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
