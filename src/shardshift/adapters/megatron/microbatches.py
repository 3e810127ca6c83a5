"""megatron-core's own count of micro-batches, for jobs that have set it up; shardshift's is in ``DataPosition``.

``get_num_microbatches()`` is a module global made for one data parallel size. A training loop that asks it after a
change of layout would train with another global batch, so it is made anew with each generation.
"""

from __future__ import annotations

from typing import Any

import megatron.core.num_microbatches_calculator as calculator

from ...values import Mismatch, Unaccounted
from .job import DataPosition, RankLayout


def check(position: DataPosition) -> None:
    """Refuse a calculator that counts otherwise than the adapter.

    Raises:
        Unaccounted: if the global batch grows as training goes on.
        Mismatch: if it has other batch sizes than the adapter.
    """
    live: Any = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if live is None:
        return
    if not isinstance(live, calculator.ConstantNumMicroBatchesCalculator):
        raise Unaccounted(
            f"megatron-core's {type(live).__name__} changes the global batch as training goes on, which shardshift "
            "cannot carry yet; nothing was moved. What to do: change layout once the batch has its final size, with a "
            "constant calculator",
            [type(live).__name__],
        )
    theirs = (live.get_current_running_global_batch_size(), live.get_micro_batch_size(), live.get())
    ours = (position.global_batch_size, position.micro_batch_size, position.num_microbatches)
    if theirs != ours:
        raise Mismatch(
            "(global batch, micro-batch, number of micro-batches) are "
            f"{theirs} in megatron-core's calculator, {ours} in the adapter; nothing was moved. What to do: give the "
            "adapter the batch sizes that the job trains with"
        )


def follow(position: DataPosition, layout: RankLayout) -> None:
    """Make megatron-core's calculator anew for a layout, if this process has one."""
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        calculator.reconfigure_num_microbatches_calculator(
            layout.rank, None, position.global_batch_size, position.micro_batch_size, layout.config.dp
        )
