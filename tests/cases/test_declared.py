"""What the two sides declare: slices that call themselves whole, element types, scales of blocks, unequal copies."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.cases.described import Side, live
from tests.cases.moves import arrive, blank, box, cut, ranks, right, run_plan, tensor, walk
from tests.unit.strategies import inside

from shardshift.engine import Copies, Journal, differing, refuse_differing, run_program
from shardshift.models import Catalogue, Model
from shardshift.plan import make_plan
from shardshift.schedule import compile_program
from shardshift.transport import MemoryHub
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Shard, StateLost, Tensor, Unaccounted, flat_range


def bf16_of(master: torch.Tensor) -> torch.Tensor:
    """The upper half of the bits, which is how master and remainder share them."""
    return (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("ways", [2, 3])
def test_slices_of_an_expert_sent_as_if_whole_are_refused_and_the_receiver_is_as_it_was(ways: int) -> None:
    """Each of the expert tensor ranks calls its slice (rows ÷ ways, 4) the whole of fc1; the receiver knows better."""
    rows = 4 * ways
    (part,), (whole,) = tensor("experts.0.fc1", torch.zeros(4, 4)), tensor("experts.0.fc1", torch.zeros(rows, 4))
    receiver = torch.full((rows, 4), 7.0)
    before = PlacedLayout(ranks(*[[box(part)] for _ in range(ways)]), tuple(range(ways)))
    with pytest.raises(Mismatch, match=rf"param:experts\.0\.fc1: .*\(4, 4\) .*\({rows}, 4\).*nothing was moved"):
        run_plan(make_plan(before, ranks([box(whole)]), devices=[0]), {}, 64, {0: {box(whole): receiver}})
    assert (receiver == 7.0).all()


def test_slices_that_all_call_themselves_the_first_are_refused_with_what_is_missing() -> None:
    """The global shape is right, but two ranks name the same half: the other one is nowhere."""
    (of,) = tensor("fc1", torch.zeros(8, 4))
    first = box(of, (0, 4))
    with pytest.raises(StateLost, match=r"param:fc1 \[4:8, 0:4\]") as refused:
        make_plan(PlacedLayout(ranks([first], [first]), (0, 1)), ranks([box(of)]), devices=[0])
    assert refused.value.names == ("param:fc1",)
    with pytest.raises(Unaccounted, match=r"drops elements .* param:fc1 \[4:8, 0:4\]"):
        make_plan(PlacedLayout(ranks([box(of)]), (0,)), ranks([first], [first]), devices=[0, 1])


def test_two_ranks_that_hold_other_bits_under_one_experts_name_are_refused() -> None:
    """EP ranks that count from nought and declare it so: expert 0 is claimed by both, with other values."""
    names = [of for e in range(2) for of in tensor(f"experts.{e}", torch.zeros(2, 3))]
    claimed = ranks(*[[box(of) for of in names] for _ in range(2)])
    plan = make_plan(PlacedLayout(claimed, (0, 1)), ranks([box(of) for of in names]), devices=[0, 1])
    for last, agree in ((1.0, True), (3.0, False)):
        held = {
            device: {box(of): torch.full((2, 3), value) for of, value in zip(names, (0.0, second), strict=True)}
            for device, second in ((0, 1.0), (1, last))
        }
        copies = {device: Copies(plan.prev, device) for device in (0, 1)}
        suspects = differing({device: copies[device].digests(held[device]) for device in (0, 1)})
        assert bool(suspects) is not agree
        if suspects:
            details = {device: copies[device].details(held[device], suspects) for device in (0, 1)}
            with pytest.raises(Mismatch, match=r"param:experts\.1\[.*devices 0 and 1 hold different bits"):
                refuse_differing(details)


def test_a_buffer_that_changed_since_the_plan_was_made_arrives_as_it_is_now() -> None:
    """A plan and its programs hold names and regions, no tensors; even the tensor object may be another by then."""
    (bias,), (w,) = tensor("expert_bias", torch.zeros(6), Kind.BUFFER), tensor("w", torch.zeros(6, 2))
    one = ranks([box(bias), box(w)])
    for devices in ([0], [1]):
        plan = make_plan(PlacedLayout(one, (0,)), one, devices=devices)
        programs = {device: compile_program(plan, device, 64) for device in plan.devices}
        live_now = {box(bias): torch.zeros(6), box(w): torch.zeros(6, 2)}
        live_now[box(bias)] = live_now[box(bias)] + 5
        live_now[box(w)].add_(3)
        found = run_plan(plan, {0: live_now}, 64)[devices[0]]
        assert found[box(bias)].tolist() == [5.0] * 6
        assert (found[box(w)] == 3).all()
        if devices == [0]:
            assert found[box(bias)] is live_now[box(bias)], "what stays is not even copied"
            transport = MemoryHub(1).transport(0)
            journal = Journal(programs[0], live_now)
            again = run_program(journal, transport, staging_bytes=64, allocate=blank, timeout_s=5)
            assert again[box(bias)] is live_now[box(bias)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 3), (6, 4)])
def test_a_fp32_bias_beside_bf16_experts_keeps_its_bits(before: int, after: int) -> None:
    """Cast to bf16 on the way, 1 + 2**-12 would be 1."""
    values = {
        of: value
        for e in range(12)
        for of, value in tensor(f"experts.{e}", torch.full((3, 2), float(e), dtype=torch.bfloat16)).items()
    }
    values |= tensor("router.expert_bias", torch.full((12,), 1 + 2**-12), Kind.BUFFER)
    *experts, bias = values

    def layout(ways: int) -> Layout:
        return ranks(
            *[[*[box(of) for of in experts[12 * r // ways : 12 * (r + 1) // ways]], box(bias)] for r in range(ways)]
        )

    for plan, held in walk(values, layout(before), layout(after), layout(before), staging_bytes=8):
        for device in plan.curr.devices:
            assert held[device][box(bias)].dtype is torch.float32
            assert held[device][box(bias)].tolist() == [1 + 2**-12] * 12


def remainders(masters: torch.Tensor) -> dict[Tensor, torch.Tensor]:
    """A master kept as its parameter and the 16 bits that the parameter lacks."""
    low = (masters.view(torch.int32) & 0xFFFF).to(torch.int32)
    values = tensor("w", bf16_of(masters))
    return values | tensor("w", (low - (low >= 0x8000) * 0x10000).to(torch.int16), Kind.MASTER)


def shares(values: dict[Tensor, torch.Tensor], ways: int) -> Layout:
    """Parameters whole on each, masters in flat ranges."""
    roles: list[list[Shard]] = []
    for rank in range(ways):
        role = []
        for of in values:
            numel = values[of].numel()
            each = -(-numel // ways)
            bounds = (min(each * rank, numel), min(each * rank + each, numel))
            whole = of.kind is Kind.PARAM
            role += [box(of)] if whole else [Shard(of, region) for region in flat_range(of.shape, *bounds)]
        roles.append(role)
    return ranks(*roles)


@pytest.mark.parametrize("ways", [(2, 3), (3, 2), (2, 5, 1, 7)])
def test_a_master_is_rebuilt_from_its_parameter_and_a_remainder_that_was_moved_as_it_is(ways: tuple[int, ...]) -> None:
    patterns = torch.tensor([0x3F802000, 0x3F80FFFF, 0x00018000, 0x7F7FFFFF, 0x40490FDB, 1, 0x3F807FFF])
    masters = torch.cat([patterns, patterns | -0x80000000]).to(torch.int32).view(torch.float32).reshape(7, 2)
    values = remainders(masters)
    for plan, held in walk(values, *[shares(values, count) for count in ways], staging_bytes=6):
        rebuilt = torch.zeros(7, 2, dtype=torch.int32)
        for device in plan.curr.devices:
            parameter = next(t for s, t in held[device].items() if s.tensor.kind is Kind.PARAM)
            for shard, low in held[device].items():
                if shard.tensor.kind is Kind.MASTER:
                    assert low.dtype is torch.int16
                    at = inside(shard.region)
                    high = parameter.view(torch.int16)[at].to(torch.int32) << 16
                    rebuilt[at] = high | (low.to(torch.int32) & 0xFFFF)
        assert torch.equal(rebuilt, masters.view(torch.int32))
        assert rebuilt[0, 0].item() == 0x3F802000


@pytest.mark.parametrize("kept_by", ["old", "new"])
def test_a_remainder_on_one_side_only_is_refused_by_name_and_never_cast(kept_by: str) -> None:
    masters = torch.full((4, 3), 1 + 2**-10)
    halves = remainders(masters)
    full = tensor("w", bf16_of(masters)) | tensor("w", masters, Kind.MASTER)
    prev, curr = (halves, full) if kept_by == "old" else (full, halves)
    types = ("int16", "float32") if kept_by == "old" else ("float32", "int16")
    with pytest.raises(Mismatch, match=rf"fp32_master:w: .* of {types[0]} .* of {types[1]} .*nothing was moved"):
        make_plan(PlacedLayout(shares(prev, 2), (0, 1)), shares(curr, 3), devices=range(3))


@pytest.mark.parametrize(("before", "after"), [("dp2", "dp4"), ("dp5", "dp3"), ("tp2dp2", "tp4dp3"), ("pp2dp3", "dp4")])
def test_every_rank_has_the_parameters_of_all_masters_those_of_others_too(before: str, after: str) -> None:
    """Masters lie in ranges; parameters are whole on each replica, and equal to bf16 of all masters on all elements."""
    model = Model(layers=2, hidden=8, heads=4, kv_heads=4, head_dim=2, ffn=8, vocab=19, tied=True, vocab_divisor=1)
    catalogue = Catalogue.of(model)
    values = live(catalogue.tensors)
    masters = {of.name: torch.randn(of.shape) for of in values if of.kind is Kind.MASTER}
    for of in values:
        if of.kind is Kind.MASTER:
            values[of] = masters[of.name]
        elif of.kind is Kind.PARAM:
            values[of] = bf16_of(masters[of.name])
    layouts = [Side(text, zero1=True).of(catalogue) for text in (before, after, before)]
    for plan, held in walk(values, *layouts, staging_bytes=256):
        gathered = {name: torch.full_like(master, float("nan")) for name, master in masters.items()}
        owned = [
            (s, t) for device in plan.curr.devices for s, t in held[device].items() if s.tensor.kind is Kind.MASTER
        ]
        for shard, found in owned:
            at = inside(shard.region)
            gathered[shard.tensor.name][at] = found
        for device in plan.curr.devices:
            parameters = [(s, t) for s, t in held[device].items() if s.tensor.kind is Kind.PARAM]
            mine = sum(t.numel() for s, t in held[device].items() if s.tensor.kind is Kind.MASTER)
            assert mine < sum(t.numel() for _, t in parameters)
            for shard, found in parameters:
                at = inside(shard.region)
                expected = bf16_of(gathered[shard.tensor.name])[at]
                assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_local_state_beside_a_parameter_that_is_cut_is_refused_where_it_calls_itself_whole() -> None:
    """Parameter (8, 4) in rows over two ranks; each calls its own (4, 4) of the moment all there is."""
    values = tensor("w", torch.arange(32.0).reshape(8, 4)) | tensor("w", torch.arange(32.0).reshape(8, 4), Kind.EXP_AVG)
    w, moment = values
    (plain,) = tensor("w", torch.zeros(4, 4), Kind.EXP_AVG)
    halves = [(0, 4), (4, 8)]
    inherits = ranks(*[[box(w, half), box(moment, half)] for half in halves])
    forgets = ranks(*[[box(w, half), box(plain)] for half in halves])
    quarters = ranks(*[[box(of, (2 * r, 2 * r + 2)) for of in values] for r in range(4)])
    arrive(values, inherits, quarters, ranks([box(w), box(moment)]), inherits)
    for prev, curr in ((forgets, quarters), (inherits, forgets)):
        with pytest.raises(Mismatch, match=r"exp_avg:w: .*\((4|8), 4\) .*\((4|8), 4\)"):
            make_plan(PlacedLayout(prev, (0, 1)), curr, devices=range(4))


@pytest.mark.parametrize(("shape", "block"), [((8, 4), 4), ((7, 6), 4), ((5, 9), 8)])
def test_a_scale_is_wherever_a_part_of_its_block_is(shape: tuple[int, int], block: int) -> None:
    """int8 with a scale a block of the flat tensor; where a shard's edge cuts a block, both sides hold its scale."""
    numel = shape[0] * shape[1]
    count = -(-numel // block)
    scales = 0.5 + torch.arange(count) / 8
    numbers = (torch.arange(numel) % 251 - 125).to(torch.int8).reshape(shape)
    values = tensor("w.int8", numbers, Kind.EXP_AVG) | tensor("w.scale", scales, Kind.EXP_AVG)
    state, scale = values

    def flat(ways: int) -> Layout:
        ends = [numel * r // ways for r in range(ways + 1)]
        roles = []
        for a, b in itertools.pairwise(ends):
            edges = (a // block, -(-b // block)) if a < b else (0, 0)
            roles.append([*[Shard(state, region) for region in flat_range(shape, a, b)], box(scale, edges)])
        return ranks(*roles)

    expected = numbers.float() * scales.repeat_interleave(block)[:numel].reshape(shape)
    for plan, held in walk(values, *map(flat, (2, 3, 1, 5, 2, 11)), staging_bytes=9):
        found = torch.full(shape, float("nan"))
        for device in plan.curr.devices:
            ((own, own_scales),) = [(s, t) for s, t in held[device].items() if s.tensor == scale]
            for shard, part in held[device].items():
                if shard.tensor == state:
                    at = inside(shard.region)
                    which = torch.arange(numel).reshape(shape)[at] // block - own.region.offsets[0]
                    found[at] = part.float() * own_scales[which]
        assert torch.equal(found, expected)


def test_scales_that_a_rank_of_a_cut_block_leaves_to_its_neighbour_are_missed() -> None:
    """Nobody guesses that a scale is needed: a layout that drops one is refused by its name."""
    values = tensor("w.int8", torch.zeros(8, 4, dtype=torch.int8)) | tensor("w.scale", torch.ones(8))
    state, scale = values
    whole = ranks([box(state), box(scale)])
    gap = ranks([box(state, (0, 4)), box(scale, (0, 3))], [box(state, (4, 8)), box(scale, (4, 8))])
    with pytest.raises(Unaccounted, match=r"param:w\.scale \[3:4\]"):
        make_plan(PlacedLayout(whole, (0,)), gap, devices=[0, 1])
    with pytest.raises(StateLost, match=r"param:w\.scale \[3:4\]"):
        make_plan(PlacedLayout(gap, (0, 1)), whole, devices=[0, 1])


def test_what_is_right_before_the_move_is_what_the_helpers_say() -> None:
    """The oracle notices one wrong bit."""
    values = tensor("w", torch.arange(4.0))
    (of,) = values
    placed = PlacedLayout(ranks([box(of)]), (0,))
    held = cut(placed, values)
    assert right(held, placed, values)
    held[0][box(of)][3] = 2.0
    assert not right(held, placed, values)
