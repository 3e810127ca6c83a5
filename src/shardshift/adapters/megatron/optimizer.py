"""Megatron's optimizers: finding the moments of a parameter, and putting them back.

Supported here: Adam and AdamW in fp32 (``optimizer.py``, ``FP32Optimizer``), alone or inside a
``ChainedOptimizer``. Any other optimizer, and any state of an optimizer that is not listed below, is refused by
name before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer

from ...values import Kind, Unaccounted

MOMENTS: Final = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
_STEP: Final = "step"


def base_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers that a Megatron optimizer wraps.

    Raises:
        Unaccounted: if it is of a kind whose state is not known.
    """
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if type(part) is not FP32Optimizer:
            raise Unaccounted(
                f"optimizer {type(part).__name__} holds state that shardshift cannot move yet; supported: "
                "FP32Optimizer with Adam. What to do: use fp32 parameters without the distributed optimizer",
                [type(part).__name__],
            )
        if part.optimizer is not None:  # a stage without parameters of this group has a stub
            yield part.optimizer


def groups(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """The live param groups of every torch optimizer inside."""
    for base in base_optimizers(optimizer):
        yield from base.param_groups


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a param group says of its parameters: lr, weight decay, betas, ..."""
    return {key: value for key, value in group.items() if key != "params"}


def moments(optimizer: MegatronOptimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Per parameter its optimizer state: ``exp_avg``, ``exp_avg_sq`` and perhaps ``step``; none before step 1.

    Raises:
        Unaccounted: if there is state of another name.
    """
    known = {*MOMENTS, _STEP}
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for base in base_optimizers(optimizer):
        for parameter, state in base.state.items():
            if unknown := sorted(map(str, set(state) - known)):
                raise Unaccounted(
                    f"{type(base).__name__} keeps state {unknown}, which no rule covers; nothing was moved. "
                    "What to do: use Adam or AdamW without amsgrad",
                    unknown,
                )
            if state:
                found[parameter] = state
    return found


def restore(optimizer: MegatronOptimizer, states: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Give each parameter the optimizer state that is in place for it; those left out start without."""
    for base in base_optimizers(optimizer):
        for group in base.param_groups:
            for parameter in group["params"]:
                base.state.pop(parameter, None)
                if parameter in states:
                    base.state[parameter] = states[parameter]
