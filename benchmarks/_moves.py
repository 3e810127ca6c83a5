"""Several plans on the same real state, in the same processes, by turns; and the paper's ways to place a change.

1. One process a device. What a device holds under one layout is made once, coded (``_state``), for all plans that
   begin there.
2. New tensors get memory as the engine asks for it, anew for each run, as a move in a job does.
3. The first, untimed, run of each plan is held to the codes, element by element.

The paper's way is in three forms: *migrate* (its sketch), then *defragment* (its Algorithm 2), as two moves; or
*coalesced*, straight to where the second ends. Ours is *joint*: pairing and placement solved at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _processes import Rank, Side, Spans, median_s, run_ranks
from _state import Locals, by_engine, check, held
from engine import Engine, connected
from planner import asked, layouts

from shardshift.models import Model
from shardshift.plan import Plan
from shardshift.plan.methods import Change, Method, direct, solve
from shardshift.plan.summary import STAGING_BYTES
from shardshift.schedule import Program, compile_program
from shardshift.transport import Transport
from shardshift.values import PlacedLayout, Topology

VOCAB, HEADS = 51200, 16


@dataclass(frozen=True, slots=True)
class Ways:
    """The plans of one change.

    Attributes:
        change: what is asked.
        joint: ours.
        phases: the paper's two moves, or one if there is nothing to defragment.
        coalesced: straight to the end of ``phases``.
    """

    change: Change
    joint: Plan
    phases: tuple[Plan, ...]
    coalesced: Plan

    @classmethod
    def of(cls, model: Model, prev: str, curr: str, where: Topology) -> Ways:
        """Plan a change on as many whole nodes as its larger layout needs."""
        change = asked(model, prev, curr, where)
        before, after = layouts(model, prev, curr)
        (joint,) = solve(change, before, after, Method.EXACT)
        phases = solve(change, before, after, Method.PHASES)
        coalesced = direct(change, PlacedLayout(before, change.prev_devices), after, phases[-1].curr.devices)
        return cls(change, joint, phases, coalesced)

    @property
    def named(self) -> dict[str, Plan]:
        """All of them: ``joint``, ``coalesced``, ``migrate`` and, unless there is nothing to do, ``defragment``."""
        phases = dict(zip(("migrate", "defragment"), self.phases, strict=False))
        return {"joint": self.joint, "coalesced": self.coalesced, **phases}


def shrunk(layers: int, hidden: int, shrink: int) -> Model:
    """A GPT whose hidden size, vocabulary and positions are divided: ``shrink`` squared times fewer bytes."""
    return Model.from_dimensions(
        layers=layers, hidden=hidden // shrink, heads=HEADS, vocab=VOCAB // shrink, positions=2048 // shrink
    )


def largest_received_bytes(plan: Plan) -> int:
    """The most that one device receives."""
    return max(_received(plan).values(), default=0)


def _received(plan: Plan) -> dict[int, int]:
    found: dict[int, int] = {}
    nbytes = plan.cells.nbytes
    for cell, target in zip(plan.moves.cell.tolist(), plan.moves.target.tolist(), strict=True):
        found[target] = found.get(target, 0) + int(nbytes[cell])
    return found


def time_plans(plans: Mapping[str, Plan], runs: int, *, devices: int | None = None) -> dict[str, float]:
    """Seconds of each plan, the median of its runs, over gloo.

    Args:
        plans: by name.
        runs: of each, by turns.
        devices: processes; None: as many as any plan names.
    """
    count = devices or 1 + max(device for plan in plans.values() for device in plan.devices)

    def body(rank: Rank) -> Spans:
        return rank.measure(plan_sides(plans, rank, connected(rank, "gloo")), runs, warm=True)  # each has run once

    spans = run_ranks(count, body)
    return medians_s(spans)


def medians_s(spans: Sequence[Spans]) -> dict[str, float]:
    """Per side its seconds."""
    return {name: median_s(spans, name) for name in spans[0]}


def plan_sides(plans: Mapping[str, Plan], rank: Rank, transport: Transport) -> dict[str, Side]:
    """A side of a comparison for each plan, on one device; all of them have been run once and are right."""
    device = rank.index
    sources: dict[PlacedLayout, Locals] = {}
    sides: dict[str, Side] = {}
    for name, plan in plans.items():
        if device not in plan.devices:
            engine = Engine(plan, Program(device, (), (), plan.digest), {}, {})
        else:
            if plan.prev not in sources:
                sources[plan.prev] = held(plan, device)
            engine = Engine(plan, compile_program(plan, device, STAGING_BYTES), sources[plan.prev], {})
        found = engine.prepared(transport, by_engine).run()
        if device in plan.devices:
            check(plan, device, found)
        del found
        sides[name] = _side(engine, transport)
    return sides


def _side(engine: Engine, transport: Transport) -> Side:
    return lambda: engine.prepared(transport, by_engine).run
