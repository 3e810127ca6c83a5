"""Transportation, held against an assignment of every single unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from shardshift.plan.flow import match, transport
from shardshift.values import Infeasible
from shardshift.values.boxes import Ints


@dataclass(frozen=True)
class Problem:
    """Supplies, capacities, and what a unit of each origin saves at each place."""

    supply: Ints
    capacity: Ints
    saving: Ints

    def solve(self) -> tuple[int, Ints]:
        """What is saved, and units by origin and place, for savings that are positive."""
        origin, place = np.nonzero(self.saving)
        used = transport(self.supply, self.capacity, origin, place, self.saving[origin, place])
        keys = list(zip(used[0].tolist(), used[1].tolist(), strict=True))
        assert keys == sorted(set(keys)), "by origin, then place, each pair once"
        assert (used[2] > 0).all()
        units = np.zeros(self.saving.shape, np.int64)
        units[used[0], used[1]] = used[2]
        return int((self.saving * units).sum()), units

    def assigned(self) -> int:
        """What is saved at most, every unit a row and every place for one a column."""
        table = np.repeat(np.repeat(self.saving, self.supply, axis=0), self.capacity, axis=1)
        rows, columns = linear_sum_assignment(table, maximize=True)
        return int(table[rows, columns].sum())


@st.composite
def problems(draw: st.DrawFn, largest: int = 9) -> Problem:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    supply, capacity = random.integers(0, 4, n), random.integers(0, 4, m)
    capacity[-1] += max(0, supply.sum() - capacity.sum())
    density = draw(st.sampled_from([0.2, 0.7, 1.0]))
    saving = np.where(random.random((n, m)) < density, random.integers(0, largest, (n, m), endpoint=True), 0)
    return Problem(supply, capacity, saving)


@settings(max_examples=150)
@given(problems())
def test_no_assignment_of_single_units_saves_more(problem: Problem) -> None:
    saved, units = problem.solve()
    assert units.sum(axis=1).tolist() == problem.supply.tolist()
    assert (units.sum(axis=0) <= problem.capacity).all()
    assert saved == problem.assigned()


@settings(max_examples=30)
@given(problems())
def test_the_linear_program_saves_as_much(problem: Problem) -> None:
    n, m = problem.saving.shape
    answer = linprog(
        -problem.saving.reshape(-1).astype(float),
        A_eq=np.kron(np.eye(n), np.ones(m)), b_eq=problem.supply,
        A_ub=np.kron(np.ones(n), np.eye(m)), b_ub=problem.capacity,
    )  # fmt: skip
    assert answer.fun is not None
    assert round(-answer.fun) == problem.solve()[0]


@settings(max_examples=60)
@given(problems(largest=2**45))
def test_large_savings_are_compared_to_the_last_byte(problem: Problem) -> None:
    # Below 2**53 in all, so that SciPy's floats are exact too.
    assert problem.solve()[0] == problem.assigned()


def test_one_byte_in_2_to_the_45_decides() -> None:
    big = 2**45
    problem = Problem(np.array([1, 1]), np.array([1, 1]), np.array([[big, big - 1], [big - 1, big - 1]]))
    assert problem.solve()[1].tolist() == [[1, 0], [0, 1]]
    problem = Problem(np.array([1, 1]), np.array([1, 1]), np.array([[big, big], [big + 1, big]]))
    assert problem.solve()[1].tolist() == [[0, 1], [1, 0]]


def test_savings_beyond_53_bits_are_exact_where_they_share_a_divisor() -> None:
    # As floats 2**60 and 2**60 + 16 are equal; the one that saves more is the crossed one.
    big = 2**60
    problem = Problem(np.array([1, 1]), np.array([1, 1]), np.array([[big, big + 32], [big + 32, big + 48]]))
    assert problem.solve()[1].tolist() == [[0, 1], [1, 0]]


def test_savings_that_cannot_be_compared_exactly_are_refused() -> None:
    problem = Problem(np.array([1]), np.array([1, 1]), np.array([[2**60, 2**60 + 1]]))
    with pytest.raises(Infeasible, match="not exact in 64 bits; what to do"):
        problem.solve()


def test_among_equals_low_places_are_taken() -> None:
    problem = Problem(np.array([2]), np.array([1, 1, 1, 1]), np.array([[5, 5, 5, 5]]))
    assert problem.solve()[1].tolist() == [[1, 1, 0, 0]]
    assert Problem(np.array([2]), np.array([1, 1, 1]), np.zeros((1, 3), np.int64)).solve()[1].tolist() == [[1, 1, 0]]


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(Infeasible, match="3 ranks do not fit 2 devices"):
        Problem(np.array([3]), np.array([2]), np.array([[1]])).solve()


def test_nothing_goes_nowhere() -> None:
    assert Problem(np.zeros(2, np.int64), np.array([1]), np.ones((2, 1), np.int64)).solve()[1].tolist() == [[0], [0]]


@given(st.lists(st.integers(0, 4), min_size=1))
def test_supply_and_room_are_matched_in_order(parts: list[int]) -> None:
    supply = np.array(parts, np.int64)
    room = np.array([0, int(supply.sum()), 0], np.int64)
    for one, other in ((supply, room), (room, supply), (supply, supply[::-1])):
        origin, place, units = match(one, other)
        expected = list(
            zip(
                np.repeat(np.arange(len(one)), one).tolist(),
                np.repeat(np.arange(len(other)), other).tolist(),
                strict=True,
            )
        )
        found = [
            pair
            for *pair, count in zip(origin.tolist(), place.tolist(), units.tolist(), strict=True)
            for _ in range(count)
        ]
        assert list(map(tuple, found)) == expected
