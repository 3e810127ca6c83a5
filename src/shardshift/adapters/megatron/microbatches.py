"""megatron-core's own count of micro-batches (``num_microbatches_calculator.py``), carried along with a change.

``get_num_microbatches()`` is a module global made for one data parallel size. A training loop that asks it after a
change of layout would train with another global batch, so it is made anew with each generation, on joiners too.

1. The global batch at each count of samples must be the same in the new layout: the constant one, the present one of a
   ramp, and every later one of it. One that micro-batch x dp does not divide is refused before anything moves, by its
   size. With ``decrease_batch_size_if_needed`` Megatron rounds a size down to what dp allows: allowed where old and new
   dp round every size that is still to come alike (then nothing changes), refused by size where not.
2. The adapter's position follows: ``size_at`` tells the global batch at a count of samples, ramp or not.
3. A new rank makes the calculator from the settings that travel, and sets it to the samples consumed.

Rejected: reading ``current_global_batch_size`` of the live one; the loop updates that at the start of a step, so
between steps it may still be the last step's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import megatron.core.num_microbatches_calculator as calculator

from ...values import Infeasible, Mismatch, Unaccounted
from .job import DataPosition, RankLayout


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The settings of a calculator: global batches as training goes on. Sizes and counts in samples.

    Attributes:
        final: the global batch after the ramp, or the constant one.
        micro_batch_size: samples per forward on one rank.
        start: the first global batch of the ramp; ``final`` if there is none.
        increment: what the ramp adds at each step; 0 if there is none.
        rampup_samples: when the ramp ends.
        decrease: whether sizes that dp does not divide are rounded down.
    """

    final: int
    micro_batch_size: int
    start: int
    increment: int = 0
    rampup_samples: int = 0
    decrease: bool = False

    @classmethod
    def constant(cls, size: int, micro_batch_size: int) -> BatchSizes:
        """One global batch for all time."""
        return cls(size, micro_batch_size, size)

    @classmethod
    def live(cls) -> BatchSizes | None:
        """Those of this process's calculator; None if it has none.

        Raises:
            Unaccounted: if it is of a kind that is not known.
        """
        live: Any = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        if live is None:
            return None
        if isinstance(live, calculator.ConstantNumMicroBatchesCalculator):
            final, micro = live.current_global_batch_size, live.micro_batch_size
            return cls(final, micro, final, decrease=live.current_running_global_batch_size != final)
        if isinstance(live, calculator.RampupBatchsizeNumMicroBatchesCalculator):
            return cls(
                live.global_batch_size,
                live.micro_batch_size,
                live.start_global_batch_size,
                live.batch_size_increment,
                live.ramup_samples,
                live.decrease_batch_size_if_needed,
            )
        raise Unaccounted(
            f"megatron-core's count of micro-batches is a {type(live).__name__}, which no rule covers; nothing was "
            "moved. What to do: use the constant one or the ramp",
            [type(live).__name__],
        )

    def nominal(self, consumed_samples: int) -> int:
        """The global batch at a count of samples, before any rounding down (Megatron's ``update``)."""
        if not self.increment or consumed_samples > self.rampup_samples:
            return self.final
        samples_per_step = self.rampup_samples / ((self.final - self.start) // self.increment)
        return self.start + int(consumed_samples / samples_per_step) * self.increment

    def running(self, size: int, dp: int) -> int | None:
        """What a global batch of a nominal size really is with a dp; None if it cannot be."""
        per_forward = self.micro_batch_size * dp
        if size % per_forward == 0:
            return size
        return size - size % per_forward or None if self.decrease else None

    def to_come(self, consumed_samples: int) -> range:
        """Every nominal size from a count of samples on."""
        return range(self.nominal(consumed_samples), self.final + 1, self.increment or 1)

    def refuse(self, consumed_samples: int, dp: int, dp_before: int | None = None) -> None:
        """Refuse a dp in which the global batch would not be what it is.

        Args:
            consumed_samples: where the data stands.
            dp: data parallel ways to check.
            dp_before: those of the present layout; None at the start of a job.

        Raises:
            Infeasible: naming the size.
        """
        for size in self.to_come(consumed_samples):
            here, before = self.running(size, dp), self.running(size, dp if dp_before is None else dp_before)
            if here is None:
                raise Infeasible(
                    f"the global batch of {size}{self._ramp()} is not divisible by micro-batch {self.micro_batch_size} "
                    f"x dp {dp} = {self.micro_batch_size * dp}; nothing was moved. What to do: choose a dp that "
                    "divides it"
                )
            if here != before:
                raise Infeasible(
                    f"the global batch of {size}{self._ramp()} is rounded to {before} samples with dp {dp_before} and "
                    f"to {here} with dp {dp} (decrease_batch_size_if_needed), so the change of layout would change it; "
                    f"nothing was moved. What to do: choose a dp that rounds it to {before} too"
                )

    def _ramp(self) -> str:
        return f", to which the ramp of {self.start} to {self.final} comes," if self.increment else ""


def size_at(consumed_samples: int, dp: int, default: int) -> int:
    """The global batch of the next step, in samples over all ranks: for ``DataPosition``.

    Args:
        consumed_samples: samples used so far.
        dp: data parallel ways.
        default: the adapter's own global batch, if this process has no calculator.
    """
    sizes = BatchSizes.live()
    running = None if sizes is None else sizes.running(sizes.nominal(consumed_samples), dp)
    return default if running is None else running


def refuse_dp(dp: int, default: BatchSizes) -> None:
    """Refuse a dp that the final global batch cannot take: for ``Adapter.check``, which knows of no job.

    Args:
        dp: data parallel ways.
        default: the adapter's own batch sizes, if this process has no calculator.

    Raises:
        Infeasible: naming the size.
    """
    sizes = BatchSizes.live() or default
    sizes.refuse(sizes.rampup_samples + 1, dp)


def check(position: DataPosition, dp: int | None = None, dp_before: int | None = None) -> None:
    """Refuse a calculator that counts otherwise than the adapter, or that could not go on in the new layout.

    Args:
        position: the adapter's.
        dp: data parallel ways of the new layout.
        dp_before: of the present one.

    Raises:
        Unaccounted: if it is of a kind that is not known.
        Mismatch: if it has other batch sizes than the adapter.
        Infeasible: if the new layout cannot take the present global batch or a later one.
    """
    sizes = BatchSizes.live()
    if sizes is None:
        return
    ways = dp_before or position.global_batch_size // (position.micro_batch_size * position.num_microbatches)
    size = sizes.running(sizes.nominal(position.consumed_samples), ways)
    theirs = (size, sizes.micro_batch_size, (size or 0) // (sizes.micro_batch_size * ways))
    ours = (position.global_batch_size, position.micro_batch_size, position.num_microbatches)
    if theirs != ours:
        raise Mismatch(
            "(global batch, micro-batch, number of micro-batches) are "
            f"{theirs} in megatron-core's calculator, {ours} in the adapter; nothing was moved. What to do: give the "
            "adapter the batch sizes that the job trains with"
        )
    if dp is not None:
        sizes.refuse(position.consumed_samples, dp, ways)


def capture() -> dict[str, Any] | None:
    """The calculator's settings, for the record of the job; None if there is none."""
    sizes = BatchSizes.live()
    return None if sizes is None else asdict(sizes)


def renew(consumed_samples: int, layout: RankLayout, settings: dict[str, Any] | None) -> None:
    """Make megatron-core's calculator anew for a layout, if the job has one; before ``size_at`` is asked.

    Args:
        consumed_samples: where training stands.
        layout: of this rank.
        settings: what ``capture`` gave on the first rank.
    """
    if settings is None:
        return
    sizes = BatchSizes(**settings)
    ramp = [sizes.start, sizes.increment, sizes.rampup_samples] if sizes.increment else None
    calculator.reconfigure_num_microbatches_calculator(
        layout.rank, ramp, sizes.final, sizes.micro_batch_size, layout.config.dp, sizes.decrease
    )
    calculator.update_num_microbatches(consumed_samples, consistency_check=False)


def advance(position: DataPosition) -> None:
    """Set the calculator to the samples that are consumed; the loop's own ``update_num_microbatches`` finds it so."""
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        calculator.update_num_microbatches(position.consumed_samples, consistency_check=False)
