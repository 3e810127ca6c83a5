"""Programs: both ends meet, no round exceeds the staging bound, and what is needed first comes first."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, growths, mask, moves

from shardshift.models import Catalogue, Model
from shardshift.plan import Moves, Plan, make_plan
from shardshift.schedule import (
    Copy,
    Forward,
    NeedOrder,
    Program,
    Recv,
    Refer,
    Schedule,
    Send,
    compile_program,
    compile_programs,
    describe,
    peak_extra_bytes,
)
from shardshift.schedule.cuts import cut_by_slots
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    ParallelConfig,
    PlacedLayout,
    Region,
    Shard,
    Tensor,
    Topology,
)

STAGING = st.integers(8, 200)
ROUND = st.sampled_from([None, 1, 5, 16, 100])
MOVES = st.one_of(moves(), growths())
Messages: TypeAlias = dict[tuple[int, int], list[list[Shard]]]


def plan_of(move: Move) -> Plan:
    return make_plan(move.prev, move.curr, devices=move.devices)


def whole(kind: Kind, name: str, count: int, itemsize: int = 1) -> Shard:
    return Shard(Tensor(kind, name, (count,), "uint8", itemsize), Region((0,), (count,)))


def handover(*shards: Shard, staging_bytes: int) -> dict[int, Program]:
    """Device 0 gives everything to device 1."""
    prev = PlacedLayout(Layout((shards,), (0,)), (0,))
    return compile_programs(make_plan(prev, prev.layout, devices=(1,)), staging_bytes)


def replicas(shards: tuple[Shard, ...], ways: int) -> Plan:
    """Device 0 stays, and all others become its replicas."""
    prev = PlacedLayout(Layout((shards,), (0,)), (0,))
    return make_plan(prev, Layout((shards,), (0,) * ways), devices=range(ways))


def messages(programs: dict[int, Program]) -> tuple[Messages, Messages]:
    """Per (source, target) the messages, one after the other, as the source and as the target list them."""
    sent, received = defaultdict(list), defaultdict(list)
    for device, program in programs.items():
        for step in program.rounds:
            for peer in {send.peer for send in step.sends}:
                sent[device, peer].append([send.piece for send in step.sends if send.peer == peer])
            for peer in {recv.peer for recv in step.recvs}:
                received[peer, device].append([recv.piece for recv in step.recvs if recv.peer == peer])
    return sent, received


@settings(max_examples=100)
@given(MOVES, STAGING, ROUND)
def test_both_ends_list_the_same_pieces_in_the_same_messages_and_order(
    move: Move, staging_bytes: int, round_bytes: int | None
) -> None:
    sent, received = messages(compile_programs(plan_of(move), staging_bytes, round_bytes))
    assert sent == received


@settings(max_examples=80)
@given(MOVES, STAGING, ROUND)
def test_no_round_sends_and_receives_more_than_half_of_the_bound(
    move: Move, staging_bytes: int, round_bytes: int | None
) -> None:
    for program in compile_programs(plan_of(move), staging_bytes, round_bytes).values():
        for step in program.rounds:
            assert sum(one.piece.nbytes for one in (*step.sends, *step.recvs)) <= staging_bytes // 2
            assert step.sends or step.recvs or step.copies


@settings(max_examples=60)
@given(MOVES, STAGING, ROUND)
def test_one_device_compiles_what_all_compile_for_it(move: Move, staging_bytes: int, round_bytes: int | None) -> None:
    plan = plan_of(move)
    programs = compile_programs(plan, staging_bytes, round_bytes)
    assert tuple(programs) == plan.devices
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    for device, program in programs.items():
        assert compile_program(again, device, staging_bytes, round_bytes) == program
        assert program.digest == plan.digest


@settings(max_examples=60)
@given(MOVES, STAGING)
def test_programs_carry_exactly_the_elements_of_the_plan(move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    programs = compile_programs(plan, staging_bytes)
    steps = [step for program in programs.values() for step in program.rounds]
    assert sum(recv.piece.nbytes for step in steps for recv in step.recvs) == plan.moved_bytes
    assert sum(copy.piece.nbytes for step in steps for copy in step.copies) == plan.copied_bytes
    arriving: defaultdict[tuple[int, Shard], list[Region]] = defaultdict(list)
    for device, program in programs.items():
        for step in program.rounds:
            for recv in step.recvs:
                assert recv.target.region.contains(recv.piece.region)
                arriving[device, recv.target].append(recv.piece.region)
    meant: defaultdict[tuple[int, Shard], list[Region]] = defaultdict(list)
    for transfer in plan.transfers:
        meant[transfer.target_device, transfer.target].append(transfer.piece.region)
    assert arriving.keys() == meant.keys()
    for (device, target), regions in arriving.items():
        shape = target.tensor.shape
        np.testing.assert_array_equal(mask(shape, *regions), mask(shape, *meant[device, target]))


@settings(max_examples=60)
@given(MOVES, STAGING)
def test_every_new_shard_is_referred_or_allocated(move: Move, staging_bytes: int) -> None:
    plan = plan_of(move)
    for device, program in compile_programs(plan, staging_bytes).items():
        kept = [refer.shard for refer in program.refers]
        assert sorted(map(str, [*kept, *program.allocate])) == sorted(map(str, plan.curr.shards_on(device)))


@settings(max_examples=80)
@given(growths(), STAGING, ROUND)
def test_what_is_forwarded_has_come_in_an_earlier_round(
    move: Move, staging_bytes: int, round_bytes: int | None
) -> None:
    plan = plan_of(move)
    programs = compile_programs(plan, staging_bytes, round_bytes)
    forwarded = 0
    for program in programs.values():
        received: set[Shard] = set()
        for step in program.rounds:
            forwards = [send for send in step.sends if isinstance(send, Forward)]
            assert {forward.piece for forward in forwards} <= received
            assert all(forward.source in program.allocate for forward in forwards)
            received |= {recv.piece for recv in step.recvs}
            forwarded += sum(forward.piece.nbytes for forward in forwards)
    assert forwarded == plan.cells.nbytes[plan.moves.cell[plan.moves.hop > 1]].sum()


def test_a_chain_receives_and_forwards_in_the_same_rounds() -> None:
    shards = tuple(whole(Kind.PARAM, f"w{i}", size) for i, size in enumerate((100, 37, 3, 260)))
    programs = compile_programs(replicas(shards, 6), 128, 20)
    inner = [program for program in programs.values() if any(step.recvs and step.sends for step in program.rounds)]
    assert len(inner) == 4
    for program in inner:
        # 400 bytes in slots of 20, of which no granule is longer than 2; the last is forwarded in a round of its own.
        assert len(program.rounds) == 21
        assert all(
            abs(sum(one.piece.nbytes for one in pieces) - 20) <= 2
            for step in program.rounds[1:20]
            for pieces in (step.sends, step.recvs)
        )


def test_long_chains_have_shorter_slots() -> None:
    shards = (whole(Kind.PARAM, "w", 64 << 20),)
    slots = [Schedule.of(replicas(shards, ways), 64 << 20).round_bytes for ways in (2, 9, 33)]
    assert slots[0] == 16 << 20
    assert slots[0] > slots[1] > slots[2] >= 1 << 18


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=3),
    st.integers(1, 4),
    st.integers(0, 60),
    st.integers(1, 90),
)
def test_cuts_at_slots_cover_a_region_once_and_keep_slots_evenly_full(
    dims: list[tuple[int, int]], itemsize: int, start_bytes: int, round_bytes: int
) -> None:
    region = Region(tuple(low for low, _ in dims), tuple(size for _, size in dims))
    cuts = list(cut_by_slots(region, itemsize, start_bytes, round_bytes))
    slots = [slot for slot, _ in cuts]
    assert slots == sorted(slots)
    np.testing.assert_array_equal(mask(region.stops, *(box for _, box in cuts)), mask(region.stops, region))
    order = np.full(region.stops, -1)
    order[tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))] = np.arange(
        region.numel
    ).reshape(region.shape)
    granule_bytes = max(round_bytes // 8, itemsize)
    for slot, box in cuts:
        inside = order[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))] * itemsize + start_bytes
        assert inside.min() >= slot * round_bytes
        assert inside.max() < (slot + 1) * round_bytes + granule_bytes


@settings(max_examples=60)
@given(MOVES)
def test_the_order_of_need_is_that_of_kinds_and_then_of_places_in_roles(move: Move) -> None:
    layout = move.curr
    found = NeedOrder.of(layout).at
    assert found.keys() == set(layout.tensors)
    assert sorted(rank for rank, _ in found.values()) == list(range(len(layout.tensors)))
    kinds = [Kind.PARAM, Kind.BUFFER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]
    base = 0
    for kind in kinds:
        least: dict[Tensor, int] = {}
        longest = 0
        for role in layout.roles:
            at = 0
            for tensor in dict.fromkeys(shard.tensor for shard in role if shard.tensor.kind is kind):
                least[tensor] = min(least.get(tensor, at), at)
                at += sum(shard.nbytes for shard in role if shard.tensor == tensor)
            longest = max(longest, at)
        for tensor, position in least.items():
            assert found[tensor][1] == base + position
        base += longest
    ordered = sorted(found, key=lambda tensor: found[tensor][0])
    assert [kinds.index(tensor.kind) for tensor in ordered] == sorted(kinds.index(t.kind) for t in layout.tensors)
    assert [found[t][1] for t in ordered if t.kind is Kind.PARAM] == sorted(
        found[t][1] for t in ordered if t.kind is Kind.PARAM
    )


def test_parameters_come_first_and_moments_last() -> None:
    kinds = [Kind.EXP_AVG_SQ, Kind.PARAM, Kind.EXP_AVG, Kind.BUFFER, Kind.MASTER]
    shards = [whole(kind, f"layers.{i}", 8) for kind in kinds for i in (1, 0)]
    received = [
        (recv.piece.tensor.kind, recv.piece.tensor.name)
        for step in handover(*shards, staging_bytes=16)[1].rounds
        for recv in step.recvs
    ]
    ordered = [Kind.PARAM, Kind.BUFFER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]
    # Within a kind it is the order of the role, here layer 1 before layer 0.
    assert list(dict.fromkeys(received)) == [(kind, f"layers.{i}") for kind in ordered for i in (1, 0)]


def test_a_device_has_no_rounds_for_what_others_exchange() -> None:
    a, b = whole(Kind.PARAM, "a", 100), whole(Kind.PARAM, "b", 4)
    prev = PlacedLayout(Layout(((a,), (b,)), (0, 1)), (0, 1))
    programs = compile_programs(make_plan(prev, prev.layout, devices=(2, 3), placement=(2, 3)), staging_bytes=16)
    assert len(programs[0].rounds) == len(programs[2].rounds) > 10
    assert len(programs[1].rounds) == len(programs[3].rounds) == 1


def test_small_pieces_of_a_pair_and_slot_are_one_message() -> None:
    programs = handover(*(whole(Kind.PARAM, f"w{i}", 3) for i in range(30)), staging_bytes=60)
    assert [len(step.sends) for step in programs[0].rounds] == [5] * 6  # slots of 15 bytes


def test_large_pieces_are_cut_to_the_bound_on_elements() -> None:
    rounds = handover(whole(Kind.PARAM, "w", 10, itemsize=4), staging_bytes=31)[0].rounds
    sizes = [send.piece.region.numel for step in rounds for send in step.sends]
    assert sum(sizes) == 10
    assert max(sizes) == 2  # slots of 7 bytes


def test_an_element_larger_than_the_bound_is_refused() -> None:
    with pytest.raises(Infeasible, match="one element has 4 bytes, a round has 3, half of the staging bound of 7"):
        handover(whole(Kind.PARAM, "w", 10, itemsize=4), staging_bytes=7)


@pytest.mark.parametrize(("staging_bytes", "round_bytes"), [(0, None), (1, None), (8, 0)])
def test_bounds_that_move_nothing_are_refused(staging_bytes: int, round_bytes: int | None) -> None:
    with pytest.raises(Infeasible, match=r"[01] bytes move"):
        Schedule.of(replicas((whole(Kind.PARAM, "w", 4),), 2), staging_bytes, round_bytes)


def test_an_unknown_device_has_no_program() -> None:
    prev = PlacedLayout(Layout(((whole(Kind.PARAM, "w", 4),),), (0,)), (0,))
    with pytest.raises(KeyError, match="device 9"):
        compile_program(make_plan(prev, prev.layout, devices=(0,)), 9, 64)


def test_a_plan_of_copies_alone_has_one_round_and_one_of_refers_has_none() -> None:
    shard = whole(Kind.PARAM, "w", 8)
    halves = tuple(Shard(shard.tensor, Region((start,), (4,))) for start in (0, 4))
    prev = PlacedLayout(Layout(((shard,),), (0,)), (0,))
    (step,) = compile_programs(make_plan(prev, Layout((halves,), (0,)), devices=(0,)), 64)[0].rounds
    assert step.copies == tuple(Copy(half, shard, half) for half in halves)
    stay = compile_programs(make_plan(prev, prev.layout, devices=(0,)), 64)[0]
    assert (stay.refers, stay.allocate, stay.rounds) == ((Refer(shard),), (), ())


def test_the_peak_is_new_shards_plus_two_rounds() -> None:
    programs = handover(whole(Kind.PARAM, "a", 10), whole(Kind.PARAM, "b", 3), staging_bytes=16)
    assert [sum(send.piece.nbytes for send in step.sends) for step in programs[0].rounds] == [4, 4, 4, 1]
    assert peak_extra_bytes(programs[0]) == 8
    assert peak_extra_bytes(programs[1]) == 13 + 8


@settings(max_examples=40)
@given(MOVES, STAGING)
def test_a_program_survives_json(move: Move, staging_bytes: int) -> None:
    for policy in ("keep", "release"):
        try:
            programs = compile_programs(plan_of(move), staging_bytes, policy=policy)
        except Infeasible:
            continue
        for program in programs.values():
            assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_an_unknown_instruction_is_refused() -> None:
    record = handover(whole(Kind.PARAM, "w", 4), staging_bytes=8)[0].to_json()
    record["epochs"][0]["rounds"][0][0]["do"] = "teleport"
    with pytest.raises(ValueError, match="teleport"):
        Program.from_json(record)


def test_devices_may_have_ids_that_are_far_apart() -> None:
    shards = (whole(Kind.PARAM, "w", 100), whole(Kind.MASTER, "w", 100))
    prev, far = PlacedLayout(Layout((shards,), (0,)), (7,)), (10**9, 3 * 10**9, 2**40)
    plan = make_plan(prev, Layout((shards,), (0,) * 4), devices=(7, *far))
    assert plan.moves.hop.max() > 1  # chains: the length of a slot hangs on what each device receives
    for device in far:
        rounds = compile_program(plan, device, 64).rounds
        assert sum(recv.piece.nbytes for step in rounds for recv in step.recvs) == 200


def test_a_plan_that_prove_would_refuse_is_refused_in_words() -> None:
    plan = replicas((whole(Kind.PARAM, "w", 8),), 3)
    cell, source, target, hop = plan.moves.columns
    empty_handed = Moves(cell, np.array([1, 2]), target, np.ones_like(hop))
    unasked = Moves(cell, source, np.array([1, 9]), hop)
    for columns in (empty_handed, unasked):
        wrong = replace(plan, moves=columns)
        with pytest.raises(Mismatch, match=r"cell 0 \(param:w, ...\) goes from .* run only plans that prove accepts"):
            compile_programs(wrong, 64)


def test_a_program_in_words_names_every_instruction() -> None:
    stays, grows = whole(Kind.PARAM, "stays", 4), whole(Kind.PARAM, "grows", 8)
    half = Shard(grows.tensor, Region((0,), (4,)))
    prev = PlacedLayout(Layout(((stays, half), (stays, grows)), (0, 1)), (0, 1))
    plan = make_plan(prev, Layout(((stays, grows),), (0, 0)), devices=range(2), placement=(0, 1))
    lines = list(describe(compile_program(plan, 0, 64)))
    assert lines[0].startswith("device 0: 1 shards stay (4 B), 1 are new (8 B), 1 rounds, at most ")
    assert lines[1:] == [
        "  refer    param:stays[0:4] (4 B)",
        "  allocate param:grows[0:8] (8 B)",
        "round 0: receives 4 B from device 1, copies 4 B",
        "  copy     param:grows[0:4] (4 B) of [0:4] into [0:8]",
        "  recv     param:grows[4:8] (4 B) into [0:8] from device 1",
    ]
    chain = compile_programs(replicas((grows,), 3), 64)
    said = [line for program in chain.values() for line in describe(program)]
    assert any(line.startswith("  send     param:grows[0:8] (8 B) of [0:8] to device ") for line in said)
    assert any(line.startswith("  forward  param:grows[0:8] (8 B) of new [0:8] to device ") for line in said)


def test_one_device_of_a_large_job_finds_its_own_pieces() -> None:
    model = Model(layers=24, hidden=256, heads=16, kv_heads=16, head_dim=16, ffn=1024, vocab=1024)
    catalogue = Catalogue.of(model)
    prev, curr = (catalogue.layout(ParallelConfig.parse(text)) for text in ("pp8tp4dp64", "pp6tp4dp80"))
    plan = make_plan(
        PlacedLayout(prev, tuple(range(2048))), curr, devices=range(2048), topology=Topology(256, 8), group_size=4
    )
    for device in (plan.curr.devices[0], int(plan.moves.target[-1]), int(plan.moves.source[len(plan.moves) // 2])):
        program = compile_program(plan, device, 1 << 16)
        found: defaultdict[tuple[type, Shard, int], list[Region]] = defaultdict(list)
        for step in program.rounds:
            for one in (*step.sends, *step.recvs):
                local = one.target if isinstance(one, Recv) else one.source
                found[type(one), local, one.peer].append(one.piece.region)
        meant: defaultdict[tuple[type, Shard, int], int] = defaultdict(int)
        for transfer in plan.transfers_of(device):
            if transfer.target_device == device:
                meant[Recv, transfer.target, transfer.source_device] += transfer.piece.region.numel
            else:
                kind = Send if transfer.hop == 1 else Forward
                meant[kind, transfer.source, transfer.target_device] += transfer.piece.region.numel
        assert {key: sum(region.numel for region in regions) for key, regions in found.items()} == meant
        assert meant
