"""The predicted time: the busiest lane and the fill of chains, held against a piece-by-piece simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.plan.bound import lower_bound
from shardshift.plan.timing import LEAST_PIECE_BYTES, Prediction, piece_bytes, piece_bytes_of, predict
from shardshift.values import Topology
from shardshift.values.topology import Rates

MIB = 2**20
GIB = 2**30


def predicted(
    topology: Topology, cell_bytes: list[int], transfers: list[tuple[int, int, int, int]], piece: int
) -> Prediction:
    """Transfers are (cell, source, target, hop)."""
    cell, source, target, hop = np.array(transfers, dtype=np.int64).reshape(-1, 4).T
    return predict(topology, np.array(cell_bytes), cell, source, target, hop, piece_bytes=piece)


def chain(receivers: int) -> list[tuple[int, int, int, int]]:
    return [(0, hop - 1, hop, hop) for hop in range(1, receivers + 1)]


def simulated_chain_s(pieces: list[int], rates: list[float], latency_s: float) -> float:
    """Hop h passes piece i on when it has arrived and the piece before it has left."""
    arrived = [0.0] * len(pieces)
    for rate in rates:
        free = 0.0
        for index, piece in enumerate(pieces):
            free = max(free, arrived[index]) + piece / rate
            arrived[index] = free + latency_s
    return arrived[-1]


def test_one_transfer_takes_its_bytes_over_the_slowest_lane_and_a_latency() -> None:
    topology = Topology(1, 2, Rates(5.0, 10.0), latency_s=0.25)
    found = predicted(topology, [20], [(0, 0, 1, 1)], piece=20)
    assert found == Prediction(4.25, 4.0, 2.0, 0.0, 0.0, 0.25, "device 1 in")


def test_links_carry_only_what_crosses_nodes() -> None:
    topology = Topology(2, 2, Rates.both(100.0), Rates(2.0, 4.0), latency_s=0.0)
    found = predicted(topology, [8, 8], [(0, 0, 1, 1), (1, 0, 2, 1), (1, 1, 3, 1)], piece=8)
    assert (found.node_in_s, found.node_out_s, found.device_out_s) == (8.0, 4.0, 0.16)
    assert (found.seconds, found.busiest) == (8.0, "node 1 in")


def test_a_slow_device_is_the_busiest() -> None:
    topology = Topology(1, 4, Rates.both(10.0), latency_s=0.0, device_exceptions=((2, Rates(10.0, 1.0)),))
    found = predicted(topology, [10, 10], [(0, 0, 1, 1), (1, 2, 3, 1)], piece=10)
    assert (found.seconds, found.busiest) == (10.0, "device 2 out")


def test_a_chain_of_r_pieces_to_k_receivers_costs_r_plus_k_less_one_over_r() -> None:
    topology = Topology(1, 8, Rates.both(1.0), latency_s=0.0)
    for receivers, pieces in ((1, 10), (2, 10), (7, 10), (7, 1)):
        found = predicted(topology, [100], chain(receivers), piece=100 // pieces)
        assert found.seconds == pytest.approx(100 * (pieces + receivers - 1) / pieces)


@pytest.mark.parametrize("replicas", [3, 8, 17, 64])
@pytest.mark.parametrize("cells", [1, 500])
def test_many_new_replicas_cost_about_as_much_as_one(replicas: int, cells: int) -> None:
    topology, each_bytes = Topology.preset("cluster-b").with_nodes(8), 20 * GIB // cells
    lengths = {
        count: [(cell, source, target, hop) for cell in range(cells) for _, source, target, hop in chain(count - 1)]
        for count in (2, replicas)
    }
    size = piece_bytes(20 * GIB, replicas - 1, 512 * MIB)
    one = predicted(topology, [each_bytes] * cells, lengths[2], size)
    many = predicted(topology, [each_bytes] * cells, lengths[replicas], size)
    # From 2 replicas to more, the network joins in: the copy is to be compared at the rate of the slowest lane.
    copy_s = 20 * GIB / (300e9 if replicas <= 8 else 100e9)
    assert one.seconds <= many.seconds <= 1.3 * copy_s


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5]),
)
def test_a_chain_alone_takes_no_longer_than_predicted(rates: list[float], sizes: list[int], latency_s: float) -> None:
    hops, whole = len(rates), 9
    topology = Topology(
        1,
        hops + 1,
        Rates.both(100.0),
        latency_s=latency_s,
        device_exceptions=tuple((hop, Rates(100.0, rate)) for hop, rate in enumerate(rates)),
    )
    # Cells of any size follow one another; a cell above the piece size is passed on in pieces.
    piece = max(sizes) if len(sizes) % 2 else min(whole, 4)
    transfers = [(cell, hop, hop + 1, hop + 1) for cell in range(len(sizes)) for hop in range(hops)]
    pieces = [part for size in sizes for part in [piece] * (size // piece) + [size % piece] * (size % piece > 0)]
    found = predicted(topology, sizes, transfers, piece)
    truth = simulated_chain_s(pieces, rates, latency_s)
    assert (found.seconds - found.fill_s) * (1 - 1e-9) <= truth <= found.seconds * (1 + 1e-9)
    if len(set(rates)) == 1 and len(set(pieces)) == 1:
        assert found.seconds == pytest.approx(truth)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_prediction_is_never_below_the_bound(data: st.DataObject) -> None:
    rate = st.sampled_from([1.0, 2.0, 5.0])
    rates = st.builds(Rates, rate, rate)
    topology = Topology(
        2,
        3,
        data.draw(rates),
        data.draw(rates),
        0.125,
        tuple(data.draw(st.dictionaries(st.integers(0, 5), rates, max_size=3)).items()),
        tuple(data.draw(st.dictionaries(st.integers(0, 1), rates, max_size=1)).items()),
    )
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    transfers, holds = [], []
    for cell in range(len(sizes)):
        order = data.draw(st.permutations(range(6)))
        holders = data.draw(st.integers(1, 5))
        holds += [(cell, device) for device in order[:holders]]
        depth = dict.fromkeys(order[:holders], 0)
        for target in order[holders : data.draw(st.integers(holders + 1, 6))]:
            source = data.draw(st.sampled_from(sorted(depth)))
            depth[target] = depth[source] + 1
            transfers.append((cell, source, target, depth[target]))
    wants = np.array([(cell, target) for cell, _, target, _ in transfers])
    least = lower_bound(topology, np.array(sizes), *wants.T, *np.array(holds).T)
    assert least.seconds <= predicted(topology, sizes, transfers, piece=4).seconds * (1 + 1e-9)


def test_nothing_takes_no_time() -> None:
    assert predicted(Topology(1, 2), [5], [], piece=1) == Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "nothing")


@pytest.mark.parametrize(
    ("transfer", "piece", "says"),
    [
        ((0, 1, 1, 1), 1, "transfer 0 of cell 0 stays on device 1"),
        ((0, 0, 1, 0), 1, "transfer 0 has hop 0"),
        ((0, 0, 2, 1), 1, "device 2 is not in"),
        ((0, 0, 1, 1), 0, "at least one byte"),
    ],
)
def test_transfers_that_cannot_be_are_refused(transfer: tuple[int, int, int, int], piece: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        predicted(Topology(1, 2), [5], [transfer], piece)


@given(st.integers(0, 2**45), st.integers(0, 5000), st.integers(1, 2**36))
def test_a_piece_fits_staging_and_is_neither_tiny_nor_too_large(most: int, hops: int, staging: int) -> None:
    piece = piece_bytes(most, hops, staging)
    assert 1 <= piece <= staging
    assert piece >= min(LEAST_PIECE_BYTES, most, staging)
    if piece > LEAST_PIECE_BYTES and hops > 1:
        assert most / piece >= (hops - 1) / 0.3


@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 64 * MIB),
)
def test_pieces_are_only_so_small_that_no_chain_takes_much_longer_to_fill(
    cells: list[tuple[int, int]], staging: int
) -> None:
    transfers = [(cell, *end) for cell, (_, depth) in enumerate(cells) for end in enumerate(range(1, depth + 1))]
    cell, receiver, hop = (np.array(column, np.int64) for column in zip(*transfers, strict=True))
    piece = piece_bytes_of(np.array([size for size, _ in cells]), cell, receiver, hop, staging)
    by_device = [[(size, device) for size, depth in cells if depth > device] for device in range(9)]
    received = sum(size for size, _ in by_device[0])
    waited_for = max(sum(size * before for size, before in one) for one in by_device)
    assert 1 <= piece <= staging
    if piece > LEAST_PIECE_BYTES:
        assert all((depth - 1) * min(piece, size) <= 0.3 * received for size, depth in cells)
    if waited_for <= 0.25 * received:
        assert piece == min(received, staging)
    else:
        assert piece == piece_bytes(received, max(depth for _, depth in cells), staging)


def test_chains_of_small_tensors_among_large_ones_do_not_make_pieces_small() -> None:
    large = [(n, 0, n, 1) for n in range(4)]
    norms = [(4, source, source + 1, source + 1) for source in range(4)]
    cell, _, receiver, hop = (np.array(column, np.int64) for column in zip(*large, *norms, strict=True))
    sizes = np.array([GIB] * 4 + [MIB])
    assert piece_bytes_of(sizes, cell, receiver, hop, 16 * MIB) == 16 * MIB
    assert piece_bytes_of(sizes, cell, receiver, hop, 16 * MIB, epochs=10_000) < MIB


def test_who_does_not_forward_takes_what_staging_allows() -> None:
    assert piece_bytes(10 * GIB, 1, 256 * MIB) == 256 * MIB
    with pytest.raises(ValueError, match="staging"):
        piece_bytes(1, 1, 0)
