"""Features of a live job that decide whether its state can be carried at all, found by looking at its objects.

Some features keep state where no rule of shardshift reaches (inside a kernel's library, in a captured graph, on another
device), so a job that uses one is refused by its name before anything moves. Others need a word said: they are carried,
and what is made anew is listed. Nothing is believed from settings alone where the objects themselves tell; a setting
counts where it makes Megatron behave so later (captured graphs begin after some steps).

Classes are known by name, because most of them come from packages that need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...values import Unaccounted
from ..reach import Reached


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that a job uses.

    Attributes:
        name: of the feature.
        path: where it was seen first.
        carried: whether the job can be carried with it.
        why: what becomes of it, or why it cannot be carried.
    """

    name: str
    path: str
    carried: bool
    why: str


_CLASSES: Final[dict[str, tuple[str, bool, str]]] = {
    "OptimizedModule": (
        "torch.compile around a module",
        True,
        "the module is compiled anew at its first call in the new layout, if build_model compiles it",
    ),
    "CUDAGraph": (
        "captured CUDA graphs",
        False,
        "a graph replays addresses and communicators of the layout in which it was captured; train without them",
    ),
    "HybridDeviceOptimizer": (
        "optimizer CPU offload",
        False,
        "its sub-optimizers hold copies of parameters and gradients on two devices; set optimizer_cpu_offload to False",
    ),
    "LayerWiseDistributedOptimizer": (
        "layer-wise distributed optimizer",
        False,
        "it shares whole parameters out over data parallel ranks by size; use the distributed optimizer",
    ),
    "TensorParallelMuon": (
        "Muon",
        False,
        "no rule says how its state follows the parameter; use Adam or SGD",
    ),
    "TorchFullyShardedDataParallel": (
        "torch FSDP2 in Megatron",
        False,
        "parameters are DTensors; use shardshift.fsdp for such jobs, or Megatron's DistributedDataParallel",
    ),
    "FullyShardedDataParallel": (
        "Megatron FSDP",
        False,
        "parameters are sharded in buffers of its own; use Megatron's DistributedDataParallel",
    ),
}
_QUANTISED: Final = ("Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor", "QuantizedTensor")
"""Tensor classes of Transformer Engine, by any class they derive from."""
_SETTINGS: Final[dict[str, tuple[object, str, str]]] = {
    "fp8": (None, "FP8 (Transformer Engine)", "scales and amax histories lie inside its modules; train in bf16"),
    "fp4": (None, "FP4 (Transformer Engine)", "scales lie inside its modules; train in bf16"),
    "cuda_graph_impl": (
        "none",
        "captured CUDA graphs",
        "a graph replays addresses and communicators of the layout in which it was captured; set cuda_graph_impl to "
        "none",
    ),
    "cpu_offloading": (
        False,
        "offload of activations and weights (Transformer Engine)",
        "weights may lie on the host between two layers; set cpu_offloading to False",
    ),
    "use_precision_aware_optimizer": (
        False,
        "precision-aware optimizer",
        "masters and moments lie inside Transformer Engine's Adam, in formats of its own; set "
        "use_precision_aware_optimizer to False",
    ),
    "optimizer_cpu_offload": (
        False,
        "optimizer CPU offload",
        "its sub-optimizers hold copies of parameters and gradients on two devices; set optimizer_cpu_offload to False",
    ),
    "num_distributed_optimizer_instances": (
        1,
        "several optimizer instances",
        "state is shared out within a part of the data parallel ranks; use one instance",
    ),
    "use_megatron_fsdp": (
        False,
        "Megatron FSDP",
        "parameters are sharded in buffers of its own; use Megatron's DistributedDataParallel",
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        False,
        "parameters gathered in the gradient buffer (MXFP8)",
        "a gather overwrites gradients; train in bf16",
    ),
}
"""Entries of Megatron's configurations: the plain value, the feature, why it is refused."""
_CONFIGURATIONS: Final = ("TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")


def features(found: Reached) -> list[Feature]:
    """The features that a job uses, each once; ``found`` is ``reach(audit.roots(job))``."""
    seen: dict[str, Feature] = {}
    for feature in _seen(found):
        seen.setdefault(feature.name, feature)
    return list(seen.values())


def refuse(used: Sequence[Feature]) -> None:
    """Refuse a job by the features that cannot be carried.

    Raises:
        Unaccounted: naming them, where they are, and what to do.
    """
    refused = [feature for feature in used if not feature.carried]
    if refused:
        raise Unaccounted(
            "the job cannot be carried; nothing was moved: "
            + "; ".join(f"{feature.name} at {feature.path}: what to do: {feature.why}" for feature in refused),
            [feature.name for feature in refused],
        )


def _seen(found: Reached) -> Iterator[Feature]:
    for path, value in found.objects:
        names = [kind.__name__ for kind in type(value).__mro__]
        for name in names:
            if name in _CLASSES:
                feature, carried, why = _CLASSES[name]
                yield Feature(feature, path, carried, why)
        if any(name in _CONFIGURATIONS for name in names):
            yield from _settings(path, value)
        if isinstance(value, torch.nn.Module):
            if getattr(value, "_compiled_call_impl", None) is not None:
                why = "the module is compiled anew at its first call in the new layout, if build_model compiles it"
                yield Feature("torch.compile of a module in place", path, True, why)
            if type(value).__module__.startswith("transformer_engine."):
                why = "its parameters carry Megatron's marks, its extra state travels as such"
                yield Feature("Transformer Engine layers", path, True, why)
    for each in found.state:
        names = [kind.__name__ for kind in type(each.value).__mro__]
        if any(name in _QUANTISED for name in names):
            why = f"{names[0]} holds its values in a format of its own; train in bf16"
            yield Feature("quantised tensors (Transformer Engine)", each.path, False, why)


def _settings(path: str, config: Any) -> Iterator[Feature]:
    for name, (plain, feature, why) in _SETTINGS.items():
        value = getattr(config, name, plain)
        if value not in (plain, None):
            yield Feature(feature, f"{path}.{name}", False, why)
