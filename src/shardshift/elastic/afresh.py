"""Starting afresh: when nobody holds some of the state any more, what is left is the last checkpoint.

The processes live on, and with them what they have imported and built; only the state comes from where the user's own
function loads it. Without such a function the loss is an error that names what is gone (``StateLost``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..adapters.protocol import J
from ..values import ParallelConfig
from .proposal import Proposal
from .report import Phases, ResizeReport

if TYPE_CHECKING:
    from .party import Party
    from .transition import Transition


def afresh(party: Party[J], config: ParallelConfig, usable: Sequence[int], reason: str) -> bytes:
    """The lead's proposal to start from the checkpoint.

    Args:
        party: of the session.
        config: the configuration to start in; the lowest of the devices take its ranks.
        usable: the devices that there are.
        reason: what is lost.
    """
    course = party.course
    return Proposal(
        prev=course.config,
        curr=config,
        prev_devices=course.devices,
        curr_devices=tuple(sorted(usable)[: config.world_size]),
        usable=tuple(usable),
        lost=course.lost,
        wires=party.era.wires_number,
        ends=(),
        iteration=0,
        kinds=(),
        digest="",
        afresh=reason,
    ).to_wire()


def start_afresh(party: Party[J], transition: Transition[J], proposal: Proposal, phases: Phases) -> J | None:
    """Take part in it: all agree, the old job goes, a new one is started and loads the checkpoint.

    Returns:
        The job; None if this process has no role in it.
    """
    load = party.settings.checkpoint
    assert load is not None  # the lead has one, and all have the same
    party.era.watch.concern(proposal.participants)
    with party.timed(phases, "commit"):
        transition.commit(proposal)
    with party.timed(phases, "rebuild"):
        party.follow(proposal)
        party.retire()
        party.moved = None
        if party.member.device in proposal.curr_devices:
            rank = proposal.curr_devices.index(party.member.device)
            party.job = job = party.adapter.start(party.place(rank))
            load(job)
            party.mark()
    party.reports.append(ResizeReport.afresh(proposal, 0 if party.job is None else party.job.iteration, phases))
    party.era.watch.phase = "standby" if party.job is None else "train"
    return party.job
