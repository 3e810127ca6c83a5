"""Copies that overlap without being equal boxes, held against element by element comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.strategies import inside, mask
from tests.unit.test_region import boxes
from tests.unit.together import together

from shardshift.engine import Copies, Mover, names_of
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, Tensor

Whole = dict[int, NDArray[np.float32]]
"""Per device the tensor as it holds it; NaN where it does not."""


def weight(*shape: int) -> Tensor:
    return Tensor(Kind.PARAM, "w", shape, "float32", 4)


def placed(tensor: Tensor, *held: Sequence[Region]) -> PlacedLayout:
    """Device i holds the i-th regions."""
    roles = [tuple(Shard(tensor, region) for region in regions) for regions in held]
    return PlacedLayout(Layout(roles, range(len(roles))), tuple(range(len(roles))))


def rows(low: int, high: int, width: int = 2) -> Region:
    return Region((low, 0), (high - low, width))


def state(values: Whole, layout: PlacedLayout, device: int) -> dict[str, torch.Tensor]:
    """What a device holds, by name."""
    return {
        name: torch.tensor(values[device][inside(shard.region)])
        for name, shard in names_of(layout.shards_on(device)).items()
    }


def is_state(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@dataclass(frozen=True, eq=False)
class Case:
    """A tensor that devices hold in any boxes, and what they hold, which may differ here and there."""

    prev: PlacedLayout
    curr: PlacedLayout
    values: Whole

    @property
    def stack(self) -> NDArray[np.float32]:
        return np.stack([self.values[device] for device in sorted(self.values)])

    @property
    def differs(self) -> NDArray[np.bool_]:
        """Per element whether holders of it differ."""
        low, high = np.fmin.reduce(self.stack, 0), np.fmax.reduce(self.stack, 0)
        found: NDArray[np.bool_] = low < high
        return found

    def settled(self, way: str) -> Whole:
        """The same on every device, as far as it holds it, by the element."""
        one = np.full(self.stack.shape[1:], np.nan, np.float32)
        for index in np.ndindex(one.shape):
            held = [value for value in self.stack[(slice(None), *index)] if not np.isnan(value)]
            if held:
                one[index] = held[0] if way == "first" else sum(held, np.float32(0)) / np.float32(len(held))
        return dict.fromkeys(range(len(self.curr.devices)), one)


def half(shape: tuple[int, ...], dim: int, second: bool) -> Region:
    size = shape[dim]
    low, high = (size // 2, size) if second else (0, size // 2)
    offsets, sizes = [0] * len(shape), [*shape]
    offsets[dim], sizes[dim] = low, high - low
    return Region(tuple(offsets), tuple(sizes))


@st.composite
def holdings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """What one device holds: all, a half by any dim, or one or two boxes anywhere."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return [Region.whole(shape)]
    if kind == 1:
        return [half(shape, draw(st.integers(0, len(shape) - 1)), draw(st.booleans()))]
    drawn = draw(st.lists(boxes(shape), min_size=1, max_size=2, unique=True))
    return drawn if len(drawn) < 2 or drawn[0].intersect(drawn[1]) is None else drawn[:1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple))
    tensor, devices = weight(*shape), draw(st.integers(2, 4))
    held = [draw(holdings(shape)) for _ in range(devices)]
    common = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    values = {}
    for device in range(devices):
        own = common.copy()
        bits = draw(st.just(0) | st.integers(0, 2**own.size - 1))
        own[np.array([bits >> at & 1 for at in range(own.size)], bool).reshape(shape)] += 100 * (1 + device)
        own[mask(shape, *held[device]) == 0] = np.nan
        values[device] = own
    curr = draw(st.sampled_from([held, held[::-1], [*held[1:], held[0]]]))
    return Case(placed(tensor, *held), placed(tensor, *curr), values)


@given(cases())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_elements_that_differ_are_refused_by_name_or_become_one_everywhere(case: Case) -> None:
    def work(mover: Mover) -> Any:
        def move(**options: Any) -> Any:
            given = state(case.values, case.prev, mover.device)
            found = mover.move(case.prev, case.curr, given, **options)
            assert is_state(given, state(case.values, case.prev, mover.device)), "sources are only read"
            return found

        for way in ("first", "mean"):
            assert is_state(move(differing=way), state(case.settled(way), case.curr, mover.device)), way
        try:
            return is_state(move(), state(case.settled("first"), case.curr, mover.device))
        except Mismatch as error:
            return str(error)

    found = together(case.prev.devices, work)
    if not case.differs.any():
        assert set(found.values()) == {True}, found
        return
    (text,) = set(found.values())
    said = re.match(r"param:w\[(.*)\]: devices (\d+) and (\d+) hold different bits", text)
    assert said, text
    ends = [tuple(map(int, end.split(":"))) for end in said[1].split(", ")]
    at = tuple(slice(low, high) for low, high in ends)
    one, other = case.values[int(said[2])][at], case.values[int(said[3])][at]
    assert not np.isnan(one).any()
    assert not np.isnan(other).any()
    assert (one != other).any()


ROWS_BESIDE_COLUMNS = placed(
    weight(8, 4), [rows(0, 4, 4)], [rows(4, 8, 4)], [Region((0, 0), (8, 2))], [Region((0, 2), (8, 2))]
)
CUT_BESIDE_WHOLE = placed(weight(8), *([Region((low,), (n,))] for low, n in ((0, 4), (4, 4), (0, 8), (0, 8))))


@pytest.mark.parametrize(
    ("layout", "apart", "region", "devices"),
    [
        (placed(weight(6, 2), [rows(0, 4)], [rows(2, 6)]), {1}, "2:4, 0:2", (0, 1)),
        (placed(weight(6, 2), [rows(0, 6)], [rows(0, 3)], [rows(3, 6)]), {2}, "3:6, 0:2", (0, 2)),
        (ROWS_BESIDE_COLUMNS, {2, 3}, "0:4, 0:2", (0, 2)),
        (ROWS_BESIDE_COLUMNS, {3}, "0:4, 2:4", (0, 3)),
        (CUT_BESIDE_WHOLE, {2, 3}, "0:4", (0, 2)),
        (CUT_BESIDE_WHOLE, {3}, "0:4", (0, 3)),
    ],
)
@pytest.mark.parametrize("verify", [False, "digest"])
def test_the_region_and_the_devices_are_named(
    layout: PlacedLayout, apart: set[int], region: str, devices: tuple[int, int], verify: Any
) -> None:
    shape = layout.layout.tensors[0].shape
    values = {device: np.full(shape, 2.0 if device in apart else 1.0, np.float32) for device in layout.devices}
    whole = PlacedLayout(placed(layout.layout.tensors[0], [Region.whole(shape)]).layout, (0,))

    def work(mover: Mover) -> Any:
        return mover.move(layout, whole, state(values, layout, mover.device), verify=verify)

    for error in together(layout.devices, work).values():
        assert isinstance(error, Mismatch)
        assert f"param:w[{region}]: devices {devices[0]} and {devices[1]} hold different bits" in str(error)


def test_what_only_a_lost_device_holds_too_is_not_compared() -> None:
    layout = placed(weight(6, 2), [rows(0, 6)], [rows(0, 3)], [rows(3, 6)])
    found = [[str(part) for group in Copies(layout, one, (2,)).groups.values() for part in group] for one in range(3)]
    assert found == [["param:w[0:3, 0:2]"], ["param:w[0:3, 0:2]"], []]


def test_tensors_in_which_nothing_differs_keep_their_storage_and_ties_are_kept() -> None:
    """Device 0 holds embedding and head as one, whole; device 1 and 2 hold halves of them, also as one."""
    emb, head, other = (Tensor(Kind.PARAM, name, (4,), "float32", 4) for name in ("emb", "head", "other"))
    cuts = (Region((0,), (4,)), Region((0,), (2,)), Region((2,), (2,)))
    layout = PlacedLayout(
        Layout([tuple(Shard(tensor, cut) for tensor in (emb, head, other)) for cut in cuts], range(3)), (0, 1, 2)
    )

    def work(mover: Mover) -> Any:
        shape = cuts[mover.device].shape
        tied, apart = torch.full(shape, 1.0 + mover.device), torch.ones(shape)
        found = mover.move(layout, layout, {"emb": tied, "head": tied, "other": apart}, differing="mean")
        assert found["emb"] is found["head"]
        assert found["other"] is apart
        return found["emb"].tolist()

    assert together((0, 1, 2), work) == {0: [1.5, 1.5, 2.0, 2.0], 1: [1.5, 1.5], 2: [2.0, 2.0]}


def test_equal_boxes_stay_one_digest_however_many_tensors_there_are() -> None:
    """And boxes that cross are one for each set of devices, not one for each tensor."""
    tensors = [Tensor(Kind.PARAM, f"layers.{index}", (6, 2), "float32", 4) for index in range(100)]

    def layout(*cuts: Region) -> PlacedLayout:
        roles = [tuple(Shard(tensor, cut) for tensor in tensors) for cut in cuts]
        return PlacedLayout(Layout(roles, range(len(cuts))), tuple(range(len(cuts))))

    assert [len(Copies(layout(rows(0, 6), rows(0, 6)), device).groups) for device in (0, 1)] == [1, 1]
    crossing = layout(rows(0, 6), rows(0, 3), rows(3, 6))
    assert [len(Copies(crossing, device).groups) for device in (0, 1, 2)] == [2, 1, 1]
    assert len(Copies(layout(rows(0, 3), rows(3, 6)), 0).groups) == 0
