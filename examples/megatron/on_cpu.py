"""Runs one of the programs beside it on a machine without GPUs, as ``torchrun ... on_cpu.py pretrain_gpt.py ...``.

megatron-core takes some things from ``torch.cuda`` without asking whether there is a GPU; shardshift has stand-ins for
them, which must be there before anything of megatron is imported. With a GPU this only runs the program.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

from shardshift.adapters import megatron  # noqa: F401  (puts the stand-ins in place)

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    torch.set_num_threads(1)
    runpy.run_path(sys.argv[0], run_name="__main__")
