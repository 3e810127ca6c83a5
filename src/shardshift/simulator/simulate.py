"""How long a move would take on a modelled cluster.

The model, deliberately plain:

1. A device has four independent lanes: out and in, inside its node (NVLink, shared memory) and across nodes
   (its share of the network). A lane carries its bytes at its rate.
2. A round lasts as long as its busiest lane, plus one latency if anything moves at all.
3. Rounds follow one another: no round starts before the last has ended everywhere.

Left out: contention in the fabric beyond a device's own lanes, local copies (they run under the wire), the cost
of packing small pieces, and overlap of rounds. So the model compares plans; it does not predict a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..schedule import Program, peak_extra_bytes
from ..values import Topology


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the model says.

    Attributes:
        total_s: seconds from the first round's start to the last one's end.
        round_s: seconds per round.
        link_bytes: bytes by (source device, target device).
        peak_extra_bytes: per device, see ``shardshift.schedule.peak_extra_bytes``.
    """

    total_s: float
    round_s: tuple[float, ...]
    link_bytes: dict[tuple[int, int], int]
    peak_extra_bytes: dict[int, int]


def simulate(
    programs: Mapping[int, Program],
    topology: Topology,
    *,
    inside_bytes_per_s: float,
    cross_bytes_per_s: float,
    latency_s: float,
) -> Simulation:
    """Time the programs of a plan.

    Args:
        programs: all programs of one plan.
        topology: which devices share a node.
        inside_bytes_per_s: rate of a device within its node, per direction.
        cross_bytes_per_s: rate of a device to other nodes, per direction.
        latency_s: what a round costs besides its bytes.
    """
    link_bytes: Counter[tuple[int, int]] = Counter()
    round_s = []
    for steps in zip(*(program.rounds for program in programs.values()), strict=True):
        busy_s: Counter[tuple[int, str, bool]] = Counter()
        for source, step in zip(programs, steps, strict=True):
            for send in step.sends:
                inside = topology.node_of(source) == topology.node_of(send.peer)
                lane_s = send.piece.nbytes / (inside_bytes_per_s if inside else cross_bytes_per_s)
                busy_s[source, "out", inside] += lane_s
                busy_s[send.peer, "in", inside] += lane_s
                link_bytes[source, send.peer] += send.piece.nbytes
        round_s.append(max(busy_s.values()) + latency_s if busy_s else 0.0)
    return Simulation(
        sum(round_s),
        tuple(round_s),
        dict(link_bytes),
        {device: peak_extra_bytes(program) for device, program in programs.items()},
    )
