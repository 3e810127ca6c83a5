"""Random models, layouts and moves for Hypothesis, and the slow, obvious oracles that tests compare with.

A model here is a handful of tiny logical tensors with the rules of a Megatron job: uneven pipeline stages (some
empty), slices on dim 0 or dim 1 of sizes that nothing divides, replicated norms, an embedding on the first and
the last stage, optimizer state that is a flat range per data parallel rank, and one tensor that some ranks hold
whole and others in slices. The oracles mark elements one by one with numpy; they know nothing of boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardshift.values import (
    Coordinate,
    Kind,
    Layout,
    ParallelConfig,
    PlacedLayout,
    Region,
    Role,
    Rows,
    Shard,
    Tensor,
    flat_range,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class Rule:
    """One tensor and how it is cut: ``cut`` is a dim, "replicated", "mixed", or "flat" (per dp rank)."""

    tensor: Tensor
    layer: int | str
    cut: int | str


@dataclass(frozen=True)
class Model:
    """Rules, and the number of layers they speak of."""

    layers: int
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Move:
    """Arguments of ``make_plan``."""

    prev: PlacedLayout
    curr: Layout
    devices: tuple[int, ...]
    lost: tuple[int, ...] = ()


def part(n: int, ways: int, index: int) -> tuple[int, int]:
    """(offset, size) of one of ``ways`` parts of ``n``, as even as can be; empty where n < ways."""
    return n * index // ways, n * (index + 1) // ways - n * index // ways


def even_split(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be."""
    return tuple(part(layers, pp, stage)[1] for stage in range(pp))


def grid_layout(model: Model, config: ParallelConfig, split: Sequence[int]) -> Layout:
    """The layout of a model: ``split`` gives the layers of each stage."""
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    roles: dict[Role, int] = {}
    of_rank = []
    for rank in range(config.world_size):
        at = config.coordinate(rank)
        role = tuple(
            Shard(rule.tensor, region)
            for rule in model.rules
            if _on_stage(rule, at.pp, stage_of, config.pp)
            for region in _regions(rule, at, config)
        )
        of_rank.append(roles.setdefault(role, len(roles)))
    return Layout(tuple(roles), tuple(of_rank))


def equal_layers(count: int, *, width: int = 24, numel: int = 1) -> Model:
    """A model of equal layers: one matrix of ``width`` rows of ``numel`` bytes each, cut on dim 0."""
    return Model(
        count,
        tuple(Rule(Tensor(Kind.PARAM, f"layers.{i}", (width, numel), "uint8", 1), i, 0) for i in range(count)),
    )


def even_grid(model: Model, text: str) -> Layout:
    """The layout of a configuration such as ``pp2tp4``, layers split evenly."""
    config = ParallelConfig.parse(text)
    return grid_layout(model, config, even_split(model.layers, config.pp))


def in_two_columns(layout: Layout, second: Sequence[bool]) -> Layout:
    """The same layout with two roles a rank: ``second`` says which tensors are in the second one."""
    rows, roles = layout.rows, layout.role_count
    # Bundles by what they were, and by column.
    old = layout.bundle_of * 2 + np.array(second, np.int32)
    bundles, bundle_of = np.unique(old, return_inverse=True)
    of = [np.flatnonzero(bundles // 2 == bundle) for bundle in rows.bundle]
    row = np.repeat(np.arange(len(rows)), [len(new) for new in of])
    bundle = np.concatenate([*of, np.empty(0, np.int64)]).astype(np.int32)
    role = (rows.role[row] + roles * (bundles[bundle] % 2)).astype(np.int32)
    order = np.argsort(role, kind="stable")
    columns = Rows(role[order], bundle[order], rows.low[row][order], rows.high[row][order])
    of_rank = np.array(
        [[layout.role_of_rank[rank] + roles * column for column in (0, 1)] for rank in range(layout.world_size)]
    )
    return Layout.of_rows(
        layout.tensors, bundle_of.reshape(-1).astype(np.int32), columns, of_rank.astype(np.int32).reshape(-1, 2)
    )


def _on_stage(rule: Rule, stage: int, stage_of: Sequence[int], stages: int) -> bool:
    if isinstance(rule.layer, int):
        return stage_of[rule.layer] == stage
    return stage in {"ends": (0, stages - 1), "last": (stages - 1,)}[rule.layer]


def _regions(rule: Rule, at: Coordinate, config: ParallelConfig) -> list[Region]:
    shape = rule.tensor.shape
    if rule.cut == "replicated" or (rule.cut == "mixed" and at.tp == 0):
        return [Region.whole(shape)]
    dim = rule.cut if isinstance(rule.cut, int) else 0
    offset, size = part(shape[dim], config.tp, at.tp)
    sliced = Region((*(0,) * dim, offset, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], size, *shape[dim + 1 :]))
    if rule.cut != "flat":
        return [sliced]
    start, count = part(sliced.numel, config.dp, at.dp)
    return [
        Region(tuple(a + b for a, b in zip(box.offsets, sliced.offsets, strict=True)), box.shape)
        for box in flat_range(sliced.shape, start, start + count)
    ]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Up to five layers of up to three tensors, an embedding on both ends, a last norm, a scalar."""
    layers = draw(st.integers(1, 5))
    sizes = st.integers(1, 7)
    rules = []

    def add(name: str, layer: int | str, shape: tuple[int, ...], cut: int | str) -> None:
        rules.append(Rule(Tensor(Kind.PARAM, name, shape, "bfloat16", 2), layer, cut))
        if moments:
            flat = "flat" if zero1 and cut in (0, 1) else cut
            rules.append(Rule(Tensor(Kind.EXP_AVG, name, shape, "float32", 4), layer, flat))

    moments, zero1 = draw(st.booleans()), draw(st.booleans())
    choices: list[int | str] = [0, 1, "replicated", "mixed"]
    cuts = draw(st.lists(st.sampled_from(choices), min_size=1, max_size=3))
    shapes = [draw(st.tuples(sizes, sizes)) for _ in cuts]
    if draw(st.booleans()):
        add("embedding", "ends", draw(st.tuples(sizes, sizes)), 0)
    for layer in range(layers):
        for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True)):
            add(f"layers.{layer}.{i}", layer, shape, cut)
    if draw(st.booleans()):
        add("norm", "last", (draw(sizes),), "replicated")
        add("scale", "last", (), "replicated")
    return Model(layers, tuple(rules))


@st.composite
def layouts(draw: st.DrawFn, model: Model, most_ranks: int = 12) -> Layout:
    """A grid of up to ``most_ranks`` ranks with any split of the layers, empty stages included.

    Some have two roles a rank: one for some of the tensors, one for the others.
    """
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
    pp, tp, dp = draw(sizes.filter(lambda s: s[0] * s[1] * s[2] <= most_ranks))
    ends = sorted(draw(st.lists(st.integers(0, model.layers), min_size=pp - 1, max_size=pp - 1)))
    split = [b - a for a, b in zip([0, *ends], [*ends, model.layers], strict=True)]
    layout = grid_layout(model, ParallelConfig(pp=pp, tp=tp, dp=dp), split)
    if draw(st.booleans()):
        return layout
    return in_two_columns(layout, [draw(st.booleans()) for _ in layout.tensors])


@st.composite
def moves(draw: st.DrawFn, most_ranks: int = 12, losses: bool = False) -> Move:
    """Any two layouts of one model; devices stay, leave, join and (if ``losses``) die."""
    model = draw(models())
    prev, curr = draw(layouts(model, most_ranks)), draw(layouts(model, most_ranks))
    slots = draw(st.permutations(range(max(prev.world_size, curr.world_size) + 2)))
    placed = PlacedLayout(prev, tuple(slots[: prev.world_size]))
    spare = len(slots) - curr.world_size
    lost = tuple(draw(st.lists(st.sampled_from(placed.devices), max_size=min(spare, 2), unique=True))) if losses else ()
    usable = [device for device in draw(st.permutations(slots)) if device not in lost]
    return Move(placed, curr, tuple(usable[: draw(st.integers(curr.world_size, len(usable)))]), lost)


@st.composite
def growths(draw: st.DrawFn, most_ranks: int = 9) -> Move:
    """More replicas than before, so that receivers forward to one another; a grid that changes as well, at times."""
    model = draw(models())
    pp, tp, dp = draw(st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)]))
    ways = draw(st.integers(dp + 1, max(most_ranks // (pp * tp), dp + 1)))
    prev = grid_layout(model, ParallelConfig(pp=pp, tp=tp, dp=dp), even_split(model.layers, pp))
    after = draw(st.sampled_from([(pp, tp), (pp, tp), (1, 1)]))
    curr = grid_layout(model, ParallelConfig(pp=after[0], tp=after[1], dp=ways), even_split(model.layers, after[0]))
    devices = tuple(range(max(prev.world_size, curr.world_size)))
    return Move(PlacedLayout(prev, devices[: prev.world_size]), curr, devices)


def inside(region: Region) -> tuple[Any, ...]:
    """The numpy index of a region in an array of the whole tensor."""
    return (*(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True)), ...)


def mask(shape: Sequence[int], *regions: Region) -> NDArray[np.int64]:
    """How many of the regions each element is in."""
    counts = np.zeros(tuple(shape), dtype=np.int64)
    for region in regions:
        counts[inside(region)] += 1
    return counts


def identities(layout: Layout) -> dict[Tensor, Array]:
    """Per tensor an array in which every element of the whole model has a number of its own."""
    arrays, first = {}, 0
    for tensor in layout.tensors:
        count = int(np.prod(tensor.shape, dtype=np.int64))
        arrays[tensor] = np.arange(first, first + count, dtype=np.float64).reshape(tensor.shape)
        first += count
    return arrays


def state_of(
    placed: PlacedLayout, values: dict[Tensor, Array], lost: Sequence[int] = ()
) -> dict[int, dict[Shard, Array]]:
    """What every living device holds, cut out of ``values``."""
    return {
        device: {shard: values[shard.tensor][inside(shard.region)].copy() for shard in placed.shards_on(device)}
        for device in placed.devices
        if device not in lost
    }


def element_costs(prev: PlacedLayout, curr: Layout, devices: Sequence[int]) -> NDArray[np.int64]:
    """Bytes that each device lacks for each rank, counted element by element: shape (ranks, devices)."""

    def marks(role: Role) -> dict[Tensor, Array]:
        found: dict[Tensor, Array] = {}
        for shard in role:
            found.setdefault(shard.tensor, np.zeros(shard.tensor.shape, dtype=bool))[inside(shard.region)] = True
        return found

    held = [marks(prev.shards_on(device)) for device in devices]
    costs = np.zeros((curr.world_size, len(devices)), dtype=np.int64)
    for rank in range(curr.world_size):
        for tensor, wanted in marks(curr.shards(rank)).items():
            for column, has in enumerate(held):
                lacking = wanted & ~has[tensor] if tensor in has else wanted
                costs[rank, column] += int(lacking.sum()) * tensor.itemsize
    return costs
