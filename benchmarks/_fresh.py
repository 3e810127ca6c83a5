"""The script of a restarted job (``baselines/restart.py``): torchrun runs it in each process. It imports torch alone.

Argument: a folder with ``RANK.pkl`` for each rank, ``checkpoint`` to load, and room for ``RANK.json``, which says when
the process came where, by ``time.perf_counter``, and the CRC-32 of each tensor that it loaded.
"""

# ruff: noqa: E402

from __future__ import annotations

import time

_BEGAN_S = time.perf_counter()  # before anything else is imported

import json
import os
import pickle
import sys
import warnings
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

TIMEOUT_S = 120.0


def main(folder: Path) -> None:
    """One process of the job."""
    warnings.simplefilter("ignore")
    times = {"began": _BEGAN_S, "imported": time.perf_counter()}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    times["met"] = time.perf_counter()
    rank = os.environ["RANK"]
    mesh_ranks, tensors = pickle.loads((folder / f"{rank}.pkl").read_bytes())
    mesh = DeviceMesh("cpu", torch.tensor(mesh_ranks), mesh_dim_names=("dp", "tp"), _init_backend=False)
    state = {}
    for name, dtype, local, whole, dim in tensors:
        placements: list[Placement] = [Replicate(), Replicate() if dim is None else Shard(dim)]
        memory = torch.zeros(local, dtype=getattr(torch, dtype))
        stride = torch.empty(whole, device="meta").stride()
        state[name] = DTensor.from_local(memory, mesh, placements, run_check=False, shape=whole, stride=stride)
    dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    times["loaded"] = time.perf_counter()
    sums = {
        name: zlib.crc32(tensor.to_local().flatten().view(torch.uint8).numpy().data)
        for name, tensor in state.items()
        if tensor.to_local().numel()
    }
    (folder / f"{rank}.json").write_text(json.dumps([times, sums]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
