"""Megatron's world: the default process group and ``parallel_state``, real for a generation or imagined.

Megatron keeps its groups in module globals and numbers them by the rank in torch's default group. So each
generation gets a default group of its own, in which the rank *is* the virtual rank of the layout: any virtual
rank may then run on any device, and ``initialize_model_parallel`` needs no knowledge of devices. Keeping one
world of all devices was rejected: Megatron would lay its ranks out over devices in order, idle ones included.

``virtual_rank`` imagines a world: torch's fake process group and a scratch ``parallel_state`` stand in, the
real ones come back on leaving. A model built inside, on the meta device, is what that rank would build.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from ...values import ParallelConfig
from ..protocol import Place


def enter(place: Place) -> None:
    """Make the real world of a generation: the default group, and Megatron's groups inside it."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=place.store,
        rank=place.rank,
        world_size=place.config.world_size,
        timeout=timedelta(seconds=place.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        place.config.tp,
        place.config.pp,
        distributed_timeout_minutes=place.timeout_s / 60,
        create_gloo_process_groups=torch.cuda.is_available(),
    )


def leave() -> None:
    """Give back the real world, if there is one."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def virtual_rank(config: ParallelConfig, rank: int) -> Iterator[None]:
    """Imagine being ``rank`` of a world laid out as ``config``; nothing is sent, the real world is untouched.

    Random number generators are as before on leaving, whatever was built inside.
    """
    # Known only to torch's own tests: the fake group is in the library, its store there.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_world, group_count = c10d.GroupMember.WORLD, c10d._world.group_count
    real_groups = set(c10d._world.pg_map)
    real_state = {name: value for name, value in vars(parallel_state).items() if _is_state(name)}
    c10d.GroupMember.WORLD = None
    try:
        with undisturbed_rng():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
            for name in real_state:
                setattr(parallel_state, name, None)
            parallel_state.initialize_model_parallel(config.tp, config.pp, create_gloo_process_groups=False)
            megatron_random.model_parallel_cuda_manual_seed(0)  # building may want the streams to exist
            yield
    finally:
        # With the real world back in place, torch takes the imagined default group for one group among others.
        imagined = [group for group in c10d._world.pg_map if group not in real_groups]
        c10d.GroupMember.WORLD = real_world
        for group in imagined:
            _forget(group)
        c10d._world.group_count = group_count
        for name, value in real_state.items():
            setattr(parallel_state, name, value)


def _is_state(name: str) -> bool:
    return name.startswith("_") and name[1:2].isupper()


def _forget(group: dist.ProcessGroup) -> None:
    """Take one group out of torch's registries.

    ``dist.destroy_process_group(group)`` does it too, except that with no real world it destroys them all.
    """
    world = c10d._world
    tag = world.pg_to_tag.get(group)
    for registry in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        registry.pop(group, None)
    world.pg_coalesce_state.pop(group, None)
    if tag is not None:
        for label in (tag, f"user:{tag}"):
            if group in world.tags_to_pg.get(label, []):
                world.tags_to_pg[label].remove(group)
    c10d._unregister_process_group(group.group_name)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build on the meta device: shapes without memory; collectives on such tensors do nothing.

    megatron-core broadcasts the tied embedding while it builds (``language_module.py``,
    ``setup_embeddings_and_output_layer``), which no backend can do with a tensor that has no data.
    """
    real_all_reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.is_meta else real_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        with torch.device("meta"):
            yield
    finally:
        dist.all_reduce = real_all_reduce


@contextlib.contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Every generator that a training job draws from is as before on leaving."""
    tracker = megatron_random.get_cuda_rng_tracker()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracker.get_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        tracker.set_states(states[3])
