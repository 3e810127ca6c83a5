"""Stand-ins that let megatron-core run on a machine without CUDA. All of them are here, and nowhere else.

megatron-core takes some things from ``torch.cuda`` without asking whether there is a GPU. ``install`` puts
CPU versions in their place; it does nothing where CUDA is available, and nothing when called again. Each
stand-in names the place in megatron-core 0.16.1 that needs it. Import this module before anything of megatron.
"""

from __future__ import annotations

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
    for name in _FACTORIES:  # a literal device="cuda" in many places
        setattr(patched, name, _on_cpu(getattr(torch, name)))
    patched.cuda.manual_seed = torch.manual_seed
    patched.cuda.get_rng_state = patched.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    import megatron.core.tensor_parallel.random as megatron_random

    # The real tracker of RNG streams, on the CPU's generator.
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    patched._shardshift_cpu_standins = True
    return True


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
        return factory(*args, **kwargs)

    return on_cpu
