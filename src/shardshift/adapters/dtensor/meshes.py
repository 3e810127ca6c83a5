"""Torch's meshes, and the process groups of their axes.

1. Torch numbers process groups by a count of its own in each process, and their ranks meet under that number. Ranks
   that have not taken part in every change have counted less. So before groups are made, all who take part set their
   count to the highest; groups that ``build`` makes itself then meet, too.
2. A mesh that was made is kept, with its groups, for as long as the default process group lives, and taken again when
   a job comes back to it. DTensor remembers what it has worked out for a mesh, in every thread of autograd by itself,
   and takes an equal mesh for the same one: so tensors on a second mesh of the same ranks would meet in the groups of
   the first, which therefore have to live. All who take part must have it, or it is made anew.

Rejected: destroying groups and clearing DTensor's caches, which can be cleared for one's own thread only.
"""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ...values import Infeasible, Mesh

_MADE: Final[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Mesh, str], DeviceMesh | None]]] = WeakKeyDictionary()
"""By the world that they are of, which they do not outlive; None on a rank that is not in the mesh."""


@contextmanager
def meshes_apart() -> Iterator[None]:
    """Meshes that are made meanwhile, in an imagined world, are not taken for those of the real one, nor after it.

    They are of the same ranks and seen from another one. What DTensor has worked out for meshes is forgotten before and
    after: this thread's, and in an imagined world no other one works.
    """
    _forget()
    try:
        yield
    finally:
        _forget()


def let_go() -> None:
    """Let go of the meshes that were made, and of their groups, where nobody else has them. Called when Python ends.

    Later, when modules are torn down, it would be too late: a group's threads, which give tensors back, could not take
    the interpreter's lock any more, and torch ends the process by SIGABRT then, now and then.
    """
    _MADE.clear()
    _forget()
    for each in gc.get_objects():  # DTensor has more tables by meshes, none of which is needed any more
        if type(each) is functools._lru_cache_wrapper and str(each.__module__).startswith("torch.distributed"):
            each.cache_clear()
    gc.collect()  # meshes and jobs are in cycles


atexit.register(let_go)


def _forget() -> None:
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()


def group_count() -> int:
    """How many process groups torch has numbered in this process."""
    return int(c10d._world.group_count)


def align_groups(count: int) -> None:
    """Go on numbering process groups from there."""
    c10d._world.group_count = count


def has_mesh(mesh: Mesh, device_type: str) -> bool:
    """Whether this rank has kept torch's mesh."""
    return (mesh, device_type) in _made()


def torch_mesh(
    mesh: Mesh, device_type: str, *, kept: bool = False, timeout_s: float | None = None
) -> DeviceMesh | None:
    """Torch's mesh, None on a rank that is not in it. Called by all who take part in the change, with counts aligned.

    Torch sorts the ranks of the groups that it makes for a mesh, while coordinates follow the mesh: FSDP2 goes by the
    one, DTensor by the other. So groups are made here, in the mesh's order.

    Args:
        mesh: the mesh.
        device_type: of its tensors.
        kept: whether all who take part have kept it.
        timeout_s: the longest to wait for the others of a group; None for as long as its collectives may take.

    Raises:
        Infeasible: if the mesh has no axis.
    """
    if not mesh.axes:
        raise Infeasible("the new mesh has no axis; nothing was moved. What to do: give one, of size 1 for one rank")
    made, key = _made(), (mesh, device_type)
    if not (kept and key in made):
        made[key] = _new(mesh, device_type, None if timeout_s is None else timedelta(seconds=timeout_s))
    return made[key]


def _made() -> dict[tuple[Mesh, str], DeviceMesh | None]:
    world = dist.group.WORLD
    assert world is not None  # whoever makes a mesh is in one
    return _MADE.setdefault(world, {})


def _new(mesh: Mesh, device_type: str, timeout: timedelta | None) -> DeviceMesh | None:
    ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").reshape(mesh.shape)
    own: list[dist.ProcessGroup] = []
    for axis, (name, size) in enumerate(mesh.axes):
        for line in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = dist.new_group(line, timeout=timeout, group_desc=f"mesh_{name}", sort_ranks=False)
            if dist.get_rank() in line:
                own.append(group)
    if not own:
        return None
    if timeout is not None:
        usual = c10d._get_default_timeout(c10d.Backend(dist.get_backend()))
        for group in own:
            c10d._set_pg_timeout(usual, group)
    given = own if len(own) > 1 else own[0]
    return DeviceMesh.from_group(given, device_type, mesh=ranks.tolist(), mesh_dim_names=mesh.names)
