from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift.engine.staging import Arena
from shardshift.values import Mismatch

CPU = torch.device("cpu")


def stretch(payload: torch.Tensor) -> range:
    return range(payload.data_ptr(), payload.data_ptr() + payload.numel())


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 40))
def test_payloads_share_no_byte_and_fit_their_half_to_the_last_byte(sizes: list[int], spare_bytes: int) -> None:
    arena = Arena(2 * (sum(sizes) + spare_bytes))
    payloads = [payload for payload in arena.place(0, CPU, sizes) if payload.numel()]
    assert sorted(payload.numel() for payload in payloads) == sorted(filter(None, sizes))
    taken = sorted(map(stretch, payloads), key=lambda one: one.start)
    assert all(one.stop <= other.start for one, other in pairwise(taken))
    if taken:
        assert taken[-1].stop - taken[0].start <= sum(sizes) + spare_bytes


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 30)), min_size=1, max_size=12))
def test_payloads_of_one_dtype_are_aligned_to_it_without_a_byte_to_spare(items: list[tuple[int, int]]) -> None:
    sizes = [itemsize * count for itemsize, count in items]
    for payload, (itemsize, _) in zip(Arena(2 * sum(sizes)).place(0, CPU, sizes), items, strict=True):
        assert payload.data_ptr() % itemsize == 0


def test_behind_payloads_of_several_dtypes_is_a_gap_where_there_is_room() -> None:
    for payload in Arena(200).place(0, CPU, [10, 10, 10]):
        assert payload.data_ptr() % 16 == 0


def test_two_rounds_in_flight_have_memory_of_their_own_and_the_third_takes_the_first_ones() -> None:
    arena = Arena(256)
    first, second, third = (arena.place(number, CPU, [128])[0] for number in range(3))
    assert third.data_ptr() == first.data_ptr()
    assert set(stretch(first)).isdisjoint(stretch(second))


def test_a_round_that_does_not_fit_half_the_staging_is_refused() -> None:
    with pytest.raises(Mismatch, match="round 3 stages 65 bytes, half of the staging is 64"):
        Arena(128).place(3, CPU, [64, 1])
