"""ETC as published, carried out by our engine: what differs from ours is the placement alone.

The paper pairs old and new ranks by its matrices of layers and slices with DP replicas kept apart
(``plan/paper.py``), then packs nodes by its Algorithm 2 (``plan/allocator.py``). Three forms:

- *migrate*: the pairing alone;
- *then defragment*: two moves, one after the other;
- *coalesced*: at once to where the two would end.

Sources and rounds are ours in all of them, so these are ETC's plans at their best. In one thing they are better than
the paper: what a dropped replica's device happens to hold of its new rank is used and not sent.
"""

from __future__ import annotations

from typing import Final

from shardshift.plan import Plan
from shardshift.plan.methods import Change, Method, direct, solve
from shardshift.values import Layout

ETC: Final = "ETC's plan"


def published(change: Change, prev: Layout, curr: Layout) -> dict[str, tuple[Plan, ...]]:
    """The moves of each form, one after the other.

    Raises:
        Infeasible: if the paper's planner does not know an axis that is used.
    """
    migrate = solve(change, prev, curr, Method.PAPER)
    phases = solve(change, prev, curr, Method.PHASES)
    coalesced = direct(change, phases[0].prev, curr, phases[-1].curr.devices)
    return {"migrate": migrate, "migrate, then defragment": phases, "coalesced": (coalesced,)}
