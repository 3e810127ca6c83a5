"""The predicted time of a set of transfers: the busiest lane, plus what it takes to fill the longest chain.

The model, in words: pieces flow without a barrier between rounds, every lane is kept busy, and lanes do not disturb
one another. So:

1. Every transfer loads the out lane of its source, the in lane of its target and, if they sit on two nodes, the
   links of both. A lane is busy for its bytes over its rate; nothing ends before the busiest lane does.
2. A transfer at hop 1 comes from an old holder. At hop h > 1 it comes from a device that receives the cell itself at
   hop h - 1, and so it starts when h - 1 pieces have passed: a chain of R pieces to k receivers costs
   (R + k - 1) / R of one copy. That *fill* is the time of one piece on the slowest lane of the cell's transfers, for
   each hop after the first, plus one latency a hop. Cells that share a chain follow one another through it, so the
   fill counts once: that of the cell for which it is longest.
3. The prediction is the sum of the two.

For one chain of equal lanes this is exact; for one of unequal lanes it errs on the long side by at most the fill.
Left out: contention in the fabric, local copies (they run under the wire), the packing of small pieces, and waiting:
for a peer that serves another, and for the last message of a round. So it compares plans and is no clock. It is never
below ``bound.lower_bound`` for the needs that the transfers meet. ``simulator.simulate`` runs compiled programs
instead, piece by piece, and sees the waiting. There, with 256 MiB of staging, programs take up to 1.1 of the prediction
on the paper's changes and up to 1.25 where every receiver wants every sender (PP8 -> TP8). Where all that moves between
many devices and also fills the links of several nodes, it is 1.4 to 1.6 (PP8TP2DP2 -> PP2TP8DP2 on 4 nodes): the
timetable of programs evens out devices and knows no links. Rejected here: an event simulation of pieces, which takes
minutes at 131,072 devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..values import Topology
from ..values.boxes import Ints

Floats = NDArray[np.float64]

LEAST_PIECE_BYTES = 256 * 1024
"""Below this a piece costs more in calls and latency than it saves in fill."""

MOST_FILL = 0.25
"""The fill of a chain over the time of one copy that ``piece_bytes`` aims at.

The goal is a chain within 1.3 of one copy; the rest is for latencies.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a set of transfers.

    Attributes:
        seconds: the busiest lane and the fill; 0 if nothing moves.
        device_in_s: seconds that the busiest inbound device lane is busy.
        device_out_s: likewise outbound.
        node_in_s: likewise the busiest inbound network link.
        node_out_s: likewise outbound.
        fill_s: seconds until the last hop of the slowest chain is under way, latencies included.
        busiest: the busiest lane in words, e.g. ``device 3 out`` or ``node 0 in``; of equals the first in the order
            above, then the lowest id. ``nothing`` if nothing moves.
    """

    seconds: float
    device_in_s: float
    device_out_s: float
    node_in_s: float
    node_out_s: float
    fill_s: float
    busiest: str


def predict(
    topology: Topology,
    cell_bytes: Ints,
    cell: Ints,
    source: Ints,
    target: Ints,
    hop: Ints,
    *,
    piece_bytes: int,
) -> Prediction:
    """Predict how long the transfers take, all started at once.

    Args:
        topology: the rates.
        cell_bytes: bytes of each cell, shape (cells,).
        cell: the cell that each transfer carries, shape (transfers,).
        source: the device that sends it.
        target: the device that receives it.
        hop: 1 if the source held the cell before the move, h if it receives the cell at hop h - 1.
        piece_bytes: the size in which cells are passed on.

    Raises:
        ValueError: if a transfer stays on its device, a hop is below 1, the piece is empty, or a device is outside.
    """
    if piece_bytes < 1:
        raise ValueError(f"a piece must hold at least one byte, not {piece_bytes}")
    if not len(cell):
        return Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "nothing")
    if len(still := np.flatnonzero(source == target)):
        raise ValueError(f"transfer {still[0]} of cell {cell[still[0]]} stays on device {source[still[0]]}")
    if hop.min() < 1:
        raise ValueError(f"transfer {hop.argmin()} has hop {hop.min()}; hops count from 1")

    source_node, target_node = topology.nodes_of(source), topology.nodes_of(target)
    moved_bytes, crosses = cell_bytes[cell], source_node != target_node
    rates = (
        topology.device_in_bytes_per_s(),
        topology.device_out_bytes_per_s(),
        topology.node_in_bytes_per_s(),
        topology.node_out_bytes_per_s(),
    )
    lanes = (
        (target, moved_bytes),
        (source, moved_bytes),
        (target_node[crosses], moved_bytes[crosses]),
        (source_node[crosses], moved_bytes[crosses]),
    )
    busy_s, busiest_lane = [], []
    for rate, (lane, carried_bytes) in zip(rates, lanes, strict=True):
        seconds = np.bincount(lane, carried_bytes, len(rate)) / rate
        busiest_lane.append(int(seconds.argmax()))
        busy_s.append(float(seconds[busiest_lane[-1]]))
    worst = int(np.argmax(busy_s))

    # The rate of a piece that is alone on all lanes that the transfer uses.
    device_in, device_out, node_in, node_out = rates
    alone = np.minimum(device_out[source], device_in[target])
    alone[crosses] = np.minimum(
        alone[crosses], np.minimum(node_out[source_node[crosses]], node_in[target_node[crosses]])
    )
    fill_s = _fill_s(cell_bytes, cell, hop, alone, piece_bytes, topology.latency_s)
    device_in_s, device_out_s, node_in_s, node_out_s = busy_s
    name = ("device {} in", "device {} out", "node {} in", "node {} out")[worst].format(busiest_lane[worst])
    return Prediction(busy_s[worst] + fill_s, device_in_s, device_out_s, node_in_s, node_out_s, fill_s, name)


def _fill_s(cell_bytes: Ints, cell: Ints, hop: Ints, alone: Floats, piece_bytes: int, latency_s: float) -> float:
    """The longest fill of any cell; ``alone`` is each transfer's rate in bytes/s when nothing else moves."""
    slowest = np.full(len(cell_bytes), np.inf)
    np.minimum.at(slowest, cell, alone)
    deepest = np.zeros(len(cell_bytes), dtype=np.int64)
    np.maximum.at(deepest, cell, hop)
    piece_s = np.minimum(cell_bytes, piece_bytes) / slowest
    return float(((deepest - 1).clip(min=0) * piece_s + deepest * latency_s).max())


def piece_bytes_of(
    cell_bytes: Ints, cell: Ints, receiver: Ints, hop: Ints, staging_bytes: int, *, epochs: int = 1
) -> int:
    """``piece_bytes`` for a set of transfers.

    Chains that carry so little that to fill them costs no more than ``MOST_FILL`` in pieces of any size have no say:
    those of norms within a TP group, say, which go along with what else is sent. A device at hop h waits for h - 1
    pieces, and for no more than h - 1 times what it receives there.

    Args:
        cell_bytes: bytes of each cell, shape (cells,).
        cell: the cell that each transfer carries, shape (transfers,).
        receiver: who receives it, by any numbers from 0.
        hop: 1 if the source held the cell before the move, more if it receives the cell itself.
        staging_bytes: the most that a device may stage.
        epochs: in how many parts they are carried out.
    """
    moved_bytes, late = cell_bytes[cell], np.flatnonzero(hop > 1)
    most_bytes = int(np.bincount(receiver, moved_bytes).max(initial=0)) // epochs
    waited_for = np.bincount(receiver[late], moved_bytes[late] * (hop[late] - 1)).max(initial=0)
    deepest = int(hop.max(initial=1)) if waited_for > most_bytes * MOST_FILL else 1
    return piece_bytes(most_bytes, deepest, staging_bytes)


def piece_bytes(most_bytes: int, deepest_hop: int, staging_bytes: int) -> int:
    """Choose the size in which cells are passed on.

    A chain of R pieces to k receivers costs (R + k - 1) / R of one copy, so R = (k - 1) / ``MOST_FILL`` pieces are
    enough. Fewer and larger pieces cost fewer calls, so no more are made than that, up to rounding.

    Args:
        most_bytes: bytes that the longest chain carries in all; the piece is at most this.
        deepest_hop: receivers of the longest chain; 1 or less means that nobody forwards.
        staging_bytes: the most that a device may stage; the piece is at most this, whatever the rest says.

    Returns:
        Bytes: a multiple of 256 KiB, unless ``most_bytes`` or ``staging_bytes`` is the limit.

    Raises:
        ValueError: if ``staging_bytes`` is below 1.
    """
    if staging_bytes < 1:
        raise ValueError(f"staging must hold at least one byte, not {staging_bytes}")
    whole = min(max(most_bytes, 1), staging_bytes)
    if deepest_hop <= 1:
        return whole
    enough = int(most_bytes * MOST_FILL / (deepest_hop - 1))
    return min(whole, max(LEAST_PIECE_BYTES, enough - enough % LEAST_PIECE_BYTES))
