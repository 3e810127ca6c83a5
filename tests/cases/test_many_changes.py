"""Changes of several things at once, of sizes that are no powers of two: each element on each device, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases.described import KINDS, Case, Side, check_arrived, live, moved
from tests.cases.moves import cut, right, run_plan
from tests.unit.test_models_describe import Job, Oracle, jobs

from shardshift.models import Catalogue, Experts, LatentAttention, Model
from shardshift.values import StateLost, Topology

FIFTEEN = Model(layers=7, hidden=4, heads=15, kv_heads=1, head_dim=2, ffn=15, vocab=47, tied=True, vocab_divisor=1)
"""Divisible by 3 and 5; the vocabulary by neither."""
SIX = Model(layers=5, hidden=6, heads=6, kv_heads=6, head_dim=1, ffn=6, vocab=50, tied=True, vocab_divisor=4)
GROUPED = Model(layers=3, hidden=5, heads=12, kv_heads=3, head_dim=2, ffn=12, vocab=13, vocab_divisor=3, qkv_bias=True)
MIXED = Model(
    layers=3, hidden=4, heads=6, kv_heads=1, head_dim=2, ffn=6, vocab=11, vocab_divisor=2,
    experts=Experts(12, 6, shared_ffn=6, first_dense=1),
)  # fmt: skip
LATENT = Model(
    layers=4, hidden=3, heads=6, kv_heads=6, head_dim=3, ffn=6, vocab=10, vocab_divisor=1, tied=True,
    latent=LatentAttention(2, 2, 1, 2, 2), experts=Experts(6, 6, every=2),
)  # fmt: skip
GPT = Model.from_dimensions(layers=4, hidden=6, heads=6, vocab=21, positions=5)

NODES_OF_3 = Topology(nodes=7, devices_per_node=3)

CASES: Mapping[str, Case] = {
    "tied, uneven, interleaved, TP 3 to 5": Case(
        FIFTEEN, Side("pp2tp3vpp2", split=(1, 3, 2, 1)), Side("pp3tp5", split=(0, 6, 1))
    ),
    "TP 5 to 3, ranges on one side only": Case(FIFTEEN, Side("tp5dp2"), Side("pp2tp3dp3", zero1=True)),
    "EP 6 to 4, ETP 2 to 3, TP with it": Case(MIXED, Side("tp2dp6ep6"), Side("tp3dp4ep4")),
    "EP 6 to 4, ETP 2 to 3, ranges of both": Case(
        MIXED, Side("tp1dp12ep6etp2", zero1=True), Side("tp2dp6ep4etp3", zero1=True)
    ),
    "EP 3 over a stage each, to EP 12": Case(MIXED, Side("pp3tp1dp3ep3", zero1=True), Side("tp1dp12ep12", zero1=True)),
    "experts whole on each, to cut by two axes": Case(MIXED, Side("tp6etp1"), Side("tp1cp2dp3ep2etp3", zero1=True)),
    "ranges, DP 7 to 4, TP 2 to 3": Case(SIX, Side("tp2dp7", zero1=True), Side("tp3dp4", zero1=True)),
    "ranges, DP 5 to 3": Case(SIX, Side("pp1dp5", zero1=True), Side("pp1dp3", zero1=True)),
    "ranges of chunks that take turns": Case(
        SIX, Side("pp2dp3vpp2", zero1=True), Side("pp5dp2", zero1=True)
    ),
    "most ranges are padding": Case(
        Model(layers=0, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=5, vocab_divisor=1),
        Side("dp48", zero1=True), Side("dp7", zero1=True),
    ),
    "from no ranges to ranges and another context": Case(SIX, Side("pp2tp3cp2"), Side("tp3cp1dp4", zero1=True)),
    "key heads shared by two, then by four": Case(GROUPED, Side("tp6dp2"), Side("pp1tp12")),
    "key heads parted again": Case(GROUPED, Side("tp12", zero1=True), Side("pp3tp3", zero1=True)),
    "stages without layers, on both sides": Case(
        replace(SIX, layers=2), Side("pp4tp2", split=(0, 2, 0, 0)), Side("pp3tp3dp2", zero1=True, split=(1, 0, 1))
    ),
    "no layers at all": Case(replace(SIX, layers=0), Side("pp2tp3"), Side("tp2dp4")),
    "latent attention, experts on every other layer": Case(
        LATENT, Side("pp2tp2dp3ep3", zero1=True), Side("pp1vpp2tp3dp2ep2etp3", zero1=True)
    ),
    "one replica to nine, forwarded": Case(SIX, Side("pp1"), Side("dp9")),
    "one replica of a TP group to nine on nodes": Case(
        GPT, Side("tp2"), Side("tp2dp9"), topology=NODES_OF_3, devices=range(18)
    ),
    "one replica to seven in three stages": Case(GPT, Side("pp1tp2"), Side("pp3tp1dp7", split=(1, 1, 2))),
    "scattered devices": Case(
        GPT, Side("pp2tp3dp2"), Side("pp3tp2dp2", zero1=True), prev_devices=(40, 3, 17, 9, 2, 31, 8, 25, 60, 1, 5, 12),
        devices=(60, 7, 40, 2, 90, 33, 12, 9, 41, 25, 77, 3, 19),
    ),
    "scattered over nodes, three leave": Case(
        SIX, Side("pp2tp3dp2"), Side("pp3tp3"), prev_devices=(0, 7, 2, 14, 4, 11, 6, 1, 17, 9, 10, 5),
        devices=(0, 2, 4, 5, 6, 7, 8, 10, 11, 13, 14, 16), topology=NODES_OF_3,
    ),
    "all devices are other ones": Case(GROUPED, Side("tp3dp2"), Side("pp2tp3"), devices=range(6, 12)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_device_holds_what_megatron_would_give_its_rank(case: Case) -> None:
    plan = case.plan(Catalogue.of(case.model))
    check_arrived(case, plan, moved(plan, 300))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_live_tensors_arrive_bit_for_bit(case: Case) -> None:
    catalogue = Catalogue.of(case.model)
    plan, values = case.plan(catalogue), live(catalogue.tensors)
    held = run_plan(plan, cut(plan.prev, values), 512)
    assert right({device: held[device] for device in plan.curr.devices}, plan.curr, values)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_lost_device_is_made_good_from_others_or_what_it_took_along_is_named(case: Case) -> None:
    catalogue = Catalogue.of(case.model)
    prev = case.placed(catalogue)
    for rank in {0, len(prev.devices) - 1}:
        lost = (prev.devices[rank],)
        gone = taken_along(case, rank)
        if gone:
            with pytest.raises(StateLost) as refused:
                case.plan(catalogue, lost)
            assert set(refused.value.names) == gone
        else:
            plan = case.plan(catalogue, lost)
            check_arrived(case, plan, moved(plan, 1000, lost))


def taken_along(case: Case, lost: int) -> set[str]:
    """The tensors of which elements are on one old rank alone."""
    oracle = Oracle(case.prev.job(case.model))
    names, world = list(oracle.numbers), case.prev.parsed.world_size
    gone = set()
    for index, kind in enumerate(KINDS):
        hold = oracle.owned if case.prev.zero1 and index else oracle.params
        others = np.concatenate([np.empty(0, np.int64), *(hold(rank) for rank in range(world) if rank != lost)])
        alone = np.setdiff1d(hold(lost), others)
        gone |= {f"{kind}:{names[owner]}" for owner in np.unique(oracle.owner[alone])}
    return gone


def test_where_one_replica_becomes_nine_new_ones_pass_on_what_they_have() -> None:
    for name, case in CASES.items():
        if name.startswith("one replica"):
            plan = case.plan(Catalogue.of(case.model))
            assert {transfer.hop for transfer in plan.transfers} > {1, 2, 3}, name


@st.composite
def changes(draw: st.DrawFn) -> Case:
    """Any two configurations of any small model, of up to 16 ranks each."""
    small = jobs().filter(lambda job: job.config.world_size <= 16)
    one, other = draw(small), draw(small)

    def side(job: Job) -> Side:
        fits = job.split is not None and sum(job.split) == one.model.layers
        return Side(str(job.config), job.zero1, job.split if fits else None)

    count = max(one.config.world_size, other.config.world_size)
    slots = draw(st.permutations(range(count + 2)))
    return Case(one.model, side(one), side(other), slots[: one.config.world_size], slots[1 : count + 2])


@settings(max_examples=12, deadline=None)
@given(changes(), st.integers(8, 300), st.booleans())  # a round is half the staging, an element up to 4 bytes
def test_any_change_of_any_described_model(case: Case, staging_bytes: int, loses_one: bool) -> None:
    catalogue = Catalogue.of(case.model)
    lost = case.placed(catalogue).devices[:1] if loses_one else ()
    if loses_one and (gone := taken_along(case, 0)):
        with pytest.raises(StateLost) as refused:
            case.plan(catalogue, lost)
        assert set(refused.value.names) == gone
    else:
        plan = case.plan(catalogue, lost)
        check_arrived(case, plan, moved(plan, staging_bytes, lost))
