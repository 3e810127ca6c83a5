"""A toy training that goes on until a file appears, whoever joins, leaves or is lost. It prints what becomes of it.

Arguments: the first layout, the file that ends it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.elastic.toy import REPLICATED, ToyAdapter, ToyJob

from shardshift import Member, PeerLost, session

STEP_S = 0.02
"""What a step takes: whoever joins imports meanwhile, for which steps without end would leave it no core."""


def tell(*what: Any) -> None:
    os.write(1, (" ".join(map(str, (f"{os.environ['RANK']}:", *what))) + "\n").encode())


def ends(stop: Path) -> bool:
    """Whether the lowest rank sees the file: all alike."""
    seen = torch.tensor([int(stop.exists() and dist.get_rank() == 0)])
    dist.all_reduce(seen)
    return bool(seen)


def main() -> None:
    start, stop = sys.argv[1], Path(sys.argv[2])
    member = Member.from_launcher(timeout_s=20.0)
    adapter = ToyAdapter(member.device, lambda message: None, model=REPLICATED)
    with session(
        adapter, start, member=member, timeout_s=20.0, policy="keep", survive=True, layouts="nearest"
    ) as elastic:
        job: ToyJob | None = elastic.start()
        told: Any = None
        while job is not None:
            try:
                if elastic.resize_due(job):
                    job = elastic.resize(job) or elastic.start()
                    continue
                if ends(stop):
                    break
                time.sleep(STEP_S)
                job.meet()
                with elastic.commit_step(job):
                    for tensor in job.tensors.values():
                        tensor += 1
                    job.meet()
                if told != (now := (str(job.config), len(elastic.reports))):
                    told = now
                    tell("trains", job.config, "exact" if job.exact() else "WRONG", f"pid{os.getpid()}")
            except (PeerLost, RuntimeError) as lost:
                job = elastic.recover(job, lost) or elastic.start()
                tell("recovered", "exact" if job is None or job.exact() else "WRONG")
    tell("ended")


main()
