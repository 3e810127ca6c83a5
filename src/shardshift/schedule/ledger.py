"""What tensors take and give back when they move, as tables over classes of tensors and classes of devices.

A *unit* is a tensor that moves, or several that share a storage: an old storage is given back as a whole. Units of one
*class* take and give back the same on every device: the same rows of all layers of a stage. A job of a thousand
devices and some thousand tensors has some hundred of either class.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..plan.lists import is_in, number_values
from ..values import Tensor
from ..values.boxes import Ints, expand
from .held import DeviceClasses
from .need import NeedOrder

Bools: TypeAlias = NDArray[np.bool_]
Unit: TypeAlias = tuple[int, ...]
"""Tensors, as the new layout numbers them, in order of need."""


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """The tables. C is the number of device classes, K that of unit classes; all figures are bytes.

    Attributes:
        devices: per device class a device of it, shape (C,).
        before: old state, shape (C,).
        steady: the larger of old and new state, shape (C,).
        largest: the largest storage, old or new, shape (C,); a storage of several tensors is taken to be one on every
            device that has some of them.
        new: what a unit allocates, shape (K, C).
        old: what it gives back, shape (K, C).
        carried: what it sends and receives, at most, shape (K, C).
        units: per unit class its units, in order of need.
        rank: per tensor its rank of need, shape (tensors,).
        kind: per tensor the place of its kind, shape (tensors,).
    """

    devices: Ints
    before: Ints
    steady: Ints
    largest: Ints
    new: Ints
    old: Ints
    carried: Ints
    units: tuple[tuple[Unit, ...], ...]
    rank: Ints
    kind: Ints

    @classmethod
    def of(cls, plan: Plan, need: NeedOrder, storages: Collection[Collection[Tensor]] = ()) -> Ledger:
        """The tables of a plan; ``storages`` as in ``assign_epochs``."""
        table, layout, cells = _Elements.of(plan), plan.curr.layout, plan.cells
        joint, itemsize = cells.joint_of, layout.itemsizes
        rank = np.empty(len(itemsize), np.int64)
        by_need = np.lexsort((np.arange(len(rank)), need.position, need.kind))
        rank[by_need] = np.arange(len(rank))
        moved, groups = table.moved[joint], _groups(layout.tensors, storages)
        before = cells.itemsizes @ (table.old + table.kept)
        after = cells.itemsizes @ (table.new + table.kept)
        widest = np.zeros(len(cells.itemsizes), np.int64)
        np.maximum.at(widest, joint, itemsize)
        largest = (table.largest * widest[:, None]).max(axis=0, initial=0)

        shared = np.zeros(len(rank), np.bool_)
        shared[[tensor for group in groups for tensor in group]] = True
        single = by_need[moved[by_need] & ~shared[by_need]]
        _, number = number_values(joint[single] * (int(itemsize.max(initial=0)) + 1) + itemsize[single])
        _, first = np.unique(number, return_index=True)
        like = single[first]
        new, old, carried = (
            list(elements[joint[like]] * itemsize[like, None])
            for elements in (table.new, table.old, table.carried)
        )  # fmt: skip
        units: list[list[Unit]] = [[] for _ in like]
        for code, tensor in zip(number.tolist(), single.tolist(), strict=True):
            units[code].append((tensor,))

        # Units of several tensors, each a class of its own.
        given = {t: table.old[joint[t]] * itemsize[t] for group in groups for t in group}
        for group in groups:
            at = np.array(sorted(group))
            kept, held, made = (
                itemsize[at] @ elements[joint[at]] for elements in (table.kept, table.old + table.kept, table.new)
            )
            largest = np.maximum(largest, np.maximum(held, made))
            for tensor in at.tolist():  # where some of a storage stays, all of it does
                after = after + np.where(kept > 0, given[tensor], 0)
                given[tensor] = np.where(kept > 0, 0, given[tensor])
        for members in _joined(groups):
            unit = tuple(tensor for tensor in sorted(members, key=rank.tolist().__getitem__) if moved[tensor])
            if unit:
                at = np.array(unit)
                new.append(itemsize[at] @ table.new[joint[at]])
                old.append(np.sum([given[tensor] for tensor in unit], axis=0))
                carried.append(itemsize[at] @ table.carried[joint[at]])
                units.append([unit])
        shape = len(units), len(before)
        tables = [np.array(rows, np.int64).reshape(shape) for rows in (new, old, carried)]
        return cls(
            table.devices,
            before,
            np.maximum(before, after),
            largest,
            tables[0],
            tables[1],
            tables[2],
            tuple(map(tuple, units)),
            rank,
            need.kind,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Elements:
    """Elements per joint bundle of ``plan.cells`` and class of devices; tables of shape (joints, C).

    Attributes:
        devices: per class a device of it, shape (C,).
        old: of old shards that go.
        new: of new shards that come.
        kept: of shards that stay as they are.
        carried: sent and received, by the device of the class that does most.
        largest: of the largest shard, old or new.
        moved: whether any shard goes or comes, empty ones too, shape (joints,).
    """

    devices: Ints
    old: Ints
    new: Ints
    kept: Ints
    carried: Ints
    largest: Ints
    moved: Bools

    @classmethod
    def of(cls, plan: Plan) -> _Elements:
        cells, classes = plan.cells, DeviceClasses.of(plan)
        shape = len(cells.itemsizes), classes.count
        old, new, kept, largest = (np.zeros(shape, np.int64) for _ in range(4))
        moved = np.zeros(len(cells.itemsizes), np.bool_)
        for parts, (owner, part), moves, into in zip(
            (cells.prev_parts, cells.curr_parts), (classes.prev, classes.curr), _moves(plan, classes), (old, new),
            strict=True,
        ):  # fmt: skip
            joint, volume = parts.joint[part], parts.volume[part]
            np.add.at(into, (joint[moves], owner[moves]), volume[moves])
            np.maximum.at(largest, (joint, owner), volume)
            moved[joint[moves]] = True
            if into is new:
                np.add.at(kept, (joint[~moves], owner[~moves]), volume[~moves])
        _, first = np.unique(classes.of_device, return_index=True)
        return cls(classes.devices[first], old, new, kept, _carried(plan, classes), largest, moved)


def _moves(plan: Plan, classes: DeviceClasses) -> tuple[Bools, Bools]:
    """Which of ``classes.prev`` go, and which of ``classes.curr`` come: all but what a device keeps as it is."""
    same_prev, same_curr = plan.cells.same_parts
    partner = np.full(len(plan.cells.curr_parts.joint), -1, np.int64)
    partner[same_curr] = same_prev
    width = len(plan.cells.prev_parts.joint)
    (prev_class, prev_part), (curr_class, curr_part) = classes.prev, classes.curr
    held = prev_class * width + prev_part  # ascending
    wanted = np.where(partner[curr_part] >= 0, curr_class * width + partner[curr_part], -1)
    stays = is_in(wanted, held)
    return ~is_in(held, np.sort(wanted[stays])), ~stays


def _carried(plan: Plan, classes: DeviceClasses) -> Ints:
    """Elements that a device of each class sends and receives at most, by joint bundle; shape (joints, C)."""
    cells, moves, joints = plan.cells, plan.moves, len(plan.cells.itemsizes)
    devices = len(classes.devices)
    if not len(moves):
        return np.zeros((joints, classes.count), np.int64)
    pairs, number = number_values(cells.atoms.cell * joints + cells.atoms.joint)
    volume = np.zeros(len(pairs), np.int64)
    np.add.at(volume, number, cells.atoms.volume)
    start = np.searchsorted(pairs, np.arange(len(cells) + 1) * joints)
    move, at = expand(start[moves.cell], np.diff(start)[moves.cell])
    total = np.zeros(joints * devices, np.int64)
    for end in (moves.source, moves.target):
        device = np.searchsorted(classes.devices, end)[move]
        np.add.at(total, pairs[at] % joints * devices + device, volume[at])
    order = np.argsort(classes.of_device, kind="stable")
    _, first = np.unique(classes.of_device[order], return_index=True)
    most: Ints = np.maximum.reduceat(total.reshape(joints, devices)[:, order], first, axis=1)
    return most


def _groups(tensors: Sequence[Tensor], storages: Collection[Collection[Tensor]]) -> list[set[int]]:
    """Storages as numbers of tensors; those of one tensor are left out, and so are tensors that the plan has not."""
    index = {tensor: number for number, tensor in enumerate(tensors)} if storages else {}
    found = [{index[tensor] for tensor in group if tensor in index} for group in storages]
    return [group for group in found if len(group) > 1]


def _joined(groups: Sequence[set[int]]) -> list[list[int]]:
    """Groups that have a member in common as one (union-find), each ascending, by their first members."""
    parent: dict[int, int] = {}

    def root(one: int) -> int:
        while parent.setdefault(one, one) != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    for group in groups:
        first, *others = sorted(group)
        for other in others:
            parent[root(other)] = root(first)
    found: dict[int, list[int]] = {}
    for one in sorted(parent):
        found.setdefault(root(one), []).append(one)
    return list(found.values())
