"""Recovery: after a loss, the survivors agree on a step that all hold whole, and move on from it without the lost.

1. Each survivor looks what it holds: its live state, if it is of a whole step, and the undo copy of the last gate.
   Its world is severed: whoever still waits in a collective of it wakes up.
2. A new era begins. Each survivor says which steps it can offer, of itself and as a buddy of the lost (``buddy``); the
   lowest (the lead) takes the newest that all can, chooses a configuration for the devices that are left, standbys
   included, and plans with the lost devices as lost: survival is decided per byte, by who holds it or a copy of it.
   What nobody holds any more is named, and all end with that, or start from the last checkpoint (``afresh``).
3. From here on it is a change of layout like any other: derive, agree, move, commit, rebuild. Replicas are compared
   before anything moves, so ranks of different steps cannot be mixed.

Another loss on the way begins the next era, and all of this again with who is left.

A rank that others have given up, though it lives (it was stopped, say), finds itself among the lost, and ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic

from ..adapters.protocol import J
from ..coordination import opened, refusal, to_record
from ..values import PeerLost, StateLost
from .afresh import afresh
from .crossing import await_quorum, next_era, resolve
from .party import PATIENCE, Party
from .report import Phases
from .state import Kept, kinds_of
from .survivors import Offer, choose
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

    def kinds(self, iteration: int) -> tuple[str, ...]:
        """Kinds of optimizer state that existed in the whole job then."""
        return kinds_of(self.party.adapter, self.job) if iteration == self.live_at else self.undo.kinds

    def of(self, iteration: int) -> Kept[J]:
        """Its state of a step."""
        adapter, job, undo = self.party.adapter, self.job, self.undo
        live, kinds = adapter.shards(job), self.kinds(iteration)
        if iteration != self.live_at:
            assert iteration == undo.iteration
            undo.put_back(live)
            live = {shard: tensor for shard, tensor in live.items() if shard in undo.shards}
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

    def kinds(self, iteration: int) -> tuple[str, ...]:
        """Kinds of optimizer state that existed in the whole job then."""
        return self.moved.kinds

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
        _let_go(lost)
        next_era(party, lost)
        try:
            with party.era.watch.peers():
                await_quorum(party)
                if resolve(party):
                    held = _held(party, undo, job_is_whole=job_is_whole)
                return None if held is None else _go_on(party, held)
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
        offer = Offer(held.iterations, party.buddies.offers(course.generation))
        control.publish(_roll(control.device), to_record(**offer.fields()))
        derived: Derived[J] | None = None
        if party.leads:
            derived = _propose(party, held, transition)
        # One limit more than the lead waits for offers: it says then who has not come, and must not be blamed for that.
        proposal = transition.proposal(course.lead, (PATIENCE + 1) * control.timeout_s)
        kept = None
        if not proposal.afresh:
            kept = party.buddies.beside(held.of(proposal.iteration), course.generation, proposal.copies)
        prepared: Prepared[J] = party.derive(None, transition, proposal, derived)
        if party.leads:
            transition.decide(holds=True)
    return party.take_part(kept, prepared, phases)


def _propose(party: Party[J], held: _Job[J] | _Moved[J], transition: Transition[J]) -> Derived[J] | None:
    """The lead's part: which step, which configuration, which devices."""
    try:
        course = party.course
        iteration, copies = choose(
            _offers(party),
            course.lost,
            lambda at: party.buddies.lonely(course.config, course.devices, held.kinds(at), course.lost),
        )
        usable = _usable(party)
        config = party.choose(usable)
    except PeerLost:
        raise
    except Exception as error:
        party.era.control.publish(transition.key("proposal"), _refusal(party, error))
        return None
    return transition.propose(
        held.of(iteration),
        config,
        party.course.devices,
        iteration=iteration,
        usable=usable,
        lost=party.course.lost,
        copies=copies,
        wires=party.era.next_wires,
        refuse=lambda error: _refusal(party, error),
    )


def _refusal(party: Party[J], error: Exception) -> bytes:
    """What all survivors are to raise; or, where state is lost and there is a checkpoint, to start from that."""
    if not isinstance(error, StateLost) or party.settings.checkpoint is None:
        return refusal(error)
    try:
        usable = _usable(party)
        return afresh(party, party.choose(usable), usable, str(error))
    except Exception as worse:
        return refusal(worse)


def _offers(party: Party[J]) -> dict[int, Offer]:
    """What each survivor holds.

    Raises:
        PeerLost: if one does not come.
    """
    control = party.era.control
    limit_s = PATIENCE * control.timeout_s
    return {
        device: Offer.of(opened(control.fetch(_roll(device), device, "recover", limit_s)))
        for device in party.course.living
    }


def _let_go(error: BaseException) -> None:
    """Drop what the frames hold that an error went through, and those of the errors behind it.

    Process groups are among it, whose threads and sockets live as long as their last reference; and an error that a
    frame of its own holds would go only with Python's garbage collection, which training loops like to switch off.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__


def _usable(party: Party[J]) -> Sequence[int]:
    """The survivors, and who stood by and has come into this era."""
    for device in party.stood_by:
        party.era.control.comes(f"standby/{device}", _STANDBY_S)
    return party.usable()


def _roll(device: int) -> str:
    return f"roll/{device}"
