"""A plan's figures, held against its facts: every transfer, copy and refer written out, and summed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardshift.models import Catalogue, Model
from shardshift.plan.methods import Change, Method, solve
from shardshift.plan.plan import Plan
from shardshift.plan.summary import Summary, old_bytes, peak_extra_bytes, require_memory, require_staging, summarise
from shardshift.schedule import Schedule
from shardshift.values import Infeasible, ParallelConfig, Topology

MODEL = Model.from_dimensions(layers=5, hidden=24, heads=12, kv_heads=12, vocab=40, positions=4)
CATALOGUE = Catalogue.of(MODEL)
KEYS = [
    *("prev", "curr", "method", "digest", "state_bytes", "referred_bytes", "copied_bytes", "moved_bytes"),
    *("cross_node_bytes", "least_moved_bytes", "lower_bound_s", "predicted_s", "peak_extra_bytes", "free_nodes"),
    *("cross_node_tp_groups", "plan_s", "pairs", "instructions"),
]

CONFIGS = st.builds(
    ParallelConfig, pp=st.integers(1, 4), tp=st.sampled_from([1, 2, 3, 4]), dp=st.integers(1, 3)
).filter(lambda config: config.world_size <= 16)


def change(prev: ParallelConfig, curr: ParallelConfig, per_node: int = 4) -> Change:
    nodes = -(-max(prev.world_size, curr.world_size) // per_node)
    devices = tuple(range(nodes * per_node))
    return Change(prev, curr, MODEL.layers, devices[: prev.world_size], devices, Topology(nodes, per_node))


def planned(
    asked: Change, method: Method = Method.EXACT, staging_bytes: int = 1000
) -> tuple[Summary, tuple[Plan, ...]]:
    plans = solve(asked, CATALOGUE.layout(asked.prev), CATALOGUE.layout(asked.curr), method)
    return summarise(asked, method, plans, plan_s=0.5, staging_bytes=staging_bytes), plans


@settings(max_examples=60)
@given(prev=CONFIGS, curr=CONFIGS, method=st.sampled_from(Method), per_node=st.sampled_from([2, 4]))
def test_figures_are_the_sums_of_the_facts(
    prev: ParallelConfig, curr: ParallelConfig, method: Method, per_node: int
) -> None:
    asked = change(prev, curr, per_node)
    found, plans = planned(asked, method)
    transfers = [transfer for plan in plans for transfer in plan.transfers]
    copies = [copy for plan in plans for copy in plan.copies]
    refers = [refer for plan in plans for refer in plan.refers]
    assert found.moved_bytes == sum(one.piece.nbytes for one in transfers)
    assert found.copied_bytes == sum(one.piece.nbytes for one in copies)
    assert found.referred_bytes == sum(one.shard.nbytes for one in refers)
    crossing = [one for one in transfers if one.source_device // per_node != one.target_device // per_node]
    assert found.cross_node_bytes == sum(one.piece.nbytes for one in crossing)
    assert found.instructions == {
        "refer": len(refers),
        "copy": len(copies),
        "send": sum(one.hop == 1 for one in transfers),
        "recv": len(transfers),
        "forward": sum(one.hop > 1 for one in transfers),
    }
    used = {device // per_node for device in plans[-1].curr.devices}
    assert found.free_nodes == asked.topology.nodes - len(used)
    assert found.state_bytes == sum(tensor.nbytes for tensor in CATALOGUE.tensors)
    assert found.digest == plans[-1].digest
    assert 0 <= found.lower_bound.seconds <= found.predicted_s * (1 + 1e-9)


@settings(max_examples=40)
@given(prev=CONFIGS, curr=CONFIGS, staging_bytes=st.sampled_from([1, 500, 10**9]))
def test_the_peak_is_new_shards_and_staging_of_the_device_that_needs_most(
    prev: ParallelConfig, curr: ParallelConfig, staging_bytes: int
) -> None:
    found, (plan,) = planned(change(prev, curr), staging_bytes=staging_bytes)
    extra = []
    for device in plan.devices:
        kept = {refer.shard for refer in plan.refers_of(device)}
        new = sum(shard.nbytes for shard in plan.curr.shards_on(device) if shard not in kept)
        sent = sum(one.piece.nbytes for one in plan.transfers if one.source_device == device)
        received = sum(one.piece.nbytes for one in plan.transfers if one.target_device == device)
        extra.append(new + min(sent + received, staging_bytes))
    assert peak_extra_bytes(plan, staging_bytes).tolist() == extra
    assert found.peak_extra_bytes == max(extra)
    assert found.old_state_bytes == max(
        sum(shard.nbytes for shard in plan.prev.shards_on(device)) for device in plan.prev.devices
    )


def test_a_move_that_just_fits_is_allowed_and_one_byte_less_is_refused_by_device() -> None:
    asked = change(ParallelConfig(pp=2), ParallelConfig(tp=2))
    _, (plan,) = planned(asked)
    held = {device: sum(shard.nbytes for shard in plan.prev.shards_on(device)) for device in plan.devices}
    needed = {
        device: held[device] + extra
        for device, extra in zip(plan.devices, peak_extra_bytes(plan, 1000).tolist(), strict=True)
    }
    most = max(needed.values())
    require_memory(plan, replace(asked.topology, device_memory_bytes=most), 1000)
    require_memory(plan, asked.topology, 1000)  # unknown memory refuses nothing
    with pytest.raises(Infeasible, match=f"device {max(needed, key=needed.__getitem__)} needs {most} bytes"):
        require_memory(plan, replace(asked.topology, device_memory_bytes=most - 1), 1000)


@settings(max_examples=20)
@given(prev=CONFIGS, curr=CONFIGS)
def test_staging_is_refused_where_the_largest_element_that_moves_does_not_fit(
    prev: ParallelConfig, curr: ParallelConfig
) -> None:
    _, (plan,) = planned(change(prev, curr))
    largest = max((one.piece.tensor.itemsize for one in plan.transfers), default=0)
    require_staging(plan, 2 * largest)
    if largest:
        short = 2 * largest - 1
        said = (
            f"an element of {largest} bytes has to move, the staging bound is {short} bytes, of which a round has half"
        )
        with pytest.raises(Infeasible, match=said):
            require_staging(plan, short)


@settings(max_examples=15, deadline=None)
@given(prev=CONFIGS, curr=CONFIGS, staging_bytes=st.sampled_from([8000, 10**6]))
def test_the_peak_is_that_of_the_programs_or_a_little_more(
    prev: ParallelConfig, curr: ParallelConfig, staging_bytes: int
) -> None:
    _, (plan,) = planned(change(prev, curr))
    schedule = Schedule.of(plan, staging_bytes)
    predicted = dict(zip(plan.devices, peak_extra_bytes(plan, staging_bytes).tolist(), strict=True))
    for device in plan.devices:
        exact = schedule.peak_extra_bytes(device)
        assert exact <= predicted[device] <= exact + staging_bytes


def test_two_phases_are_both_counted_and_the_bound_is_that_of_going_there_at_once() -> None:
    asked = change(ParallelConfig(pp=4, tp=2), ParallelConfig(pp=2, tp=2))
    found, plans = planned(asked, Method.PHASES)
    assert len(plans) == 2
    assert found.moved_bytes == plans[0].moved_bytes + plans[1].moved_bytes
    assert len(found.prediction) == 2
    assert found.predicted_s == sum(one.seconds for one in found.prediction)
    assert {(pair.curr, pair.device) for pair in found.pairs} == set(enumerate(plans[1].curr.devices))


def test_lost_devices_hold_no_old_state() -> None:
    asked = replace(change(ParallelConfig(pp=2, dp=2), ParallelConfig(pp=2)), devices=(1, 2, 3), lost=(0,))
    _, (plan,) = planned(asked)
    held = dict(zip(plan.devices, old_bytes(plan).tolist(), strict=True))
    assert held[0] == 0
    assert held[1] == sum(shard.nbytes for shard in plan.prev.shards_on(1)) > 0


@settings(max_examples=30)
@given(prev=CONFIGS, curr=CONFIGS, per_node=st.sampled_from([2, 4]))
def test_what_moves_more_is_held_against_the_placement_that_moves_least(
    prev: ParallelConfig, curr: ParallelConfig, per_node: int
) -> None:
    asked = change(prev, curr, per_node)
    found, _ = planned(asked)
    more = found.moved_bytes > found.least_moved_bytes
    assert (found.bytes_alone is not None) == (more and asked.topology.nodes > 1)
    if alone := found.bytes_alone:
        least, _ = planned(replace(asked, node_worth_bytes=0))
        assert least.moved_bytes == least.least_moved_bytes
        assert (alone.free_nodes, alone.cross_node_tp_groups) == (least.free_nodes, least.cross_node_tp_groups)


def test_json_has_the_agreed_keys_in_their_order() -> None:
    found, _ = planned(change(ParallelConfig(pp=2), ParallelConfig(pp=2, dp=2)))
    record = found.to_json()
    assert list(record) == KEYS
    assert (record["prev"], record["curr"], record["method"]) == ("pp2tp1dp1", "pp2tp1dp2", "exact")
    assert record["plan_s"] == 0.5
