"""The model of the step's time: by hand on small numbers, and against what was published of real runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardshift.models import Model
from shardshift.models.load import Load, StageLoad, State, Traffic, load_of
from shardshift.models.step import Step
from shardshift.models.step_time import fitted_flops_per_s, step_time
from shardshift.values import Infeasible, ParallelConfig, Rates, Topology

NOTHING = Traffic()
CLUSTER = Topology(4, 4, Rates.both(100.0), Rates.both(50.0), latency_s=0.0)


def load(config: str, sent: Mapping[str, Traffic] | None = None, *, flops: float = 0.0, micro_batches: int = 1) -> Load:
    parsed = ParallelConfig.parse(config)
    every = {axis: (sent or {}).get(axis, NOTHING) for axis in ("tp", "cp", "ep", "pp", "dp", "edp", "ends")}
    stage = StageLoad(State(0, 0, 0), 0, flops, **every)
    return Load(parsed, (stage,) * parsed.pp, micro_batches)


def seconds(config: str, topology: Topology, sent: Traffic) -> float:
    return step_time(load(config, {"tp": sent}), topology).seconds


def test_micro_batches_and_the_bubble_add_up() -> None:
    """8 micro-batches of 2 s on 4 stages: 16 s, and 3 x 2 s to fill and drain; a third of that with 3 chunks."""
    time = step_time(load("pp4", flops=20.0, micro_batches=8), CLUSTER, flops_per_s=10.0)
    assert (time.compute_s, time.bubble_s, time.seconds) == (16, 6, 22)
    assert step_time(load("pp4vpp3", flops=20.0, micro_batches=8), CLUSTER, flops_per_s=10.0).bubble_s == 2


def test_the_slowest_stage_sets_the_pace() -> None:
    one = load("pp2", flops=20.0)
    slow = replace(one, stages=(one.stages[0], replace(one.stages[1], flops=50.0)))
    assert step_time(slow, CLUSTER, flops_per_s=10.0).compute_s == 5


@pytest.mark.parametrize(
    ("config", "traffic", "expected"),
    [
        ("tp4", "tp", 1.0),  # in a node: 100 bytes at 100 a second
        ("tp8", "tp", 2.0),  # over two: one ring leaves the node, 50 a second
        ("tp2dp2", "dp", 1.0),  # all four in a node
        ("tp2dp4", "dp", 4.0),  # two rings share the link
        ("tp4dp4", "dp", 8.0),  # four rings do
        ("tp4cp2", "cp", 8.0),
        ("pp4", "pp", 1.0),  # all stages in a node
        ("pp2tp4", "pp", 8.0),
    ],
)
def test_groups_take_the_lanes_that_they_lie_on(config: str, traffic: str, expected: float) -> None:
    found = step_time(load(config, {traffic: Traffic(100.0, 1)}), CLUSTER)
    assert {"tp": found.tp_s, "cp": found.cp_s, "pp": found.pp_s, "dp": found.dp_s}[traffic] == expected


def test_a_collective_waits_for_latency_by_the_logarithm_of_its_group() -> None:
    topology = replace(CLUSTER, latency_s=1.0)
    assert seconds("tp4", topology, Traffic(100.0, 5)) == 1 + 5 * 2
    assert seconds("tp1", topology, Traffic(100.0, 5)) == 0


def test_the_slowest_device_and_link_in_use_count() -> None:
    slow = replace(CLUSTER, device_exceptions=((1, Rates(100.0, 10.0)), (9, Rates.both(1.0))))
    assert seconds("tp4", slow, Traffic(100.0, 1)) == 10


def test_what_overlaps_is_not_counted() -> None:
    one = load("dp4", {"dp": Traffic(100.0, 1)})
    assert step_time(one, CLUSTER, overlap=0.75).dp_s == 0.25


def test_a_measured_step_gives_the_rate_that_predicts_it() -> None:
    step = Step(Model.from_dimensions(layers=6, hidden=64, heads=4, vocab=512), 32, 16, 1)
    found = load_of(step, ParallelConfig.parse("pp2tp2dp2"))
    topology = Topology(2, 4)
    rate = fitted_flops_per_s(found, topology, 3.0)
    assert step_time(found, topology, flops_per_s=rate).seconds == pytest.approx(3.0)
    with pytest.raises(Infeasible, match="communication alone"):
        fitted_flops_per_s(found, topology, 1e-9)


# Selene (Narayanan et al. 2021, section 5): nodes of 8 A100 with NVLink, 300e9 bytes/s each way, and 8 x 200 Gb/s.
SELENE = Topology(8, 8, Rates.both(300e9), Rates.both(8 * 200 * 125e6))


def test_tensor_parallelism_within_a_node_and_pipelines_across_are_fastest_as_published() -> None:
    """Figure 13: a model of 162.2 B parameters on 64 GPUs runs fastest with tensor and pipeline size 8.

    That is the larger of the two batches there. With the smaller, 32, the model puts tensor size 16 first, by 4 %.
    """
    model = Model.from_dimensions(layers=32, hidden=20480, heads=128, vocab=51200)
    step = Step(model, sequence=2048, global_batch=128, micro_batch=1, recompute="full")
    times = {
        tp: step_time(load_of(step, ParallelConfig(pp=64 // tp, tp=tp)), SELENE).seconds for tp in (2, 4, 8, 16, 32)
    }
    assert min(times, key=lambda tp: times[tp]) == 8


def test_data_parallelism_beats_both_where_memory_allows_as_published() -> None:
    """Figures 14 and 15: a model of 5.9 B parameters on 64 GPUs gets slower with pipeline and with tensor size."""
    model = Model.from_dimensions(layers=32, hidden=3840, heads=32, vocab=51200)
    step = Step(model, sequence=2048, global_batch=512, micro_batch=1, recompute="full")
    for axis in ("pp", "tp"):
        times = [
            step_time(load_of(step, ParallelConfig.parse(f"{axis}{ways}dp{64 // ways}")), SELENE).seconds
            for ways in (2, 4, 8, 16, 32)
        ]
        assert times == sorted(times)
