"""Defragmentation (the paper's Fig. 10): memory of each device before and after a scale-in, and the nodes it frees.

PP16TP1 → PP8TP1 on nodes of 4, the paper's change of GPT3-64B, with hidden size, vocabulary and positions divided.
One process stands for a device. The change is made twice on the same state, each time by the engine and with the old
tensors given back (``release``): by the paper's sketch alone, and with joint placement. A process's memory is what
the kernel has resident for it, less what it has without any state; so a device that the change frees is one that
holds next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from _memory import resident_bytes, trim
from _moves import Ways, shrunk
from _processes import Rank, run_ranks
from _state import check, coded, copies, dtype_of

from shardshift.engine import Mover, names_of
from shardshift.plan import Plan
from shardshift.plan.allocator import free_nodes
from shardshift.report.bench import Curve, Row
from shardshift.values import Topology

MiB: Final = 2**20
BUSY: Final = 0.3
"""A device is busy if it has more than this part of the most that any has."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        layers: of the model.
        hidden: of the paper's model.
        shrink: what hidden size, vocabulary and positions are divided by.
        prev: the configuration before.
        curr: the one after.
        preset: of the cluster.
    """

    layers: int = 64
    hidden: int = 8192
    shrink: int = 32
    prev: str = "PP16TP1"
    curr: str = "PP8TP1"
    preset: str = "cluster-a"


TINY: Final = Scale(layers=8, hidden=4096, shrink=16, prev="PP8TP1", curr="PP4TP1")


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row], Sequence[Curve]]:
    """All rows and the memory of each device; see ``cli.bench.Run``."""
    scale = scale or Scale()
    where = Topology.preset(scale.preset)
    ways = Ways.of(shrunk(scale.layers, scale.hidden, scale.shrink), scale.prev, scale.curr, where)
    topology, devices = ways.change.topology, ways.change.devices
    say(f"{scale.prev} → {scale.curr}: {ways.joint.state_bytes / MiB:.0f} MiB of state, {len(devices)} processes")
    plans = {"migration alone": ways.phases[0], "joint placement": ways.joint}
    found = {name: run_ranks(len(devices), partial(_measure, plan=plan)) for name, plan in plans.items()}
    memory = {"before": [before for before, _ in found["joint placement"]]}
    memory |= {name: [after for _, after in pairs] for name, pairs in found.items()}
    case = f"{scale.prev} → {scale.curr}"
    nodes = {name: _busy_nodes(held, topology) for name, held in memory.items()}
    free = {name: topology.nodes - len(busy) for name, busy in nodes.items()}
    planned = {name: free_nodes(plan.curr.devices, topology, devices) for name, plan in plans.items()}
    for name, count in planned.items():
        if count != free[name]:
            raise AssertionError(f"{name}: {free[name]} nodes hold next to nothing, {count} were planned to be free")
    joint, alone = free["joint placement"], free["migration alone"]
    rows = [
        Row.of(f"{case}: nodes in use", len(nodes["joint placement"]), "nodes", baseline="migration alone",
               theirs=len(nodes["migration alone"]), most_ratio=0.5),
        Row.of(f"{case}: whole nodes freed", joint, "nodes", baseline="migration alone", theirs=alone),
        Row.of(f"{case}: moved", ways.joint.moved_bytes / MiB, "MiB", baseline="migrate, then defragment",
               theirs=sum(plan.moved_bytes for plan in ways.phases) / MiB, most_ratio=1),
    ]  # fmt: skip
    for name, held in memory.items():
        busy = [device for device in devices if _is_busy(held, device)]
        per_node = max(sum(topology.node_of(device) == node for device in busy) for node in nodes[name])
        rows += [
            Row.of(f"{case}: devices in use on the fullest node, {name}", per_node, "devices"),
            Row.of(f"{case}: memory of a device in use, {name}", max(held) / MiB, "MiB"),
            Row.of(f"{case}: memory of the emptiest device, {name}", max(min(held), 0) / MiB, "MiB"),
        ]
    curves = [
        Curve.of("memory by device", name, "device", "MiB resident", ((i, held[i] / MiB) for i in devices))
        for name, held in memory.items()
    ]
    described = (
        f"GPT of {scale.layers} layers, hidden {scale.hidden // scale.shrink}: 1/{scale.shrink**2} of the bytes of the "
        f"paper's hidden {scale.hidden}; nodes of {topology.devices_per_node}; resident memory of one process a device "
        "less that without state"
    )
    return described, rows, curves


def _is_busy(held: Sequence[int], device: int) -> bool:
    return held[device] > BUSY * max(held)


def _busy_nodes(held: Sequence[int], topology: Topology) -> set[int]:
    return {topology.node_of(device) for device in range(len(held)) if _is_busy(held, device)}


def _measure(rank: Rank, plan: Plan) -> tuple[int, int]:
    """Resident bytes of state before and after the change."""
    device = rank.index
    with Mover(rank.store("move"), device, range(rank.count), transport="gloo") as mover:
        small = copies(2, 4096, 1, rank.count)  # its move brings in whatever code and buffers a first move needs
        mover.move(small.prev, small.curr, _state(small, device), policy="release", compare_copies=False)
        gc.collect()
        trim()
        empty_bytes = resident_bytes()
        state = _state(plan, device)
        before_bytes = resident_bytes() - empty_bytes
        rank.barrier()
        found = mover.move(plan.prev, plan.curr, state, policy="release", compare_copies=False)
        rank.barrier()
        gc.collect()
        trim()
        after_bytes = resident_bytes() - empty_bytes
    check(plan, device, {shard: found[name] for name, shard in names_of(plan.curr.shards_on(device)).items()})
    return before_bytes, after_bytes


def _state(plan: Plan, device: int) -> dict[str, torch.Tensor]:
    """What a device holds before, by name, in memory that goes when it does."""
    names = names_of(plan.prev.shards_on(device))
    return {name: coded(shard, torch.empty(shard.region.shape, dtype=dtype_of(shard))) for name, shard in names.items()}
