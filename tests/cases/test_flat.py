"""Flat optimizer shards: buckets, padding and boundaries are no part of what is moved, so none of them loses any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.cases.moves import Values, arrive, ranks, tensor, walk

from shardshift.values import Kind, Layout, Shard, Tensor, flat_range

Buckets = Sequence[Sequence[int]]
"""Per bucket the indices of its parameters, in the order in which they lie in it."""


def parameters(*shapes: tuple[int, ...]) -> Values:
    """Moments of parameters of these shapes, numbered through from one."""
    values: dict[Tensor, torch.Tensor] = {}
    first = 1
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        values |= tensor(f"p{index}", torch.arange(float(first), first + numel).reshape(shape), Kind.EXP_AVG)
        first += numel
    return values


def bucketed(values: Values, buckets: Buckets, ways: int) -> Layout:
    """Each bucket is padded to a multiple of ``ways`` and cut evenly; a rank's role is what it has of parameters."""
    tensors = list(values)
    roles: list[list[Shard]] = [[] for _ in range(ways)]
    for bucket in buckets:
        numel = sum(values[tensors[index]].numel() for index in bucket)
        each = -(-numel // ways)
        for rank, role in enumerate(roles):
            at = 0
            for of in (tensors[index] for index in bucket):
                start, stop = (min(max(each * r - at, 0), values[of].numel()) for r in (rank, rank + 1))
                role += [Shard(of, region) for region in flat_range(of.shape, start, stop)]
                at += values[of].numel()
    return ranks(*roles)


@pytest.mark.parametrize(
    ("shapes", "buckets", "ways"),
    [
        (((5,), (6,), (7,), (3,)), ((0, 1), (2, 3)), (4, 3, 1)),
        (((5, 1), (2, 3), (7,), (1, 3)), ((0, 1), (2, 3)), (4, 3, 1, 8, 2)),
        (((2, 3, 5), (), (7, 2), (1,)), ((0,), (1, 2, 3)), (7, 5, 2, 12, 3)),
        (((4, 4), (0, 3), (2, 2)), ((0, 1, 2),), (3, 5, 1)),
    ],
    ids=["two buckets", "matrices", "a scalar and three dims", "a parameter of no elements"],
)
def test_moments_are_whole_however_many_buckets_there_are(
    shapes: Sequence[tuple[int, ...]], buckets: Buckets, ways: tuple[int, ...]
) -> None:
    values = parameters(*shapes)
    for plan, held in walk(values, *[bucketed(values, buckets, count) for count in ways], staging_bytes=12):
        found = sorted(value for device in plan.curr.devices for t in held[device].values() for value in t.flatten())
        assert found == [value + 1.0 for value in range(sum(v.numel() for v in values.values()))]


@pytest.mark.parametrize(("numel", "ways"), [(5, (8, 2, 8)), (1, (4, 1, 8)), (3, (16, 2, 5))])
def test_replicas_that_own_nothing_but_padding_send_and_receive_nothing(numel: int, ways: tuple[int, ...]) -> None:
    values = parameters((numel,))
    for plan, _ in walk(values, *[bucketed(values, ((0,),), count) for count in ways]):
        senders = {transfer.source_device for transfer in plan.transfers}
        receivers = {transfer.target_device for transfer in plan.transfers}
        for placed, busy in ((plan.prev, senders), (plan.curr, receivers)):
            assert not busy & {device for device in placed.devices if not placed.shards_on(device)}


def test_another_order_of_parameters_in_the_buffer_changes_nothing_of_them() -> None:
    values = parameters((3, 2), (4,), (5, 2), (6,))
    caps = [((0, 1), (2,), (3,)), ((0, 1, 2), (3,)), ((3, 2, 1, 0),), ((3,), (2, 1), (0,))]
    arrive(values, *[bucketed(values, buckets, ways) for buckets, ways in zip(caps, (2, 4, 4, 3), strict=True)])
