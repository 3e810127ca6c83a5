"""Stand-ins that let megatron-core run on a machine without CUDA. All of them are here, and nowhere else.

megatron-core takes some things from ``torch.cuda`` without asking whether there is a GPU. ``install`` puts
CPU versions in their place; it does nothing where CUDA is available, and nothing when called again. Each
stand-in names the place in megatron-core 0.16.1 that needs it. Import this module before anything of megatron.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")


def install() -> bool:
    """Patch torch for megatron-core on CPU, once.

    Returns:
        Whether the stand-ins are in place, i.e. whether this machine has no CUDA.
    """
    if torch.cuda.is_available():
        return False
    if getattr(torch, "_shardshift_cpu_standins", False):
        return True
    # torch.device("meta") as a context finds the factories by identity, in a set that is made at its first use:
    # make it now, or the factories that stand in below would build on the CPU inside such a context.
    from torch.utils._device import _device_constructors

    _device_constructors()
    # Megatron insists on it when tensor parallelism is on (transformer_config.py); no effect without CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # What megatron-core and torch say at import and use of what no machine without CUDA has.
    for text in ("Transformer Engine and Apex are not installed", "Apex is not installed"):
        warnings.filterwarnings("ignore", message=text)
    patched: Any = torch
    patched.Tensor.type = _type_as_cuda(torch.Tensor.type)
    patched.Tensor.cuda = lambda self, *args, **kwargs: self  # language_module.py:244
    patched.cuda.FloatTensor, patched.cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    patched.cuda.current_device = lambda: _CPU
    patched.cuda.synchronize = lambda *args, **kwargs: None  # p2p_communication.py:398
    # token_dispatcher.py:445, resharding/refit.py: streams of copies, which here happen at once
    patched.cuda.Stream, patched.cuda.stream = _Stream, lambda stream: contextlib.nullcontext()
    patched.cuda.current_stream = patched.cuda.default_stream = lambda device=None: _Stream()
    for name in _FACTORIES:  # a literal device="cuda" in many places
        setattr(patched, name, _on_cpu(getattr(torch, name)))
    # Not torch.manual_seed: for each device that is not here it queues the seed with a traceback, 0.5 ms and for good.
    patched.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    patched.cuda.get_rng_state = patched.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    import megatron.core.tensor_parallel.random as megatron_random

    # The real tracker of RNG streams, on the CPU's generator.
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _experts_and_latent_attention()
    patched._shardshift_cpu_standins = True
    return True


def _experts_and_latent_attention() -> None:
    """What experts and latent attention need on CPU, without Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    # token_dispatcher.py:879 wants the sizes for all_to_all as numbers; moe_utils.py:1093 converts those of CUDA alone
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **kwargs: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # moe_utils.py:1192 compares it with None
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(latent, name, None), type):
            setattr(latent, name, _NoSuchModule)  # multi_latent_attention.py:185 asks isinstance


class _Stream:
    """A CUDA stream on which everything is done as soon as it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _Stream:
        """An event that has happened."""
        return self


class _NoSuchModule:
    """A class of which nothing is an instance."""


def _type_as_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensor_type)
    def type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # clip_grads.py:167, optimizer.py:671-698 and distrib_optimizer.py:361,420 compare with 'torch.cuda.*Tensor'
        out = tensor_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) and ".cuda." not in out else out

    return type_as_cuda


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # rope_utils.py:62; only CUDA has pinned memory
        return factory(*args, **kwargs)

    return on_cpu
