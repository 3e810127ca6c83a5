"""The policy against a search through every configuration, on described models: no process, no torch tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from shardshift.elastic.candidates import candidates
from shardshift.elastic.policy import Choice, Settings, best, policy_of
from shardshift.elastic.present import Present
from shardshift.models import Catalogue, Model
from shardshift.models.load import Load, State, load_of
from shardshift.models.step import Step
from shardshift.models.step_time import step_time
from shardshift.plan import lacking_bytes, make_plan
from shardshift.schedule import compile_program, peak_of
from shardshift.schedule.staging import staging_in_use_bytes
from shardshift.values import Infeasible, Mismatch, ParallelConfig, PlacedLayout, Rates, Topology

NODES = Topology(4, 2, Rates.both(1e9), Rates.both(2e8), latency_s=1e-5)
MODEL = Model.from_dimensions(layers=4, hidden=24, heads=6, vocab=100, positions=16)
STEP = Step(MODEL, sequence=16, global_batch=12, micro_batch=1)
RATES = Settings(flops_per_s=1e9, prefer="bytes", staging_bytes=0)


def at(config: str) -> ParallelConfig:
    return ParallelConfig.parse(config)


@dataclass
class Described:
    """An adapter of a described model. Layers must be divided by virtual stages, heads by tp."""

    step: Step = STEP
    state_factor: float = 1.0
    looked_at: list[ParallelConfig] = field(default_factory=list)

    def check(self, config: ParallelConfig) -> None:
        self.looked_at.append(config)
        stages = config.pp * config.vpp
        if self.step.model.layers % stages:
            raise Infeasible(f"{config}: {self.step.model.layers} layers do not make {stages} stages; what to do: x")

    def load(self, config: ParallelConfig, *, exact: bool = True) -> Load:
        if self.step.model.heads % config.tp:
            raise Infeasible(f"{config}: {self.step.model.heads} attention heads, tp {config.tp}; what to do: x")
        load = load_of(self.step, config)
        if not exact or self.state_factor == 1:
            return load
        states = [each.state for each in load.stages]
        more = [State(*(int(self.state_factor * size) for size in state_sizes(state))) for state in states]
        return load_of(self.step, config, more)

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, kinds: Sequence[str]) -> Any:
        catalogue = Catalogue.of(self.step.model)
        layouts = [catalogue.layout(config, zero1=self.step.zero1) for config in (prev, curr)]
        return SimpleNamespace(prev=layouts[0], curr=layouts[1])


def state_sizes(state: State) -> tuple[int, int, int]:
    return state.param_bytes, state.gradient_bytes, state.optimizer_bytes


def present(config: str, topology: Topology = NODES, first: int = 0) -> Present:
    parsed = at(config)
    return Present(parsed, tuple(range(first, first + parsed.world_size)), topology)


def least_moved(adapter: Described, now: Present, config: ParallelConfig, devices: Sequence[int]) -> int:
    """The least bytes that move over all pairings, by an assignment of ranks to devices."""
    change = adapter.change(now.config, config, kinds=())
    cost = lacking_bytes(change.prev, change.curr)
    table, of_rank = [], change.curr.role_of_rank
    for rank in range(config.world_size):
        ranks = [now.devices.index(device) if device in now.devices else None for device in devices]
        row = [cost[of_rank[rank], -1 if one is None else change.prev.role_of_rank[one]] for one in ranks]
        table.append(row)
    matrix = np.array(table)
    return int(matrix[linear_sum_assignment(matrix)].sum())


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(
    ("config", "devices", "memory_bytes"),
    [
        ("pp2tp2dp1", range(4), None),
        ("pp2tp2dp1", range(7), None),
        ("pp1tp2dp3", range(2, 8), None),
        ("pp2tp2dp1", range(8), 700_000),
        ("pp4tp1dp2", (0, 3, 5), 1_200_000),
    ],
)
def test_the_choice_is_that_of_a_search_through_all(
    config: str, devices: Sequence[int], memory_bytes: int | None, tolerance: float
) -> None:
    adapter, now = Described(), present(config)
    settings = replace(RATES, memory_bytes=memory_bytes, tolerance=tolerance)
    found: dict[ParallelConfig, float] = {}
    for pp, tp, dp in itertools.product(range(1, 9), repeat=3):
        one = ParallelConfig(pp, tp, dp)
        if one.world_size > len(devices) or 4 % pp or 6 % tp or 12 % dp:
            continue
        load = load_of(STEP, one)
        change = adapter.change(now.config, one, kinds=())
        if memory_bytes is not None:
            # In these cases the old and the new state together fit or do not fit whatever stays in place.
            old = load_of(STEP, now.config).stages
            before = max(change.prev.rank_bytes) + max(each.state.gradient_bytes for each in old)
            fits = max(change.curr.rank_bytes) + before <= memory_bytes
            if load.memory_bytes > memory_bytes or not fits:
                continue
        found[one] = step_time(load, NODES, flops_per_s=1e9).seconds
    fastest_s = min(found.values())
    as_good = {one for one, time_s in found.items() if time_s <= fastest_s * (1 + tolerance)}
    moved = {one: least_moved(adapter, now, one, list(devices)) for one in as_good}

    choice = best(devices, now, adapter, settings)
    assert set(choice.as_good) == as_good
    assert moved[choice.config] == min(moved.values()) == choice.plan.moved_bytes
    assert set(choice.plan.curr.devices) <= set(devices)


def test_the_choice_is_the_same_in_whatever_order_devices_come() -> None:
    now = present("pp2tp2dp1")
    choices = {
        (choice.config, choice.plan.digest)
        for order in ([0, 1, 2, 3, 4, 5], [5, 0, 4, 1, 3, 2])
        for choice in [best(order, now, Described(), RATES)]
    }
    assert len(choices) == 1


def test_of_configurations_as_good_the_one_that_moves_least_is_chosen() -> None:
    """With a tolerance that takes in everything nothing has to move."""
    now = present("pp2tp3dp1")
    choice = best(range(6), now, Described(), replace(RATES, tolerance=1e9))
    assert (choice.config, choice.plan.moved_bytes) == (now.config, 0)
    assert len(choice.as_good) > 10


def test_devices_that_do_not_divide_are_left_over() -> None:
    """Seven devices: neither layers, heads nor batch have a 7, nor 4 x 6 x 12 a product of 7."""
    choice = best(range(7), present("pp1tp1dp1"), Described(), RATES)
    assert choice.config.world_size == 6


def test_models_are_built_for_the_fastest_alone() -> None:
    adapter = Described()
    choice = best(range(8), present("pp1tp1dp1"), adapter, replace(RATES, tolerance=0.0))
    assert adapter.looked_at[-1] == choice.config
    assert len(adapter.looked_at) < sum(1 for _ in candidates(8, at("pp1"))) / 3


def test_what_is_counted_decides_about_memory_and_not_what_is_worked_out() -> None:
    now, limit = present("pp1tp1dp1", first=7), replace(RATES, memory_bytes=1_000_000)
    light, heavy = (best(range(7), now, Described(state_factor=factor), limit) for factor in (1.0, 4.0))
    assert light.config.pp * light.config.tp < heavy.config.pp * heavy.config.tp
    assert {one.family for one in heavy.refused} >= {"memory"}


def test_the_peak_of_the_move_is_that_of_the_programs() -> None:
    """Just enough for the move's peak is enough, one byte less is not."""
    now, target = present("pp1tp2"), at("pp2tp1")
    adapter = Described(replace(STEP, sequence=1))
    gradient_bytes = adapter.load(now.config).stages[0].state.gradient_bytes
    change = adapter.change(now.config, target, kinds=())
    plan = make_plan(PlacedLayout(change.prev, now.devices), change.curr, devices=range(2), topology=NODES)
    peak_bytes = 0
    for device in range(2):
        program = compile_program(plan, device, 1 << 20)
        staged_bytes = max(staging_in_use_bytes(epoch.rounds) for epoch in program.epochs)
        live_bytes = peak_of(program, plan.prev.shards_on(device)).live_bytes - staged_bytes
        peak_bytes = max(peak_bytes, live_bytes + gradient_bytes)
    assert peak_bytes > adapter.load(target).memory_bytes

    def families(memory_bytes: int) -> dict[str, str]:
        settings = replace(RATES, memory_bytes=memory_bytes, tolerance=1e9)
        refused = best(range(2), now, adapter, settings).refused
        return {one.family: one.reason for one in refused if one.config == target}

    assert families(peak_bytes) == {}
    assert "during the move" in families(peak_bytes - 1)["memory"]


def test_activations_that_were_measured_to_be_more_count_as_more() -> None:
    now, limit = present("pp1tp1dp1", first=7), replace(RATES, memory_bytes=1_000_000)
    light, heavy = (best(range(7), now, Described(), replace(limit, activation_factor=f)) for f in (1.0, 12.0))
    assert light.config.pp * light.config.tp < heavy.config.pp * heavy.config.tp


def test_where_nothing_fits_every_kind_of_reason_is_named() -> None:
    with pytest.raises(Infeasible) as caught:
        best(range(8), present("pp1tp1dp1"), Described(), replace(RATES, memory_bytes=50_000))
    text = str(caught.value)
    for part in ("8 devices", "memory: ", "batch: ", "heads: ", "layers: ", "a device has 50,000", "what to do: "):
        assert part.lower() in text.lower()


def test_a_layout_for_which_the_jobs_own_functions_fail_is_passed_over_and_named() -> None:
    class Failing(Described):
        def check(self, config: ParallelConfig) -> None:
            super().check(config)
            if config == first:
                raise Mismatch(f"build_model failed for {config}")

    now = present("pp2tp2dp1")
    first = best(range(4), now, Described(), RATES).config
    choice = best(range(4), now, Failing(), RATES)
    assert choice.config != first
    assert [one.reason for one in choice.refused if one.config == first] == [f"build_model failed for {first}"]


def test_no_device_is_refused() -> None:
    with pytest.raises(Infeasible, match="0 devices"):
        best((), present("pp1"), Described(), RATES)


def test_each_configuration_comes_once_and_other_axes_stay_where_they_can() -> None:
    groups = list(candidates(12, at("pp2tp2dp4vpp2cp2ep4etp1")))
    sizes = [(one.pp, one.tp, one.dp) for one, *_ in groups]
    assert len(set(sizes)) == len(sizes)
    assert set(sizes) == {(pp, tp, dp) for pp, tp, dp in itertools.product(range(1, 7), repeat=3) if pp * tp * dp <= 6}
    by_size = dict(zip(sizes, groups, strict=True))
    assert by_size[2, 1, 2] == (at("pp2dp2cp2vpp2ep4etp1"), at("pp2dp2cp2ep4etp1"))
    assert by_size[1, 1, 1] == (at("cp2ep2"),)  # one stage has no chunks; two ranks have no room for four experts
    assert by_size[1, 1, 3] == (at("dp3cp2ep2"),)
    assert by_size[1, 3, 1] == (at("tp3cp2ep2etp1"),)


def test_chunks_go_where_layers_do_not_make_them() -> None:
    """Six layers do not make 2 x 2 chunks of pp 2, so it has none there."""
    model = Model.from_dimensions(layers=6, hidden=24, heads=1, vocab=100)
    adapter = Described(replace(STEP, model=model, global_batch=5))  # which leaves pp alone to choose
    now = present("pp3vpp2")
    assert best(range(3), now, adapter, RATES).config == at("pp3vpp2")
    choice = best(range(2), now, adapter, RATES)
    assert at("pp2vpp2") in {one.config for one in choice.refused}
    assert choice.config == at("pp2")


def test_a_table_gives_the_most_devices_that_are_there() -> None:
    adapter = Described()
    policy = policy_of({2: "tp2", 4: at("pp2tp2"), 8: "pp2tp2dp2"}, adapter)
    now = present("pp1")
    assert [policy(range(count), now) for count in (8, 7, 4, 3, 2)] == [
        at(config) for config in ("pp2tp2dp2", "pp2tp2", "pp2tp2", "tp2", "tp2")
    ]
    with pytest.raises(Infeasible, match=r"no entry for 1 devices or fewer, only for 2, 4, 8"):
        policy(range(1), now)
    with pytest.raises(Infeasible, match="for 2 devices, which needs 4"):
        policy_of({2: "tp4"}, adapter)


def test_a_function_decides_and_is_held_to_what_the_job_can() -> None:
    adapter, now = Described(), present("pp1")
    assert policy_of(lambda devices: f"dp{len(devices)}", adapter)([1, 4, 6], now) == at("dp3")
    with pytest.raises(Infeasible, match="needs 5 devices, of 2"):
        policy_of(lambda devices: "dp5", adapter)(range(2), now)
    with pytest.raises(Infeasible, match="4 layers do not make 3 stages"):
        policy_of(lambda devices: at("pp3"), adapter)(range(3), now)
    with pytest.raises(Infeasible, match="give 'auto'"):
        policy_of("best", adapter)  # type: ignore[arg-type]


def test_auto_is_the_best() -> None:
    now, adapter = present("pp2tp2dp1"), Described()
    choice: Choice = best(range(6), now, adapter, RATES)
    assert policy_of("auto", adapter, RATES)(range(6), now) == choice.config
