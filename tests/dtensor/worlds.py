"""Worlds without processes: any rank of a mesh in torch's fake group, one real rank, and torch's own cutting."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.distributed.tensor.placement_types import Shard as Sharded

from shardshift.adapters.dtensor.cuts import Cut
from shardshift.adapters.dtensor.described import (
    Entry,
    Standing,
    Text,
    described,
    layout_of,
    local_shape,
    pieces,
)
from shardshift.adapters.dtensor.live import held_by, optimizers_in, state_of, unwrapped
from shardshift.adapters.dtensor.parts import Names, parts_of
from shardshift.adapters.imagined import imagined_world
from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.simulator import execute
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard

T = TypeVar("T")
Axes = dict[str, int]

_worlds = itertools.count(1)


@contextlib.contextmanager
def rank_of(axes: Axes, position: int) -> Iterator[DeviceMesh]:
    """Be the rank at a position of a mesh."""
    size = math.prod(axes.values())
    # Torch takes meshes of the same ranks for the same, whoever looks at them: so no two have the same ranks.
    start = size * next(_worlds)
    with imagined_world(start + position, start + size):
        ranks = torch.arange(start, start + size).reshape(tuple(axes.values()))
        yield DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes))


def every_rank(axes: Axes, make: Callable[[DeviceMesh], T]) -> list[T]:
    """What each rank of a mesh makes of it."""
    found = []
    for position in range(math.prod(axes.values())):
        with rank_of(axes, position) as mesh:
            found.append(make(mesh))
    return found


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A real process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_part(
    whole: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], at: Sequence[int]
) -> torch.Tensor:
    """A rank's part of a tensor, as torch splits it: placement by placement."""
    for placement, count, index in zip(placements, mesh, at, strict=True):
        if isinstance(placement, Sharded | _StridedShard):
            whole = placement._split_tensor(whole, count, with_padding=False)[0][index]
    return whole


def cuts(placements: Sequence[Placement]) -> tuple[Cut, ...]:
    """Placements as cuts, in the order of the mesh's axes."""
    return tuple(
        Cut(placement.dim, axis, getattr(placement, "split_factor", 1))
        for axis, placement in enumerate(placements)
        if isinstance(placement, Sharded | _StridedShard)
    )


def dtensor(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's DTensor of a whole tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = torch_part(whole, placements, tuple(mesh.shape), coordinate)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def coordinates(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """All coordinates in row-major order."""
    return list(itertools.product(*map(range, mesh)))


def entry(
    name: str,
    whole: torch.Tensor,
    placements: Sequence[Placement] | None,
    kind: Kind = Kind.PARAM,
    names: Names | None = None,
) -> Entry:
    """The entry of a tensor on the first mesh of a rank; None: whole everywhere."""
    shape, dtype = tuple(whole.shape), str(whole.dtype).removeprefix("torch.")
    mesh, along = (-1, ()) if placements is None else (0, cuts(placements))
    return Entry(kind, name, shape, dtype, whole.dtype.itemsize, mesh, along, parts_of(name, shape, names))


def layout(mesh: Sequence[int], entries: Sequence[Entry]) -> Layout:
    """The layout of a mesh whose ranks all have these entries."""
    return layout_of_ranks(ranks(mesh, entries))


def described_at_every_rank(
    axes: Axes, build: Callable[[DeviceMesh], Any], names: Names | None = None
) -> list[tuple[Text, Standing]]:
    """Text and standing of each rank of a mesh, of the model, or (model, optimizer), that it builds."""

    def make(mesh: DeviceMesh) -> tuple[Text, Standing]:
        made = build(mesh)
        model, optimizer = made if isinstance(made, tuple) else (made, None)
        held = held_by([unwrapped(model)])
        state, _ = state_of(optimizers_in(optimizer), held)
        return described((*held.tensors, *state), held.ties, names)

    return every_rank(axes, make)


def layout_at_every_rank(found: Sequence[tuple[Text, Standing]]) -> Layout:
    """The layout that ranks of these texts have."""
    texts = {text.digest: text for text, _ in found}
    order = list(texts)
    return layout_of(list(texts.values()), [(order.index(text.digest), standing) for text, standing in found])


def at(box: Region) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


Rank = tuple[Sequence[Entry], Standing]
"""The tensors of a rank, and where it stands in its meshes."""
Locals = dict[tuple[Kind, str], torch.Tensor]
"""By kind and name the local parts of a rank."""


def ranks(mesh: Sequence[int], entries: Sequence[Entry]) -> list[Rank]:
    """The ranks of a mesh that all have these entries."""
    return [(entries, ((tuple(mesh), position),)) for position in coordinates(mesh)]


def layout_of_ranks(of: Sequence[Rank]) -> Layout:
    """The layout of some ranks, each text once."""
    texts = list(dict.fromkeys(Text(tuple(entries), ()) for entries, _ in of))
    return layout_of(texts, [(texts.index(Text(tuple(entries), ())), standing) for entries, standing in of])


def carry(
    old: Sequence[Rank],
    locals_: Sequence[Locals],
    new: Sequence[Rank],
    *,
    before: Sequence[int] | None = None,
    after: Sequence[int] | None = None,
    staging_bytes: int = 64,
) -> tuple[Plan, list[Locals]]:
    """Carry local parts from old ranks to new ones, by a plan that the simulator executes.

    Args:
        old: the old ranks.
        locals_: what each holds.
        new: the new ranks.
        before: the devices of the old ranks; None for 0, 1, ...
        after: those of the new ranks.
        staging_bytes: the bound on staging of a round.

    Returns:
        The plan, and what each new rank then holds; what nothing was written to is NaN, or the lowest integer.
    """
    devices, places = (given or tuple(range(len(of))) for given, of in ((before, old), (after, new)))
    prev = PlacedLayout(layout_of_ranks(old), tuple(devices))
    plan = make_plan(prev, layout_of_ranks(new), devices=sorted(places), placement=places)
    state: dict[int, dict[Shard, Any]] = {}
    for device, (entries, standing), own in zip(devices, old, locals_, strict=True):
        state[device] = {
            piece.shard: np.array(_numbers(own[of.kind, of.name])[at(piece.local)]).reshape(piece.shard.region.shape)
            for of in entries
            for piece in pieces(of, standing)
        }
        assert state[device].keys() == set(prev.shards_on(device))
    arrived = execute(compile_programs(plan, staging_bytes), state)
    found: list[Locals] = []
    for device, (entries, standing) in zip(places, new, strict=True):
        held = {shard: torch.as_tensor(np.asarray(array)) for shard, array in arrived[device].items()}
        found.append({(of.kind, of.name): _filled(of, standing, held) for of in entries})
    return plan, found


def _numbers(tensor: torch.Tensor) -> Any:
    """NumPy has no bfloat16: its bits."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _filled(of: Entry, standing: Standing, held: dict[Shard, torch.Tensor]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, of.dtype)
    plain = torch.int16 if dtype is torch.bfloat16 else dtype
    blank = float("nan") if plain.is_floating_point else torch.iinfo(plain).min
    local = torch.full(local_shape(of, standing), blank, dtype=plain)
    for piece in pieces(of, standing):
        local[at(piece.local)] = held[piece.shard].reshape(piece.local.shape)
    return local.view(dtype) if plain is not dtype else local


def numbered(shape: Sequence[int], number: int = 0) -> torch.Tensor:
    """A tensor whose elements say which of them they are: 1000 * number + flat index."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(tuple(shape)) + 1000 * number
