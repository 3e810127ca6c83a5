"""Recovery: after a loss, the survivors agree on a step that all hold whole, and move on from it without the lost.

1. Each survivor looks what it holds: its live state, if it is of a whole step, and the undo copy of the last gate.
   Its world is severed: whoever still waits in a collective of it wakes up.
2. A new era begins. Each survivor says which steps it can offer; the lowest (the lead) takes the newest that all can,
   chooses a configuration for the devices that are left, standbys included, and plans with the lost devices as lost:
   survival is decided per byte, by who holds it. What nobody holds any more is named, and all end with that.
3. From here on it is a change of layout like any other: derive, agree, move, commit, rebuild. Replicas are compared
   before anything moves, so ranks of different steps cannot be mixed.

Another loss on the way begins the next era, and all of this again with who is left.

A rank that others have given up, though it lives (it was stopped, say), finds itself among the lost, and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic

from ..adapters.protocol import J
from ..coordination import opened, refusal, to_record
from ..values import PeerLost, StateLost
from .party import PATIENCE, Party
from .report import Phases
from .state import Kept, kinds_of
from .transition import Derived, Prepared, Transition
from .undo import Undo

_STANDBY_S: Final = 3.0
"""For so long the lead waits for each device that stood by when the era ended."""


@dataclass(frozen=True, slots=True)
class _Job(Generic[J]):
    """A survivor's job: severed from its world, live or put back from the undo copy.

    Attributes:
        party: of the session.
        job: the job.
        undo: the undo copy of the last gate.
        live_at: iteration of which its live tensors are; None if they are of no whole step.
    """

    party: Party[J]
    job: J
    undo: Undo
    live_at: int | None

    @property
    def iterations(self) -> list[int]:
        """The steps that it can offer."""
        return sorted({at for at in (self.live_at, self.undo.iteration) if at is not None})

    def of(self, iteration: int) -> Kept[J]:
        """Its state of a step."""
        adapter, job, undo = self.party.adapter, self.job, self.undo
        live = adapter.shards(job)
        kinds = kinds_of(adapter, job)
        if iteration != self.live_at:
            assert iteration == undo.iteration
            undo.put_back(live)
            live = {shard: tensor for shard, tensor in live.items() if shard in undo.shards}
            kinds = undo.kinds
        adapter.rewind(job, iteration)
        return Kept(job.config, iteration, kinds, live, adapter.alone(job, iteration))


@dataclass(frozen=True, slots=True)
class _Moved(Generic[J]):
    """What a survivor holds whose job was not built yet: all that a change has moved, and that it has committed."""

    moved: Kept[J]

    @property
    def iterations(self) -> list[int]:
        """The steps that it can offer."""
        return [self.moved.iteration]

    def of(self, iteration: int) -> Kept[J]:
        """Its state of a step."""
        assert iteration == self.moved.iteration
        return self.moved


def recover(party: Party[J], lost: PeerLost, undo: Undo, *, job_is_whole: bool) -> J | None:
    """Go on without the lost ranks; see ``Session.recover``.

    Args:
        party: of the session.
        lost: the loss.
        undo: the copy of the last gate.
        job_is_whole: whether the job is between two steps, not in the middle of an optimizer step.
    """
    while True:
        held = _held(party, undo, job_is_whole=job_is_whole)
        party.next_era(lost)
        if held is None:
            return None
        try:
            with party.era.watch.peers():
                return _go_on(party, held)
        except PeerLost as again:
            lost = again


def _held(party: Party[J], undo: Undo, *, job_is_whole: bool) -> _Job[J] | _Moved[J] | None:
    """What this process can offer; None if it has no part in the layout."""
    if party.member.device not in party.course.devices:
        return None
    if party.moved is not None:
        return _Moved(party.moved)
    job = party.job
    assert job is not None
    live_at = job.iteration if job_is_whole and party.adapter.whole(job) else None
    if not party.severed:
        party.adapter.sever(job)
        party.severed = True
    return _Job(party, job, undo, live_at)


def _go_on(party: Party[J], held: _Job[J] | _Moved[J]) -> J | None:
    phases = Phases()
    control, course = party.era.control, party.course
    transition = party.next_transition()
    with party.timed(phases, "plan"):
        control.publish(_roll(control.device), to_record(iterations=held.iterations))
        derived: Derived[J] | None = None
        if party.leads:
            derived = _propose(party, held, transition)
        proposal = transition.proposal(course.lead, PATIENCE * control.timeout_s)
        kept = held.of(proposal.iteration)
        prepared: Prepared[J] = party.derive(None, transition, proposal, derived)
        if party.leads:
            transition.decide(holds=True)
    return party.take_part(kept, prepared, phases)


def _propose(party: Party[J], held: _Job[J] | _Moved[J], transition: Transition[J]) -> Derived[J] | None:
    """The lead's part: which step, which configuration, which devices."""
    try:
        iteration = _newest(_offers(party))
        usable = _usable(party)
        config = party.settings.layouts(usable, party.course.config)
    except PeerLost:
        raise
    except Exception as error:
        party.era.control.publish(transition.key("proposal"), refusal(error))
        return None
    return transition.propose(
        held.of(iteration),
        config,
        party.course.devices,
        iteration=iteration,
        usable=usable,
        lost=party.course.lost,
        wires=party.era.next_wires,
    )


def _offers(party: Party[J]) -> dict[int, list[int]]:
    """Per survivor the steps that it holds whole.

    Raises:
        PeerLost: if one does not come.
    """
    control = party.era.control
    limit_s = PATIENCE * control.timeout_s
    return {
        device: opened(control.fetch(_roll(device), device, "recover", limit_s))["iterations"]
        for device in party.course.living
    }


def _newest(offers: dict[int, list[int]]) -> int:
    """The newest step that all survivors hold.

    Raises:
        StateLost: if there is none.
    """
    common = set.intersection(*map(set, offers.values()))
    if not common:
        raise StateLost(
            f"the survivors hold no common step: {offers} (device: finished steps). What to do: restart the job from "
            "its last checkpoint",
            ["step"],
        )
    return max(common)


def _usable(party: Party[J]) -> Sequence[int]:
    """The survivors, and who stood by and has come into this era."""
    for device in party.stood_by:
        party.era.control.comes(f"standby/{device}", _STANDBY_S)
    return party.usable()


def _roll(device: int) -> str:
    return f"roll/{device}"
