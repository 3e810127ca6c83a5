"""Megatron's optimizers: what each keeps of a parameter, and putting it back.

megatron-core wraps torch's optimizers in three ways, alone or chained (``optimizer/optimizer.py``,
``optimizer/distrib_optimizer.py``):

1. ``FP32Optimizer``: state belongs to the parameter itself.
2. ``Float16OptimizerWithFloat16Params``: state belongs to an fp32 master; parameters that are fp32 have none.
3. ``DistributedOptimizer`` (ZeRO-1): state belongs to a flat range of the parameter, different on each data parallel
   rank; of 16-bit parameters the range has an fp32 master, of fp32 ones it is a view.

``Holding`` says the same of all three. Any other optimizer, and any state of a name that is not listed below, is
refused by name before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from ...values import Kind, Unaccounted

STATE: Final = (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MAX_EXP_AVG_SQ, Kind.MOMENTUM)
"""State that has an element for each one of the parameter: cut as the parameter is, whatever the values mean."""
_STEP: Final = "step"
_WRAPPERS: Final = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_KNOWN: Final = ("Adam", "AdamW", "FusedAdam", "SGD", "FusedSGD")
"""Names of torch's and Apex's or Transformer Engine's classes."""
_PRECEDENCE: Final = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": True}


@dataclass(frozen=True, slots=True)
class Holding:
    """What an optimizer keeps of one parameter.

    Attributes:
        base: torch's optimizer.
        key: the tensor that ``base`` knows: parameter, master, or flat range of either.
        master: the fp32 master, or the range of it that is here; None if the parameter is its own.
        flat: the range of the parameter that is here, in elements; None for all of it.
    """

    base: torch.optim.Optimizer
    key: torch.Tensor
    master: torch.Tensor | None
    flat: tuple[int, int] | None

    @property
    def state(self) -> dict[str, Any]:
        """Live state by torch's name; empty before the first step."""
        found: dict[str, Any] = self.base.state.get(self.key, {})
        return found


def parts(optimizer: MegatronOptimizer | None) -> Iterator[Any]:
    """A Megatron optimizer, those that it chains, and torch's inside, whatever they are."""
    for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        yield part
        if part is not None and not isinstance(part, ChainedOptimizer) and part.optimizer is not None:
            yield part.optimizer


def wrappers(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """The Megatron optimizers that wrap one of torch's each.

    Raises:
        Unaccounted: if one is of a kind whose state is not known.
    """
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if type(part) not in _WRAPPERS:
            raise Unaccounted(
                f"optimizer {type(part).__name__} holds state that shardshift cannot move; supported: "
                f"{', '.join(kind.__name__ for kind in _WRAPPERS)}; nothing was moved. What to do: use one of these",
                [type(part).__name__],
            )
        if part.optimizer is None:
            continue  # a stage without parameters of this group has a stub
        if type(part.optimizer).__name__ not in _KNOWN:
            raise Unaccounted(
                f"optimizer {type(part.optimizer).__name__} inside {type(part).__name__} holds state that shardshift "
                f"cannot move; nothing was moved. What to do: use one of {', '.join(_KNOWN)}",
                [type(part.optimizer).__name__],
            )
        if getattr(part.config, "use_precision_aware_optimizer", False):
            raise Unaccounted(
                "the precision-aware optimizer keeps masters and moments inside Transformer Engine's Adam, in formats "
                "of its own, which no rule covers; nothing was moved. What to do: set use_precision_aware_optimizer "
                "to False",
                ["use_precision_aware_optimizer"],
            )
        yield part


def groups(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """The live param groups of every torch optimizer inside."""
    for part in wrappers(optimizer):
        yield from part.optimizer.param_groups


def holdings(optimizer: MegatronOptimizer) -> dict[torch.Tensor, Holding]:
    """Per parameter of the model what is kept of it here; one of which this rank owns nothing is left out."""
    found: dict[torch.Tensor, Holding] = {}
    for part in wrappers(optimizer):
        base = part.optimizer
        if isinstance(part, DistributedOptimizer):
            # Not model_param_group_index_map: where a group mixes dtypes, its order is not that of the groups.
            for models, keys, has_masters in (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups, True),
                (part.model_fp32_groups, part.shard_fp32_groups, False),
            ):
                for parameter, key in zip(chain(*models), chain(*keys), strict=True):
                    owned = part._get_model_param_range_map(parameter)["param"]
                    found[parameter] = Holding(base, key, key if has_masters else None, (owned.start, owned.end))
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                found |= {p: Holding(base, m, m, None) for p, m in zip(models, masters, strict=True)}
            found |= {p: Holding(base, p, None, None) for models in part.fp32_from_fp32_groups for p in models}
        else:
            found |= {p: Holding(base, p, None, None) for group in base.param_groups for p in group["params"]}
    return found


def kinds_of(optimizer: MegatronOptimizer) -> tuple[Kind, ...]:
    """The kinds of state that the optimizer has made; none before the first step.

    Raises:
        Unaccounted: if there is state of another name.
    """
    known = {*STATE, _STEP}
    seen: set[str] = set()
    for part in wrappers(optimizer):
        for state in part.optimizer.state.values():
            unknown = sorted(str(key) for key, value in state.items() if key not in known and value is not None)
            if unknown:
                raise Unaccounted(
                    f"{type(part.optimizer).__name__} keeps state {unknown}, which no rule covers; nothing was moved. "
                    "What to do: use Adam, AdamW or SGD",
                    unknown,
                )
            seen |= {key for key, value in state.items() if value is not None}
    return tuple(kind for kind in STATE if kind in seen)


def trained(part: Any) -> Iterator[torch.Tensor]:
    """Parameters of the model that a wrapper steps, in whole or in part, on some data parallel rank."""
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.params
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for group in (*part.float16_groups, *part.fp32_from_fp32_groups):
            yield from group
    else:
        for group in part.optimizer.param_groups:
            yield from group["params"]


def makes(optimizer: MegatronOptimizer) -> tuple[Kind, ...]:
    """The kinds of state that the optimizer makes at its first step, going by its class and settings."""
    seen: set[Kind] = set()
    for part in wrappers(optimizer):
        for group in part.optimizer.param_groups:
            if "SGD" in type(part.optimizer).__name__:
                seen |= {Kind.MOMENTUM} if group.get("momentum") else set()
            else:
                seen |= {Kind.EXP_AVG, Kind.EXP_AVG_SQ} | ({Kind.MAX_EXP_AVG_SQ} if group.get("amsgrad") else set())
    return tuple(kind for kind in STATE if kind in seen)


def restore(holding: Holding, master: torch.Tensor | None, state: Mapping[str, Any]) -> None:
    """Give a parameter the optimizer state that is in place for it; no copy is made.

    Args:
        holding: of the new optimizer.
        master: the fp32 master, if there is one.
        state: torch's state by name; empty to begin without.
    """
    if master is not None:
        assert holding.master is not None
        holding.master.data = master
    holding.base.state.pop(holding.key, None)
    if state:
        holding.base.state[holding.key] = dict(state)


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
