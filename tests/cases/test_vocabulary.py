"""Embeddings and heads: padding that depends on TP, copies of a tied matrix, a head that only one side has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.cases.described import KINDS, Side, holders, live, local
from tests.cases.moves import Held, arrive, box, cut, ranks, run_plan, tensor, walk
from tests.unit.strategies import inside

from shardshift.models import Catalogue, Model
from shardshift.plan import make_plan
from shardshift.values import Layout, Mismatch, PlacedLayout, Tensor, Unaccounted

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MODEL = Model(layers=1, hidden=4, heads=12, kv_heads=12, head_dim=1, ffn=12, vocab=50, vocab_divisor=4)


@pytest.mark.parametrize(
    ("model", "ways", "padded"),
    [
        (MODEL, (1, 2, 4, 1), (52, 56, 64, 52)),
        (replace(MODEL, tied=True), (1, 2, 4, 1), (52, 56, 64, 52)),
        (replace(MODEL, vocab=31, vocab_divisor=3, tied=True), (2, 3, 6, 4, 1), (36, 36, 36, 36, 33)),
        (replace(MODEL, vocab=13, vocab_divisor=4), (1, 6, 12, 2), (16, 24, 48, 16)),
    ],
    ids=["50 by 4", "tied", "31 by 3", "ranks of padding alone"],
)
def test_rows_of_the_vocabulary_stay_and_padding_is_what_the_memory_was_given_as(
    model: Model, ways: Sequence[int], padded: Sequence[int]
) -> None:
    """Each rank's memory has padded rows, as Megatron makes it, all of them 0; the shard is a view of the others."""
    catalogue = Catalogue.of(model)
    values = live(catalogue.tensors)
    placed = PlacedLayout(catalogue.layout(Side(f"tp{ways[0]}").parsed), tuple(range(ways[0])))
    held = cut(placed, values)
    for tp, rows in zip(ways[1:], padded[1:], strict=True):
        assert model.padded_vocab(tp) == rows
        plan = make_plan(placed, catalogue.layout(Side(f"tp{tp}").parsed), devices=range(max(ways)))
        memory = {
            (device, shard): torch.zeros(rows // tp, model.hidden, dtype=getattr(torch, shard.tensor.dtype))
            for device in plan.curr.devices
            for shard in plan.curr.shards_on(device)
            if shard.tensor.name in (EMBEDDING, HEAD)
        }
        targets: Held = {
            device: {
                shard: memory[device, shard][: shard.region.shape[0]]
                if (device, shard) in memory
                else torch.empty(shard.region.shape, dtype=getattr(torch, shard.tensor.dtype))
                for shard in plan.curr.shards_on(device)
            }
            for device in plan.devices
        }
        for refer in plan.refers:  # what stays is no longer rows of a larger memory here; put it there by hand
            if (refer.device, refer.shard) in memory:
                targets[refer.device][refer.shard].copy_(held[refer.device][refer.shard])
        held, placed = run_plan(plan, held, 48, targets), plan.curr
        for of in catalogue.tensors:
            if of.name in (EMBEDDING, HEAD):
                whole = torch.cat([memory[d, s] for d in placed.devices for s in placed.shards_on(d) if s.tensor == of])
                assert whole.shape == (rows, model.hidden)
                assert torch.equal(bits(whole[: model.vocab]), bits(values[of]))
                assert (whole[model.vocab :] == 0).all()


def bits(value: torch.Tensor) -> torch.Tensor:
    """Bits as integers: some that stand for ids are NaN."""
    return value.contiguous().view(torch.int16 if value.element_size() == 2 else torch.int32)


def test_a_global_shape_stays_global_and_a_local_one_in_its_place_is_refused() -> None:
    values = tensor(EMBEDDING, torch.arange(224.0).reshape(56, 4))
    (of,) = values
    two = ranks([box(of, (0, 28))], [box(of, (28, 56))])
    arrive(values, two, ranks([box(of)]), two)
    (double,), (half,) = tensor(EMBEDDING, torch.zeros(112, 4)), tensor(EMBEDDING, torch.zeros(28, 4))
    with pytest.raises(Mismatch, match=rf"param:{EMBEDDING}: .*\(56, 4\).*\(112, 4\)"):
        make_plan(PlacedLayout(two, (0, 1)), ranks([box(double)]), devices=[0])
    with pytest.raises(Mismatch, match=rf"param:{EMBEDDING}: .*\(28, 4\).*\(56, 4\)"):
        make_plan(PlacedLayout(ranks([box(half)], [box(half)]), (0, 1)), ranks([box(of)]), devices=[0])
    with pytest.raises(Mismatch, match=r"\[28:56, 0:4\] is not inside .* \(28, 4\)"):
        box(half, (28, 56))


def test_a_head_with_memory_of_its_own_keeps_its_own_value() -> None:
    catalogue = Catalogue.of(Model(layers=2, hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=4, vocab=16, tied=False))
    values = live(catalogue.tensors)
    for of in catalogue.tensors:
        if of.name in (EMBEDDING, HEAD):
            values[of] = torch.full_like(values[of], 1.0 if of.name == EMBEDDING else 2.0)
    layouts = [Side(text).of(catalogue) for text in ("pp1", "pp2", "pp2tp2", "pp1")]
    for plan, held in walk(values, *layouts, staging_bytes=64):
        first, last = plan.curr.devices[0], plan.curr.devices[-1]
        for kind in KINDS:
            assert (local(held, first, EMBEDDING, kind) == 1.0).all()
            assert (local(held, last, HEAD, kind) == 2.0).all()


@pytest.mark.parametrize("moves_to", ["tied", "apart"])
def test_a_head_that_is_tied_on_one_side_only_is_refused_by_name(moves_to: str) -> None:
    tied, apart = (Catalogue.of(replace(MODEL, tied=is_tied)) for is_tied in (True, False))
    prev, curr = (apart, tied) if moves_to == "tied" else (tied, apart)
    with pytest.raises(Unaccounted) as refused:
        make_plan(PlacedLayout(Side("pp2").of(prev), (0, 1)), Side("pp1").of(curr), devices=[0, 1])
    assert refused.value.names == tuple(f"{kind}:{HEAD}" for kind in KINDS)


@pytest.mark.parametrize("zero1", [False, True])
def test_a_tied_matrix_is_on_the_first_and_the_last_chunk_and_counts_once(zero1: bool) -> None:
    model = Model(layers=8, hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=4, vocab=17, tied=True, vocab_divisor=1)
    catalogue = Catalogue.of(model)
    values = live(catalogue.tensors)
    assert HEAD not in {of.name for of in catalogue.tensors}
    walked = [("pp1", {0}), ("pp4", {0, 3}), ("pp2vpp2", {0, 1}), ("pp3", {0, 2}), ("pp4vpp2", {0, 3}), ("pp1", {0})]
    layouts = [Side(text, zero1).of(catalogue) for text, _ in walked]
    for layout, (_, ends) in zip(layouts, walked, strict=True):
        for kind in KINDS:
            assert set(holders(layout, EMBEDDING, kind)) == ends
        assert layout.state_bytes == sum(of.nbytes for of in catalogue.tensors)
    for plan, held in walk(values, *layouts, staging_bytes=256):
        outer = [plan.curr.devices[0], plan.curr.devices[-1]]
        for kind in KINDS:
            (of,) = [of for of in catalogue.tensors if (of.kind, of.name) == (kind, EMBEDDING)]
            for device in outer:
                whole = torch.zeros_like(values[of])
                for shard, found in held[device].items():
                    if shard.tensor == of:
                        whole[inside(shard.region)] = found
                assert torch.equal(bits(whole), bits(values[of]))
        sent = [transfer.target_device for transfer in plan.transfers if transfer.piece.tensor.name == EMBEDDING]
        assert set(sent) <= set(outer)


def test_what_was_one_storage_is_one_shard_again_when_the_stages_meet() -> None:
    catalogue = Catalogue.of(replace(MODEL, tied=True))
    (plan,) = [p for p, _ in walk(live(catalogue.tensors), *[Side(text).of(catalogue) for text in ("pp2", "pp1")])]
    shards = [shard for shard in plan.curr.shards_on(plan.curr.devices[0]) if shard.tensor.name == EMBEDDING]
    assert [shard.tensor.kind for shard in shards] == list(KINDS)
    assert {refer.shard for refer in plan.refers} >= set(shards), "either end has it already"


@pytest.mark.parametrize("where", ["old", "new"])
def test_a_head_that_nobody_reads_and_one_side_alone_has_is_refused_by_name(where: str) -> None:
    """Two stages; the last one has a dead ``output_layer.weight``, of which the other layout knows nothing."""
    state = [of for kind in KINDS[:2] for name in ("a", "b") for of in tensor(name, torch.zeros(4, 2), kind)]
    (dead,) = tensor(HEAD, torch.zeros(16, 4))

    def stages(*extra: Tensor) -> Layout:
        return ranks(
            [box(of) for of in state if of.name == "a"], [box(of) for of in (*state, *extra) if of.name != "a"]
        )

    whole = [box(of) for of in state]
    sides = [(stages(dead), ranks(whole)), (ranks(whole), stages(dead))]
    prev, curr = sides[where == "new"]
    with pytest.raises(
        Unaccounted, match=rf"only the {where} layout knows 1 tensors: param:{HEAD};.*nothing was moved"
    ):
        make_plan(PlacedLayout(prev, tuple(range(prev.world_size))), curr, devices=[0, 1])
    both = ranks([*whole, box(dead)])
    arrive(live((*state, dead)), stages(dead), both, stages(dead))


def test_another_divisor_moves_what_it_cuts_elsewhere_and_nothing_if_it_cuts_alike() -> None:
    """48 rows over 4 ranks: 12 each, be they padded to multiples of 4, 8 or 12; 15, 15, 15 and 3 of 60 by 5."""
    alike = [Side("tp4").of(Catalogue.of(replace(MODEL, vocab=48, vocab_divisor=divisor))) for divisor in (1, 2, 3)]
    for prev, curr in itertools.pairwise(alike):
        plan = make_plan(PlacedLayout(prev, (3, 1, 0, 2)), curr, devices=range(4))
        assert (plan.moved_bytes, plan.copied_bytes) == (0, 0)
        assert plan.curr.devices == (3, 1, 0, 2)
    fifths = Side("tp4").of(Catalogue.of(replace(MODEL, vocab=48, vocab_divisor=5)))
    rows = [next(s.region.shape[0] for s in fifths.shards(r) if s.tensor.name == EMBEDDING) for r in range(4)]
    assert rows == [15, 15, 15, 3]
    arrive(live(fifths.tensors), alike[0], fifths, alike[0])
