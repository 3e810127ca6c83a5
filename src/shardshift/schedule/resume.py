"""After a failure in a move under ``release``: who holds what, and the way forward or back from there.

Whole tensors move in an epoch, and old shards are given back only after its fence. So after n fences, whatever was
under way, the tensors of the first n epochs are in the new layout and all others are still in the old one. Those of the
epoch under way are in both on a device that has finished it.

1. ``holdings`` writes that down as a layout of its own, in which every device holds what it holds. Of a tensor that it
   has in both layouts, that is its old shards, and of its new ones what the old ones lack: each element once.
2. What no survivor holds is lost, and is named.
3. A plan leads from the holdings of the survivors to the layout that is asked for; or forward to the new one or back
   to the old one, without the lost devices, whichever moves fewer bytes, of those that hold every tensor whole.

That plan is like any other: it is proved, scheduled, and may itself be interrupted and resumed. To go on with the old
programs was rejected: they name lost peers, and what they would have done before the failure is done. So was to count
single pieces that have arrived: devices would have to tell one another which, and few moves are cut off so that it
would save much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan, make_plan
from ..plan.cells import Cells, Parts
from ..plan.lists import Lists, is_in, number_rows
from ..values import Infeasible, Layout, PlacedLayout, Region, Rows, StateLost, Unaccounted, subtract_all
from ..values.boxes import Ints
from .compile import Schedule
from .held import DeviceClasses

Direction: TypeAlias = Literal["forward", "back", "to"]
"""To the new layout, to the old one, or to the one that was asked for."""

_NOBODY: Final[Mapping[int, int]] = MappingProxyType({})
_OLD, _NEW, _BOTH = range(3)
"""How far a tensor has come: its epoch has not begun or nobody has finished it; is past its fence; is in between."""
_MOST_NAMED: Final = 20


def holdings(schedule: Schedule, fences: int, finished: Mapping[int, int] = _NOBODY) -> PlacedLayout:
    """What every device holds, in complete shards, after so many fences.

    Args:
        schedule: of the move.
        fences: how many fences all devices have passed, 0 to ``schedule.epochs``. Under ``keep`` the commit is one.
        finished: per device how many epochs it has finished. One that is not named has finished those only.

    Returns:
        A layout in which all devices of the plan have a rank, those that hold nothing too, ascending. Devices that
        the plan says are lost hold nothing that they have not received. Every region is an old shard, a new one, or
        part of a new one.

    Raises:
        ValueError: if there are not so many fences.
    """
    if not 0 <= fences <= schedule.epochs:
        raise ValueError(f"{fences} fences, of {schedule.epochs}")
    plan, cells = schedule.plan, schedule.plan.cells
    tensors = plan.curr.layout.tensors
    classes = DeviceClasses.of(plan)
    # A role: the devices of a class that have finished the epoch under way, or those that have not.
    ahead = np.array([finished.get(device, fences) > fences for device in plan.devices], np.int64)
    first, of_device = number_rows(np.stack([classes.of_device, ahead], axis=1))
    roles = Lists.group(classes.of_device[first], np.arange(len(first)), classes.count)
    # A bundle: tensors that are cut alike in both layouts, and of which all have come equally far.
    epoch = np.array([schedule.epoch_of.get(tensor, -1) for tensor in tensors], np.int64)
    far = np.where(epoch < fences, _NEW, _OLD)
    if ahead.any():
        far[epoch == fences] = _BOTH
    codes, bundle_of = np.unique(cells.joint_of * 3 + far, return_inverse=True)

    old, new = (cells.prev_parts, classes.prev), (cells.curr_parts, classes.curr)
    boxes = [_boxes(*held, roles, far_held).among(codes) for held, far_held in ((old, _OLD), (new, _NEW), (old, _BOTH))]
    if ahead.any():
        arrived = _boxes(*new, roles, _BOTH).among(codes)
        boxes.append(_lacking(arrived.of(ahead[first][arrived.role] > 0), boxes[-1]))
    role = np.concatenate([one.role for one in boxes])
    order = np.argsort(role, kind="stable")
    rows = Rows(
        role[order].astype(np.int32),
        np.searchsorted(codes, np.concatenate([one.code for one in boxes]))[order].astype(np.int32),
        np.concatenate([one.low for one in boxes])[order],
        np.concatenate([one.high for one in boxes])[order],
    )
    layout = Layout.of_rows(tensors, bundle_of.reshape(-1).astype(np.int32), rows, of_device.astype(np.int32)[:, None])
    return PlacedLayout(layout, plan.devices)


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Boxes that roles hold: per box its role, joint bundle and how far that has come (as one number), and its ends."""

    role: Ints
    code: Ints
    low: Ints
    high: Ints

    def of(self, which: NDArray[np.bool_]) -> _Boxes:
        """Some of them."""
        return _Boxes(self.role[which], self.code[which], self.low[which], self.high[which])

    def among(self, codes: Ints) -> _Boxes:
        """Those of some bundles."""
        return self.of(is_in(self.code, codes))


def _boxes(parts: Parts, held: tuple[Ints, Ints], roles: Lists, far: int) -> _Boxes:
    """What classes hold, written out for their roles, of the tensors that have come so far."""
    of_class, part = held
    entry, role = roles.take(of_class)
    part = part[entry]
    return _Boxes(role, parts.joint[part] * 3 + far, parts.low[part], parts.high[part])


def _lacking(new: _Boxes, old: _Boxes) -> _Boxes:
    """What of some boxes no other box of the same role and bundle has."""
    had: dict[tuple[int, int], list[Region]] = {}
    for key, region in _regions(old):
        had.setdefault(key, []).append(region)
    left = [(key, rest) for key, region in _regions(new) for rest in subtract_all(region, had.get(key, ()))]
    dims = new.low.shape[1]
    return _Boxes(
        np.array([role for (role, _), _ in left], np.int64),
        np.array([code for (_, code), _ in left], np.int64),
        np.array([region.offsets for _, region in left], np.int64).reshape(-1, dims),
        np.array([region.stops for _, region in left], np.int64).reshape(-1, dims),
    )


def _regions(boxes: _Boxes) -> Iterable[tuple[tuple[int, int], Region]]:
    lows, sizes = boxes.low.tolist(), (boxes.high - boxes.low).tolist()
    for role, code, low, shape in zip(boxes.role.tolist(), boxes.code.tolist(), lows, sizes, strict=True):
        yield (role, code), Region(tuple(low), tuple(shape))


def resume_plan(
    schedule: Schedule,
    fences: int,
    lost: Iterable[int],
    to: PlacedLayout | None = None,
    *,
    finished: Mapping[int, int] = _NOBODY,
) -> tuple[Direction, Plan]:
    """The plan by which the survivors of an interrupted move come to a whole layout.

    Args:
        schedule: of the move.
        fences: how many fences all devices have passed.
        lost: devices that are gone; those that the plan of the move says are lost are, too.
        to: the layout to go to. None for the new layout or the old one, less the lost devices, whichever moves fewer
            bytes; the new one, if they are equal.
        finished: per device how many epochs it has finished; see ``holdings``.

    Returns:
        Which way, and the plan; its ``prev`` is ``holdings(schedule, fences, finished)``.

    Raises:
        StateLost: naming exactly the logical tensors of which no survivor holds some byte.
        Infeasible: if ``to`` is None and neither layout holds every tensor whole without the lost devices.
        Unaccounted: if ``to`` drops elements or does not know a tensor.
    """
    held = holdings(schedule, fences, finished)
    gone = sorted({*lost, *schedule.plan.lost} & {*held.devices})
    _refuse_lost(held, schedule.plan.curr.layout, gone)
    if to is not None:
        return "to", _planned(held, to, gone)
    found: list[tuple[Direction, Plan]] = []
    ways: tuple[tuple[Direction, PlacedLayout], ...] = (("forward", schedule.plan.curr), ("back", schedule.plan.prev))
    for direction, placed in ways:
        try:
            found.append((direction, _planned(held, _without(placed, gone), gone)))
        except StateLost:
            raise
        except Unaccounted:  # some part of a tensor was to be on a lost device only
            continue
    if not found:
        raise Infeasible(
            f"devices {gone} are lost, and without them neither the new layout nor the old one holds every tensor "
            "whole, though the survivors do; what to do: give the layout to go to (to=...)"
        )
    return min(found, key=lambda one: one[1].moved_bytes)


def _planned(held: PlacedLayout, to: PlacedLayout, gone: Collection[int]) -> Plan:
    return make_plan(held, to.layout, devices=to.devices, placement=to.devices, lost=gone)


def _without(placed: PlacedLayout, gone: Collection[int]) -> PlacedLayout:
    """A layout less some devices; its tensors are the same, even if nobody holds them."""
    layout, rows = placed.layout, placed.layout.rows
    stays = np.flatnonzero(~is_in(placed.device_ids, np.array(gone, np.int64)))
    played = layout.roles_of_rank[stays]
    kept = np.isin(rows.role, played)
    less = Rows(rows.role[kept], rows.bundle[kept], rows.low[kept], rows.high[kept])
    rest = Layout.of_rows(layout.tensors, layout.bundle_of, less, played)
    return PlacedLayout(rest, tuple(placed.device_ids[stays].tolist()))


def _refuse_lost(held: PlacedLayout, whole: Layout, gone: Collection[int]) -> None:
    """Refuse what no survivor holds; ``whole`` is a layout of all of the state."""
    cells = Cells(held.layout, whole)
    living = np.zeros(max(held.layout.role_count, 1), np.bool_)
    living[held.layout.roles_of_rank[~is_in(held.device_ids, np.array(gone, np.int64))].reshape(-1)] = True
    cell, role = cells.prev_roles.take(np.arange(len(cells)))
    survives = np.zeros(len(cells), np.bool_)
    survives[cell[living[role]]] = True
    if (bare := np.flatnonzero(~survives)).size:
        names = [str(tensor) for tensor in cells.regions(bare.tolist())]
        raise StateLost(
            f"devices {list(gone)} are lost, and no other holds all of {len(names)} tensors: {_listed(names)}; what "
            "the survivors hold is as it was. What to do: restart from a checkpoint",
            names,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
