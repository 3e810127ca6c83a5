"""Whether the installed megatron-core has what the adapter relies on, and what stands in where an older one has less.

The adapter uses parts of megatron-core that are not public, so any release may lack or move them. What counts is
whether they are there, not the release's number:

1. ``NEEDED`` lists modules, names and parameters without which nothing works. If one is missing, importing the adapter
   is refused with all that are.
2. Where an older release has less, a function here asks for it and does without: ``for_tracker``,
   ``declare_fused_halves``.
3. A release that has all of it, but with which the tests have never run, is used with a warning.

Comparing version numbers was rejected: builds from git and vendors' forks carry numbers that say little.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from ...values import Infeasible

TESTED: Final = ("0.15.", "0.16.")
"""Releases that tests run with: the whole suite with 0.16.1, ``tests/megatron/test_versions.py`` with 0.15.3."""

NEEDED: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (
        "parallel_state",
        "initialize_model_parallel",
        (
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "create_gloo_process_groups",
        ),
    ),
    ("parallel_state", "create_group", ("ranks", "group_desc")),
    ("parallel_state", "get_data_parallel_group", ("with_context_parallel",)),
    ("process_groups_config", "ProcessGroupCollection", ()),
    ("distributed.distributed_data_parallel", "DistributedDataParallel.start_param_sync", ("force_sync",)),
    ("num_microbatches_calculator", "reconfigure_num_microbatches_calculator", ()),
    ("optimizer.optimizer", "ChainedOptimizer", ()),
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params", ()),
    ("optimizer.optimizer", "FP32Optimizer", ()),
    ("optimizer.distrib_optimizer", "DistributedOptimizer._get_model_param_range_map", ()),
    ("optimizer.grad_scaler", "MegatronGradScaler", ()),
    ("rerun_state_machine", "RerunStateMachine", ()),
    ("tensor_parallel.random", "get_cuda_rng_tracker", ()),
    ("tensor_parallel.random", "model_parallel_cuda_manual_seed", ()),
    ("transformer.mlp", "MLP", ()),
    ("transformer.transformer_config", "TransformerConfig", ()),
)
"""Module of megatron-core, name in it, parameters of that."""


@contextlib.contextmanager
def supported() -> Iterator[None]:
    """Around the imports of the adapter: what megatron-core lacks for them is said as such.

    Raises:
        Infeasible: if something of ``NEEDED`` is missing.
        ModuleNotFoundError: if megatron-core is not installed.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        if getattr(error, "name", None) in ("megatron", "megatron.core"):
            raise
        refuse_lacking(error)
        raise  # not megatron-core's fault
    refuse_lacking()
    warn_untested()


def refuse_lacking(cause: BaseException | None = None) -> None:
    """Refuse a megatron-core that lacks something of ``NEEDED``.

    Raises:
        Infeasible: naming all that is missing.
    """
    if found := lacking():
        raise Infeasible(
            f"megatron-core {version()} lacks {', '.join(found)}, without which shardshift cannot move a job; what to "
            f"do: use a release that it is tested with ({_tested()})"
        ) from cause


def warn_untested() -> None:
    """Warn if the tests have never run with this release."""
    if not version().startswith(TESTED):
        warnings.warn(
            f"shardshift has not been tested with megatron-core {version()}, only with {_tested()}. All names that it "
            "relies on are there, so it goes on; what they do may have changed. Known to work with tested releases: "
            "GPT with pp, tp, dp, vpp, cp, ep and etp, FP32, mixed precision and distributed optimizers. What to do: "
            "change the layout of a small job first and compare its losses with those of a job left alone",
            stacklevel=3,
        )


def lacking() -> list[str]:
    """What of ``NEEDED`` the installed megatron-core does not have."""
    found = []
    for module, name, parameters in NEEDED:
        path = f"megatron.core.{module}.{name}"
        try:
            thing: Any = importlib.import_module(f"megatron.core.{module}")
            for part in name.split("."):
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            found.append(path)
            continue
        known = inspect.signature(thing).parameters if parameters else {}
        found += [f"{path}({parameter}=...)" for parameter in parameters if parameter not in known]
    return found


def version() -> str:
    """What megatron-core says that it is."""
    found: str = getattr(importlib.import_module("megatron.core"), "__version__", "of an unknown version")
    return found


def for_tracker(state: torch.Tensor) -> Any:
    """A random state as this process's tracker keeps it: with CUDA graphs a generator (``random.py``, ``add``).

    0.15 can capture graphs too, but has no functions that say so and convert a state.
    """
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker = random.get_cuda_rng_tracker()
    if hasattr(random, "is_graph_safe_cuda_rng_tracker"):
        graph_safe = random.is_graph_safe_cuda_rng_tracker(tracker)
    else:
        graph_safe = getattr(tracker, "use_cudagraphable_rng", False)
    if not graph_safe:
        return state.clone()
    if hasattr(random, "convert_cuda_rng_state"):
        return random.convert_cuda_rng_state(state.clone(), to_graphable=True)
    generator = random._get_cuda_rng_state(clone=True, graph_safe=True)
    generator.set_state(state)
    return generator


def declare_fused_halves(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark the first matrix of a gated MLP as two segments where megatron-core has not.

    Every tensor rank has its part of the gate and its part of the other half below (``transformer/mlp.py``, ``glu`` in
    ``forward``), in all releases. From 0.16 on ``partition_stride`` says so; before, and with Kitchen's layers, it is 1
    and only the checkpoint knows (``apply_swiglu_sharded_factory``), so that a change of TP would mix the halves.

    Args:
        chunks: model chunks, not wrapped. Their parameters are marked in place.
    """
    gated_mlp: Any = importlib.import_module("megatron.core.transformer.mlp").MLP
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, gated_mlp) and module.config.gated_linear_unit:
                for parameter in module.linear_fc1.parameters(recurse=False):
                    marks: Any = parameter
                    if getattr(marks, "tensor_model_parallel", False) and marks.partition_stride == 1:
                        marks.partition_stride = 2


def _tested() -> str:
    return " and ".join(f"{release}x" for release in TESTED)
