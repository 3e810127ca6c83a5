"""Strided, shared and odd tensors as sources: bits arrive, and what was given stays as it is held.

Gloo sends wrong bytes of strided tensors without a word, so each transport and both policies are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.cases.movers import DIRECTLY, Send, bits, is_right, mover_in, process, told, wanted
from tests.cases.moves import Values, box, ranks, tensor
from tests.unit.together import together

from shardshift.engine import Mover, names_of
from shardshift.transport import MemoryHub
from shardshift.values import Layout, PlacedLayout

Made = tuple[torch.Tensor, torch.Tensor]
"""Memory full of 0xFF, and a view on it."""


def memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.full((numel * dtype.itemsize,), 255, dtype=torch.uint8)
    return raw.view(dtype)


def plain(shape: Sequence[int], dtype: torch.dtype) -> Made:
    base = memory(torch.Size(shape).numel(), dtype)
    return base, base.view(tuple(shape))


def turned(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """As ``base.t()``."""
    base = memory(torch.Size(shape).numel(), dtype)
    return base, base.view(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))


def column(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """As ``base[:, 0]``."""
    base = memory(3 * torch.Size(shape).numel(), dtype)
    return base, base.view((*shape, 3))[..., 0]


def every_other(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """As ``base[1::2, ::3]``, from an odd offset."""
    wide = tuple(3 * size + 1 for size in shape)
    base = memory(1 + torch.Size(wide).numel(), dtype)
    return base, base[1:].view(wide)[tuple(slice(1, 1 + 3 * size, 3) for size in shape)]


def unaligned_rows(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """Rows that are contiguous each, with a gap after each."""
    if not shape:
        return plain(shape, dtype)
    base = memory(torch.Size((*shape[:-1], shape[-1] + 1)).numel(), dtype)
    return base, base.view(*shape[:-1], shape[-1] + 1)[..., : shape[-1]]


WAYS: tuple[Callable[[Sequence[int], torch.dtype], Made], ...] = (plain, turned, column, every_other, unaligned_rows)
DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((8, 6), (9,), (5, 7), (6, 2, 3), (8, 1), (1, 8), (2,), (0, 4))


def state() -> Values:
    """One tensor per dtype and shape, any bits in it, and scalars."""
    values: dict[Any, torch.Tensor] = {}
    for at, dtype in enumerate(DTYPES):
        for number, shape in enumerate((SHAPES[at % 8], SHAPES[(at + 3) % 8], ())):
            numel = torch.Size(shape).numel()
            raw = ((torch.arange(numel * dtype.itemsize) + 31 * at + number) * 2654435761 >> 7) % 256
            if dtype is torch.bool:
                raw %= 2
            value = raw.to(torch.uint8).view(dtype).reshape(shape)
            values |= tensor(f"{str(dtype)[6:]}.{number}", value)
    return values


def rows(values: Values, ways: int, turn: int = 0) -> Layout:
    """Rank r has the (r + turn)-th run of rows; what has no dim is with the rank that has the last run."""

    def of_rank(r: int) -> list[Any]:
        cut = [box(of, (of.shape[0] * r // ways, of.shape[0] * (r + 1) // ways)) for of in values if of.shape]
        return cut + [box(of) for of in values if not of.shape and r == ways - 1]

    return ranks(*[of_rank((rank + turn) % ways) for rank in range(ways)])


def last_dims(values: Values, ways: int) -> Layout:
    """Cut by the last dim; what has no dim is with all."""

    def of_rank(r: int) -> list[Any]:
        cut = []
        for of in values:
            if of.shape:
                size = of.shape[-1]
                whole = [(0, n) for n in of.shape[:-1]]
                cut.append(box(of, *whole, (size * r // ways, size * (r + 1) // ways)))
            else:
                cut.append(box(of))
        return cut

    return ranks(*[of_rank(rank) for rank in range(ways)])


def walk(mover: Mover, ways: int) -> list[str]:
    """Go through layouts, every time from views of another kind; what was wrong."""
    values, device, wrong = state(), mover.device, []
    layouts = [rows(values, ways), rows(values, ways, 1), last_dims(values, ways), rows(values, ways, ways - 1)]
    for policy in ("keep", "release"):
        for number, (before, after) in enumerate(pairwise(layouts)):
            prev, curr = (PlacedLayout(one, tuple(range(ways))) for one in (before, after))
            given, held, bases = {}, {}, {}
            for index, (name, shard) in enumerate(names_of(prev.shards_on(device)).items()):
                base, view = WAYS[(index + number) % len(WAYS)](shard.region.shape, getattr(torch, shard.tensor.dtype))
                given[name] = view.copy_(wanted(shard, values))
                held[name], bases[name] = (view, view.stride(), view.data_ptr()), base
            beside = {name: bits(base) for name, base in bases.items()}
            kept = dict(given)
            found = mover.move(prev, curr, given, policy=policy)
            what = f"{policy}, change {number}, device {device}"
            if not is_right(device, curr, values, found):
                wrong.append(f"{what}: bits")
            if policy == "keep" and given != kept:
                wrong.append(f"{what}: the state that was given")
            for name, (view, stride, at) in held.items():
                if (view.stride(), view.data_ptr()) != (stride, at) or bits(bases[name]) != beside[name]:
                    wrong.append(f"{what}: the source {name}")
                stays = names_of(prev.shards_on(device))[name] in curr.shards_on(device)
                if stays and found[name] is not view:
                    wrong.append(f"{what}: {name} is another tensor, though its shard is the same")
    return wrong


def walk_in_a_process(send: Send, ways: int, kind: str, staging_bytes: int) -> None:
    with process() as (member, meet), mover_in(member, ways, kind, staging_bytes=staging_bytes) as mover:
        send(walk(mover, ways))
        meet.gather("done", range(ways), b"", "test")


@pytest.mark.parametrize("kind", DIRECTLY)
@pytest.mark.parametrize(("ways", "staging_bytes"), [(2, 64 << 20), (3, 200)])
def test_strided_sources_of_all_types_arrive_bit_for_bit_and_stay_as_they_are(
    ways: int, staging_bytes: int, kind: str
) -> None:
    assert told(ways, walk_in_a_process, ways, kind, staging_bytes) == {device: [[]] for device in range(ways)}


@pytest.mark.parametrize(
    ("ways", "views", "deferred"),
    [(1, False, False), (3, False, False), (4, True, False), (3, False, True), (4, True, True)],
)
def test_the_same_between_threads_whenever_bytes_land(ways: int, views: bool, deferred: bool) -> None:
    hub = MemoryHub(ways, views=views, deferred=deferred)
    found = together(
        range(ways), lambda mover: walk(mover, ways), transport=lambda _, d, __: hub.transport(d), staging_bytes=160
    )
    assert found == {device: [] for device in range(ways)}
    assert not hub.violations
