"""Walks a logical state through layouts, by engine and simulator, and looks at each element.

A case gives whole tensors whose elements say who they are, and per step what each rank holds of them. New memory is
full of NaN (or of the lowest integer), so what nobody writes shows; the simulator has to come to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tests.unit.strategies import inside

from shardshift.engine import Journal, run_program
from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.simulator import execute
from shardshift.transport import MemoryHub, byte_view
from shardshift.values import Kind, Layout, PlacedLayout, Region, Shard, Tensor

Values = Mapping[Tensor, torch.Tensor]
Held = dict[int, dict[Shard, torch.Tensor]]

TIMEOUT_S = 20.0


def tensor(name: str, value: torch.Tensor, kind: Kind = Kind.PARAM) -> dict[Tensor, torch.Tensor]:
    """A logical tensor and its value."""
    return {
        Tensor(kind, name, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.dtype.itemsize): value
    }


def box(of: Tensor, *bounds: tuple[int, int]) -> Shard:
    """The shard from start to stop in each dim; dims that are not given are whole."""
    full = [*bounds, *((0, size) for size in of.shape[len(bounds) :])]
    return Shard(of, Region(tuple(a for a, _ in full), tuple(b - a for a, b in full)))


def ranks(*roles: Sequence[Shard]) -> Layout:
    """A layout in which every rank has a role of its own."""
    return Layout(tuple(tuple(role) for role in roles), tuple(range(len(roles))))


def blank(shard: Shard) -> torch.Tensor:
    """Memory in which nothing has been written yet."""
    dtype: torch.dtype = getattr(torch, shard.tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shard.region.shape, float("nan"), dtype=dtype)
    return torch.full(shard.region.shape, torch.iinfo(dtype).min, dtype=dtype)


def cut(layout: PlacedLayout, values: Values) -> Held:
    """What each device holds of the values."""
    return {
        device: {shard: values[shard.tensor][inside(shard.region)].clone() for shard in layout.shards_on(device)}
        for device in layout.devices
    }


def run_plan(plan: Plan, held: Held, staging_bytes: int, targets: Held | None = None) -> Held:
    """Run a plan on live tensors, one thread a device."""
    hub = MemoryHub(1 + max(plan.devices))

    def one(device: int) -> dict[Shard, torch.Tensor]:
        def allocate(shard: Shard) -> torch.Tensor:
            return blank(shard) if targets is None else targets[device][shard]

        try:
            return run_program(
                Journal(programs[device], held.get(device, {})),
                hub.transport(device),
                staging_bytes=staging_bytes,
                allocate=allocate,
                timeout_s=TIMEOUT_S,
            )
        except BaseException:
            hub.cut(device)
            raise

    programs = compile_programs(plan, staging_bytes)
    with ThreadPoolExecutor(len(programs)) as pool:
        return dict(zip(programs, pool.map(one, programs), strict=True))


def simulated(plan: Plan, values: Values, staging_bytes: int) -> bool:
    """Whether the simulator brings every value where it belongs."""
    arrays = {of: np.arange(value.numel(), dtype=np.float64).reshape(value.shape) for of, value in values.items()}
    state = {
        device: {shard: arrays[shard.tensor][inside(shard.region)].copy() for shard in plan.prev.shards_on(device)}
        for device in plan.prev.devices
    }
    found = execute(compile_programs(plan, staging_bytes), state)
    return all(
        np.array_equal(found[device][shard], arrays[shard.tensor][inside(shard.region)])
        for device in plan.curr.devices
        for shard in plan.curr.shards_on(device)
    )


def right(held: Held, layout: PlacedLayout, values: Values) -> bool:
    """Whether every device holds exactly what the layout says, bit for bit."""
    return all(
        held[device].keys() == set(layout.shards_on(device))
        and all(
            tensor.dtype is values[shard.tensor].dtype
            and tensor.shape == torch.Size(shard.region.shape)
            and torch.equal(
                byte_view(tensor.contiguous()), byte_view(values[shard.tensor][inside(shard.region)].contiguous())
            )
            for shard, tensor in held[device].items()
        )
        for device in layout.devices
    )


def walk(
    values: Values, *layouts: Layout, first: Sequence[int] | None = None, staging_bytes: int = 64
) -> Iterator[tuple[Plan, Held]]:
    """Go from layout to layout; per change the plan and what each device holds after it, which is right.

    Args:
        values: the whole state.
        layouts: one after the other.
        first: the devices of the first layout, in order of its ranks.
        staging_bytes: the bound on staging of a round.
    """
    devices = range(max(layout.world_size for layout in layouts))
    placed = PlacedLayout(layouts[0], tuple(first or range(layouts[0].world_size)))
    held = cut(placed, values)
    for layout in layouts[1:]:
        plan = make_plan(placed, layout, devices=devices)
        assert simulated(plan, values, staging_bytes)
        held = run_plan(plan, held, staging_bytes)
        placed = plan.curr
        assert right(held, placed, values)
        yield plan, held


def arrive(values: Values, *layouts: Layout, first: Sequence[int] | None = None, staging_bytes: int = 64) -> None:
    """Go from layout to layout and find every value where it belongs after each change."""
    assert len(list(walk(values, *layouts, first=first, staging_bytes=staging_bytes))) == len(layouts) - 1
