"""How long a move would take on a modelled cluster.

The programs are run message by message, without data (``rendezvous``):

1. A message may start when both ends are in the round that holds it.
2. It uses *lanes*: its source's out, its target's in, and between nodes also the link of either node. Lanes are
   serial: it starts when all its lanes are free, and keeps each for its bytes at that lane's rate. So a fast link
   takes the next message while a slow device still receives the first. It arrives when its slowest lane is done, plus
   one latency.
3. Of the messages that may start, the one that can do so first does; of equals, the one that became ready first.
4. A device goes on to its next round when all messages of its round have arrived. Rounds are its own: nobody waits
   for a device that it has no message with.
5. At the fence between two epochs all wait for the last. The agreement itself is not timed.

Left out: contention in the fabric, local copies (they run under the wire), and the cost of packing small pieces. So
the model compares plans and programs; it does not predict a clock. Shared lanes in fair parts were rejected: every
message that starts or ends would change the rates of all others.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..schedule import Program, peak_extra_bytes
from ..values import Topology
from .rendezvous import Message, Rendezvous

_Lane: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the model says.

    Attributes:
        total_s: seconds from the start to the end of the last device.
        device_s: per device, seconds until its last round has ended.
        busy_s: per lane, such as ``("device out", 3)`` or ``("link in", 0)``, seconds that it carries bytes.
        link_bytes: bytes by (source device, target device).
        peak_extra_bytes: per device, what it needs beside its old state (``schedule.peak``).
    """

    total_s: float
    device_s: dict[int, float]
    busy_s: dict[tuple[str, int], float]
    link_bytes: dict[tuple[int, int], int]
    peak_extra_bytes: dict[int, int]


def simulate(programs: Mapping[int, Program], topology: Topology) -> Simulation:
    """Time the programs of a plan.

    Args:
        programs: all programs of one plan.
        topology: which devices share a node, rates of devices and links, latency.

    Raises:
        Mismatch: if the two ends of a message do not meet, or devices wait for one another.
        ValueError: if a device is outside the topology.
    """
    return _Clock(programs, topology).run()


class _Clock:
    """Lanes and devices with the times at which they are free."""

    def __init__(self, programs: Mapping[int, Program], topology: Topology) -> None:
        self._programs, self._topology = programs, topology
        self._rates = {
            "device out": topology.device_out_bytes_per_s(),
            "device in": topology.device_in_bytes_per_s(),
            "link out": topology.node_out_bytes_per_s(),
            "link in": topology.node_in_bytes_per_s(),
        }
        self._rendezvous = Rendezvous(programs)
        self._began_s = dict.fromkeys(programs, 0.0)  # per device, its round
        self._last_s = dict.fromkeys(programs, 0.0)  # per device, the latest arrival in its round
        self._free_s: dict[_Lane, float] = {}
        self._busy_s: defaultdict[_Lane, float] = defaultdict(float)
        self._link_bytes: Counter[tuple[int, int]] = Counter()
        self._ready: list[tuple[float, int, Message]] = []
        self._count = 0

    def run(self) -> Simulation:
        self._run_epoch()
        while self._rendezvous.pass_fence():
            self._last_s = dict.fromkeys(self._programs, max(self._last_s.values()))
            self._run_epoch()
        return Simulation(
            max(self._last_s.values(), default=0.0),
            self._last_s,
            dict(self._busy_s),
            dict(self._link_bytes),
            {device: peak_extra_bytes(program) for device, program in self._programs.items()},
        )

    def _run_epoch(self) -> None:
        for device in self._programs:
            self._go_on(device)
        while self._ready:
            earliest_s, number, message = heapq.heappop(self._ready)
            lanes = self._lanes(message)
            start_s = max([earliest_s, *(self._free_s.get(lane, 0.0) for lane in lanes)])
            if start_s > earliest_s:
                heapq.heappush(self._ready, (start_s, number, message))
                continue
            self._carry(message, lanes, start_s)
            for device in self._rendezvous.complete(message):
                self._go_on(device)

    def _carry(self, message: Message, lanes: dict[_Lane, float], start_s: float) -> None:
        size_bytes = message.nbytes
        for lane, rate in lanes.items():
            self._busy_s[lane] += size_bytes / rate
            self._free_s[lane] = start_s + size_bytes / rate
        end_s = start_s + size_bytes / min(lanes.values()) + self._topology.latency_s
        for device in (message.source, message.target):
            self._last_s[device] = max(self._last_s[device], end_s)
        self._link_bytes[message.source, message.target] += size_bytes

    def _go_on(self, device: int) -> None:
        """Begin rounds until one has messages."""
        while self._rendezvous.is_through(device) and self._rendezvous.has_more(device):
            self._began_s[device] = self._last_s[device]
            for message in self._rendezvous.enter_next(device):
                # The other end entered its round earlier in this run, but perhaps later in the time that is modelled.
                ready_s = max(self._began_s[message.source], self._began_s[message.target])
                heapq.heappush(self._ready, (ready_s, self._count, message))
                self._count += 1

    def _lanes(self, message: Message) -> dict[_Lane, float]:
        """The lanes of a message, with their rates in bytes/s."""
        source, target = message.source, message.target
        lanes = [("device out", source), ("device in", target)]
        nodes = self._topology.node_of(source), self._topology.node_of(target)
        if nodes[0] != nodes[1]:
            lanes += [("link out", nodes[0]), ("link in", nodes[1])]
        return {(kind, index): float(self._rates[kind][index]) for kind, index in lanes}
