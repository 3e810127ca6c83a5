"""The lower bound: never above what the best plan needs, and equal to the linear programmes that it stands for.

Oracles are SciPy's HiGHS on programmes that know nothing of groups, classes or nested sets: the best plan over all
ways to route every cell (splits, forwarding and relays included), and the best split among holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from shardshift.plan import bound
from shardshift.plan.bound import LowerBound, lower_bound
from shardshift.values import Topology
from shardshift.values.topology import Rates

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Needs:
    """Per cell its bytes, holders and wanters."""

    topology: Topology
    cell_bytes: tuple[int, ...]
    holders: tuple[frozenset[int], ...]
    wanters: tuple[frozenset[int], ...]

    def bound(self) -> LowerBound:
        return lower_bound(self.topology, np.array(self.cell_bytes), *pairs(self.wanters), *pairs(self.holders))


def pairs(devices: Sequence[frozenset[int]]) -> tuple[Ints, Ints]:
    """(cell, device) of every entry, as two arrays, in no helpful order."""
    found = [(cell, device) for cell, some in enumerate(devices) for device in sorted(some, reverse=True)][::-1]
    both = np.array(found, dtype=np.int64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def topologies(nodes: int, per_node: int) -> st.SearchStrategy[Topology]:
    rate = st.sampled_from([1.0, 2.0, 3.0, 10.0])
    rates = st.builds(Rates, rate, rate)
    return st.builds(
        Topology,
        st.just(nodes),
        st.just(per_node),
        rates,
        rates,
        st.just(0.0),
        st.dictionaries(st.integers(0, nodes * per_node - 1), rates, max_size=3).map(lambda d: tuple(d.items())),
        st.dictionaries(st.integers(0, nodes - 1), rates, max_size=1).map(lambda d: tuple(d.items())),
    )


@st.composite
def needs(draw: st.DrawFn, nodes: int = 2, per_node: int = 2, cells: int = 3) -> Needs:
    topology = draw(topologies(nodes, per_node))
    devices = range(topology.devices)
    held, wanted = [], []
    count = draw(st.integers(1, cells))
    for _ in range(count):
        holders = draw(st.frozensets(st.sampled_from(devices), min_size=1, max_size=topology.devices - 1))
        held.append(holders)
        wanted.append(draw(st.frozensets(st.sampled_from(sorted(set(devices) - holders)))))
    cell_bytes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return Needs(topology, tuple(cell_bytes), tuple(held), tuple(wanted))


def routes(holders: frozenset[int], wanters: frozenset[int], devices: range) -> Iterator[dict[int, int]]:
    """Every way to bring a cell from its holders to its wanters, as source by receiver; others may relay."""
    others = sorted(set(devices) - holders - wanters)
    for relays in itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1)):
        receivers = sorted(wanters) + list(relays)
        for sources in itertools.product(*([d for d in (*holders, *receivers) if d != to] for to in receivers)):
            route = dict(zip(receivers, sources, strict=True))
            if all(reaches_a_holder(route, receiver) for receiver in receivers):
                yield route


def reaches_a_holder(route: dict[int, int], device: int) -> bool:
    for _ in route:
        device = route.get(device, device)
    return device not in route


def best_plan_s(problem: Needs) -> float:
    """The busiest lane of the best plan that may mix all routes of every cell."""
    topology = problem.topology
    rates = (
        topology.device_in_bytes_per_s(),
        topology.device_out_bytes_per_s(),
        topology.node_in_bytes_per_s(),
        topology.node_out_bytes_per_s(),
    )
    loads, of_cell = [], []
    for cell, nbytes in enumerate(problem.cell_bytes):
        for route in routes(problem.holders[cell], problem.wanters[cell], range(topology.devices)):
            lanes = [np.zeros(len(rate)) for rate in rates]
            for receiver, source in route.items():
                lanes[0][receiver] += nbytes
                lanes[1][source] += nbytes
                if topology.node_of(receiver) != topology.node_of(source):
                    lanes[2][topology.node_of(receiver)] += nbytes
                    lanes[3][topology.node_of(source)] += nbytes
            loads.append(np.concatenate([lane / rate for lane, rate in zip(lanes, rates, strict=True)]))
            of_cell.append(cell)
    load = np.column_stack([*loads, np.full(len(loads[0]), -1.0)])
    shares = np.zeros((len(problem.cell_bytes), len(loads) + 1))
    shares[of_cell, range(len(loads))] = 1
    cost = np.eye(len(loads) + 1)[-1]
    return solved(cost, load, shares, np.ones(len(shares)))


def solved(cost: Floats, load: Floats, split: Floats, amounts: Floats) -> float:
    found = linprog(cost, load, np.zeros(len(load)), split, amounts)
    assert found.fun is not None, found.message
    return float(found.fun)


def best_split_s(cell_bytes: Sequence[int], holders: Sequence[frozenset[int]], rate: Floats) -> float:
    """The busiest holder when every cell leaves its holders once, in the best split."""
    columns = [(cell, holder) for cell, some in enumerate(holders) for holder in sorted(some)]
    load = np.zeros((len(rate), len(columns) + 1))
    split = np.zeros((len(holders), len(columns) + 1))
    for column, (cell, holder) in enumerate(columns):
        load[holder, column] = split[cell, column] = 1
    load[:, -1] = -rate
    cost = np.eye(len(columns) + 1)[-1]
    return solved(cost, load, split, np.array(cell_bytes, dtype=float))


def split_s(cell_bytes: Sequence[int], holders: Sequence[frozenset[int]], rate: Floats) -> tuple[float, bool]:
    cell, holder = pairs(holders)
    order = np.lexsort((holder, cell))
    return bound.least_busiest(np.array(cell_bytes), cell[order], holder[order], rate)


def about(value: float) -> object:
    return pytest.approx(value, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(needs())
def test_no_plan_beats_the_bound(problem: Needs) -> None:
    found = problem.bound()
    assert found.seconds <= best_plan_s(problem) * (1 + 1e-7) + 1e-9
    parts = (found.device_in_s, found.node_in_s, found.device_out_s, found.node_out_s, found.all_out_s)
    assert found.seconds == max(parts) == getattr(found, f"{found.limited_by}_s")


@settings(max_examples=60, deadline=None)
@given(needs(nodes=3, per_node=3, cells=8))
def test_each_part_is_what_its_definition_says(problem: Needs) -> None:
    found, topology = problem.bound(), problem.topology
    lacking, entering = np.zeros(topology.devices), np.zeros(topology.nodes)
    crossing: list[tuple[int, frozenset[int]]] = []
    leaving: list[tuple[int, frozenset[int]]] = []
    for nbytes, holders, wanters in zip(problem.cell_bytes, problem.holders, problem.wanters, strict=True):
        holder_nodes = frozenset(map(topology.node_of, holders))
        entered = set(map(topology.node_of, wanters)) - holder_nodes
        lacking[list(wanters)] += nbytes
        entering[list(entered)] += nbytes
        if wanters:
            leaving.append((nbytes, holders))
        if entered:
            crossing.append((nbytes, holder_nodes))

    assert found.device_in_s == about((lacking / topology.device_in_bytes_per_s()).max())
    assert found.node_in_s == about((entering / topology.node_in_bytes_per_s()).max())
    device_out, node_out = topology.device_out_bytes_per_s(), topology.node_out_bytes_per_s()
    assert found.all_out_s == about(max(lacking.sum() / device_out.sum(), entering.sum() / node_out.sum()))
    for part, cells, rate in ((found.device_out_s, leaving, device_out), (found.node_out_s, crossing, node_out)):
        sizes, sets = [nbytes for nbytes, _ in cells], [some for _, some in cells]
        assert part == about(best_split_s(sizes, sets, rate) if cells else 0.0)
    assert found.exact


@settings(max_examples=60, deadline=None)
@given(needs(nodes=1, per_node=7, cells=9))
def test_where_the_programme_is_too_large_the_bound_by_sets_stays_below_it(problem: Needs) -> None:
    optimum = best_split_s(problem.cell_bytes, problem.holders, problem.topology.device_out_bytes_per_s())
    for most_nesting in (0, bound.NESTING_ENTRIES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bound, "LP_ENTRIES", 0)
            patch.setattr(bound, "NESTING_ENTRIES", most_nesting)
            seconds, exact = split_s(problem.cell_bytes, problem.holders, problem.topology.device_out_bytes_per_s())
        assert seconds <= optimum * (1 + 1e-7) + 1e-9
        assert not exact or seconds == about(optimum)


@st.composite
def nested_sets(draw: st.DrawFn) -> list[frozenset[int]]:
    """Halves of halves of eight devices, as replicas, slices and optimizer ranges make them."""
    sizes = st.sampled_from([1, 2, 4, 8])
    blocks = st.tuples(sizes, st.integers(0, 7)).map(lambda b: frozenset(range(b[1] // b[0] * b[0], 8)[: b[0]]))
    return draw(st.lists(blocks, min_size=1, max_size=12))


@settings(max_examples=60, deadline=None)
@given(nested_sets(), st.data())
def test_nested_holder_sets_need_no_solver(sets: list[frozenset[int]], data: st.DataObject) -> None:
    cell_bytes = data.draw(st.lists(st.integers(0, 9), min_size=len(sets), max_size=len(sets)))
    rate = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=8, max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "linprog", None)
        seconds, exact = split_s(cell_bytes, sets, np.array(rate))
    assert exact
    assert seconds == about(best_split_s(cell_bytes, sets, np.array(rate)))


def test_one_replica_to_many_costs_one_copy() -> None:
    topology = Topology(1, 65, latency_s=0.5)
    for receivers in (1, 64):
        problem = Needs(topology, (50 * 10**9,), (frozenset({0}),), (frozenset(range(1, 1 + receivers)),))
        assert problem.bound().seconds == 2.5


def test_a_fast_replica_sends_more_than_a_slow_one() -> None:
    topology = Topology(1, 3, Rates.both(3.0), latency_s=0.0, device_exceptions=((0, Rates.both(1.0)),))
    problem = Needs(replace(topology), (8, 4), (frozenset({0, 1}),) * 2, (frozenset({2}),) * 2)
    assert problem.bound().device_out_s == 12 / (1 + 3)


def test_a_node_brings_in_once_what_all_its_devices_lack() -> None:
    topology = Topology(2, 4, Rates.both(100.0), Rates.both(1.0), latency_s=0.0)
    found = Needs(topology, (10,), (frozenset({0}),), (frozenset({1, 4, 5, 6}),)).bound()
    assert (found.node_in_s, found.node_out_s, found.limited_by) == (10.0, 10.0, "node_in")


def test_nothing_lacking_takes_no_time() -> None:
    found = Needs(Topology(1, 2), (7,), (frozenset({0}),), (frozenset(),)).bound()
    assert (found.seconds, found.exact) == (0.0, True)


@pytest.mark.parametrize(
    ("want", "hold", "says"),
    [
        ([(0, 1), (1, 1)], [(0, 0)], "1 wanted cells have no holder, the first is cell 1"),
        ([(0, 1)], [(0, 0), (0, 1)], "device 1 wants cell 0, which it holds"),
        ([(0, 1), (0, 1)], [(0, 0)], "need of device 1 and cell 0 is stated twice"),
        ([(0, 1)], [(0, 0), (0, 0)], "holding of device 0 and cell 0 is stated twice"),
        ([(0, 4)], [(0, 0)], "device 4 is not in"),
        ([(0, 1)], [], "no holder"),
    ],
)
def test_needs_that_cannot_be_are_refused(want: list[tuple[int, int]], hold: list[tuple[int, int]], says: str) -> None:
    wants, holds = (np.array(some, dtype=np.int64).reshape(-1, 2) for some in (want, hold))
    with pytest.raises(ValueError, match=says):
        lower_bound(Topology(2, 2), np.array([5, 5]), *wants.T, *holds.T)


def test_a_hundred_thousand_devices_with_ranges_of_their_own_are_exact() -> None:
    """8 pipeline stages, 16 replicas of parameters a stage, and one optimizer range a device; all leave once."""
    topology = Topology(2**10, 2**7, Rates.both(1.0), Rates.both(1e9), latency_s=0.0)
    devices = np.arange(topology.devices)
    stage = devices // 2**14
    cell_bytes = np.concatenate([np.full(len(devices), 3), np.full(8, 2**14)])
    want = np.concatenate([devices, np.unique(stage) + len(devices)])
    receiver = np.concatenate([(devices + 2**16) % len(devices), (np.arange(8) * 2**14 + 2**16) % len(devices)])
    found = lower_bound(
        topology,
        cell_bytes,
        want,
        receiver,
        np.concatenate([devices, stage + len(devices)]),
        np.concatenate([devices, devices]),
    )
    assert found.exact
    assert found.device_out_s == 4.0
