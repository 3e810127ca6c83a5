"""Real processes on the wires: views on both ends, swaps both ways at once, pieces to oneself, messages with a cap."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.cases.movers import DIRECTLY, TIMEOUT_S, Send, is_right, mover_in, process, told, wanted
from tests.cases.moves import Held, Values, box, cut, ranks, right, tensor

from shardshift.engine import Journal, names_of, run_program
from shardshift.plan import Plan, make_plan
from shardshift.report.links import log_links
from shardshift.schedule import compile_programs
from shardshift.transport import Message, Pending, Transport, connect
from shardshift.values import Infeasible, Kind, Layout, PlacedLayout, Tensor

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


def swap(send: Send, ways: int, staging_bytes: int, kind: str) -> None:
    with process() as (member, meet):
        values, copied = state(), 0
        transport = connect(dist.PrefixStore("move", member.store), member.device, ways, TIMEOUT_S, kind=kind)
        for plan in swaps(values, ways):
            for number in range(len(VIEWS)):
                copied += swap_once(plan, values, transport, staging_bytes, number)
        meet.gather("done", range(ways), b"", "test")
        transport.close()
        send(copied)


def swap_once(plan: Plan, values: Values, transport: Transport, staging_bytes: int, number: int) -> int:
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
@pytest.mark.parametrize(
    ("ways", "staging_bytes", "kind"),
    [(2, 1 << 20, "gloo"), (2, 16, "gloo"), (3, 80, "gloo"), (2, 16, "same-host"), (4, 1 << 20, "same-host")],
)
def test_all_swap_strided_shards_of_several_types_at_once_and_what_is_their_own_stays_inside(
    ways: int, staging_bytes: int, kind: str
) -> None:
    started_s = time.monotonic()
    copies = [copied for (copied,) in told(ways, swap, ways, staging_bytes, kind).values()]
    assert len(copies) == ways
    assert all(copies)
    assert time.monotonic() - started_s < 20


MIB = 1 << 20
LARGE = [
    *(Tensor(Kind.PARAM, f"w{n}", (12, MIB // 4), "float32", 4) for n in range(2)),
    *(Tensor(Kind.PARAM, f"b{n}", (12, 5), "int64", 8) for n in range(20)),
    Tensor(Kind.PARAM, "half", (12, MIB // 4 + 3), "bfloat16", 2),
]


def by_rows(ways: int, turn: int) -> PlacedLayout:
    """Rank r has the (r + turn)-th run of rows of each."""
    runs = [(12 * r // ways, 12 * (r + 1) // ways) for r in range(ways)]
    roles = [[box(of, runs[(r + turn) % ways]) for of in LARGE] for r in range(ways)]
    return PlacedLayout(ranks(*roles), tuple(range(ways)))


def by_columns(ways: int) -> PlacedLayout:
    roles = [
        [box(of, (0, 12), (of.shape[1] * r // ways, of.shape[1] * (r + 1) // ways)) for of in LARGE]
        for r in range(ways)
    ]
    return PlacedLayout(ranks(*roles), tuple(range(ways)))


def large_values() -> Values:
    return {
        of: (torch.arange(of.shape[0] * of.shape[1]) * (2 * n + 1) % 30_011).to(getattr(torch, of.dtype)).view(of.shape)
        for n, of in enumerate(LARGE)
    }


def swap_large(send: Send, ways: int, kind: str, staging_bytes: int) -> None:
    with process() as (member, meet), mover_in(member, ways, kind, staging_bytes=staging_bytes) as mover:
        values, fine = large_values(), []
        walked = [by_rows(ways, 0), by_rows(ways, 1), by_columns(ways), by_rows(ways, ways - 1)]
        held = {
            name: wanted(shard, values).clone() for name, shard in names_of(walked[0].shards_on(mover.device)).items()
        }
        for policy in ("keep", "release"):
            for prev, curr in pairwise(walked):
                held = mover.move(prev, curr, held, policy=policy, verify=policy == "keep")
                fine.append(is_right(mover.device, curr, values, held))
            held = mover.move(walked[-1], walked[0], held)
        send(fine)
        meet.gather("done", range(ways), b"", "test")


@pytest.mark.parametrize("kind", DIRECTLY)
@pytest.mark.parametrize(("ways", "staging_bytes"), [(2, 64 << 20), (3, 600_000)])
def test_large_and_small_pieces_of_all_to_all_cross_at_once(ways: int, staging_bytes: int, kind: str) -> None:
    """Large ones go from tensor to tensor, small ones through the staging, in one round."""
    assert told(ways, swap_large, ways, kind, staging_bytes) == {device: [[True] * 6] for device in range(ways)}


class Counting:
    """A transport that remembers how large the messages are that it sends."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.sent_bytes = inner, list[int]()
        self.device = inner.device
        self.takes_views, self.close = inner.takes_views, inner.close

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self.sent_bytes += [message.nbytes for message in sends]
        return self._inner.post(sends, recvs)


def chunked(send: Send) -> None:
    made: list[Counting] = []

    def transport(store: dist.Store, device: int, devices: Sequence[int]) -> Transport:
        made.append(Counting(connect(store, device, devices, TIMEOUT_S, kind="gloo")))
        return made[-1]

    with process() as (member, meet), mover_in(member, 2, transport) as mover:
        values = dict(state()) | tensor("long", torch.arange(1000.0).reshape(10, 100))
        first, other = ranks([box(of) for of in values], []), ranks([], [box(of) for of in values])
        rows = ranks(*[[box(of, (of.shape[0] * r // 2, of.shape[0] * (r + 1) // 2)) for of in values] for r in (0, 1)])
        found = []
        for cap_bytes in (None, 64):
            if cap_bytes is not None:
                lower_the_cap(cap_bytes)
            for before, after in ((first, other), (first, rows), (rows, other)):
                prev, curr = (PlacedLayout(one, (0, 1)) for one in (before, after))
                given = {
                    name: turned(shard.region.shape, values[shard.tensor].dtype)[1].copy_(wanted(shard, values))
                    for name, shard in names_of(prev.shards_on(mover.device)).items()
                }
                made[-1].sent_bytes.clear()
                moved = mover.move(prev, curr, given)
                most_bytes = max(made[-1].sent_bytes, default=0)
                found.append((is_right(mover.device, curr, values, moved), most_bytes, len(made[-1].sent_bytes)))
        send(found)
        meet.gather("done", (0, 1), b"", "test")


def lower_the_cap(cap_bytes: int) -> None:
    """Let no message be larger, wherever the engine says what its most is."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(("shardshift.engine", "shardshift.schedule")):
            for most in ("MESSAGE_BYTES", "DIRECT_BYTES", "WHOLE_BYTES", "VERIFIED_BYTES"):
                if hasattr(module, most):
                    setattr(module, most, cap_bytes)


@pytest.mark.timeout(60)
def test_with_a_cap_of_64_bytes_a_message_everything_arrives_as_without() -> None:
    found: dict[int, list[Any]] = told(2, chunked)
    for device, ((*all_of_it,),) in found.items():
        assert all(fine for fine, _, _ in all_of_it)
        for (_, free_bytes, few), (_, capped_bytes, many) in zip(all_of_it[:3], all_of_it[3:], strict=True):
            if device == 0 and few:
                assert free_bytes > 64 >= capped_bytes
                assert many > 4 * few


def move_over(send: Send, addresses: Sequence[str]) -> None:
    """Move state between two processes with an address each; tell what the log says, and how they are connected."""
    lines: list[str] = []
    logger = logging.getLogger("links of this test")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    connected: list[tuple[str, str]] = []

    def transport(store: dist.Store, device: int, devices: Sequence[int]) -> Transport:
        before = {one for one in psutil.Process().net_connections("tcp") if one.status == "ESTABLISHED"}
        made = connect(store, device, devices, TIMEOUT_S, kind="gloo", address=addresses[device])
        now = {one for one in psutil.Process().net_connections("tcp") if one.status == "ESTABLISHED"}
        connected.extend((one.laddr.ip, one.raddr.ip) for one in now - before)
        return made

    with process() as (member, meet), mover_in(member, 2, transport, sink=log_links(logger)) as mover:
        values = state()
        prev, curr = (PlacedLayout(by, (0, 1)) for by in (whole_on(values, 0), whole_on(values, 1)))
        held = {name: wanted(shard, values).clone() for name, shard in names_of(prev.shards_on(mover.device)).items()}
        moved = mover.move(prev, curr, held)
        send((is_right(mover.device, curr, values, moved), connected, lines))
        meet.gather("done", range(2), b"", "test")


def whole_on(values: Values, rank: int) -> Layout:
    return ranks(*[[box(of) for of in values] if one == rank else [] for one in (0, 1)])


def test_state_goes_over_the_address_that_is_given_and_the_log_says_how_fast() -> None:
    addresses = ("127.0.0.2", "127.0.0.3")
    for [(fine, connected, lines)] in told(2, move_over, addresses).values():
        assert fine
        assert connected
        # Who is called is called at its address; who calls has the address that leads there.
        assert all({*ends} & {*addresses} for ends in connected)
        (line,) = lines
        assert re.fullmatch(r"device 0 -> device 1: .* in .*, .*B/s", line), line


def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(Infeasible, match=r"cannot use address '192\.0\.2\.1'"):
        connect(dist.HashStore(), 0, 2, TIMEOUT_S, kind="gloo", address="192.0.2.1")
