"""Real processes: views, swaps and pieces to oneself over gloo, and what a device that dies midway leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases.moves import Held, Values, box, cut, ranks, right, tensor

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.engine import RoundEvent, run_program
from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.transport import ProcessGroupTransport, TransportError
from shardshift.values import Layout, PeerLost, PlacedLayout, Shard

TIMEOUT_S = 8.0
Send = Callable[[Any], None]
View = Callable[[Sequence[int], torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""A shape and an element type to (a storage full of NaN, a view of that shape on it)."""


def full_of_nan(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)


def turned(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``base.t()``."""
    storage = full_of_nan(torch.Size(shape).numel(), dtype)
    return storage, storage.view(*reversed(shape)).permute(*reversed(range(len(shape))))


def column(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``base[:, 1]`` of rows of four."""
    storage = full_of_nan(4 * torch.Size(shape).numel(), dtype)
    return storage, storage.view(*shape, 4)[..., 1]


def every_second(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``base[1::2, ::3]`` of a wider matrix."""
    wide = (2 * shape[0] + 1, *(3 * size for size in shape[1:]))
    storage = full_of_nan(torch.Size(wide).numel(), dtype)
    steps = (slice(1, 1 + 2 * shape[0], 2), *(slice(None, None, 3) for _ in shape[1:]))
    return storage, storage.view(*wide)[steps]


VIEWS: tuple[View, ...] = (turned, column, every_second)


def state() -> Values:
    """Tensors of several element types; each element of each has bits of its own."""
    values = tensor("w", torch.arange(48.0).reshape(8, 6))
    values |= tensor("half", torch.arange(40).to(torch.int16).view(torch.bfloat16).reshape(8, 5))
    values |= tensor("counts", torch.arange(24).reshape(8, 3) << 40)
    values |= tensor("line", torch.arange(8.0, dtype=torch.float64))
    return values


def swaps(values: Values, ways: int) -> list[Plan]:
    """Every device gives away all that it has and gets another's; and then rows against columns, part of it its own."""

    def rows(turn: int) -> Layout:
        cuts = [8 * r // ways for r in range(ways + 1)]
        return ranks(
            *[[box(of, (cuts[r], cuts[r + 1])) for of in values] for r in ((i + turn) % ways for i in range(ways))]
        )

    def columns() -> Layout:
        def bounds(size: int, rank: int) -> tuple[int, int]:
            return size * rank // ways, size * (rank + 1) // ways

        return ranks(
            *[
                [
                    box(of, (0, 8), bounds(of.shape[1], r)) if len(of.shape) > 1 else box(of, bounds(8, r))
                    for of in values
                ]
                for r in range(ways)
            ]
        )

    devices = tuple(range(ways))
    plans = []
    for before, after in ((rows(0), rows(1)), (rows(1), columns()), (columns(), rows(ways - 1))):
        prev = PlacedLayout(before, devices)
        plans.append(make_plan(prev, after, devices=devices, placement=devices))
    return plans


def swap(send: Send, ways: int, staging_bytes: int) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    values = state()
    transport = ProcessGroupTransport.gloo(dist.PrefixStore("move", member.store), member.device, ways, TIMEOUT_S)
    copied = 0
    for plan in swaps(values, ways):
        for number in range(len(VIEWS)):
            copied += swap_once(plan, values, transport, staging_bytes, number)
    Control(member.store, member.device, TIMEOUT_S).gather("done", range(ways), b"", "test")
    transport.close()
    send(copied)


def swap_once(plan: Plan, values: Values, transport: ProcessGroupTransport, staging_bytes: int, number: int) -> int:
    device = transport.device
    sources: Held = {device: {}}
    for index, (shard, value) in enumerate(cut(plan.prev, values)[device].items()):
        _, view = VIEWS[(number + index) % 3](shard.region.shape, value.dtype)
        sources[device][shard] = view.copy_(value)
    memory = {
        shard: VIEWS[(number + index + 1) % 3](shard.region.shape, values[shard.tensor].dtype)
        for index, shard in enumerate(plan.curr.shards_on(device))
    }
    strides = {shard: view.stride() for shard, (_, view) in memory.items()}
    program = compile_programs(plan, staging_bytes)[device]
    found = run_program(
        program, sources[device], transport, allocate=lambda shard: memory[shard][1], timeout_s=TIMEOUT_S
    )
    mine = PlacedLayout(Layout((plan.curr.shards_on(device),), (0,)), (device,))
    assert right({device: found}, mine, values)
    for shard, (storage, view) in memory.items():
        assert found[shard] is view
        assert view.stride() == strides[shard]
        view.copy_(full_of_nan(1, view.dtype)[0].expand(view.shape))
        assert bool((storage.view(torch.uint8) == 255).all()), f"{shard}: memory beside the view was written"
    return sum(len(step.copies) for step in program.rounds)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("ways", "staging_bytes"), [(2, 1 << 20), (2, 16), (4, 40)])
def test_all_swap_strided_shards_of_several_types_at_once_and_what_is_their_own_stays_inside(
    ways: int, staging_bytes: int
) -> None:
    started_s = time.monotonic()
    with LocalJob(ways, swap, (ways, staging_bytes), timeout_s=TIMEOUT_S, preload=["shardshift.elastic"]) as job:
        copies = [copied for _, copied in job.messages()]
    assert len(copies) == ways
    assert all(copies)
    assert time.monotonic() - started_s < 20


def halves_and_quarters() -> tuple[Values, Plan]:
    values = tensor("w", torch.arange(64.0).reshape(8, 8)) | tensor("v", torch.arange(64, 128).reshape(8, 8))
    before = ranks(*[[box(of, (2 * r, 2 * r + 2)) for of in values] for r in range(4)])
    after = ranks(*[[box(of, (0, 8), (2 * r, 2 * r + 2)) for of in values] for r in range(4)])
    return values, make_plan(PlacedLayout(before, (0, 1, 2, 3)), after, devices=range(4))


def die_halfway(send: Send, how: str) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    values, plan = halves_and_quarters()
    transport = ProcessGroupTransport.gloo(dist.PrefixStore("move", member.store), member.device, 4, TIMEOUT_S)
    sources = cut(plan.prev, values)[member.device]
    lasting = {shard: (value, value.data_ptr()) for shard, value in sources.items()}

    def on_round(event: RoundEvent) -> None:
        if member.device == 2 and event.index == event.rounds // 2:
            send("dies")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    program = compile_programs(plan, 16)[member.device]
    assert len(program.rounds) > 4
    started_s = time.monotonic()
    try:
        run_program(program, sources, transport, allocate=fresh, timeout_s=2.0, on_round=on_round)
    except TransportError:
        mine = PlacedLayout(Layout((plan.prev.shards_on(member.device),), (0,)), (member.device,))
        whole = right({member.device: sources}, mine, values)
        same = all(sources[shard] is value and value.data_ptr() == at for shard, (value, at) in lasting.items())
        send(("survived", whole and same, time.monotonic() - started_s))
    finally:
        transport.close()


def fresh(shard: Shard) -> torch.Tensor:
    return torch.full(shard.region.shape, -1.0).to(getattr(torch, shard.tensor.dtype))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_death_of_one_of_four_after_half_of_the_pieces_leaves_the_others_with_their_old_state(how: str) -> None:
    told: dict[int, tuple[str, bool, float]] = {}
    with LocalJob(4, die_halfway, (how,), timeout_s=TIMEOUT_S, preload=["shardshift.elastic"]) as job:
        try:
            for device, message in job.messages():
                if message != "dies":
                    told[device] = message
                if len(told) == 3:
                    break
        except PeerLost:
            pass
    assert told.keys() == {0, 1, 3}
    for _, whole, elapsed_s in told.values():
        assert whole
        assert elapsed_s < 2.0 + 5.0
