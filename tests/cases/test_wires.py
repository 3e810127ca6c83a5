"""Real processes over gloo: views, swaps, pieces to oneself, peaks of memory, and what a death midway leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases.moves import Held, Values, box, cut, ranks, right, tensor

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.engine import Journal, Pages, pieces, run_program
from shardshift.engine.events import Event, RoundEnded
from shardshift.plan import Plan, make_plan
from shardshift.schedule import compile_programs
from shardshift.transport import ProcessGroupTransport, TransportError
from shardshift.values import Kind, Layout, PeerLost, PlacedLayout, Shard, Tensor

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
        Journal(program, sources[device]),
        transport,
        staging_bytes=staging_bytes,
        allocate=lambda shard: memory[shard][1],
        timeout_s=TIMEOUT_S,
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

    def sink(event: Event) -> None:
        if member.device == 2 and isinstance(event, RoundEnded) and event.index == event.rounds // 2:
            send("dies")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    program = compile_programs(plan, 16)[member.device]
    assert len(program.rounds) > 4
    started_s = time.monotonic()
    try:
        run_program(Journal(program, sources), transport, staging_bytes=16, allocate=fresh, timeout_s=2.0, sink=sink)
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


def chunked(send: Send) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    values = dict(state()) | tensor("long", torch.arange(1000.0).reshape(10, 100))
    of = [*values]
    plan = make_plan(
        PlacedLayout(ranks([box(one) for one in of], []), (0, 1)),
        ranks([], [box(one) for one in of]),
        devices=(0, 1),
        placement=(0, 1),
    )
    transport = ProcessGroupTransport.gloo(dist.PrefixStore("move", member.store), member.device, 2, TIMEOUT_S)
    counts = []
    for cap_bytes in (64, pieces.MESSAGE_BYTES):
        pieces.MESSAGE_BYTES = pieces.DIRECT_BYTES = cap_bytes  # type: ignore[misc, attr-defined]
        program = compile_programs(plan, 1 << 20)[member.device]
        sources = cut(plan.prev, values).get(member.device, {})
        sources = {shard: turned(shard.region.shape, live.dtype)[1].copy_(live) for shard, live in sources.items()}
        found = run_program(
            Journal(program, sources), transport, staging_bytes=1 << 20, allocate=fresh, timeout_s=TIMEOUT_S
        )
        mine = PlacedLayout(Layout((plan.curr.shards_on(member.device),), (0,)), (member.device,))
        assert right({member.device: found}, mine, values)
        counts.append(sum(len(pieces.parcels_of(step.sends, transport.takes_views)) for step in program.rounds))
    Control(member.store, member.device, TIMEOUT_S).gather("done", range(2), b"", "test")
    transport.close()
    send(counts)


@pytest.mark.timeout(60)
def test_a_piece_that_exceeds_the_cap_of_a_message_is_sent_in_several_to_the_same_end() -> None:
    with LocalJob(2, chunked, (), timeout_s=TIMEOUT_S, preload=["shardshift.elastic"]) as job:
        counts = dict(job.messages())
    many, few = counts[0]
    assert many > 60
    assert few == 1


MIB = 1 << 20
TENSORS, STAGING_BYTES = 64, 4 * MIB


def shrink(send: Send) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    device = member.device
    moments = [Tensor(Kind.EXP_AVG, f"m{n}", (4, MIB // 4), "float32", 4) for n in range(TENSORS)]
    params = [Tensor(Kind.PARAM, f"w{n}", (64, 64), "float32", 4) for n in range(4)]
    before, after = (
        ranks(*[[*map(box, params), *(box(of, (4 * r // n, 4 * (r + 1) // n)) for of in moments)] for r in range(n)])
        for n in (4, 2)
    )
    plan = make_plan(PlacedLayout(before, (0, 1, 2, 3)), after, devices=range(4))
    program = compile_programs(plan, STAGING_BYTES, policy="release")[device]
    sources = {shard: torch.full(shard.region.shape, float(device)) for shard in plan.prev.shards_on(device)}
    lasting = {shard: live.data_ptr() for shard, live in sources.items() if shard.tensor.kind is Kind.PARAM}
    transport = ProcessGroupTransport.gloo(dist.PrefixStore("move", member.store), device, 4, TIMEOUT_S)
    control, pages = Control(member.store, device, TIMEOUT_S), Pages()
    control.gather("ready", range(4), b"", "test")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory counts from here
    resident_bytes = in_status("VmRSS")
    journal = Journal(program, sources)
    del sources

    def fence(epoch: int) -> None:
        control.gather(f"fence/{epoch}", range(4), b"", "test")

    found = run_program(
        journal,
        transport,
        staging_bytes=STAGING_BYTES,
        allocate=pages.of_shard,
        pages=pages,
        timeout_s=TIMEOUT_S,
        fence=fence,
    )
    now_bytes, then_bytes = (
        sum(shard.nbytes for shard in placed.shards_on(device)) for placed in (plan.curr, plan.prev)
    )
    grown_bytes = max(now_bytes - then_bytes, 0)
    rows_right = all(
        live[row].eq(shard.region.offsets[0] + row).all()
        for shard, live in found.items()
        if shard.tensor.kind is Kind.EXP_AVG
        for row in range(len(live))
    )
    kept = all(found[shard].data_ptr() == at for shard, at in lasting.items()) if found else True
    send((in_status("VmHWM") - resident_bytes - grown_bytes, rows_right and kept, len(program.epochs)))
    control.gather("done", range(4), b"", "test")
    transport.close()


def in_status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status[status.index(name) :].split()[1]) * 1024


@pytest.mark.timeout(60)
def test_under_release_resident_memory_peaks_at_no_more_than_staging_and_a_piece_over_the_larger_state() -> None:
    with LocalJob(4, shrink, (), timeout_s=TIMEOUT_S, preload=["shardshift.elastic"]) as job:
        told = dict(job.messages())
    assert len(told) == 4
    for extra_bytes, fine, epochs in told.values():
        assert fine
        assert epochs > 1
        assert extra_bytes <= STAGING_BYTES + 2 * MIB + 10 * MIB  # the last for gloo, threads and Python


def die_in_a_child_group(send: Send) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    device = member.device
    values, plan = halves_and_quarters()
    whole = ProcessGroupTransport.gloo(dist.PrefixStore("all", member.store), device, 3, TIMEOUT_S)
    if device == 2:  # it has no part in the child group, and is told of no failure
        send(("beside", True, 0.0))
        whole.close()
        return
    child = ProcessGroupTransport.gloo(dist.PrefixStore("child", member.store), device, 2, TIMEOUT_S)
    values = tensor("w", torch.arange(64.0).reshape(8, 8))
    (of,) = values
    rows, columns = ([box(of, (0, 4)), box(of, (4, 8))], [box(of, (0, 8), (0, 4)), box(of, (0, 8), (4, 8))])
    placed = PlacedLayout(ranks(*[[one] for one in rows]), (0, 1))
    plan = make_plan(placed, ranks(*[[one] for one in columns]), devices=(0, 1), placement=(0, 1))
    program, sources = compile_programs(plan, 16)[device], cut(plan.prev, values)[device]

    def sink(event: Event) -> None:
        if device == 1 and isinstance(event, RoundEnded) and event.index == event.rounds // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    started_s = time.monotonic()
    journal = Journal(program, sources)
    try:
        run_program(journal, child, staging_bytes=16, allocate=fresh, timeout_s=2.0, sink=sink)
    except TransportError:
        mine = PlacedLayout(Layout((plan.prev.shards_on(device),), (0,)), (device,))
        send(("survived", right({device: journal.held()}, mine, values), time.monotonic() - started_s))
    finally:
        child.close()
        whole.close()


@pytest.mark.timeout(60)
def test_whoever_moves_in_a_child_group_leaves_it_in_time_when_its_only_peer_is_killed() -> None:
    told: dict[int, tuple[str, bool, float]] = {}
    with LocalJob(3, die_in_a_child_group, (), timeout_s=TIMEOUT_S, preload=["shardshift.elastic"]) as job:
        try:
            for device, message in job.messages():
                told[device] = message
        except PeerLost:
            pass
    assert told.keys() == {0, 2}
    assert told[0][:2] == ("survived", True)
    assert told[0][2] < 2.0 + 5.0
