"""The simulator: every element that arrives is the element that was meant, whatever the move."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, identities, inside, moves, state_of

from shardshift.plan import make_plan
from shardshift.schedule import Program, compile_programs
from shardshift.simulator import execute, simulate
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, StateLost, Tensor, Topology


def whole(name: str, count: int) -> Shard:
    return Shard(Tensor(Kind.PARAM, name, (count,), "uint8", 1), Region((0,), (count,)))


def handover(count: int, staging_bytes: int) -> dict[int, Program]:
    """Device 0 gives ``count`` bytes to device 1."""
    prev = PlacedLayout(Layout(((whole("w", count),),), (0,)), (0,))
    return compile_programs(make_plan(prev, prev.layout, devices=(1,)), staging_bytes)


@settings(max_examples=150)
@given(moves(losses=True), st.sampled_from([4, 16, 64, 1 << 20]), st.sampled_from([None, Topology(5, 3)]))
def test_every_element_arrives_as_itself(move: Move, staging_bytes: int, topology: Topology | None) -> None:
    try:
        plan = make_plan(move.prev, move.curr, devices=move.devices, lost=move.lost, topology=topology)
    except StateLost:
        assume(False)
    values = identities(move.prev.layout)
    states = state_of(move.prev, values, lost=move.lost)
    result = execute(compile_programs(plan, staging_bytes), states)
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
    cut, uncut = (execute(compile_programs(plan, size), state_of(prev, values)) for size in (64, 1 << 30))
    assert all(
        send.piece.nbytes <= 64
        for program in compile_programs(plan, 64).values()
        for step in program.rounds
        for send in step.sends
    )
    for device, shards in uncut.items():
        for shard, array in shards.items():
            np.testing.assert_array_equal(cut[device][shard], array)


def test_an_element_that_nothing_writes_shows_as_poison() -> None:
    programs = handover(4, 64)
    states = {0: {whole("w", 4): np.arange(4.0)}}
    silent = {device: replace(program, rounds=()) for device, program in programs.items()}
    assert np.isnan(execute(silent, states)[1][whole("w", 4)]).all()
    integers = {0: {whole("w", 4): np.arange(4, dtype=np.uint8)}}
    assert (execute(silent, integers)[1][whole("w", 4)] == 255).all()


def test_ends_that_do_not_meet_are_refused() -> None:
    programs = handover(4, 64)
    states = {0: {whole("w", 4): np.arange(4.0)}}
    deaf = {**programs, 1: replace(programs[1], rounds=(replace(programs[1].rounds[0], recvs=()),))}
    with pytest.raises(Mismatch, match="nobody awaits"):
        execute(deaf, states)
    mute = {**programs, 0: replace(programs[0], rounds=(replace(programs[0].rounds[0], sends=()),))}
    with pytest.raises(Mismatch, match="got nothing"):
        execute(mute, states)


def test_an_array_of_another_shape_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"expected shape \(4,\), got \(5,\)"):
        execute(handover(4, 64), {0: {whole("w", 4): np.arange(5.0)}})


def test_time_is_the_busiest_lane_a_round_plus_latency() -> None:
    # 20 bytes in rounds of 8, 8 and 4, once inside a node and once across.
    for topology, rate in ((Topology(1, 2), 4.0), (Topology(2, 1), 2.0)):
        found = simulate(handover(20, 8), topology, inside_bytes_per_s=4.0, cross_bytes_per_s=2.0, latency_s=0.5)
        assert found.round_s == (8 / rate + 0.5, 8 / rate + 0.5, 4 / rate + 0.5)
        assert found.total_s == sum(found.round_s)
        assert found.link_bytes == {(0, 1): 20}
        assert found.peak_extra_bytes == {0: 8, 1: 28}


@settings(max_examples=40)
@given(moves(), st.sampled_from([16, 1 << 20]))
def test_links_carry_the_bytes_of_the_plan(move: Move, staging_bytes: int) -> None:
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    programs = compile_programs(plan, staging_bytes)
    found = simulate(programs, Topology(1, 100), inside_bytes_per_s=1.0, cross_bytes_per_s=1.0, latency_s=0.0)
    assert sum(found.link_bytes.values()) == plan.moved_bytes
    assert set(found.peak_extra_bytes) == set(plan.devices)
    busiest = [sum(b for link, b in found.link_bytes.items() if link[end] == d) for d in plan.devices for end in (0, 1)]
    assert max(busiest) <= found.total_s <= plan.moved_bytes
