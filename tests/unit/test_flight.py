from __future__ import annotations

import torch
from tests.cases.moves import box, cut, ranks, tensor

from shardshift.engine.flight import Flight, bind
from shardshift.engine.journal import Journal
from shardshift.engine.staging import Arena
from shardshift.plan import Plan, make_plan
from shardshift.schedule import DIRECT_BYTES, Forward, Program, compile_programs
from shardshift.transport import MemoryHub
from shardshift.values import Layout, PlacedLayout

STAGING_BYTES = 64 * DIRECT_BYTES
LARGE = tensor("large", torch.zeros(4, DIRECT_BYTES // 4))
SMALL = {of: value for n in range(4) for of, value in tensor(f"small{n}", torch.zeros(8, 6)).items()}


def plan_of(before: Layout, after: Layout) -> Plan:
    devices = tuple(range(after.world_size))
    return make_plan(PlacedLayout(before, devices[: before.world_size]), after, devices=devices, placement=devices)


def flights(
    before: Layout, after: Layout, device: int, *, staging_bytes: int = STAGING_BYTES, verify: bool = False
) -> list[Flight]:
    plan = plan_of(before, after)
    program: Program = compile_programs(plan, staging_bytes)[device]
    journal = Journal(program, cut(plan.prev, LARGE | SMALL).get(device, {}))
    journal.begin()
    journal.allocate(0, lambda shard: torch.zeros(shard.region.shape))
    transport = MemoryHub(after.world_size).transport(device)
    return bind(program.rounds, 5, journal.live[0], transport, Arena(staging_bytes), verify=verify)


def to_two() -> tuple[Layout, Layout]:
    everything = [box(of) for of in LARGE | SMALL]
    return ranks(everything, []), ranks([], everything)


def test_what_is_sent_from_tensors_themselves_is_posted_together_and_what_is_packed_alone() -> None:
    (flight,) = flights(*to_two(), 0)
    assert [[bound.is_staged for bound in leg.bounds] for leg in flight.leaving] == [[False], [True]]
    assert [leg.peer for leg in flight.leaving] == [1, 1]
    assert flight.arriving == []
    assert flight.links == {1: [sum(of.nbytes for of in LARGE | SMALL), 0]}


def test_both_ends_have_the_same_messages_and_rounds_count_on() -> None:
    sent, received = (flights(*to_two(), device, staging_bytes=4 * DIRECT_BYTES) for device in (0, 1))
    assert len(sent) > 1
    assert [flight.number for flight in sent] == [flight.number for flight in received] == [*range(5, 5 + len(sent))]
    for flight, other in zip(sent, received, strict=True):
        out, back = (
            [bound.parcel.nbytes for leg in legs for bound in leg.bounds] for legs in (flight.leaving, other.arriving)
        )
        assert out == back


def test_digests_are_taken_message_by_message() -> None:
    for flight in flights(*to_two(), 0, verify=True):
        assert all(len(leg.bounds) == 1 for leg in flight.leaving)


def test_a_round_waits_for_rounds_in_flight_that_receive_what_it_forwards() -> None:
    (large,) = LARGE
    whole = [box(large)]
    before, after = ranks(whole), ranks(*[whole] * 4)
    programs = compile_programs(plan_of(before, after), 4 * DIRECT_BYTES)
    for device in range(1, 4):
        rounds, found = programs[device].rounds, flights(before, after, device, staging_bytes=4 * DIRECT_BYTES)
        forwarding = [index for index, flight in enumerate(found) if flight.forwards]
        for index in forwarding:
            peers = {send.peer for send in rounds[index].sends if isinstance(send, Forward)}
            assert found[index].waits_for(found[:index]) == peers
            assert found[index].waits_for([]) == set()
        if forwarding:
            return
    raise AssertionError("nobody forwards")
