"""The timetable: when each cell of a plan sets out, so that devices do not all ask the same one first.

By need alone, the eight receivers of PP8 -> TP8 all begin with layer 0, which one device holds: one sends, seven
wait, and the move takes six times as long as its busiest device. Likewise TP8 -> PP8, within each tensor. So the
order of need yields to lanes (a device's out, a device's in):

1. A *task* is what one cell has of one kind. It takes the out lane of each of its sources and the in lane of each of
   its targets, for its bytes times the most copies that one source sends. Time is counted in bytes.
2. Kinds follow one another: parameters before masters before moments.
3. Within a kind, whichever task can start first does, of equals the one that is needed first; it holds its lanes
   until it ends. (This is list scheduling of an open shop: a heap by earliest start, where a task that finds its
   lanes taken goes back with the time at which they are free.)
4. Within a task, tensors follow one another by need.

Where no two receivers want the same sender, nothing waits, and this is the order of need. Where they do, layers of
one kind come to a receiver in another order; parameters still come before all else.

Under the policy ``release`` every epoch has a timetable of its own, which begins at 0, for the tensors that move in it.

It is computed from the plan alone, by operations that give the same everywhere; and the position of a piece hangs on
its cell and tensor only, hence is one for both of its ends and for every hop of a chain, which is what the order of
messages rests on (``compile``).

Rejected: to shift each receiver's start by its number among those who want the same sender (1.6 of the predicted
time where this has 1.2; it must be told who competes, and does nothing for TP8 -> PP8), the largest remaining load
first instead of need first (as good in time, and no order of need is left even where nobody competes), and node links
as lanes too (a cell then waits for the slowest of its lanes, and most moves become slower). So links are not seen
here; ``plan.timing`` says what that costs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from ..plan import Moves, Plan
from ..plan.cells import Cells
from ..plan.lists import distinct
from ..values import Tensor
from ..values.boxes import Ints, expand
from .need import PLACES, NeedOrder

MOST_CELLS: Final = 20_000
"""Cells that move, at most. With a distributed optimizer on very many ranks there are more, each of few devices: the
order of need is kept then."""

MOST_EPOCHS: Final = 100
"""With several epochs, cells times epochs are at most ``MOST_CELLS`` times this."""

MANY_MOVES: Final = 50_000
"""With more, an old and a new role are the lanes of a cell, in place of all devices that play them, and all kinds are
done in one pass: replicas do alike, and a device's program has to come within 50 ms at 131,072 devices."""


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """Where the pieces of a plan's transfers stand in the move.

    Attributes:
        plan: the plan.
        need: the order of need of its new layout.
        start: per epoch, cell and kind (in the order of need) the position at which it sets out, in bytes, shape
            (epochs, cells, kinds); 0 for what does not move. None where too many cells move, or none: then need alone
            counts.
        copies: per cell the most that one device sends of it, shape (cells,).
        epoch: per tensor of the new layout its epoch, shape (tensors,).
    """

    plan: Plan
    need: NeedOrder
    start: Ints | None
    copies: Ints
    epoch: Ints
    _places: dict[int, dict[tuple[Tensor, tuple[int, ...]], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, need: NeedOrder, epoch: Ints | None = None) -> Timetable:
        """The timetable of a plan.

        Args:
            plan: the plan.
            need: the order of need of its new layout.
            epoch: per tensor of the new layout its epoch, -1 for one that does not move. None: all are of epoch 0.
        """
        cells, moves = plan.cells, plan.moves
        epoch = np.zeros(len(need.kind), np.int64) if epoch is None else epoch
        epochs = max(int(epoch.max(initial=0)) + 1, 1)
        first = np.flatnonzero(np.diff(moves.cell, prepend=-1))
        if not 0 < len(first) * epochs <= MOST_CELLS * (MOST_EPOCHS if epochs > 1 else 1):
            return cls(plan, need, None, np.ones(len(cells), np.int64), epoch)
        moved = moves.cell[first]
        tasks = _Tasks.of(plan, need, moved)
        few = len(moves) <= MANY_MOVES
        lanes, copies = _device_lanes(moves, first) if few else (_role_lanes(cells, moved), np.ones_like(moved))
        count = 1 + max(map(max, lanes))
        start, by_cell = np.zeros((epochs, len(cells), PLACES), np.int64), np.ones(len(cells), np.int64)
        for number in range(epochs):
            task_bytes, needed_at = tasks.of_epoch(None if epochs == 1 else np.flatnonzero(epoch == number))
            if few:
                start[number, moved] = _by_kind(task_bytes * copies[:, None], needed_at, lanes, count)
            elif task_bytes.any():
                start[number, moved] = _at_once(task_bytes, needed_at, lanes, count)
        by_cell[moved] = copies
        return cls(plan, need, start, by_cell, epoch)

    def places(self, cell: int) -> dict[tuple[Tensor, tuple[int, ...]], int]:
        """Per (tensor, offsets of a piece) of a cell that moves, the position in bytes at which the piece begins."""
        if cell not in self._places:
            self._places[cell] = self._placed(cell)
        return self._places[cell]

    def _placed(self, cell: int) -> dict[tuple[Tensor, tuple[int, ...]], int]:
        cells = self.plan.cells
        tensors, atoms = cells.curr.tensors, cells.atoms
        found: dict[tuple[Tensor, tuple[int, ...]], int] = {}
        pieces = []
        for atom in cells.atoms_of[cell].tolist():
            joint = int(atoms.joint[atom])
            offsets = tuple(atoms.low[atom, : cells.dims[joint]].tolist())
            numel = int((atoms.high[atom] - atoms.low[atom]).prod())
            pieces += [(self.need.at[tensors[t]], offsets, numel, t) for t in cells.tensors_of[joint].tolist()]
        if self.start is None:
            return {(tensors[t], offsets): at for (_, at), offsets, _, t in pieces}
        epoch, kinds = self.epoch, self.need.kind
        # Bytes of a cell that one device sends several times take as many positions.
        copies = int(self.copies[cell])
        next_at = self.start[:, cell].tolist()
        for _, offsets, numel, t in sorted(pieces, key=lambda piece: piece[:2]):
            of_epoch, kind, tensor = next_at[epoch[t]], kinds[t], tensors[t]
            found[tensor, offsets] = of_epoch[kind]
            of_epoch[kind] += numel * tensor.itemsize * copies
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Tasks:
    """Which atoms of which joint bundles the cells that move are made of, by ascending joint bundle.

    Attributes:
        plan: the plan.
        need: the order of need of its new layout.
        count: cells that move.
        task: per atom the place of its cell among those.
        volume: per atom its elements.
        joint: per atom its joint bundle, ascending.
    """

    plan: Plan
    need: NeedOrder
    count: int
    task: Ints
    volume: Ints
    joint: Ints

    @classmethod
    def of(cls, plan: Plan, need: NeedOrder, moved: Ints) -> _Tasks:
        cells = plan.cells
        place = np.full(len(cells), -1)
        place[moved] = np.arange(len(moved))
        moves = np.flatnonzero(place[cells.atoms.cell] >= 0)
        moves = moves[np.argsort(cells.atoms.joint[moves], kind="stable")]
        joint = cells.atoms.joint[moves]
        return cls(plan, need, len(moved), place[cells.atoms.cell[moves]], cells.atoms.volume[moves], joint)

    def of_epoch(self, tensors: Ints | None) -> tuple[Ints, Ints]:
        """Per moved cell and kind its bytes, and the position by need of its first tensor; shape (moved, kinds).

        Args:
            tensors: which tensors count; None for all.
        """
        cells, need = self.plan.cells, self.need
        at: slice | Ints = slice(None)
        of: slice | Ints = slice(None)
        if tensors is not None:
            of, joints = tensors, distinct(cells.joint_of[tensors])
            start = np.searchsorted(self.joint, joints)
            _, at = expand(start, np.searchsorted(self.joint, joints, side="right") - start)
        far = np.iinfo(np.int64).max
        joint_itemsize = np.zeros((len(cells.itemsizes), PLACES), np.int64)
        np.add.at(joint_itemsize, (cells.joint_of[of], need.kind[of]), cells.curr.itemsizes[of])
        joint_at = np.full(joint_itemsize.shape, far)
        np.minimum.at(joint_at, (cells.joint_of[of], need.kind[of]), need.position[of])
        task_bytes = np.zeros((self.count, PLACES), np.int64)
        np.add.at(task_bytes, self.task[at], self.volume[at][:, None] * joint_itemsize[self.joint[at]])
        needed_at = np.full(task_bytes.shape, far)
        np.minimum.at(needed_at, self.task[at], joint_at[self.joint[at]])
        return task_bytes, needed_at


def _device_lanes(moves: Moves, first: Ints) -> tuple[list[list[int]], Ints]:
    """Per moved cell the lanes of all its sources and targets, and the most copies that one source sends."""
    source, target, devices = numbered(moves)
    task = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(moves))))
    pairs, sent = np.unique(task * devices + source, return_counts=True)
    copies = np.zeros(len(first), np.int64)
    np.maximum.at(copies, pairs // devices, sent)
    lanes = [(target[begin:end] + devices).tolist() for begin, end in pairwise([*first.tolist(), len(moves)])]
    for pair in pairs.tolist():
        lanes[pair // devices].append(pair % devices)
    return lanes, copies


def numbered(moves: Moves) -> tuple[Ints, Ints, int]:
    """Sources and targets by numbers below the third value: their ids, unless those are far apart."""
    count = int(max(moves.source.max(initial=-1), moves.target.max(initial=-1))) + 1
    if count <= 8 * len(moves):
        return moves.source, moves.target, count
    ids, ends = np.unique(np.concatenate([moves.source, moves.target]), return_inverse=True)
    source, target = ends.reshape(2, -1)
    return source, target, len(ids)


def _role_lanes(cells: Cells, moved: Ints) -> list[list[int]]:
    """Per moved cell one old role for all its sources, one new role for all its targets."""
    source = cells.prev_roles.items[cells.prev_roles.starts[moved]]
    target = cells.curr_roles.items[cells.curr_roles.starts[moved]] + cells.prev.role_count
    lanes: list[list[int]] = np.column_stack([source, target]).tolist()
    return lanes


def _by_kind(lasts: Ints, needed_at: Ints, lanes: list[list[int]], lane_count: int) -> Ints:
    """When tasks start, kind after kind; all of shape (cells, kinds), 0 for kinds that a cell has not."""
    start, free = np.zeros_like(lasts), [0] * lane_count
    for kind in range(PLACES):
        tasks = np.flatnonzero(lasts[:, kind])
        tasks = tasks[np.argsort(needed_at[tasks, kind], kind="stable")]
        start[tasks, kind] = _pass(lasts[tasks, kind].tolist(), [lanes[task] for task in tasks.tolist()], free)
    return start


def _at_once(lasts: Ints, needed_at: Ints, lanes: list[list[int]], lane_count: int) -> Ints:
    """The same in one pass for all kinds, each with its share of the time: alike where kinds are in proportion."""
    tasks, free = np.argsort(needed_at.min(axis=1), kind="stable"), [0] * lane_count
    at = np.zeros((len(lasts), 1))
    at[tasks, 0] = _pass(lasts.sum(axis=1)[tasks].tolist(), [lanes[task] for task in tasks.tolist()], free)
    share = lasts.sum(axis=0) / lasts.sum()
    start: Ints = (max(free) * (np.cumsum(share) - share) + at * share).astype(np.int64)
    return start


def _pass(lasts: list[int], lanes: list[list[int]], free: list[int]) -> list[int]:
    """When each task starts.

    Args:
        lasts: per task for how long it holds its lanes; the tasks are by need.
        lanes: per task its lanes.
        free: per lane from when on it is free; the pass writes on.
    """
    start = [0] * len(lasts)
    waiting = [(0, task) for task in range(len(lasts))]
    while waiting:
        earliest, task = waiting[0]
        free_at = max([free[lane] for lane in lanes[task]])
        if free_at > earliest:
            heapq.heapreplace(waiting, (free_at, task))
            continue
        heapq.heappop(waiting)
        start[task] = earliest
        for lane in lanes[task]:
            free[lane] = earliest + lasts[task]
    return start
