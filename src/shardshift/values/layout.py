"""Layouts: which rank holds which shards of which logical tensors.

A layout speaks of *roles*, not of ranks: two data parallel replicas of one (pp, tp) coordinate hold the same
shards, so they share one role. A rank may play several roles at once: one that it shares with its replicas and one
of its own (ranges of a distributed optimizer), or a dense and an expert one. Costs and pairings are computed
between roles, of which a job of a hundred thousand ranks has some hundred.

It also speaks of *bundles*, not of tensors: tensors of one shape that every role holds alike. A parameter and its
moments are one bundle, and so are the equal matrices of all layers of a stage. Inside, a layout is columns (numpy):
one row per (role, bundle, box). ``shards`` writes a rank's shards out as values, when somebody needs them.

A table of a row per (rank, tensor) was rejected: it is some million rows where this one has some thousand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .boxes import Ints, expand, overlapping_within
from .errors import Infeasible, Mismatch
from .region import Region, overlapping
from .rows import TOO_FAR, Rows, box, check_bundles, columns
from .tensor import Kind, Role, Shard, Tensor

_MOST_BYTES: Final = 2**62
"""Of one role. Beyond 2**63 int64 would wrap around; the sum that is compared is rounded, hence the distance."""


class Layout:
    """Roles, and the roles of each virtual rank. Never changes.

    Attributes:
        tensors: every logical tensor, in order of need: what the next forward reads first comes first.
        bundle_of: per tensor its bundle, shape (tensors,).
        rows: what each role holds, by ascending role.
        roles_of_rank: shape (ranks, k): the k roles that each virtual rank plays; different columns, different roles.

    Args:
        roles: per role its shards.
        role_of_rank: per virtual rank the index of its role, or the indices of its roles, which have nothing in common.

    Raises:
        Mismatch: if two shards of one role overlap, if tensors of one name differ, or if a role index is out
            of range.
        Infeasible: if a role would hold 2**62 bytes or more.
    """

    tensors: tuple[Tensor, ...]
    bundle_of: NDArray[np.int32]
    rows: Rows
    roles_of_rank: NDArray[np.int32]

    def __init__(self, roles: Sequence[Role], role_of_rank: Sequence[int] | Sequence[tuple[int, ...]]) -> None:
        players = np.array(role_of_rank, np.int32).reshape(len(role_of_rank), -1 if len(role_of_rank) else 1)
        if ((players < 0) | (players >= len(roles))).any():
            raise Mismatch(f"a rank names a role outside 0..{len(roles) - 1}: {tuple(role_of_rank)}")
        held = _held(roles)
        bundles: dict[tuple[tuple[int, ...], tuple[tuple[int, Region], ...]], int] = {}
        bundle_of = [bundles.setdefault((tensor.shape, tuple(rows)), len(bundles)) for tensor, rows in held.items()]
        table = [(role, bundle, region) for (_, rows), bundle in bundles.items() for role, region in rows]
        table.sort(key=lambda row: row[:2])
        dims = max((len(tensor.shape) for tensor in held), default=0) or 1
        rows = Rows(
            np.array([role for role, _, _ in table], np.int32),
            np.array([bundle for _, bundle, _ in table], np.int32),
            columns([region.offsets for _, _, region in table], dims, 0),
            columns([region.stops for _, _, region in table], dims, 1),
        )
        self.__dict__["role_count"] = len(roles)  # the last roles may hold nothing, and no rank play them
        self._set(tuple(held), np.array(bundle_of, np.int32), rows, players)
        self._check_roles_together()

    @classmethod
    def of_rows(
        cls,
        tensors: Sequence[Tensor],
        bundle_of: NDArray[np.int32],
        rows: Rows,
        roles_of_rank: NDArray[np.int32],
    ) -> Layout:
        """A layout from its columns; see the attributes.

        Raises:
            Mismatch: if a box is outside its tensor, boxes of one role and bundle overlap, the tensors of a bundle
                differ in shape, a tensor is named twice, or an index is out of range.
            Infeasible: if a role would hold 2**62 bytes or more, or a shape does not fit 64 bits.
        """
        check_bundles(tensors, bundle_of, rows)
        layout = cls.__new__(cls)
        layout._set(tuple(tensors), bundle_of, rows, roles_of_rank)
        layout._check()
        return layout

    def _set(
        self, tensors: tuple[Tensor, ...], bundle_of: NDArray[np.int32], rows: Rows, roles_of_rank: NDArray[np.int32]
    ) -> None:
        self.tensors, self.bundle_of, self.rows, self.roles_of_rank = tensors, bundle_of, rows, roles_of_rank
        for column in (bundle_of, roles_of_rank, *rows.columns):
            column.flags.writeable = False
        sizes_bytes = (rows.high - rows.low).astype(np.float64).prod(axis=1) * self.bundle_itemsizes[rows.bundle]
        worst_bytes = np.bincount(rows.role, sizes_bytes, minlength=1).max()
        if worst_bytes > _MOST_BYTES:
            raise Infeasible(
                f"a role holds {worst_bytes:.6g} bytes; the most is 2**62; what to do: check the global shapes"
            )

    def _check(self) -> None:
        rows, shapes = self.rows, self.bundle_shapes
        if len(self.roles_of_rank) and not 0 <= self.roles_of_rank.min() <= self.roles_of_rank.max() < self.role_count:
            raise Mismatch(f"a rank names a role outside 0..{self.role_count - 1}")
        outside = (rows.low < 0) | (rows.high < rows.low) | (rows.high > shapes[rows.bundle])
        if outside.any():
            row = int(np.flatnonzero(outside.any(axis=1))[0])
            tensor = self.tensors[int(np.flatnonzero(self.bundle_of == rows.bundle[row])[0])]
            raise Mismatch(
                f"{tensor}: role {rows.role[row]} holds {rows.low[row].tolist()} to {rows.high[row].tolist()}, which "
                f"is not inside the global shape {tensor.shape}"
            )
        key = rows.role.astype(np.int64) * (int(self.bundle_of.max(initial=0)) + 1) + rows.bundle
        # Only a role with several boxes of a bundle can overlap itself.
        _, at, count = np.unique(key, return_inverse=True, return_counts=True)
        several = np.flatnonzero(count[at.reshape(-1)] > 1)
        low, high, key = rows.low[several], rows.high[several], key[several]
        one, other = overlapping_within(key, low, high)
        if len(one):
            row = int(several[one[0]])
            tensor = self.tensors[self.members[int(rows.bundle[row])][0]]
            both = " and ".join(str(box(low[side[0]], high[side[0]], len(tensor.shape))) for side in (one, other))
            raise Mismatch(f"{tensor}: role {rows.role[row]} holds {both}, which overlap")
        self._check_roles_together()

    def _check_roles_together(self) -> None:
        """The roles of one rank must have nothing in common, or it would hold elements twice."""
        rows, players = self.rows, self.roles_of_rank
        held = [np.unique(rows.bundle[np.isin(rows.role, column)]) for column in players.T]
        common, count = np.unique(np.concatenate(held), return_counts=True) if held else (np.empty(0, np.int32),) * 2
        row = np.flatnonzero(np.isin(rows.bundle, common[count > 1]))
        if not len(row):
            return  # as nearly always: parameters in one column, optimizer state in another
        _, first = np.unique(players, axis=0, return_index=True)
        rank = np.repeat(first, players.shape[1])
        roles = players[first].reshape(-1)
        start, stop = np.searchsorted(rows.role[row], roles), np.searchsorted(rows.role[row], roles, side="right")
        at, place = expand(start, stop - start)
        row = row[place]
        key = rank[at] * (int(rows.bundle.max()) + 1) + rows.bundle[row]
        one, _ = overlapping_within(key, rows.low[row], rows.high[row])
        if len(one):
            tensor, player = self.tensors[self.members[int(rows.bundle[row[one[0]]])][0]], rank[at[one[0]]]
            both = players[player].tolist()
            raise Mismatch(f"{tensor}: rank {player} plays roles {both}, of which two hold the same part")

    @cached_property
    def role_count(self) -> int:
        """Roles, numbered from 0."""
        return int(max(self.roles_of_rank.max(initial=-1), self.rows.role.max(initial=-1))) + 1

    @cached_property
    def row_starts(self) -> Ints:
        """Rows of role r are ``row_starts[r]`` to ``row_starts[r + 1]``; shape (roles + 1,)."""
        return np.searchsorted(self.rows.role, np.arange(self.role_count + 1))

    @cached_property
    def bundle_shapes(self) -> Ints:
        """Per bundle the global shape of its tensors, padded with ones; shape (bundles, dims)."""
        dims = self.rows.low.shape[1]
        shapes = np.ones((int(self.bundle_of.max(initial=-1)) + 1, dims), np.int64)
        _, first = np.unique(self.bundle_of, return_index=True)
        for bundle, tensor in zip(self.bundle_of[first].tolist(), first.tolist(), strict=True):
            shape = self.tensors[tensor].shape
            try:
                shapes[bundle, : len(shape)] = shape
            except OverflowError as error:
                raise Infeasible(f"{self.tensors[tensor]}: global shape {shape} {TOO_FAR}") from error
        return shapes

    @cached_property
    def itemsizes(self) -> Ints:
        """Bytes of one element, per tensor."""
        return np.array([tensor.itemsize for tensor in self.tensors], np.int64)

    @cached_property
    def bundle_itemsizes(self) -> Ints:
        """Bytes of one element of every tensor of the bundle together, per bundle."""
        total = np.zeros(int(self.bundle_of.max(initial=-1)) + 1, np.int64)
        np.add.at(total, self.bundle_of, self.itemsizes)
        return total

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per bundle its tensors' indices, ascending."""
        of: list[list[int]] = [[] for _ in range(int(self.bundle_of.max(initial=-1)) + 1)]
        for tensor, bundle in enumerate(self.bundle_of.tolist()):
            of[bundle].append(tensor)
        return tuple(map(tuple, of))

    @cached_property
    def role_bytes(self) -> Ints:
        """Bytes that each role holds, shape (roles,)."""
        rows, total = self.rows, np.zeros(self.role_count, np.int64)
        np.add.at(total, rows.role, (rows.high - rows.low).prod(axis=1) * self.bundle_itemsizes[rows.bundle])
        return total

    @cached_property
    def rank_bytes(self) -> Ints:
        """Bytes that each virtual rank holds, shape (ranks,)."""
        return np.asarray(self.role_bytes[self.roles_of_rank].sum(axis=1), np.int64)

    @property
    def world_size(self) -> int:
        """Virtual ranks."""
        return len(self.roles_of_rank)

    @cached_property
    def role_of_rank(self) -> tuple[int, ...]:
        """Per virtual rank its role.

        Raises:
            ValueError: if ranks play several roles.
        """
        if self.roles_of_rank.shape[1] != 1:
            raise ValueError(f"ranks of this layout play {self.roles_of_rank.shape[1]} roles each")
        return tuple(self.roles_of_rank[:, 0].tolist())

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Per role its shards, in order of need."""
        return tuple(self._shards([role]) for role in range(self.role_count))

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the whole logical state, each tensor counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def shards(self, rank: int) -> Role:
        """What a virtual rank holds, in order of need."""
        roles = self.roles_of_rank[rank].tolist()
        key = tuple(roles)
        cache: dict[tuple[int, ...], Role] = self.__dict__.setdefault("_shards_of", {})
        if key not in cache:
            cache[key] = self._shards(roles)
        return cache[key]

    def _shards(self, roles: Sequence[int]) -> Role:
        found: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        for role in roles:
            start, stop = self.row_starts[role : role + 2].tolist()
            for bundle, low, high in zip(
                self.rows.bundle[start:stop].tolist(),
                self.rows.low[start:stop].tolist(),
                self.rows.high[start:stop].tolist(),
                strict=True,
            ):
                tensors = self.members[bundle]
                dims = len(self.tensors[tensors[0]].shape)
                shape = tuple(b - a for a, b in zip(low[:dims], high[:dims], strict=True))
                found += [(tensor, tuple(low[:dims]), shape) for tensor in tensors]
        found.sort()
        return tuple(Shard(self.tensors[tensor], Region(offsets, shape)) for tensor, offsets, shape in found)

    @cached_property
    def digest(self) -> str:
        """A short fingerprint, the same in every process and for every hash seed."""
        lines = (f"{t.kind.value} {t.name!r} {t.shape} {t.dtype} {t.itemsize}" for t in self.tensors)
        state = hashlib.sha256("\n".join(lines).encode())
        for column in (self.bundle_of, *self.rows.columns, self.roles_of_rank):
            state.update(f"{column.dtype.str}{column.shape}".encode())
            state.update(np.ascontiguousarray(column).data)
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({self.world_size} ranks, {self.role_count} roles, {len(self.tensors)} tensors, {self.digest})"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives an equal layout."""
        rows = self.rows
        return {
            "tensors": [*map(_tensor_record, self.tensors)],
            "bundle_of": self.bundle_of.tolist(),
            "rows": [column.tolist() for column in rows.columns],
            "dims": rows.low.shape[1],
            "roles_of_rank": self.roles_of_rank.tolist(),
            "columns": self.roles_of_rank.shape[1],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Layout:
        """The layout that ``to_json`` described."""
        tensors = [
            Tensor(Kind(kind), name, tuple(shape), dtype, itemsize)
            for kind, name, shape, dtype, itemsize in record["tensors"]
        ]
        role, bundle, low, high = record["rows"]
        rows = Rows(
            np.array(role, np.int32),
            np.array(bundle, np.int32),
            np.array(low, np.int64).reshape(-1, record["dims"]),
            np.array(high, np.int64).reshape(-1, record["dims"]),
        )
        roles_of_rank = np.array(record["roles_of_rank"], np.int32).reshape(-1, record["columns"])
        return cls.of_rows(tensors, np.array(record["bundle_of"], np.int32), rows, roles_of_rank)


def _held(roles: Sequence[Role]) -> dict[Tensor, list[tuple[int, Region]]]:
    """Per tensor, in order of first appearance, who holds what of it."""
    seen: dict[tuple[Kind, str], Tensor] = {}
    held: dict[Tensor, list[tuple[int, Region]]] = {}
    for index, role in enumerate(roles):
        own: dict[Tensor, list[Region]] = {}
        for shard in role:
            tensor = seen.setdefault((shard.tensor.kind, shard.tensor.name), shard.tensor)
            if tensor != shard.tensor:
                raise Mismatch(
                    f"{tensor}: role {index} describes it as {shard.tensor}, another role as {tensor}; "
                    "every rank must declare the same global shape and dtype"
                )
            own.setdefault(shard.tensor, []).append(shard.region)
        for tensor, regions in own.items():
            if len(regions) > 1 and (pair := overlapping(regions)):
                raise Mismatch(f"{tensor}: role {index} holds {pair[0]} and {pair[1]}, which overlap")
            held.setdefault(tensor, []).extend((index, region) for region in sorted(regions))
    return held


def _tensor_record(tensor: Tensor) -> list[Any]:
    return [tensor.kind, tensor.name, list(tensor.shape), tensor.dtype, tensor.itemsize]


@dataclass(frozen=True)
class PlacedLayout:
    """A layout on devices: virtual rank r runs on ``devices[r]``.

    Raises:
        Mismatch: if the number of devices is not the number of ranks, a device appears twice, or is negative.
    """

    layout: Layout
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.world_size:
            raise Mismatch(f"{self.layout.world_size} ranks cannot be placed on {len(self.devices)} devices")
        if len(set(self.devices)) != len(self.devices):
            raise Mismatch(f"a device is named twice in {self.devices}")
        if self.devices and min(self.devices) < 0:
            raise Mismatch(f"device {min(self.devices)} is named; devices are numbered from 0")

    @cached_property
    def device_ids(self) -> Ints:
        """``devices`` as an array, shape (ranks,)."""
        return np.array(self.devices, np.int64)

    def ranks_of(self, devices: Ints) -> Ints:
        """Per device its virtual rank, -1 where it has none."""
        order, known = self._by_device
        if not len(known):
            return np.full(len(devices), -1, np.int64)
        at = np.minimum(np.searchsorted(known, devices), len(known) - 1)
        return np.where(known[at] == devices, order[at], -1)

    def rank_of(self, device: int) -> int | None:
        """The virtual rank on a device; None if it has none."""
        order, known = self._by_device
        at = int(np.searchsorted(known, device))
        return int(order[at]) if at < len(known) and known[at] == device else None

    @cached_property
    def _by_device(self) -> tuple[Ints, Ints]:
        """Ranks by ascending device, and those devices."""
        order = np.argsort(self.device_ids)
        return order, self.device_ids[order]

    def shards_on(self, device: int) -> Role:
        """What a device holds; nothing, if it has no rank."""
        rank = self.rank_of(device)
        return () if rank is None else self.layout.shards(rank)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"layout": self.layout.to_json(), "devices": list(self.devices)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PlacedLayout:
        """The inverse of ``to_json``."""
        return cls(Layout.from_json(record["layout"]), tuple(record["devices"]))
