"""What a plan comes to: bytes, seconds, memory, nodes. The figures of ``shardshift plan``, and its JSON.

A change in two phases (``migrate-then-defragment``) is two plans, one after the other. What is counted is then
counted over both; the lower bound is that of the same final placement reached at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..values import Infeasible, ParallelConfig, Topology
from ..values.boxes import Ints
from .allocator import cross_node_tp_groups, free_nodes
from .bound import LowerBound, lower_bound
from .methods import Change, Method, direct
from .pairing import least_bytes, savings
from .pairs import PairRun, pair_runs
from .plan import Plan
from .sources import wants
from .timing import Prediction, piece_bytes_of, predict

STAGING_BYTES: Final = 64 * 2**20
"""What a device may stage, sends and receives together, unless told otherwise; a session's default too."""

_MOST_COMPARED: Final = 4096
"""Ranks up to which a plan is compared with bytes alone: with ZeRO-1 that is a pairing of seconds, beyond."""


@dataclass(frozen=True, slots=True)
class BytesAlone:
    """Where ranks would run if nothing but bytes counted: what a plan that moves more has bought.

    Attributes:
        free_nodes: as in ``Summary``.
        cross_node_tp_groups: as in ``Summary``.
    """

    free_nodes: int
    cross_node_tp_groups: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a change.

    Attributes:
        prev: configuration before.
        curr: configuration after.
        method: how it was planned.
        digest: of the plan; of the last one, if there are two phases.
        state_bytes: the logical state, each tensor once.
        referred_bytes: left in place, over all devices.
        copied_bytes: copied within a device, over all devices.
        moved_bytes: sent between devices.
        cross_node_bytes: of those, what crosses from a node to another.
        least_moved_bytes: the least that any placement on the allowed devices has to move.
        lower_bound: no choice of sources takes less time to this placement.
        prediction: the time of the plan; of two phases, of each.
        peak_extra_bytes: the most that any device needs beyond its old state: see ``peak_extra_bytes``.
        free_nodes: nodes of the allowed devices that run no rank afterwards.
        cross_node_tp_groups: TP groups on more nodes than they must be.
        plan_s: seconds that planning took.
        pairs: who becomes what.
        instructions: by type, over all devices, before pieces are cut to the staging bound.
        old_state_bytes: the most that any living device holds before; of two phases, before either.
        bytes_alone: the same of a placement that moves the least; None if this one does, or has too many ranks to tell.
    """

    prev: ParallelConfig
    curr: ParallelConfig
    method: Method
    digest: str
    state_bytes: int
    referred_bytes: int
    copied_bytes: int
    moved_bytes: int
    cross_node_bytes: int
    least_moved_bytes: int
    lower_bound: LowerBound
    prediction: tuple[Prediction, ...]
    peak_extra_bytes: int
    free_nodes: int
    cross_node_tp_groups: int
    plan_s: float
    pairs: tuple[PairRun, ...]
    instructions: dict[str, int]
    old_state_bytes: int
    bytes_alone: BytesAlone | None = None

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the whole change."""
        return sum(one.seconds for one in self.prediction)

    def to_json(self) -> dict[str, Any]:
        """What ``shardshift plan --json`` prints."""
        return {
            "prev": str(self.prev),
            "curr": str(self.curr),
            "method": str(self.method),
            "digest": self.digest,
            "state_bytes": self.state_bytes,
            "referred_bytes": self.referred_bytes,
            "copied_bytes": self.copied_bytes,
            "moved_bytes": self.moved_bytes,
            "cross_node_bytes": self.cross_node_bytes,
            "least_moved_bytes": self.least_moved_bytes,
            "lower_bound_s": self.lower_bound.seconds,
            "predicted_s": self.predicted_s,
            "peak_extra_bytes": self.peak_extra_bytes,
            "free_nodes": self.free_nodes,
            "cross_node_tp_groups": self.cross_node_tp_groups,
            "plan_s": self.plan_s,
            "pairs": [pair.to_json(self.curr, self.prev) for pair in self.pairs],
            "instructions": self.instructions,
        }


def summarise(
    change: Change, method: Method, plans: Sequence[Plan], *, plan_s: float = 0.0, staging_bytes: int = STAGING_BYTES
) -> Summary:
    """The figures of a change that ``solve`` planned.

    Args:
        change: what was asked.
        method: how it was planned.
        plans: what ``solve`` gave.
        plan_s: how long that took, if it is to be in the figures.
        staging_bytes: the most that a device stages.
    """
    first, last = plans[0], plans[-1]
    whole = first if first is last else direct(change, first.prev, last.curr.layout, last.curr.devices)
    return Summary(
        prev=change.prev,
        curr=change.curr,
        method=method,
        digest=last.digest,
        state_bytes=first.state_bytes,
        referred_bytes=sum(plan.referred_bytes for plan in plans),
        copied_bytes=sum(plan.copied_bytes for plan in plans),
        moved_bytes=sum(plan.moved_bytes for plan in plans),
        cross_node_bytes=sum(cross_node_bytes(plan, change.topology) for plan in plans),
        least_moved_bytes=first.least_moved_bytes,
        lower_bound=bound_of(whole, change.topology),
        prediction=tuple(prediction_of(plan, change.topology, staging_bytes) for plan in plans),
        peak_extra_bytes=max(int(peak_extra_bytes(plan, staging_bytes).max(initial=0)) for plan in plans),
        free_nodes=free_nodes(last.curr.devices, change.topology, change.devices),
        cross_node_tp_groups=cross_node_tp_groups(change.curr, last.curr.devices, change.topology),
        plan_s=plan_s,
        pairs=pair_runs(first.prev, last.curr, change.curr),
        instructions=_added(plan.instructions for plan in plans),
        old_state_bytes=max(int(old_bytes(plan).max(initial=0)) for plan in plans),
        bytes_alone=_bytes_alone(change, first)
        if sum(plan.moved_bytes for plan in plans) > first.least_moved_bytes
        else None,
    )


def bound_of(plan: Plan, topology: Topology) -> LowerBound:
    """The least time of any choice of sources for a plan's placement."""
    wanted = wants(plan.cells, plan.prev, plan.curr, plan.lost)
    cells = np.repeat(wanted.cells, wanted.holders.counts)
    return lower_bound(topology, plan.cells.nbytes, wanted.cell, wanted.device, cells, wanted.holders.items)


def prediction_of(plan: Plan, topology: Topology, staging_bytes: int = STAGING_BYTES) -> Prediction:
    """The time of a plan, with pieces as large as its chains and the staging allow."""
    moves = plan.moves
    piece = piece_bytes_of(plan.cells.nbytes, moves.cell, moves.target, moves.hop, staging_bytes)
    return predict(topology, plan.cells.nbytes, moves.cell, moves.source, moves.target, moves.hop, piece_bytes=piece)


def cross_node_bytes(plan: Plan, topology: Topology) -> int:
    """Bytes that go from a device of one node to one of another."""
    moves = plan.moves
    crosses = topology.nodes_of(moves.source) != topology.nodes_of(moves.target)
    return int(plan.cells.nbytes[moves.cell[crosses]].sum())


def peak_extra_bytes(plan: Plan, staging_bytes: int) -> Ints:
    """Bytes that each device of ``plan.devices`` needs beyond its old state while nothing old is released, at most.

    That is the policy ``keep``: all of its new shards but those that it refers, and staging for what it sends and
    receives. No program is written, so what needs no staging (``schedule.staging``) counts too: ``schedule.peak`` is
    exact. Allocator rounding and the transport's own buffers are not in it.
    """
    at = np.array(plan.devices, np.int64)
    moves, extra, carried = plan.moves, np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    extra[np.searchsorted(at, plan.curr.device_ids)] = plan.curr.layout.rank_bytes - plan.referred_by_rank_bytes
    for end in (moves.source, moves.target):
        np.add.at(carried, np.searchsorted(at, end), plan.cells.nbytes[moves.cell])
    return extra + np.minimum(carried, staging_bytes)


def old_bytes(plan: Plan) -> Ints:
    """Bytes that each device of ``plan.devices`` holds before; 0 for one that is lost."""
    at = np.array(plan.devices, np.int64)
    held = np.zeros(len(at), np.int64)
    held[np.searchsorted(at, plan.prev.device_ids)] = plan.prev.layout.rank_bytes
    held[np.isin(at, np.array(plan.lost, np.int64))] = 0
    return held


def require_memory(plan: Plan, topology: Topology, staging_bytes: int) -> None:
    """Check that the old state and all that is needed beside it fit each device, where its memory is known.

    Raises:
        Infeasible: naming the device that lacks the most.
    """
    if topology.device_memory_bytes is None:
        return
    at = np.array(plan.devices, np.int64)
    extra = peak_extra_bytes(plan, staging_bytes)
    needed = extra + old_bytes(plan)
    needed[np.isin(at, np.array(plan.lost, np.int64))] = 0
    worst = int(needed.argmax())
    if needed[worst] > topology.device_memory_bytes:
        raise Infeasible(
            f"device {at[worst]} needs {needed[worst]} bytes while the state moves ({needed[worst] - extra[worst]} of "
            f"old state, {extra[worst]} of new state and staging), its memory is {topology.device_memory_bytes}; "
            "nothing was moved. What to do: allow less staging, choose a layout with smaller shards, or name a "
            "topology with more memory"
        )


def require_staging(plan: Plan, staging_bytes: int) -> None:
    """Check that one element of whatever moves fits a round, half the staging, without writing any program.

    Raises:
        Infeasible: if the largest does not.
    """
    cells, layout = plan.cells, plan.curr.layout
    itemsizes = np.zeros(len(cells.itemsizes), np.int64)  # the largest, by joint bundle
    np.maximum.at(itemsizes, cells.joint_of, layout.itemsizes)
    moves = np.zeros(len(cells), np.bool_)
    moves[plan.moves.cell] = True
    largest = int(itemsizes[cells.atoms.joint[moves[cells.atoms.cell]]].max(initial=0))
    if largest > staging_bytes // 2:
        raise Infeasible(
            f"an element of {largest} bytes has to move, the staging bound is {staging_bytes} bytes, of which a round "
            "has half; nothing was moved. What to do: allow more staging, some MiB"
        )


def _bytes_alone(change: Change, plan: Plan) -> BytesAlone | None:
    if change.topology.nodes == 1 or change.curr.world_size > _MOST_COMPARED:
        return None
    _, placement = least_bytes(savings(plan.cells, plan.prev, change.devices))
    devices = placement.tolist()
    return BytesAlone(
        free_nodes(devices, change.topology, change.devices),
        cross_node_tp_groups(change.curr, devices, change.topology),
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for key, value in one.items():
            total[key] = total.get(key, 0) + value
    return total
