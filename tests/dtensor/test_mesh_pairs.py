"""Any pair of meshes, placements and shapes: what every new rank gets is what torch's own splitting gives it.

Layouts follow from entries and coordinates alone, the plan is carried out by the simulator. Oracles: elements that say
who they are, torch's ``_split_tensor``, and SciPy's assignment over all orders of the new ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.dtensor.worlds import Locals, carry, coordinates, entry, layout, numbered, ranks, torch_part
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardshift.adapters.dtensor.described import Entry
from shardshift.plan import make_plan
from shardshift.values import Kind, Mesh, PlacedLayout

MOST = 8
MOST_ELEMENTS = 128
Placements = tuple[Placement, ...] | None


@dataclass(frozen=True)
class Side:
    """A mesh, and how it cuts each tensor."""

    mesh: Mesh
    placements: tuple[Placements, ...]

    def entries(self, wholes: Sequence[torch.Tensor]) -> list[Entry]:
        """The entry of each tensor."""
        kinds = (Kind.PARAM, Kind.EXP_AVG, Kind.BUFFER)
        return [
            entry(f"{'buffer' if number % 3 == 2 else 'weight'}{number // 3}", whole, cut, kinds[number % 3])
            for number, (whole, cut) in enumerate(zip(wholes, self.placements, strict=True))
        ]

    def parts(self, wholes: Sequence[torch.Tensor]) -> list[Locals]:
        """What each rank has of the tensors, by torch."""
        keys = [(of.kind, of.name) for of in self.entries(wholes)]
        return [
            {
                key: whole if placements is None else torch_part(whole, placements, self.mesh.shape, position)
                for key, whole, placements in zip(keys, wholes, self.placements, strict=True)
            }
            for position in coordinates(self.mesh.shape)
        ]


@dataclass(frozen=True)
class Pair:
    """What there is, before and after."""

    shapes: tuple[tuple[int, ...], ...]
    old: Side
    new: Side


def sizes() -> st.SearchStrategy[list[int]]:
    axes = st.lists(st.integers(1, MOST), min_size=1, max_size=3)
    return axes.filter(lambda sizes: math.prod(sizes) <= MOST)


@st.composite
def how_cut(draw: st.DrawFn, shape: tuple[int, ...], axes: Sequence[int]) -> Placements:
    if not shape or draw(st.integers(0, 7)) == 0:
        return None
    found: list[Placement] = []
    for axis in range(len(axes)):
        dim = draw(st.integers(0, len(shape) - 1))
        later = [axes[other] for other in range(axis + 1, len(axes))]
        factor = draw(st.sampled_from([math.prod(later), *later, 2, 3]))
        strided = _StridedShard(dim, split_factor=factor)
        found.append(draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim), strided])))
    return tuple(found)


def _is_small(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= MOST_ELEMENTS


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    shape = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 9, 11]), max_size=3).map(tuple).filter(_is_small)
    # A moment has its parameter's shape, but may be cut in another way.
    groups = [(one, one, draw(shape)) for one in draw(st.lists(shape, min_size=1, max_size=2))]
    shapes = tuple(each for group in groups for each in group)[: draw(st.integers(1, 6))]
    before, after = draw(sizes()), draw(sizes())
    m, n = math.prod(before), math.prod(after)
    old_ranks = draw(st.permutations(range(MOST)))[:m]
    fresh = range(MOST, 2 * MOST)
    new_ranks = draw(
        st.sampled_from(
            [
                list(fresh)[:n],  # disjoint
                [*old_ranks, *fresh][:n],  # grown or shrunk, in order
                [*reversed(old_ranks), *fresh][:n],  # permuted
                [*old_ranks[m // 2 :], *fresh][:n],  # overlapping
                sorted([*old_ranks, *fresh][:n]),
            ]
        )
    )

    def side(axes: list[int], ranks: Sequence[int]) -> Side:
        mesh = Mesh({f"axis{number}": size for number, size in enumerate(axes)}, ranks)
        return Side(mesh, tuple(draw(how_cut(shape, axes)) for shape in shapes))

    return Pair(shapes, side(before, old_ranks), side(after, new_ranks))


def elements(side: Side, wholes: Sequence[torch.Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Per rank which elements of all tensors, one behind the other, it holds: shape (ranks, elements)."""
    starts = np.cumsum([0, *(whole.numel() for whole in wholes)]).tolist()
    flat = [
        torch.arange(stop - start).reshape(whole.shape) + start
        for (start, stop), whole in zip(itertools.pairwise(starts), wholes, strict=True)
    ]
    held = np.zeros((len(side.mesh.ranks), starts[-1]), bool)
    for row, parts in zip(held, side.parts(flat), strict=True):
        for part in parts.values():
            row[part.flatten().numpy()] = True
    return held


@settings(max_examples=400)
@given(pairs(), st.sampled_from([128, 1 << 20]))
def test_every_new_rank_gets_what_torch_splits_off_for_it(pair: Pair, staging_bytes: int) -> None:
    wholes = [numbered(shape, number) for number, shape in enumerate(pair.shapes)]
    old, new = pair.old.entries(wholes), pair.new.entries(wholes)
    _, found = carry(
        ranks(pair.old.mesh.shape, old),
        pair.old.parts(wholes),
        ranks(pair.new.mesh.shape, new),
        before=pair.old.mesh.ranks,
        after=pair.new.mesh.ranks,
        staging_bytes=staging_bytes,
    )
    for arrived, expected in zip(found, pair.new.parts(wholes), strict=True):
        assert arrived.keys() == expected.keys()
        assert all(torch.equal(arrived[key], part) for key, part in expected.items())


@settings(max_examples=150)
@given(pairs())
def test_bytes_moved_are_those_that_ranks_lack_and_with_order_least_the_least_of_all_orders(pair: Pair) -> None:
    wholes = [numbered(shape) for shape in pair.shapes]
    before, after = elements(pair.old, wholes), elements(pair.new, wholes)
    devices = sorted(pair.new.mesh.ranks)
    held = {rank: row for rank, row in zip(pair.old.mesh.ranks, before, strict=True)}
    nothing = np.zeros(before.shape[1], bool)
    lacking = np.array([[8 * (row & ~held.get(device, nothing)).sum() for device in devices] for row in after])
    prev = PlacedLayout(layout(pair.old.mesh.shape, pair.old.entries(wholes)), pair.old.mesh.ranks)
    curr = layout(pair.new.mesh.shape, pair.new.entries(wholes))

    given_order = make_plan(prev, curr, devices=devices, placement=pair.new.mesh.ranks)
    places = [devices.index(rank) for rank in pair.new.mesh.ranks]
    assert given_order.moved_bytes == lacking[range(len(places)), places].sum()

    free = make_plan(prev, curr, devices=devices)
    least = lacking[linear_sum_assignment(lacking)].sum()
    assert free.moved_bytes == free.least_moved_bytes == given_order.least_moved_bytes == least
