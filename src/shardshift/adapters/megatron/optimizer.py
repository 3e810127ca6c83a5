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
_KNOWN: Final = ("Adam", "AdamW", "FusedAdam", "SGD", "FusedSGD")
"""Names of torch's and Apex's or Transformer Engine's classes; SGD without momentum has no state."""
_PRECEDENCE: Final = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": True}


def parts(optimizer: MegatronOptimizer | None) -> Iterator[Any]:
    """A Megatron optimizer, those that it chains, and torch's inside, whatever they are."""
    for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        yield part
        if part is not None and not isinstance(part, ChainedOptimizer) and part.optimizer is not None:
            yield part.optimizer


def base_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers that a Megatron optimizer wraps.

    Raises:
        Unaccounted: if it is of a kind whose state is not known.
    """
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if type(part) is not FP32Optimizer:
            raise Unaccounted(
                f"optimizer {type(part).__name__} holds state that shardshift cannot move yet; supported: "
                "FP32Optimizer with Adam; nothing was moved. What to do: use fp32 parameters without the distributed "
                "optimizer",
                [type(part).__name__],
            )
        base = part.optimizer
        if base is None:
            continue  # a stage without parameters of this group has a stub
        if type(base).__name__ not in _KNOWN:
            raise Unaccounted(
                f"optimizer {type(base).__name__} inside {type(part).__name__} holds state that shardshift cannot move "
                f"yet; nothing was moved. What to do: use one of {', '.join(_KNOWN)}",
                [type(base).__name__],
            )
        yield base


def trained(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Every parameter that the optimizer steps."""
    for group in groups(optimizer):
        yield from group["params"]


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
                    "What to do: use Adam or AdamW without amsgrad, or SGD without momentum",
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


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Set a new scheduler to the state of the old one, which wins wherever they differ.

    ``OptimizerParamScheduler`` compares the two unless told otherwise, and counts on from the steps it has.
    """
    before = {name: getattr(scheduler, name) for name in _PRECEDENCE if hasattr(scheduler, name)}
    for name in before:
        setattr(scheduler, name, _PRECEDENCE[name])
    if hasattr(scheduler, "num_steps"):
        scheduler.num_steps = 0
    scheduler.load_state_dict(state)
    for name, value in before.items():
        setattr(scheduler, name, value)
