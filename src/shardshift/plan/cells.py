"""Cells: the state of a job cut as fine as two layouts tell its bytes apart, and no finer.

A *cell* is all the bytes that are held by one set of old roles and wanted by one set of new roles. What the paper
writes as a workload label (``3.ab``: layer 3, slices a and b) is a cell here, in bytes, whatever the rule that cut
it. Everything that planning decides, it decides per cell: costs, sources, chains. PP16 TP8 to PP12 TP8 has 216
cells of 96 layers, 12 tensors a layer and 4 kinds, whatever DP is.

1. *Joint bundles*: tensors that are one bundle in both layouts. Each is cut once for all its tensors.
2. *Parts*: the distinct boxes of a joint bundle that roles of one layout hold, and who holds each.
3. *Atoms*: an old part intersected with a new one. Where parts of one layout overlap (one role holds a tensor whole,
   another a slice), they are first cut along one another.
4. Atoms of equal old roles and equal new roles are one cell.

Marking elements was rejected (grows with the model), and so was a table per rank (grows with the job).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ..values import Infeasible, Layout, Region, Tensor, subtract_all
from ..values.boxes import Ints, overlapping_pairs, overlapping_within
from ..values.refine import refine
from ..values.rows import box
from .lists import Lists, distinct, number_rows, number_values


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The distinct boxes of joint bundles that one layout's roles hold.

    Attributes:
        joint: shape (parts,).
        low: first indices, shape (parts, dims).
        high: one past the last indices, shape (parts, dims).
        roles: per part the roles that hold it, ascending.
        of_role: per role its parts.
    """

    joint: Ints
    low: Ints
    high: Ints
    roles: Lists
    of_role: Lists

    @property
    def volume(self) -> Ints:
        """Elements of each part."""
        return volumes(self.low, self.high)

    def region(self, part: int, dims: int) -> Region:
        """One part as a value, without the padding dims."""
        return box(self.low[part], self.high[part], dims)


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Boxes whose elements all have the same old parts and the same new parts.

    Attributes:
        joint: shape (atoms,).
        low: first indices, shape (atoms, dims).
        high: one past the last indices, shape (atoms, dims).
        prev_parts: per atom the old parts that contain it.
        curr_parts: per atom the new parts that contain it.
        cell: per atom its cell.
    """

    joint: Ints
    low: Ints
    high: Ints
    prev_parts: Lists
    curr_parts: Lists
    cell: Ints

    @property
    def volume(self) -> Ints:
        """Elements of each atom."""
        return volumes(self.low, self.high)


class Cells:
    """The common refinement of two layouts of the same tensors.

    Attributes:
        prev: the old layout.
        curr: the new one; joint bundles and tensors are numbered by its order.
        joint_of: per tensor of ``curr`` its joint bundle.
        prev_parts: boxes of the old layout.
        curr_parts: boxes of the new one.
        atoms: every element that some old and some new role hold.
        nbytes: bytes of each cell, shape (cells,).
        prev_roles: per cell the old roles that hold it, ascending.
        curr_roles: per cell the new roles that want it, ascending.

    Raises:
        KeyError: if a tensor is not in both layouts; ``account`` says it in words, and comes first.
        Infeasible: if the state is too large to be counted in 64 bits.
    """

    def __init__(self, prev: Layout, curr: Layout) -> None:
        self.prev, self.curr = prev, curr
        if prev.tensors is curr.tensors:
            prev_bundle = prev.bundle_of.astype(np.int64)
        else:
            index = {tensor: i for i, tensor in enumerate(prev.tensors)}
            prev_bundle = prev.bundle_of[[index[tensor] for tensor in curr.tensors]].astype(np.int64)
        curr_bundle = curr.bundle_of.astype(np.int64)
        width = int(curr_bundle.max(initial=0)) + 1
        both, self.joint_of = number_values(prev_bundle * width + curr_bundle)
        self.itemsizes = np.zeros(len(both), np.int64)
        np.add.at(self.itemsizes, self.joint_of, curr.itemsizes)
        self.tensors_of = Lists.group(self.joint_of, np.arange(len(curr.tensors)), len(both))
        dims = max(prev.rows.low.shape[1], curr.rows.low.shape[1])
        self.prev_parts, prev_mixed = _parts(prev, both // width, dims)
        self.curr_parts, curr_mixed = _parts(curr, both % width, dims)
        self.atoms = self._atoms(prev_mixed | curr_mixed)
        atoms = self.atoms
        if len(atoms.joint) and ((atoms.volume * 1.0) @ self.itemsizes[atoms.joint]) > 2**62:
            raise Infeasible("the state has 2**62 bytes or more; what to do: check the global shapes")
        self.nbytes = np.zeros(self.prev_roles.counts.size, np.int64)
        np.add.at(self.nbytes, atoms.cell, atoms.volume * self.itemsizes[atoms.joint])

    def __len__(self) -> int:
        return len(self.nbytes)

    @cached_property
    def dims(self) -> Ints:
        """Per joint bundle how many dims its tensors have."""
        first = self.tensors_of.items[self.tensors_of.starts[:-1]]
        return np.array([len(self.curr.tensors[tensor].shape) for tensor in first.tolist()], np.int64)

    @cached_property
    def atoms_of(self) -> Lists:
        """Per cell its atoms."""
        return Lists.group(self.atoms.cell, np.arange(len(self.atoms.cell)), len(self))

    @cached_property
    def pieces(self) -> Ints:
        """Per cell how many (tensor, box) pieces it has."""
        count = np.zeros(len(self), np.int64)
        np.add.at(count, self.atoms.cell, self.tensors_of.counts[self.atoms.joint])
        return count

    @cached_property
    def overlap_bytes(self) -> csr_array:
        """Bytes that a new and an old role have in common; sparse, shape (curr roles, prev roles)."""
        cell, curr_role = self.curr_roles.take(np.arange(len(self)))
        pair, prev_role = self.prev_roles.take(cell)
        return self._sparse(curr_role[pair], prev_role, self.nbytes[cell[pair]])

    @cached_property
    def same_bytes(self) -> csr_array:
        """Bytes of shards that a new and an old role hold exactly alike; sparse, shape (curr roles, prev roles)."""
        return self._over_same_parts(self.curr_parts.volume * self.itemsizes[self.curr_parts.joint])

    @cached_property
    def same_shards(self) -> csr_array:
        """How many shards a new and an old role hold exactly alike; sparse, shape (curr roles, prev roles)."""
        return self._over_same_parts(self.tensors_of.counts[self.curr_parts.joint])

    @cached_property
    def copied_pieces(self) -> csr_array:
        """Pieces that a new and an old role have in common, but not as the same shard; sparse, as above."""
        cell, curr_role = self.curr_roles.take(np.arange(len(self)))
        pair, prev_role = self.prev_roles.take(cell)
        common = self._sparse(curr_role[pair], prev_role, self.pieces[cell[pair]])
        atom, part = self.atoms.curr_parts.take(np.arange(len(self.atoms.joint)))
        inside = np.zeros(len(self.curr_parts.joint), np.int64)
        np.add.at(inside, part, self.tensors_of.counts[self.atoms.joint[atom]])
        return csr_array(common - self._over_same_parts(inside))

    def _over_same_parts(self, values: Ints) -> csr_array:
        """Sum of values per new part, over the parts that a new and an old role hold exactly alike."""
        prev_part, curr_part = self.same_parts
        pair, curr_role = self.curr_parts.roles.take(curr_part)
        pair_again, prev_role = self.prev_parts.roles.take(prev_part[pair])
        return self._sparse(curr_role[pair_again], prev_role, values[curr_part[pair[pair_again]]])

    @cached_property
    def same_parts(self) -> tuple[Ints, Ints]:
        """Old and new parts that are one box; empty ones too."""
        prev, curr = self.prev_parts, self.curr_parts
        keys = [np.column_stack([parts.joint, parts.low, parts.high]) for parts in (prev, curr)]
        _, number = number_rows(np.concatenate(keys))
        _, one, other = np.intersect1d(number[: len(prev.joint)], number[len(prev.joint) :], return_indices=True)
        return one, other

    def regions(self, cells: Iterable[int]) -> dict[Tensor, list[Region]]:
        """What cells are made of, per tensor, for messages and for people."""
        found: dict[Tensor, list[Region]] = {}
        for cell in cells:
            for atom in self.atoms_of[cell].tolist():
                joint = int(self.atoms.joint[atom])
                region = box(self.atoms.low[atom], self.atoms.high[atom], int(self.dims[joint]))
                for tensor in self.tensors_of[joint].tolist():
                    found.setdefault(self.curr.tensors[tensor], []).append(region)
        return found

    def dropped(self) -> dict[Tensor, list[Region]]:
        """Elements that an old role holds and no new role wants."""
        return self._uncovered(self.prev_parts, self.atoms.prev_parts)

    def missing(self) -> dict[Tensor, list[Region]]:
        """Elements that a new role wants and no old role holds."""
        return self._uncovered(self.curr_parts, self.atoms.curr_parts)

    def _uncovered(self, parts: Parts, of_atom: Lists) -> dict[Tensor, list[Region]]:
        atom, part = of_atom.take(np.arange(len(self.atoms.joint)))
        covered = np.zeros(len(parts.joint), np.int64)
        np.add.at(covered, part, self.atoms.volume[atom])
        found: dict[Tensor, list[Region]] = {}
        for short in np.flatnonzero(covered != parts.volume).tolist():
            joint = int(parts.joint[short])
            dims = int(self.dims[joint])
            inside = atom[part == short]
            left = subtract_all(
                parts.region(short, dims), [box(self.atoms.low[a], self.atoms.high[a], dims) for a in inside.tolist()]
            )
            for tensor in self.tensors_of[joint].tolist():
                found.setdefault(self.curr.tensors[tensor], []).extend(left)
        return found

    def _sparse(self, rows: Ints, columns: Ints, values: Ints) -> csr_array:
        matrix = csr_array((values, (rows, columns)), shape=(self.curr.role_count, self.prev.role_count))
        matrix.sum_duplicates()
        return matrix

    def _atoms(self, mixed: NDArray[np.bool_]) -> Atoms:
        prev, curr = self.prev_parts, self.curr_parts
        plain_prev, plain_curr = np.flatnonzero(~mixed[prev.joint]), np.flatnonzero(~mixed[curr.joint])
        one, other = overlapping_pairs(
            prev.joint[plain_prev], prev.low[plain_prev], prev.high[plain_prev],
            curr.joint[plain_curr], curr.low[plain_curr], curr.high[plain_curr],
        )  # fmt: skip
        one, other = plain_prev[one], plain_curr[other]
        low, high = np.maximum(prev.low[one], curr.low[other]), np.minimum(prev.high[one], curr.high[other])
        prev_sets, curr_sets = _RoleSets(prev.roles), _RoleSets(curr.roles)
        prev_set, curr_set = prev_sets.of_part[one], curr_sets.of_part[other]
        joint = prev.joint[one]
        parts_of = Lists(np.arange(len(one) + 1), one), Lists(np.arange(len(one) + 1), other)
        if mixed.any():
            prev_of, curr_of = one[:, None].tolist(), other[:, None].tolist()
            lows, highs, joints, prev_ids, curr_ids = [low], [high], [joint], [prev_set], [curr_set]
            for bundle in np.flatnonzero(mixed).tolist():
                for region_low, region_high, held, wanted in _refined(prev, curr, bundle):
                    lows.append(region_low[None])
                    highs.append(region_high[None])
                    joints.append(np.array([bundle]))
                    prev_of.append(held)
                    curr_of.append(wanted)
                    prev_ids.append(np.array([prev_sets.union(held)]))
                    curr_ids.append(np.array([curr_sets.union(wanted)]))
            low, high, joint = np.concatenate(lows), np.concatenate(highs), np.concatenate(joints)
            prev_set, curr_set = np.concatenate(prev_ids), np.concatenate(curr_ids)
            parts_of = Lists.of(prev_of), Lists.of(curr_of)
        pairs, cell = number_values(prev_set * len(curr_sets) + curr_set)
        self.prev_roles = prev_sets.lists(pairs // len(curr_sets))
        self.curr_roles = curr_sets.lists(pairs % len(curr_sets))
        return Atoms(joint, low, high, *parts_of, cell)


class _RoleSets:
    """Sets of roles, each with a number; parts that the same roles hold share one."""

    def __init__(self, roles: Lists) -> None:
        self._roles = roles
        self._sets: dict[bytes, int] = {}
        counts = roles.counts
        self.of_part = np.empty(len(counts), np.int64)
        # A part of one role, as nearly all are with a distributed optimizer, is numbered without a look at it.
        single = np.flatnonzero(counts == 1)
        held, number = number_values(roles.items[roles.starts[single]])
        self.of_part[single] = number
        self._sets = {role.tobytes(): i for i, role in enumerate(held)}
        for part in np.flatnonzero(counts != 1).tolist():
            self.of_part[part] = self._number(roles[part])

    def __len__(self) -> int:
        return len(self._sets)

    def union(self, parts: Sequence[int]) -> int:
        """The set of all roles that hold any of the parts."""
        return self._number(distinct(np.concatenate([self._roles[part] for part in parts])))

    def lists(self, numbers: Ints) -> Lists:
        """The sets of these numbers."""
        every = [np.frombuffer(key, np.int64) for key in self._sets]
        starts = np.cumsum([0, *map(len, every)])
        whole = Lists(starts, np.concatenate(every) if every else np.empty(0, np.int64))
        counts = whole.counts[numbers]
        return Lists(np.concatenate([[0], np.cumsum(counts)]), whole.take(numbers)[1])

    def _number(self, roles: Ints) -> int:
        return self._sets.setdefault(roles.tobytes(), len(self._sets))


def volumes(low: Ints, high: Ints) -> Ints:
    """Elements of each box."""
    size: Ints = np.prod(high - low, axis=1)
    return size


def listed(found: Mapping[Tensor, list[Region]]) -> str:
    """Tensors and regions in words, each region once."""
    return "; ".join(f"{tensor} " + ", ".join(map(str, dict.fromkeys(regions))) for tensor, regions in found.items())


def _parts(layout: Layout, bundle_of_joint: Ints, dims: int) -> tuple[Parts, NDArray[np.bool_]]:
    """The parts of one layout, and per joint bundle whether they overlap among themselves."""
    rows = layout.rows
    joints = Lists.group(bundle_of_joint, np.arange(len(bundle_of_joint)), int(layout.bundle_of.max(initial=-1)) + 1)
    row, joint = joints.take(rows.bundle.astype(np.int64))
    missing = dims - rows.low.shape[1]
    low = np.pad(rows.low, ((0, 0), (0, missing)))[row]
    high = np.pad(rows.high, ((0, 0), (0, missing)), constant_values=1)[row]
    first, part = number_rows(np.column_stack([joint, low, high]))
    role = rows.role.astype(np.int64)[row]
    parts = Parts(
        joint[first],
        low[first],
        high[first],
        Lists.group(part, role, len(first)),  # rows are sorted by role, so each list is
        Lists.group(role, part, layout.role_count),
    )
    one, _ = overlapping_within(parts.joint, parts.low, parts.high)
    mixed = np.zeros(len(bundle_of_joint), np.bool_)
    mixed[parts.joint[one]] = True
    return parts, mixed


def _refined(prev: Parts, curr: Parts, joint: int) -> Iterator[tuple[Ints, Ints, list[int], list[int]]]:
    """Atoms of a joint bundle whose parts overlap: low, high, old parts, new parts."""
    dims = prev.low.shape[1]
    before, after = (np.flatnonzero(parts.joint == joint).tolist() for parts in (prev, curr))
    regions = [*(prev.region(part, dims) for part in before), *(curr.region(part, dims) for part in after)]
    for region, of in refine(regions):
        held = [before[index] for index in of if index < len(before)]
        wanted = [after[index - len(before)] for index in of if index >= len(before)]
        if held and wanted:
            yield np.array(region.offsets, np.int64), np.array(region.stops, np.int64), held, wanted
