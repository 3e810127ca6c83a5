"""What belongs to the whole job: grad scalers, batch sizes, rerun machine, counters. On Megatron's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import megatron.core.num_microbatches_calculator as calculator
import megatron.core.rerun_state_machine as megatron_rerun
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

from shardshift import ParallelConfig
from shardshift.adapters.megatron import microbatches, rerun, scaler
from shardshift.adapters.megatron.job import DataPosition, RankLayout
from shardshift.adapters.megatron.microbatches import BatchSizes
from shardshift.adapters.megatron.records import Companions, JobRecord, RankRecord
from shardshift.values import Infeasible, Mismatch, Unaccounted


@pytest.fixture(autouse=True)
def no_globals() -> Iterator[None]:
    """Megatron keeps both in module globals."""
    calculator.unset_num_microbatches_calculator()
    megatron_rerun.destroy_rerun_state_machine()
    yield
    calculator.unset_num_microbatches_calculator()
    megatron_rerun.destroy_rerun_state_machine()


def dynamic() -> DynamicGradScaler:
    return DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, growth_interval=4, hysteresis=2)


def part(scaler: Any, *, expert: bool = False) -> Any:
    """What of a Megatron optimizer its scaler is found by."""
    return SimpleNamespace(grad_scaler=scaler, optimizer=SimpleNamespace(param_groups=[{"is_expert_parallel": expert}]))


def chained(*parts: Any) -> Any:
    return SimpleNamespace(chained_optimizers=list(parts))


def carried(*optimizers: Any) -> Any:
    """Through the bytes of records."""
    records = [RankRecord(r, [], {}, {}, scaler.capture(o, f"rank {r}")) for r, o in enumerate(optimizers)]
    contents = [record.to_bytes(first=True)[f"rank{record.rank}"] for record in records]
    return scaler.merge(RankRecord.from_bytes(content).scalers for content in contents)


OVERFLOWS = [True, False, True, False, False, False]


def test_the_loss_scale_goes_on_as_in_a_run_that_never_moved() -> None:
    alone, moving, new = dynamic(), dynamic(), dynamic()
    for overflow in OVERFLOWS:
        alone.update(overflow)
        moving.update(overflow)
    scaler.restore(carried(chained(part(moving)), chained(part(moving))), chained(part(new)))
    for overflow in [False] * 5 + [True] * 3:
        for each in (alone, new):
            each.update(overflow)
        assert (float(new.scale), new.state_dict()) == (float(alone.scale), alone.state_dict())
    assert float(alone.scale) != 2.0**16


def test_dense_and_expert_parts_keep_their_own_scales_and_share_no_tensor() -> None:
    dense, experts = dynamic(), dynamic()
    dense.update(True)
    dense.update(True)
    states = carried(chained(part(dense), part(dense), part(experts, expert=True)))
    after = [dynamic(), dynamic(), dynamic()]
    scaler.restore(states, chained(part(after[0], expert=True), part(after[1]), part(after[2])))
    assert [float(each.scale) for each in after] == [2.0**16, 2.0**15, 2.0**15]
    after[1]._scale.fill_(3.0)
    assert float(after[2].scale) == 2.0**15


def test_new_expert_parts_and_parts_without_parameters_go_on_with_the_dense_scale() -> None:
    dense, experts, stub = dynamic(), dynamic(), dynamic()
    dense.update(True)
    dense.update(True)
    empty = SimpleNamespace(grad_scaler=stub, optimizer=None)
    scaler.restore(carried(chained(part(dense))), chained(empty, part(experts, expert=True)))
    assert float(experts.scale) == float(stub.scale) == 2.0**15


def test_scalers_that_disagree_are_refused_within_a_rank_and_between_ranks() -> None:
    ahead, behind = dynamic(), dynamic()
    ahead.update(False)
    with pytest.raises(Mismatch, match="rank 5: two grad scalers of dense parameters"):
        scaler.capture(chained(part(ahead), part(behind)), "rank 5")
    with pytest.raises(Mismatch, match="two ranks: two grad scalers of dense parameters"):
        carried(chained(part(ahead)), chained(part(behind)))


def test_an_optimizer_that_has_a_scaler_where_the_job_has_none_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"the job has a grad scaler of dense parameters, .* no grad scaler"):
        scaler.check(carried(chained(part(dynamic()))), scaler.kinds(chained(part(None))))
    with pytest.raises(Mismatch, match="the job has no grad scaler"):
        scaler.restore(carried(chained(part(None))), chained(part(dynamic())))
    scaler.restore(carried(part(ConstantGradScaler(8.0))), part(ConstantGradScaler(8.0)))
    scaler.restore({}, part(None))


def make_calculator(ramp: Any, final: int, micro: int, dp: int, decrease: bool = False) -> None:
    calculator.init_num_microbatches_calculator(1, ramp, final, micro, dp, decrease)


def position(consumed: int, size: int, micro: int, dp: int) -> DataPosition:
    return DataPosition(consumed, size, micro, size // (micro * dp))


@given(
    start=st.integers(1, 6),
    increment=st.integers(1, 4),
    increments=st.integers(1, 5),
    ramp_samples=st.integers(1, 300),
    consumed=st.integers(0, 400),
    dp=st.integers(1, 4),
    decrease=st.booleans(),
)
def test_batch_sizes_are_those_of_megatrons_calculator(
    start: int, increment: int, increments: int, ramp_samples: int, consumed: int, dp: int, decrease: bool
) -> None:
    final = start + increment * increments
    calculator.unset_num_microbatches_calculator()
    make_calculator([start, increment, ramp_samples], final, 1, dp, decrease)
    sizes = BatchSizes.live()
    assert sizes is not None
    calculator.update_num_microbatches(consumed, consistency_check=False)
    assert sizes.nominal(consumed) == calculator.get_current_global_batch_size()
    running = sizes.running(sizes.nominal(consumed), dp)
    if running is not None:
        assert running == calculator.get_current_running_global_batch_size()
        assert running // dp == calculator.get_num_microbatches()
        assert microbatches.size_at(consumed, dp, 99) == running
    later = set()
    for samples in range(consumed, ramp_samples + 2):
        calculator.update_num_microbatches(samples, consistency_check=False)
        later.add(calculator.get_current_global_batch_size())
    assert later <= set(sizes.to_come(consumed))


def test_a_ramp_goes_on_in_the_new_layout_where_it_is_also_on_a_joiner() -> None:
    make_calculator([4, 4, 24], 16, 1, 2)
    calculator.update_num_microbatches(9, consistency_check=True)
    microbatches.check(position(9, 8, 1, 2), dp=4, dp_before=2)
    record = JobRecord(2, 9, 0, None, {}, microbatches=microbatches.capture())
    travelled = JobRecord.from_bytes(record.to_bytes()["job"]).microbatches
    calculator.unset_num_microbatches_calculator()  # a process that joins has none
    layout = RankLayout(ParallelConfig.parse("dp4"), 3)
    microbatches.renew(9, layout, travelled)
    assert (calculator.get_current_global_batch_size(), calculator.get_num_microbatches()) == (8, 2)
    for consumed, size in ((17, 12), (25, 16), (1000, 16)):
        microbatches.advance(position(consumed, size, 1, 4))
        assert (calculator.get_current_global_batch_size(), calculator.get_num_microbatches()) == (size, size // 4)


def test_a_size_to_which_the_ramp_still_comes_is_refused_before_it_is_reached() -> None:
    make_calculator([4, 2, 24], 8, 1, 2)
    with pytest.raises(
        Infeasible, match=r"global batch of 6, to which the ramp of 4 to 8 comes,.* x dp 4 = 4; nothing"
    ):
        microbatches.check(position(0, 4, 1, 2), dp=4, dp_before=2)
    microbatches.check(position(25, 8, 1, 2), dp=4, dp_before=2)  # 6 is over by then


def test_the_ramp_is_read_at_the_samples_consumed_even_if_the_loop_has_not_updated_it_yet() -> None:
    make_calculator([4, 4, 24], 16, 1, 2)
    microbatches.check(position(9, 8, 1, 2), dp=2, dp_before=2)
    with pytest.raises(Mismatch, match=r"\(8, 1, 4\) in megatron-core's calculator, \(4, 1, 2\) in the adapter"):
        microbatches.check(position(9, 4, 1, 2), dp=2, dp_before=2)


def test_a_constant_batch_is_kept_and_dp_3_is_refused_by_size() -> None:
    make_calculator(None, 8, 2, 2)
    at = position(8, 8, 2, 2)
    for dp, accumulated in ((4, 1), (1, 4)):
        microbatches.check(at, dp=dp, dp_before=2)
        microbatches.renew(8, RankLayout(ParallelConfig(dp=dp), 0), microbatches.capture())
        assert (calculator.get_current_global_batch_size(), calculator.get_num_microbatches()) == (8, accumulated)
    with pytest.raises(Infeasible, match=r"global batch of 8 is not divisible by micro-batch 2 x dp 3 = 6; nothing"):
        microbatches.check(at, dp=3, dp_before=2)
    with pytest.raises(Mismatch, match=r"\(8, 2, 2\) in megatron-core's calculator, \(16, 2, 4\) in the adapter"):
        microbatches.check(position(8, 16, 2, 2), dp=2, dp_before=2)


def test_batches_that_megatron_rounds_down_are_kept_where_both_layouts_round_alike() -> None:
    make_calculator(None, 10, 1, 4, decrease=True)  # trains with 8
    at = position(8, 8, 1, 4)
    microbatches.check(at, dp=8, dp_before=4)
    microbatches.renew(8, RankLayout(ParallelConfig(dp=8), 0), microbatches.capture())
    assert calculator.get_current_running_global_batch_size() == 8
    with pytest.raises(Infeasible, match="global batch of 10 is rounded to 8 samples with dp 4 and to 10 with dp 5"):
        microbatches.check(at, dp=5, dp_before=4)
    assert microbatches.size_at(8, 8, 99) == 8


def test_without_a_calculator_nothing_is_made_and_the_adapters_batch_counts() -> None:
    microbatches.check(position(0, 8, 1, 2), dp=3, dp_before=2)
    microbatches.renew(0, RankLayout(ParallelConfig(), 0), microbatches.capture())
    microbatches.advance(position(0, 8, 1, 2))
    assert calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None
    assert microbatches.size_at(5, 2, 8) == 8
    with pytest.raises(Infeasible, match="global batch of 8 is not divisible by micro-batch 1 x dp 3"):
        microbatches.refuse_dp(3, BatchSizes.constant(8, 1))


class Erratic(calculator.NumMicroBatchesCalculator):  # type: ignore[misc]
    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_a_calculator_of_another_kind_is_refused_by_its_name() -> None:
    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = Erratic()
    with pytest.raises(Unaccounted, match="Erratic"):
        microbatches.check(position(0, 8, 1, 2))


def test_the_rerun_machine_goes_on_between_steps() -> None:
    assert rerun.capture("rank 0") is None
    rerun.restore(None)
    megatron_rerun.initialize_rerun_state_machine(mode=megatron_rerun.RerunMode.VALIDATE_RESULTS)
    machine = megatron_rerun.get_rerun_state_machine()
    machine.current_iteration, machine.max_values["loss"], machine.large_value_counts["loss"] = 41, 7.5, 100
    record = JobRecord(1, 8, 0, None, {}, rerun=rerun.capture("rank 0"))
    travelled = JobRecord.from_bytes(record.to_bytes()["job"]).rerun
    megatron_rerun.destroy_rerun_state_machine()
    rerun.restore(travelled)
    assert megatron_rerun._GLOBAL_RERUN_STATE_MACHINE is None, "a process without one makes its own"
    joined = megatron_rerun.get_rerun_state_machine()
    joined.max_values["grads"] = 2.0
    rerun.restore(travelled)
    assert (joined.current_iteration, joined.max_values) == (41, {"loss": 7.5, "grads": 2.0})


@pytest.mark.parametrize("state", ["INITIAL_RUN", "RERUNNING_IN_PLACE", "WILL_RERUN_FROM_CHECKPOINT"])
def test_a_step_that_has_to_be_repeated_is_repeated_where_it_ran(state: str) -> None:
    machine = megatron_rerun.get_rerun_state_machine()
    machine.state = megatron_rerun.RerunState[state]
    with pytest.raises(Unaccounted, match=f"rank 2: .* in state {state}"):
        rerun.capture("rank 2")


def test_measuring_determinism_is_refused() -> None:
    megatron_rerun.initialize_rerun_state_machine(mode=megatron_rerun.RerunMode.REPORT_DETERMINISM_STATS)
    with pytest.raises(Unaccounted, match="report_determinism_stats"):
        rerun.capture("rank 0")


def test_counters_of_any_size_arrive_and_others_than_numbers_are_refused_by_name() -> None:
    counters: dict[str, int | float] = {
        "consumed_valid_samples": 12,
        "skipped_samples": 0,
        "floating_point_operations": 2**80 + 1,
        "tokens_per_second": 1.5,
    }
    record = JobRecord(3, 24, 1, {"num_steps": 24, "max_lr": 1e-3}, counters)
    assert JobRecord.from_bytes(record.to_bytes()["job"]) == record
    assert record.next_generation().generation == 2
    assert record.values()["counter skipped_samples"] == 0
    with pytest.raises(Unaccounted, match="counter note is a str"):
        JobRecord(3, 24, 1, None, {"note": "x"})  # type: ignore[dict-item]


def test_the_missing_record_of_the_job_is_an_error() -> None:
    with pytest.raises(Mismatch, match="record of the whole job is missing"):
        Companions.read({"rank0": b""}, ParallelConfig())
