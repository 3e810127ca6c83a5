"""Order, sizes and memory, said by the plan and its programs before anything moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.cases.moves import arrive, box, cut, ranks, right, run_plan, tensor, walk

from shardshift.engine.pieces import parcels_of
from shardshift.plan import Plan, make_plan
from shardshift.schedule import Program, compile_programs, peak_extra_bytes
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard, Tensor, flat_range

Piece = tuple[Tensor, Region]


def rows(tensors: list[Tensor], ways: int, turn: int = 0) -> Layout:
    """Each rank has as even a run of rows of every tensor as can be, rank r the run of r + turn."""
    return ranks(
        *[
            [box(of, (of.shape[0] * r // ways, of.shape[0] * (r + 1) // ways)) for of in tensors]
            for r in ((rank + turn) % ways for rank in range(ways))
        ]
    )


def columns(tensors: list[Tensor], ways: int) -> Layout:
    """The same of the columns."""
    return ranks(
        *[
            [
                box(of, (0, of.shape[0]), (of.shape[1] * r // ways, of.shape[1] * (r + 1) // ways))
                for of in tensors
            ]
            for r in range(ways)
        ]
    )  # fmt: skip


def between(programs: dict[int, Program], source: int, target: int) -> tuple[list[Piece], list[Piece]]:
    """What one end of a pair lists as sent and the other as received, in their orders."""

    def listed(device: int, peer: int, receives: bool) -> list[Piece]:
        return [
            (one.piece.tensor, one.piece.region)
            for step in programs[device].rounds
            for one in (step.recvs if receives else step.sends)
            if one.peer == peer
        ]

    return listed(source, target, False), listed(target, source, True)


@pytest.mark.parametrize("staging_bytes", [24, 64, 1 << 20])
@pytest.mark.parametrize("ways", [2, 3])
def test_both_ends_of_a_swap_list_the_same_pieces_in_one_order_and_ones_own_stay_inside(
    ways: int, staging_bytes: int
) -> None:
    """All swap their rows, several tensors; then rows against columns, where a part of each is one's own."""
    values = {
        of: value
        for i, shape in enumerate([(6, 6), (7, 5), (6, 3)])
        for of, value in tensor(f"w{i}", 100.0 * i + torch.arange(float(np.prod(shape))).reshape(shape)).items()
    }
    tensors = list(values)
    devices = tuple(range(ways))
    own_bytes = 0
    for before, after in (
        (rows(tensors, ways), rows(tensors, ways, turn=1)),
        (rows(tensors, ways, turn=1), columns(tensors, ways)),
    ):
        prev = PlacedLayout(before, devices)
        plan = make_plan(prev, after, devices=devices, placement=devices)
        programs = compile_programs(plan, staging_bytes)
        for source, target in itertools.permutations(devices, 2):
            sent, received = between(programs, source, target)
            assert sent == received
            assert sent or ways > 2
        for device, program in programs.items():
            assert device not in {one.peer for step in program.rounds for one in (*step.sends, *step.recvs)}
            own_bytes += sum(copy.piece.nbytes for step in program.rounds for copy in step.copies)
        held = run_plan(plan, cut(prev, values), staging_bytes)
        assert right({device: held[device] for device in plan.curr.devices}, plan.curr, values)
    assert own_bytes > 0


HUGE = Tensor(Kind.PARAM, "w", (262144, 8960), "bfloat16", 2)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (5, 7)])
@pytest.mark.parametrize("by_rows", [True, False])
def test_pieces_of_more_than_2_to_the_31_elements_are_where_they_should_be(
    before: int, after: int, by_rows: bool
) -> None:
    cuts = rows if by_rows else columns
    prev = PlacedLayout(cuts([HUGE], before), tuple(range(before)))
    plan = make_plan(prev, cuts([HUGE], after), devices=range(max(before, after)))
    programs = compile_programs(plan, 1 << 30)
    assert HUGE.nbytes > 2**32
    for device in plan.curr.devices:
        (wanted,) = plan.curr.shards_on(device)
        written = [one.piece.region for step in programs[device].rounds for one in step.recvs]
        written += [one.piece.region for step in programs[device].rounds for one in step.copies]
        if wanted in programs[device].allocate:
            assert fills(written, wanted.region)
        assert all(type(index) is int for region in written for index in (*region.offsets, *region.shape))
    end = max(shard.region.stops for device in plan.curr.devices for shard in plan.curr.shards_on(device))
    assert end == HUGE.shape


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 4)])
@pytest.mark.parametrize("to_columns", [True, False])
def test_messages_of_such_pieces_have_counts_of_31_bits_and_make_up_the_piece(
    before: int, after: int, to_columns: bool
) -> None:
    prev = PlacedLayout(rows([HUGE], before), tuple(range(before)))
    plan = make_plan(prev, (columns if to_columns else rows)([HUGE], after), devices=range(max(before, after)))
    most_bytes = 0
    for program in compile_programs(plan, 1 << 33).values():
        for step in program.rounds:
            for one_way in (step.sends, step.recvs):
                parcels = parcels_of(one_way, lambda peer: False)
                boxes: dict[Region, list[Region]] = {}
                for one, box_of_it, size_bytes in [part for parcel in parcels for part in parcel.parts]:
                    boxes.setdefault(one.piece.region, []).append(box_of_it)
                    assert size_bytes == box_of_it.numel * HUGE.itemsize
                for piece, found in boxes.items():
                    assert sum(one.numel for one in found) == piece.numel
                    assert all(piece.contains(one) for one in found)
                    most_bytes = max(most_bytes, piece.numel * HUGE.itemsize)
                assert all(parcel.nbytes < 2**31 for parcel in parcels)
    assert most_bytes > 2**29


@pytest.mark.parametrize(("before", "after"), [(3, 5), (8, 7)])
def test_ranges_of_a_flat_buffer_of_more_than_2_to_the_31_elements_are_exact(before: int, after: int) -> None:
    """As the distributed optimizer cuts it: ranges of equal numel that begin in the middle of a row."""
    numel = HUGE.shape[0] * HUGE.shape[1]

    def ranges(ways: int) -> Layout:
        each = -(-numel // ways)
        return ranks(
            *[
                [Shard(HUGE, region) for region in flat_range(HUGE.shape, r * each, min((r + 1) * each, numel))]
                for r in range(ways)
            ]
        )

    def start(region: Region) -> int:
        return region.offsets[0] * HUGE.shape[1] + region.offsets[1]

    prev = PlacedLayout(ranges(before), tuple(range(before)))
    plan = make_plan(prev, ranges(after), devices=range(max(before, after)))
    each = -(-numel // after)
    for rank, device in enumerate(plan.curr.devices):
        wanted = plan.curr.shards_on(device)
        assert start(wanted[0].region) == rank * each
        assert sum(shard.region.numel for shard in wanted) == min((rank + 1) * each, numel) - rank * each
    assert plan.moved_bytes == sum(_lacking(numel, before, after, plan)) * HUGE.itemsize


def _lacking(numel: int, before: int, after: int, plan: Plan) -> list[int]:
    """Per new rank the elements that its device did not hold, in plain integers."""
    then, now = -(-numel // before), -(-numel // after)
    lacking = []
    for rank, device in enumerate(plan.curr.devices):
        a, b = rank * now, min((rank + 1) * now, numel)
        old = plan.prev.rank_of(device)
        held = 0 if old is None else max(0, min(b, min((old + 1) * then, numel)) - max(a, old * then))
        lacking.append(b - a - held)
    return lacking


def fills(boxes: list[Region], whole: Region) -> bool:
    """Whether disjoint boxes make up a region: on the grid of all their edges, each cell is in exactly one."""
    dims = range(len(whole.shape))
    every = [whole, *boxes]
    edges = [sorted({edge for one in every for edge in (one.offsets[d], one.stops[d])}) for d in dims]
    count = np.zeros([len(edge) - 1 for edge in edges], np.int64)
    for one in boxes:
        at = tuple(slice(edges[d].index(one.offsets[d]), edges[d].index(one.stops[d])) for d in dims)
        count[at] += 1
    return all(edge[0] >= whole.offsets[d] and edge[-1] <= whole.stops[d] for d, edge in enumerate(edges)) and bool(
        (count == 1).all()
    )


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (5, 4)])
def test_with_messages_of_at_most_64_bytes_everything_arrives_as_without(before: int, after: int) -> None:
    values = tensor("w", torch.arange(262 * 9).to(torch.int16).view(torch.bfloat16).reshape(262, 9))
    layouts = rows(list(values), before), columns(list(values), after), rows(list(values), after)
    for staging_bytes in (64, 1 << 30):
        arrive(values, *layouts, staging_bytes=staging_bytes)
    (plan, *_) = [plan for plan, _ in walk(values, *layouts[:2], staging_bytes=64)]
    for program in compile_programs(plan, 64).values():
        for step in program.rounds:
            assert all(one.piece.nbytes <= 32 for one in (*step.sends, *step.recvs))
            assert sum(one.piece.nbytes for one in (*step.sends, *step.recvs)) <= 32


MIB = 1 << 20


def sixty_four(numel: int) -> list[Tensor]:
    return [Tensor(Kind.EXP_AVG, f"p{i}", (numel,), "float32", 4) for i in range(64)]


def owned(tensors: list[Tensor], ways: int) -> Layout:
    """Whole tensors dealt out to ranks."""
    return ranks(*[[box(of) for of in tensors[rank::ways]] for rank in range(ways)])


def planned(before: Layout, after: Layout) -> Plan:
    devices = tuple(range(max(before.world_size, after.world_size)))
    return make_plan(PlacedLayout(before, devices[: before.world_size]), after, devices=devices)


@pytest.mark.parametrize("cuts", [rows, owned])
@pytest.mark.parametrize("ways", [(4, 2), (5, 3), (8, 1)])
def test_beside_the_new_shards_the_predicted_peak_is_the_staging_and_no_second_copy(
    cuts: Callable[[list[Tensor], int], Layout], ways: tuple[int, int]
) -> None:
    """64 MiB in 64 tensors, staging 4 MiB: what a device needs beyond its new shards is at most that."""
    tensors, cap_bytes = sixty_four(MIB // 4), 4 * MIB
    plan = planned(*[cuts(tensors, count) for count in ways])
    for program in compile_programs(plan, cap_bytes).values():
        new_bytes = sum(shard.nbytes for shard in program.allocate)
        assert peak_extra_bytes(program) <= new_bytes + cap_bytes
        for step in program.rounds:
            assert sum(one.piece.nbytes for one in (*step.sends, *step.recvs)) <= cap_bytes // 2
    if cuts is owned and ways[0] % ways[1] == 0:
        kept = [sum(refer.shard.nbytes for refer in plan.refers_of(device)) for device in plan.curr.devices]
        assert min(kept) >= 64 // ways[0] * MIB, "what one has already and keeps needs no memory"


def test_replicas_that_leave_cost_those_that_stay_nothing() -> None:
    tensors = sixty_four(MIB // 4)
    four, two = (Layout((tuple(box(of) for of in tensors),), (0,) * count) for count in (4, 2))
    plan = planned(four, two)
    assert plan.moved_bytes == 0
    for program in compile_programs(plan, 4 * MIB).values():
        assert peak_extra_bytes(program) == 0
        assert not program.allocate


def test_tensors_whose_shape_stays_keep_their_memory() -> None:
    tensors = sixty_four(64)
    values = {of: torch.arange(64.0) + 64 * i for i, of in enumerate(tensors)}
    plan = planned(owned(tensors, 4), owned(tensors, 2))
    held = cut(plan.prev, values)
    found = run_plan(plan, held, 1024)
    assert right({device: found[device] for device in plan.curr.devices}, plan.curr, values)
    stayed = 0
    for device in plan.curr.devices:
        for shard, value in found[device].items():
            mine: dict[Shard, torch.Tensor] = held[device]
            if shard in mine:
                assert value.data_ptr() == mine[shard].data_ptr()
                stayed += 1
    assert stayed == 32
