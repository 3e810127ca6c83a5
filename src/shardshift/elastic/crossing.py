"""From one era to the next, after a loss; and, where the job's store is lost with its host, from one store to the next.

1. Whoever notices a loss begins the next era in the store, unless another has. Where the store does not answer, the
   launcher's agents agree on one that takes its place (``agent.succession``), and have laid down an era there.
2. Under ``shardshift run`` an era is one only with a majority of the job's nodes behind it.
3. A change may have been about to be committed when the store was lost, so that some know of the commit, and others do
   not. They tell one another. Nobody gives up the old state before it knows, so both outcomes are possible until then.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist

from ..adapters.protocol import J
from ..coordination import (
    begin_era,
    current_era,
    era_store,
    is_formed,
    known_dead,
    lost_before,
    opened,
    record_failure,
    stands_by,
    to_record,
)
from ..values import PeerLost, StateLost
from .party import PATIENCE, Party

_Next: TypeAlias = tuple[int, set[int], set[int], set[int]]
"""An era: its number; who is lost; who stood by when the last one ended; who is lost beside."""


def next_era(party: Party[J], lost: PeerLost) -> None:
    """Leave an era that has failed for the next one.

    Raises:
        PeerLost: as it is, if nobody knows who is lost, or the others have given up this process.
        StateLost: if nobody is left who trained.
        ShardshiftError: if the store is lost, and there is no other.
    """
    try:
        _enter(party, lost, *_begun(party, lost))
        return
    except dist.DistError:
        pass
    while True:
        try:
            party.next_store()
            _enter(party, lost, *_found(party, lost))
            return
        except dist.DistError:  # that one is lost, too
            continue


def _begun(party: Party[J], lost: PeerLost) -> _Next:
    """The era after the present one, in the same store."""
    control = party.era.control
    if party.member.is_behind:
        raise dist.DistStoreError("the agents have gone on with another store")
    if not lost.ranks or party.member.device in lost.ranks:
        current_era(party.store)  # raises if it is the store that is lost
        raise lost
    idle = party.devices().difference(party.course.devices, lost.ranks, control.gone())
    stood_by = {device for device in idle if stands_by(control.store, device)}
    begin_era(party.store, party.era.number, lost.ranks)
    gone = {*lost.ranks}
    return party.era.number + 1, gone, stood_by, known_dead(control.store) - party.gone - gone


def _found(party: Party[J], lost: PeerLost) -> _Next:
    """The era with which another store has begun."""
    number = current_era(party.store)
    gone = lost_before(era_store(party.store, number))
    if party.member.device in gone:
        raise lost from None
    return number, gone, party.devices().difference(party.course.devices, gone), set()


def _enter(party: Party[J], lost: PeerLost, number: int, gone: set[int], stood_by: set[int], others: set[int]) -> None:
    party.stood_by = tuple(sorted(stood_by))
    party.gone.update(gone)
    party.course.mourn(gone)
    if not party.course.living:
        raise StateLost(
            f"all devices that trained ({', '.join(map(str, party.course.devices))}) are lost, and those that stand by "
            "hold no state; what to do: start the job again from its last checkpoint",
            ["everything"],
        ) from lost
    party.course.publish(era_store(party.store, number))
    party.next_era(number)
    if others:  # nobody need wait for them: the new era has failed, too
        record_failure(party.era.control.store, others, "run", "was lost together with others")


def await_quorum(party: Party[J]) -> None:
    """Go on only if a majority of the job's nodes does: the others may have lost sight of this side for good.

    Raises:
        PeerLost: if it does not, naming nobody; or if another one is lost meanwhile.
    """
    if party.roster is None:
        return
    control, number = party.era.control, party.era.number
    if not any(is_formed(party.store, number) for _ in control.looks(PATIENCE * control.timeout_s)):
        reason = f"no majority of the job's nodes let era {number} be; this side of the network is the smaller one"
        raise PeerLost((), "recover", reason)


def resolve(party: Party[J]) -> bool:
    """Find out what became of a change in whose commit the store was lost.

    Each tells the generation that it knows of. If one knows that the change was committed, all were ready, and have all
    of the new state: then it is committed here, too. If none does, nobody has given up the old state.

    Returns:
        Whether it is committed now, and was not before.

    Raises:
        PeerLost: if another one is lost meanwhile; the question stays open.
    """
    control, course = party.era.control, party.course
    control.publish(_knows(control.device), to_record(generation=course.generation))
    if party.in_doubt is None:
        return False
    proposal, moved = party.in_doubt
    others = {*proposal.participants}.difference(party.gone)
    limit_s = PATIENCE * control.timeout_s
    told = [opened(control.fetch(_knows(other), other, "recover", limit_s)) for other in sorted(others)]
    party.in_doubt = None
    if all(one["generation"] <= course.generation for one in told):
        return False
    course.follow(proposal)
    course.mourn(party.gone)
    course.publish(control.store)
    party.moved = moved
    party.retire()
    return True


def _knows(device: int) -> str:
    return f"knows/{device}"
