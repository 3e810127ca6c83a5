"""Lets torchtitan 0.3.0 run on a machine without an accelerator. Import it before anything of torchtitan.

torchtitan asks torch for an accelerator when it is imported and takes "cuda" if there is none; no option says "cpu".
What is replaced here, and why:

1. ``torchtitan.tools.utils.device_type`` and ``device_module``: "cpu" and ``torch.cpu``. Other modules copy both names
   when they are imported, hence "before anything".
2. ``torchtitan.distributed.minimal_async_ep.kernels``: Triton kernels of one way to send tokens to experts, which every
   model imports. Triton is neither in torchtitan's metadata nor in torch's CPU build. The names are there, and nothing
   calls them: a dense model has no experts.

With an accelerator nothing is replaced.
"""

from __future__ import annotations

import sys
import types

import torch

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def _absent(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("MinimalAsyncEP needs Triton and an accelerator")


if not torch.accelerator.is_available():
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    kernels = types.ModuleType(_KERNELS)
    for name in (
        "copy_full_counts_to_peers_kernel",
        "copy_rows_to_peers_kernel",
        "expand_topk_grad_kernel",
        "fill_combine_metadata_kernel",
        "fill_dispatch_metadata_kernel",
        "invert_flat_indices_kernel",
        "reduce_topk_slots_kernel",
        "topk_scores_grad_kernel",
    ):
        setattr(kernels, name, _absent)
    sys.modules[_KERNELS] = kernels
