from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift.engine.staging import MOST_IN_FLIGHT, Arena
from shardshift.values import Mismatch

CPU = torch.device("cpu")


def stretch(payload: torch.Tensor) -> range:
    return range(payload.data_ptr(), payload.data_ptr() + payload.numel())


def payloads_of(arena: Arena, sizes: list[int]) -> list[torch.Tensor]:
    (found,) = arena.lay_out(CPU, [(0, sizes)])
    return found.payloads


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 40))
def test_payloads_share_no_byte_and_fit_half_the_staging_to_the_last_byte(sizes: list[int], spare_bytes: int) -> None:
    arena = Arena(2 * (sum(sizes) + spare_bytes))
    payloads = [payload for payload in payloads_of(arena, sizes) if payload.numel()]
    assert sorted(payload.numel() for payload in payloads) == sorted(filter(None, sizes))
    taken = sorted(map(stretch, payloads), key=lambda one: one.start)
    assert all(one.stop <= other.start for one, other in pairwise(taken))
    if taken:
        assert taken[-1].stop - taken[0].start <= sum(sizes) + spare_bytes


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 30)), min_size=1, max_size=12))
def test_payloads_of_one_dtype_are_aligned_to_it_without_a_byte_to_spare(items: list[tuple[int, int]]) -> None:
    sizes = [itemsize * count for itemsize, count in items]
    for payload, (itemsize, _) in zip(payloads_of(Arena(2 * sum(sizes)), sizes), items, strict=True):
        assert payload.data_ptr() % itemsize == 0


def test_behind_payloads_of_several_dtypes_is_a_gap_where_there_is_room() -> None:
    for payload in payloads_of(Arena(200), [10, 10, 10]):
        assert payload.data_ptr() % 16 == 0


@given(st.lists(st.integers(1, 250), min_size=1, max_size=3 * MOST_IN_FLIGHT), st.integers(500, 2000))
def test_a_round_shares_memory_with_none_that_it_does_not_wait_for(sizes: list[int], staging_bytes: int) -> None:
    found = Arena(staging_bytes).lay_out(CPU, [(2 * index, [size]) for index, size in enumerate(sizes)])
    ranges = [stretch(one.payloads[0]) for one in found]
    for index, one in enumerate(found):
        assert one.after < 2 * index
        for earlier in range(max(index - MOST_IN_FLIGHT + 1, 0), index):
            if 2 * earlier > one.after:
                a, b = ranges[earlier], ranges[index]
                assert a.stop <= b.start or b.stop <= a.start, f"rounds {earlier} and {index} meet"
    assert max(one.stop for one in ranges) - min(one.start for one in ranges) <= staging_bytes


@given(st.lists(st.integers(130, 256), min_size=3, max_size=20))
def test_of_large_rounds_one_is_packed_while_the_one_before_is_on_the_wire(sizes: list[int]) -> None:
    found = Arena(512).lay_out(CPU, list(enumerate([size] for size in sizes)))
    assert [one.after for one in found] == [-1, -1, *range(len(sizes) - 2)]


def test_of_small_rounds_many_are_in_flight() -> None:
    found = Arena(64 << 20).lay_out(CPU, [(number, [1 << 20]) for number in range(12)])
    assert [one.after for one in found] == [*[-1] * 8, 0, 1, 2, 3]


def test_an_arena_takes_no_more_than_its_rounds_need_and_is_used_again() -> None:
    arena = Arena(1 << 20)
    first, second = arena.lay_out(CPU, [(0, [128]), (1, [64])])
    assert first.payloads[0].untyped_storage().nbytes() == 192
    (again,) = arena.lay_out(CPU, [(2, [100])])
    assert again.payloads[0].data_ptr() == first.payloads[0].data_ptr()
    assert set(stretch(first.payloads[0])).isdisjoint(stretch(second.payloads[0]))


def test_a_round_that_does_not_fit_half_the_staging_is_refused() -> None:
    with pytest.raises(Mismatch, match="round 3 stages 65 bytes, half of the staging is 64"):
        Arena(128).lay_out(CPU, [(3, [64, 1])])
