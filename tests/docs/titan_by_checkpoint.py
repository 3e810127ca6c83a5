"""examples/torchtitan/train.py, and then the same change in the same processes through torchtitan's own checkpoint.

``torchrun --nproc-per-node 4 tests/docs/titan_by_checkpoint.py`` takes the example's options. It prints what the
example prints, then a line "through a checkpoint:", then the same of the oracle: two jobs that know nothing of one
another but what torchtitan's ``CheckpointManager`` saves and loads. Both leave the checkpoint of their last step: the
example in the folder that it is given, the oracle in the folder "oracle" inside.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchtitan"))
import train  # type: ignore[import-not-found]  # the example


def started(sizes: dict[str, int]) -> Any:
    job = train.build(init_device_mesh(train.utils.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    train.initialize(job)
    job.begin()
    return job


def go(job: Any, first: int, until: int) -> None:
    for step in range(first, until):
        train.tell(step, *train.train_step(job), job)


def through_a_checkpoint(args: Any) -> None:
    args.folder /= "oracle"
    if dist.get_rank() == 0:
        train.write(args.folder / "assets")
    dist.barrier()
    job = started(args.mesh)
    go(job, 0, args.at)
    job.checkpointer.save(args.at, last_step=True)
    job.checkpointer.close()
    job = started(args.to)
    assert job.checkpointer.load(step=args.at)
    job.batches = iter(job.extras["dataloader"])
    go(job, args.at, args.steps)
    job.checkpointer.save(args.steps, last_step=True)
    job.checkpointer.close()


if __name__ == "__main__":
    train.args = train.options().parse_args()
    train.main()
    if dist.get_rank() == 0:
        print("through a checkpoint:", flush=True)
    through_a_checkpoint(train.args)
    dist.destroy_process_group()
