"""The simulator: every element that arrives is the element that was meant, whatever the move; and how long it takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, equal_layers, even_grid, growths, identities, inside, moves, state_of

from shardshift.plan import Moves, Plan, make_plan, prove
from shardshift.plan.summary import prediction_of
from shardshift.schedule import Epoch, Forward, Program, Recv, Round, Send, compile_programs
from shardshift.simulator import execute, simulate
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, StateLost, Tensor, Topology
from shardshift.values.topology import Rates


def whole(name: str, count: int) -> Shard:
    return Shard(Tensor(Kind.PARAM, name, (count,), "uint8", 1), Region((0,), (count,)))


def part(name: str, count: int, start: int, stop: int) -> Shard:
    return Shard(whole(name, count).tensor, Region((start,), (stop - start,)))


def handover(count: int, staging_bytes: int) -> dict[int, Program]:
    """Device 0 gives ``count`` bytes to device 1."""
    prev = PlacedLayout(Layout(((whole("w", count),),), (0,)), (0,))
    return compile_programs(make_plan(prev, prev.layout, devices=(1,)), staging_bytes)


def with_rounds(program: Program, *rounds: Round) -> Program:
    """The same program with other rounds."""
    return replace(program, epochs=(replace(program.epochs[0], rounds=rounds),))


def replicas(sizes: list[int], ways: int, topology: Topology | None = None) -> Plan:
    """Device 0 stays, and all others become its replicas."""
    role = tuple(whole(f"w{i}", size) for i, size in enumerate(sizes))
    prev = PlacedLayout(Layout((role,), (0,)), (0,))
    return make_plan(prev, Layout((role,), (0,) * ways), devices=range(ways), topology=topology)


@settings(max_examples=80)
@given(
    st.one_of(moves(losses=True), growths()),
    st.sampled_from([8, 16, 64, 1 << 20]),
    st.sampled_from([None, 1, 7, 40]),
    st.sampled_from([None, Topology(5, 3)]),
)
def test_every_element_arrives_as_itself(
    move: Move, staging_bytes: int, round_bytes: int | None, topology: Topology | None
) -> None:
    try:
        plan = make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost, topology=topology)
    except StateLost:
        assume(False)
    values = identities(move.prev.layout)
    states = state_of(move.prev, values, lost=move.lost)
    result = execute(compile_programs(plan, staging_bytes, round_bytes), states)
    for device in plan.devices:
        assert set(result[device]) == set(plan.curr.shards_on(device))
        for shard, array in result[device].items():
            np.testing.assert_array_equal(array, values[shard.tensor][inside(shard.region)])
    for refer in plan.refers:
        assert result[refer.device][refer.shard] is states[refer.device][refer.shard]


def test_pieces_of_64_bytes_give_what_uncut_pieces_give() -> None:
    tensor = Tensor(Kind.PARAM, "w", (262, 896), "bfloat16", 2)

    def slices(ways: int) -> Layout:
        ends = [262 * i // ways for i in range(ways + 1)]
        roles = tuple((Shard(tensor, Region((a, 0), (b - a, 896))),) for a, b in itertools.pairwise(ends))
        return Layout(roles, tuple(range(ways)))

    prev = PlacedLayout(slices(2), (0, 1))
    plan = make_plan(prev, slices(3), devices=range(3))
    values = {tensor: np.arange(262 * 896, dtype=np.float64).reshape(262, 896)}
    programs = compile_programs(plan, 64)
    cut, uncut = (execute(each, state_of(prev, values)) for each in (programs, compile_programs(plan, 1 << 30)))
    assert all(
        send.piece.nbytes <= 64 for program in programs.values() for step in program.rounds for send in step.sends
    )
    for device, shards in uncut.items():
        for shard, array in shards.items():
            np.testing.assert_array_equal(cut[device][shard], array)


def test_an_element_that_nothing_writes_shows_as_poison() -> None:
    programs = handover(4, 64)
    states = {0: {whole("w", 4): np.arange(4.0)}}
    silent = {device: with_rounds(program) for device, program in programs.items()}
    assert np.isnan(execute(silent, states)[1][whole("w", 4)]).all()
    integers = {0: {whole("w", 4): np.arange(4, dtype=np.uint8)}}
    assert (execute(silent, integers)[1][whole("w", 4)] == 255).all()


def test_ends_that_do_not_meet_are_refused() -> None:
    programs = handover(4, 64)
    states = {0: {whole("w", 4): np.arange(4.0)}}
    deaf = {**programs, 1: with_rounds(programs[1])}
    with pytest.raises(Mismatch, match=r"device 0 \(round 0\) would send param:w\[0:4\] to device 1, which has ended"):
        execute(deaf, states)
    mute = {**programs, 0: with_rounds(programs[0])}
    with pytest.raises(Mismatch, match=r"device 1 \(round 0\) awaits param:w\[0:4\] from device 0, which has ended"):
        execute(mute, states)
    alone = {0: programs[0]}
    with pytest.raises(Mismatch, match="to device 1, which has no program"):
        execute(alone, states)


def test_ends_that_list_other_pieces_are_refused() -> None:
    programs = handover(16, 64)
    states = {0: {whole("w", 16): np.arange(16.0)}}
    (step,) = programs[1].rounds
    halves = tuple(Recv(part("w", 16, a, a + 8), whole("w", 16), 0) for a in (0, 8))
    for recvs in (halves, halves[:1], halves[1:], (*step.recvs, *halves)):
        other = {**programs, 1: with_rounds(programs[1], Round((), (), recvs))}
        with pytest.raises(Mismatch, match=r"device 0 \(round 0\) sends .* to device 1 \(round 0\), which awaits"):
            execute(other, states)


def test_devices_that_wait_for_one_another_in_a_ring_are_refused_by_name() -> None:
    a, b, c = whole("a", 2), whole("b", 2), whole("c", 2)
    names = (a, b, c)

    def program(device: int) -> Program:
        # Each first awaits what its predecessor sends only in its second round.
        mine, theirs = names[device], names[(device - 1) % 3]
        rounds = (
            Round(recvs=(Recv(theirs, theirs, (device - 1) % 3),)),
            Round((), (Send(mine, mine, (device + 1) % 3),)),
        )
        return Program(device, (), (Epoch((theirs,), tuple(rounds)),), "")

    states = {device: {names[device]: np.arange(2.0)} for device in range(3)}
    programs = {device: program(device) for device in range(3)}
    with pytest.raises(Mismatch, match="3 messages are incomplete") as caught:
        execute(programs, states)
    for device in range(3):
        assert f"device {device} (round 0) awaits" in str(caught.value)
    with pytest.raises(Mismatch, match="3 messages are incomplete"):
        simulate(programs, Topology(1, 3))


def test_what_has_not_been_received_cannot_be_forwarded() -> None:
    w = whole("w", 4)
    steps = (
        (0, Round((), (Send(w, w, 1),))),
        (1, Round((), (Forward(w, w, 2),), (Recv(w, w, 0),))),
        (2, Round(recvs=(Recv(w, w, 1),))),
    )
    programs = {device: Program(device, (), (Epoch((w,) if device else (), (step,)),), "") for device, step in steps}
    with pytest.raises(Mismatch, match=r"device 1, round 0: forwards param:w.* to device 2 and has not received"):
        execute(programs, {0: {w: np.full(4, np.nan)}})
    later = {
        **programs,
        1: with_rounds(programs[1], Round(recvs=(Recv(w, w, 0),)), Round((), (Forward(w, w, 2),))),
    }
    assert np.isnan(execute(later, {0: {w: np.full(4, np.nan)}})[2][w]).all()  # NaN is a state like any other


def test_an_array_of_another_shape_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"expected shape \(4,\), got \(5,\)"):
        execute(handover(4, 64), {0: {whole("w", 4): np.arange(5.0)}})


def test_a_message_takes_its_bytes_over_the_slowest_lane_and_a_latency() -> None:
    slow, fast = Rates.both(2.0), Rates.both(4.0)
    for topology, rate in (
        (Topology(1, 2, fast, slow, latency_s=0.5), 4.0),
        (Topology(2, 1, fast, slow, latency_s=0.5), 2.0),
        (Topology(1, 2, fast, latency_s=0.5, device_exceptions=((1, Rates(1.0, 9.0)),)), 1.0),
    ):
        found = simulate(handover(20, 28), topology)  # slots of 7 bytes: 7, 7, 6
        assert found.total_s == pytest.approx(20 / rate + 3 * 0.5)
        assert found.device_s == {0: found.total_s, 1: found.total_s}
        assert found.link_bytes == {(0, 1): 20}
        assert found.peak_extra_bytes == {0: 14, 1: 34}  # two rounds at a time
        assert found.busy_s["device out", 0] == 5.0
        assert ("link in" in {kind for kind, _ in found.busy_s}) == (topology.nodes == 2)


def test_two_devices_share_a_link_that_is_as_fast_as_both() -> None:
    # Devices 0 and 1 hand over to 2 and 3 on another node.
    role = tuple((whole(name, 100),) for name in "ab")
    prev = PlacedLayout(Layout(role, (0, 1)), (0, 1))
    plan = make_plan(prev, prev.layout, devices=(2, 3), placement=(2, 3))
    for link, total_s in ((20.0, 10.0 + 0.5), (10.0, 20.0), (5.0, 40.0)):
        found = simulate(compile_programs(plan, 24, 10), Topology(2, 2, Rates.both(10.0), Rates.both(link), 0.0))
        # On the fast link, the second device starts when the first message has left: half of its time later.
        assert found.total_s == pytest.approx(total_s)


@settings(max_examples=40)
@given(st.one_of(moves(), growths()), st.sampled_from([16, 1 << 20]))
def test_links_carry_the_bytes_of_the_plan(move: Move, staging_bytes: int) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    programs = compile_programs(plan, staging_bytes)
    found = simulate(programs, Topology(1, 100, Rates.both(1.0), latency_s=0.0))
    assert sum(found.link_bytes.values()) == plan.moved_bytes
    assert set(found.peak_extra_bytes) == set(plan.devices)
    busiest = [sum(b for link, b in found.link_bytes.items() if link[end] == d) for d in plan.devices for end in (0, 1)]
    assert max(busiest) == max(found.busy_s.values(), default=0.0)
    assert max(busiest) <= found.total_s <= plan.moved_bytes


SIZES = [3000, 17, 999, 8000, 5, 12_000, 640] * 6
"""Bytes of the tensors of one replica: 148 kB, of very unequal sizes."""


def sent_by(plan: Plan, source: dict[int, int], hop: dict[int, int]) -> Plan:
    """The plan of ``replicas`` with other sources: per target the device that sends it everything, and the hop."""
    cells = np.repeat(np.arange(len(plan.cells)), len(source))
    columns = [np.tile(list(values), len(plan.cells)) for values in (source.values(), source, hop.values())]
    other = Plan(plan.prev, plan.curr, Moves(cells, *columns), plan.least_moved_bytes)
    prove(other)
    return other


@pytest.mark.parametrize("topology", [Topology(1, 64, Rates.both(1e9)), Topology(8, 8, Rates.both(1e9))])
@pytest.mark.parametrize("ways", [8, 64])
def test_many_replicas_come_through_a_chain_in_about_the_time_of_one(ways: int, topology: Topology) -> None:
    topology = replace(topology, latency_s=0.0)
    one = simulate(compile_programs(replicas(SIZES, 2), 1 << 20), topology).total_s
    assert one == pytest.approx(sum(SIZES) / 1e9)
    plan = replicas(SIZES, ways, topology)
    targets = range(1, ways)
    chain = sent_by(plan, {target: target - 1 for target in targets}, {target: target for target in targets})
    for chained in (plan, chain):
        found = simulate(compile_programs(chained, 1 << 20, sum(SIZES) // (4 * ways)), topology)
        assert one <= found.total_s <= 1.3 * one


@pytest.mark.parametrize(
    ("prev", "curr"),
    [
        ("pp8", "tp8"),
        ("tp8", "pp8"),
        ("pp16", "tp16"),
        ("pp16", "pp2tp8"),
        ("pp8dp2", "pp2tp8"),
        ("pp2tp4", "pp8"),
        ("pp8tp2", "pp4tp4"),
        ("tp8dp2", "pp4tp4"),
    ],
)
def test_receivers_do_not_all_ask_the_same_sender_first(prev: str, curr: str) -> None:
    model = equal_layers(48, width=48, numel=1000)
    before, after = even_grid(model, prev), even_grid(model, curr)
    topology = Topology(1, before.world_size, Rates.both(1e9), latency_s=0.0)
    plan = make_plan(
        PlacedLayout(before, tuple(range(before.world_size))),
        after,
        devices=range(before.world_size),
        topology=topology,
    )
    for staging_bytes in (20_000, 80_000):
        found = simulate(compile_programs(plan, staging_bytes), topology).total_s
        predicted = prediction_of(plan, topology, staging_bytes).seconds
        assert 0 < found < 1.5 * predicted  # 2 to 8 times, by need alone


def test_replicas_that_all_come_from_one_device_take_as_long_as_they_are_many() -> None:
    topology = Topology(1, 8, Rates.both(1e9), latency_s=0.0)
    naive = sent_by(replicas(SIZES, 8), dict.fromkeys(range(1, 8), 0), dict.fromkeys(range(1, 8), 1))
    found = simulate(compile_programs(naive, 1 << 20, sum(SIZES) // 32), topology)
    assert found.total_s == pytest.approx(7 * sum(SIZES) / 1e9, rel=0.01)
