"""An imagined world: torch's fake process group stands in for the default one; the real one comes back on leaving.

What is built inside, on the meta device, is what that rank of such a world would build. Nothing is sent.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")
"""Of groups, in torch."""


@contextlib.contextmanager
def imagined_world(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a default process group of ``world_size`` ranks that is not there."""
    # Known only to torch's own tests: the fake group is in the library, its store there.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_world, group_count, init_method = c10d.GroupMember.WORLD, c10d._world.group_count, c10d._default_pg_init_method
    registries: list[dict[Any, Any]] = [getattr(c10d._world, name) for name in REGISTRIES]
    real_groups = [dict(registry) for registry in registries]
    real_tags = {tag: list(groups) for tag, groups in c10d._world.tags_to_pg.items()}
    excepthook = sys.excepthook
    c10d._update_default_pg(None)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield
    finally:
        c10d._update_default_pg(real_world)
        # Not dist.destroy_process_group: with no real world it destroys all groups there are.
        for group in c10d._world.pg_map.keys() - real_groups[0].keys():
            c10d._unregister_process_group(group.group_name)
        for registry, real in zip((*registries, c10d._world.tags_to_pg), (*real_groups, real_tags), strict=True):
            registry.clear()
            registry.update(real)
        c10d._world.group_count, c10d._default_pg_init_method = group_count, init_method
        sys.excepthook = excepthook


@contextlib.contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Python's, NumPy's and torch's default generators are as before on leaving."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
