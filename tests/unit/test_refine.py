"""The common refinement of regions, held against masks of elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from tests.unit.strategies import inside, mask
from tests.unit.test_region import tensors_with_boxes

from shardshift.values import Region
from shardshift.values.refine import refine


@given(tensors_with_boxes(most=7))
def test_every_element_is_in_one_box_which_knows_all_regions_around_it(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    shape, regions = case
    found = refine(regions)
    assert (mask(shape, *(box for box, _ in found)) == (mask(shape, *regions) > 0)).all()
    for box, of in found:
        assert box.numel
        assert of == sorted(set(of))
        for index, region in enumerate(regions):
            expected = 1 if index in of else 0
            assert (mask(shape, region)[inside(box)] == expected).all(), "an edge runs through the box"


def test_a_whole_tensor_beside_slices_is_cut_once_for_each() -> None:
    slices = [Region((4 * index, 0), (4, 8)) for index in range(16)]
    assert refine([Region.whole((64, 8)), *slices]) == [(part, [0, 1 + index]) for index, part in enumerate(slices)]


def test_nothing_is_cut_into_nothing() -> None:
    assert refine([]) == []
    assert refine([Region((2, 0), (0, 3)), Region((), ())][:1]) == []
    assert refine([Region((), ())] * 2) == [(Region((), ()), [0, 1])]
    assert np.iinfo(np.int64).max > refine([Region((2**40,), (2**40,))])[0][0].numel
