from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, growths, inside, moves

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.engine import Journal, available_bytes, pieces, run_program
from shardshift.engine.events import Event, FencePassed, RoundEnded, Sink, nowhere
from shardshift.engine.run import Move as LiveMove
from shardshift.plan import Plan, make_plan
from shardshift.schedule import DIRECT_BYTES, Program, compile_programs
from shardshift.transport import (
    MemoryHub,
    Message,
    Pending,
    ProcessGroupTransport,
    Transport,
    TransportError,
    byte_view,
)
from shardshift.values import Kind, Layout, Mismatch, PlacedLayout, Region, Shard, Tensor

TIMEOUT_S = 20.0
DTYPES = ("bool", "int8", "int64", "bfloat16", "float8_e4m3fn", "complex64", "float64", "float32")
STYLES = ("plain", "transposed", "column", "offset")


def dtype_of(tensor: Tensor) -> torch.dtype:
    found = getattr(torch, tensor.dtype)
    assert isinstance(found, torch.dtype)
    return found


def whole_value(tensor: Tensor) -> torch.Tensor:
    """The logical tensor: every element has a value of its own as far as its dtype has room, NaNs among them."""
    dtype = dtype_of(tensor)
    numel = Region.whole(tensor.shape).numel
    first = sum(map(ord, tensor.kind + tensor.name)) * 1009
    ids = torch.arange(first, first + numel)
    if dtype is torch.bool:
        return (ids * 7919 // 13 % 2 == 1).reshape(tensor.shape)
    if dtype is torch.int64:
        return ids.reshape(tensor.shape)
    # Any bits at all: a payload of a NaN, a signalling one, a denormal must arrive as they are.
    bits = torch.stack([(ids * 2654435761 >> shift) % 256 for shift in (0, 3, 11, 17, 5, 8, 20, 13)], dim=1)
    return bits.to(torch.uint8)[:, : tensor.itemsize].contiguous().view(dtype).reshape(tensor.shape)


def held_as(style: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the shape, held in one of several ways within a storage full of 0xFF (NaN in most dtypes)."""
    numel = Region.whole(tuple(shape)).numel
    count = {"plain": numel, "transposed": numel, "column": 2 * numel, "offset": numel + 5}[style]
    storage = torch.full((count * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
    if dtype is torch.bool:
        storage.fill_(True)
    match style:
        case "transposed":
            return storage, storage.view(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))
        case "column":
            return storage, storage.view(*shape, 2)[..., 1]
        case "offset":
            return storage, storage[3 : 3 + numel].view(tuple(shape))
        case _:
            return storage, storage.view(tuple(shape))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(byte_view(a.contiguous()), byte_view(b.contiguous()))


@dataclass
class Device:
    """What one device holds before a move, what it was given memory for, and the bytes of both storages."""

    program: Program
    staging_bytes: int
    sources: dict[Shard, torch.Tensor] = field(default_factory=dict)
    targets: dict[Shard, torch.Tensor] = field(default_factory=dict)
    source_storages: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    target_storages: dict[Shard, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, program: Program, staging_bytes: int, style: Callable[[Shard], str]) -> Device:
        device = cls(program, staging_bytes)
        for shard in plan.prev.shards_on(program.device):
            storage, tensor = held_as(style(shard), shard.region.shape, dtype_of(shard.tensor))
            tensor.copy_(whole_value(shard.tensor)[inside(shard.region)])
            device.sources[shard] = tensor
            device.source_storages.append((storage, storage.view(torch.uint8).clone()))
        for shard in program.allocate:
            storage, tensor = held_as(style(shard), shard.region.shape, dtype_of(shard.tensor))
            device.targets[shard], device.target_storages[shard] = tensor, storage
        return device

    def run(self, transport: Transport, sink: Sink = nowhere, verify: bool = False) -> None:
        strides = {shard: tensor.stride() for shard, tensor in self.targets.items()}
        found = self.moved(transport, sink, verify)
        self.check(found, strides)

    def moved(self, transport: Transport, sink: Sink = nowhere, verify: bool = False) -> dict[Shard, torch.Tensor]:
        return run_program(
            Journal(self.program, self.sources),
            transport,
            staging_bytes=self.staging_bytes,
            allocate=self.targets.__getitem__,
            timeout_s=TIMEOUT_S,
            verify=verify,
            sink=sink,
        )

    def check(self, found: Mapping[Shard, torch.Tensor], strides: Mapping[Shard, tuple[int, ...]]) -> None:
        referred = {refer.shard for refer in self.program.refers}
        assert found.keys() == referred | set(self.program.allocate)
        for shard, tensor in found.items():
            assert same_bytes(tensor, whole_value(shard.tensor)[inside(shard.region)]), f"{shard} is wrong"
            if shard in referred:
                assert tensor is self.sources[shard]
            else:
                assert tensor is self.targets[shard]
                assert tensor.stride() == strides[shard]
                self.check_surroundings(shard)
        self.check_sources()

    def check_surroundings(self, shard: Shard) -> None:
        """Nothing outside the view was written."""
        _, blank = held_as("plain", shard.region.shape, dtype_of(shard.tensor))
        self.targets[shard].copy_(blank)
        untouched = self.target_storages[shard].view(torch.uint8)
        assert bool(((untouched == 255) | (untouched == 1)).all()), f"{shard}: memory around the target was written"
        self.targets[shard].copy_(whole_value(shard.tensor)[inside(shard.region)])

    def check_sources(self) -> None:
        for storage, before in self.source_storages:
            assert torch.equal(storage.view(torch.uint8), before), "a source was written"


def retyped(move: Move, dtypes: Sequence[str]) -> Move:
    """The same move with other element types."""
    names = sorted({(t.kind, t.name) for t in move.curr.tensors} | {(t.kind, t.name) for t in move.prev.layout.tensors})
    dtype_by_name = {name: dtypes[index % len(dtypes)] for index, name in enumerate(names)}

    def layout(before: Layout) -> Layout:
        def tensor(old: Tensor) -> Tensor:
            dtype = dtype_by_name[old.kind, old.name]
            return replace(old, dtype=dtype, itemsize=getattr(torch, dtype).itemsize)

        return Layout.of_rows([*map(tensor, before.tensors)], before.bundle_of, before.rows, before.roles_of_rank)

    return Move(PlacedLayout(layout(move.prev.layout), move.prev.devices), layout(move.curr), move.devices, move.lost)


def planned(move: Move) -> Plan:
    return make_plan(move.prev, move.curr, devices=move.devices)


def style_of(shift: int) -> Callable[[Shard], str]:
    return lambda shard: STYLES[(sum(map(ord, shard.tensor.name)) + sum(shard.region.offsets) + shift) % len(STYLES)]


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result(timeout=60)


def over_memory(
    devices: Sequence[Device], *, views: bool = False, deferred: bool = False, verify: bool = False
) -> None:
    hub = MemoryHub(1 + max(device.program.device for device in devices), views=views, deferred=deferred)

    def body(device: Device) -> None:
        try:
            device.run(hub.transport(device.program.device), verify=verify)
        except BaseException:
            hub.cut(device.program.device)  # so that the others fail at once, too
            raise

    in_threads([lambda d=device: body(d) for device in devices])  # type: ignore[misc]
    assert hub.violations == [], "a source was written or let go before its round was complete"


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(moves(most_ranks=6), growths(most_ranks=6)),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sampled_from([16, 64, 4096]),
    st.sampled_from([(1 << 20, 1 << 20), (1, 24), (16, 16)]),
    st.fixed_dictionaries({"views": st.booleans(), "deferred": st.booleans(), "verify": st.booleans()}),
)
def test_every_element_arrives_in_any_dtype_from_and_into_tensors_of_any_strides(
    move: Move, dtypes: list[str], shift: int, staging_bytes: int, cuts: tuple[int, int], how: dict[str, bool]
) -> None:
    plan = planned(retyped(move, dtypes))
    programs = compile_programs(plan, staging_bytes).values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "DIRECT_BYTES", cuts[0])
        patch.setattr(pieces, "MESSAGE_BYTES", cuts[1])
        over_memory([Device.of(plan, program, staging_bytes, style_of(shift)) for program in programs], **how)


def two_devices(prev: Sequence[Sequence[Shard]], curr: Sequence[Sequence[Shard]], staging_bytes: int) -> list[Device]:
    """Two ranks on two devices, where the pairing moves the least; tensors held plainly."""
    before = Layout((tuple(prev[0]), tuple(prev[1])), (0, 1))
    after = Layout((tuple(curr[0]), tuple(curr[1])), (0, 1))
    plan = make_plan(PlacedLayout(before, (0, 1)), after, devices=(0, 1), placement=(0, 1))
    programs = compile_programs(plan, staging_bytes).values()
    return [Device.of(plan, program, staging_bytes, style_of(0)) for program in programs]


def rows(tensor: Tensor, start: int, stop: int) -> Shard:
    return Shard(tensor, Region((start, 0), (stop - start, tensor.shape[1])))


def columns(tensor: Tensor, start: int, stop: int) -> Shard:
    return Shard(tensor, Region((0, start), (tensor.shape[0], stop - start)))


WEIGHT = Tensor(Kind.PARAM, "weight", (8, 6), "float32", 4)
OTHER = Tensor(Kind.EXP_AVG, "weight", (8, 6), "bfloat16", 2)


@pytest.mark.parametrize(("direct_bytes", "message_bytes"), [(1, 8), (24, 20), (24, 1 << 20), (DIRECT_BYTES, 30)])
@pytest.mark.parametrize("staging_bytes", [8, 24, 100, 1 << 20])
def test_the_result_does_not_depend_on_how_pieces_are_cut_or_packed(
    direct_bytes: int, message_bytes: int, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr(pieces, "MESSAGE_BYTES", message_bytes)
    over_memory(
        two_devices(
            [[rows(WEIGHT, 0, 5), columns(OTHER, 0, 2)], [rows(WEIGHT, 5, 8), columns(OTHER, 2, 6)]],
            [[columns(WEIGHT, 2, 6), rows(OTHER, 4, 8)], [columns(WEIGHT, 0, 2), rows(OTHER, 0, 4)]],
            staging_bytes,
        )
    )


def test_two_devices_that_swap_their_shards_do_not_wait_for_each_other() -> None:
    first, second = rows(WEIGHT, 0, 4), rows(WEIGHT, 4, 8)
    devices = two_devices([[first], [second]], [[second], [first]], 1 << 20)
    assert all(device.program.rounds[0].sends and device.program.rounds[0].recvs for device in devices)
    over_memory(devices)


def test_pieces_of_a_rank_to_itself_are_local_copies() -> None:
    whole = Shard(WEIGHT, Region.whole(WEIGHT.shape))
    devices = two_devices([[whole], [whole]], [[rows(WEIGHT, 0, 4)], [rows(WEIGHT, 4, 8)]], 1 << 20)
    assert all(device.program.rounds[0].copies for device in devices)
    for device in devices:
        device.run(Unreachable())


def test_referred_shards_keep_their_memory_and_targets_share_none() -> None:
    scalar = Shard(Tensor(Kind.BUFFER, "steps", (), "int64", 8), Region((), ()))
    keeps = rows(OTHER, 0, 4)
    devices = two_devices(
        [[rows(WEIGHT, 0, 4), keeps, scalar], [rows(WEIGHT, 4, 8), rows(OTHER, 4, 8), scalar]],
        [[columns(WEIGHT, 0, 3), keeps, scalar], [columns(WEIGHT, 3, 6), rows(OTHER, 4, 8), scalar]],
        1 << 20,
    )
    address = devices[0].sources[keeps].data_ptr()
    over_memory(devices)  # asserts the identity of referred tensors
    assert devices[0].sources[keeps].data_ptr() == address
    storages = [t.untyped_storage().data_ptr() for d in devices for t in (*d.sources.values(), *d.targets.values())]
    assert len(set(storages)) == len(storages)


def test_empty_shards_and_a_device_without_work_take_part() -> None:
    short = Tensor(Kind.PARAM, "bias", (1, 6), "float32", 4)
    devices = two_devices(
        [[rows(short, 0, 1), rows(WEIGHT, 0, 8)], [rows(short, 1, 1)]],
        [[rows(short, 0, 0)], [rows(short, 0, 1), rows(WEIGHT, 0, 8)]],
        64,
    )
    over_memory(devices)


@pytest.mark.parametrize("views", [False, True])
def test_a_lazily_conjugated_or_negated_source_is_sent_as_what_it_stands_for(views: bool) -> None:
    signal = Tensor(Kind.BUFFER, "signal", (4, 2), "complex64", 8)
    shard = rows(signal, 0, 4)
    devices = two_devices([[shard], []], [[], [shard]], 1 << 20)
    value = torch.complex(torch.arange(8.0).reshape(4, 2), torch.ones(4, 2))
    devices[0].sources[shard] = value.conj()
    hub = MemoryHub(2, views=views)
    results: list[dict[Shard, torch.Tensor]] = []

    def body(device: Device) -> None:
        results.append(device.moved(hub.transport(device.program.device), verify=True))

    in_threads([lambda d=device: body(d) for device in devices])  # type: ignore[misc]
    assert next(torch.equal(result[shard], value.conj()) for result in results if result)


@pytest.mark.parametrize("views", [False, True])
def test_a_lazily_conjugated_target_stands_for_what_arrives(views: bool) -> None:
    signal, other = Tensor(Kind.BUFFER, "signal", (4, 2), "complex64", 8), Tensor(Kind.BUFFER, "b", (4, 2), "int8", 1)
    shards = [rows(signal, 0, 4), rows(other, 0, 4)]
    devices = two_devices([shards, []], [[], shards], 1 << 20)
    devices[1].targets[shards[0]] = torch.zeros(4, 2, dtype=torch.complex64).conj()
    hub = MemoryHub(2, views=views)
    in_threads([lambda d=d: d.moved(hub.transport(d.program.device)) and None for d in devices])  # type: ignore[misc]
    assert same_bytes(devices[1].targets[shards[0]].resolve_conj(), whole_value(signal))


def test_parameters_that_require_gradients_are_moved_without_a_graph() -> None:
    devices = two_devices([[rows(WEIGHT, 0, 8)], []], [[], [rows(WEIGHT, 0, 8)]], 64)
    for device in devices:
        for shards in (device.sources, device.targets):
            for shard in shards:
                shards[shard] = torch.nn.Parameter(shards[shard])
    hub = MemoryHub(2)

    def body(device: Device) -> None:
        found = device.moved(hub.transport(device.program.device))
        assert all(tensor.grad_fn is None and same_bytes(tensor.data, whole_value(WEIGHT)) for tensor in found.values())

    in_threads([lambda d=device: body(d) for device in devices])  # type: ignore[misc]


def test_events_tell_of_every_round_and_every_byte() -> None:
    devices = two_devices(
        [[rows(WEIGHT, 0, 4)], [rows(WEIGHT, 4, 8)]], [[columns(WEIGHT, 0, 3)], [columns(WEIGHT, 3, 6)]], 24
    )
    hub, events = MemoryHub(2), [list[Event](), list[Event]()]
    in_threads(
        [lambda d=d: d.run(hub.transport(d.program.device), events[d.program.device].append) for d in devices]  # type: ignore[misc]
    )
    for device, told in zip(devices, events, strict=True):
        rounds = [event for event in told if isinstance(event, RoundEnded)]
        fences = [event for event in told if isinstance(event, FencePassed)]
        assert [event.index for event in rounds] == list(range(len(device.program.rounds)))
        assert all(event.rounds == len(rounds) and event.ended_s >= event.began_s for event in rounds)
        assert sum(event.sent_bytes for event in rounds) == sum(event.received_bytes for event in rounds) == 4 * 3 * 4
        assert {link.peer for event in rounds for link in event.links} == {1 - device.program.device}
        assert sum(event.copied_bytes for event in rounds) == 4 * 3 * 4
        assert max(event.sent_bytes + event.received_bytes for event in rounds) <= 12
        assert [(event.epoch, event.epochs, event.released_bytes) for event in fences] == [(0, 1, 0)]
        assert told[-1] == fences[0]


class Unreachable:
    """A transport over which nothing can be sent."""

    device = 0

    def takes_views(self, peer: int) -> bool:
        return False

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if sends or recvs:
            raise AssertionError("something was posted")
        return self

    def wait(self, timeout_s: float) -> None:
        pass

    def complete(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (torch.zeros(4, 5), r"shape \(4, 5\) and dtype float32"),
        (torch.zeros(4, 6, dtype=torch.float64), "dtype float64"),
        (torch.zeros(24), r"shape \(24,\)"),
    ],
)
@pytest.mark.parametrize("side", ["sources", "targets"])
def test_a_tensor_that_is_not_what_its_shard_says_is_refused_before_anything_is_posted(
    wrong: torch.Tensor, what: str, side: str
) -> None:
    first, second = rows(WEIGHT, 0, 4), rows(WEIGHT, 4, 8)
    device = two_devices([[first], [second]], [[second], [first]], 1 << 20)[0]
    if side == "sources":
        shard, tensors = first, device.sources
    else:
        shard, tensors = second, device.targets
    tensors[shard] = wrong
    with pytest.raises(Mismatch, match=what) as caught:
        device.moved(Unreachable())
    assert "param:weight" in str(caught.value)


def test_a_referred_shard_is_checked_like_any_other() -> None:
    keeps = rows(WEIGHT, 0, 4)
    device = two_devices([[keeps], [rows(WEIGHT, 4, 8)]], [[keeps], [rows(WEIGHT, 4, 8)]], 64)[0]
    with pytest.raises(Mismatch, match="no tensor was given"):
        Device(device.program, 64).moved(Unreachable())


def test_while_one_round_is_on_the_wire_the_next_is_posted_and_no_third() -> None:
    """The receiver's first message is held on its way: the sender gets two rounds ahead of nobody."""
    shard = rows(WEIGHT, 0, 8)
    devices = two_devices([[shard], []], [[], [shard]], 96)
    assert [len(device.program.rounds) for device in devices] == [8, 8]
    for device in devices:
        for held in (device.sources, device.targets):
            for one, live in held.items():
                held[one] = live.t().contiguous().t()  # so that it has to be staged
    hub = MemoryHub(2, deferred=True)
    hub.hold(0, 1)
    posts: list[tuple[int, int]] = []

    class Counted:
        def __init__(self, device: int) -> None:
            self._own, self.device = hub.transport(device), device

        def takes_views(self, peer: int) -> bool:
            return False

        def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
            pending = self._own.post(sends, recvs)
            posts.append((self.device, len(sends) + len(recvs)))
            if sorted(posts) == [(0, 1), (0, 1), (1, 1), (1, 1)]:
                two_each.set()
            return pending

        def close(self) -> None:
            self._own.close()

    two_each = threading.Event()

    def let_go() -> None:
        assert two_each.wait(TIMEOUT_S)
        assert len(posts) == 4
        hub.release(0, 1)

    in_threads([let_go, *(lambda d=d: d.run(Counted(d.program.device)) for d in devices)])
    assert len(posts) == 16


def test_rounds_that_stage_nothing_are_all_posted_while_the_first_is_on_the_wire() -> None:
    shard = rows(WEIGHT, 0, 8)
    sender, receiver = two_devices([[shard], []], [[], [shard]], 96)
    hub, posted, all_posted = MemoryHub(2, deferred=True), list[int](), threading.Event()
    hub.hold(0, 1)

    class Counted:
        device = sender.program.device

        def __init__(self) -> None:
            self._own = hub.transport(self.device)

        def takes_views(self, peer: int) -> bool:
            return False

        def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
            posted.append(len(sends))
            if len(posted) == len(sender.program.rounds) == 8:
                all_posted.set()
            return self._own.post(sends, recvs)

        def close(self) -> None:
            self._own.close()

    def let_go() -> None:
        assert all_posted.wait(TIMEOUT_S)
        hub.release(0, 1)

    in_threads([let_go, lambda: sender.run(Counted()), lambda: receiver.run(hub.transport(receiver.program.device))])
    assert posted == [1] * 8


def test_a_move_is_prepared_without_a_word_to_anybody_and_only_once() -> None:
    devices = two_devices(
        [[rows(WEIGHT, 0, 4)], [rows(WEIGHT, 4, 8)]], [[columns(WEIGHT, 0, 3)], [columns(WEIGHT, 3, 6)]], 24
    )
    hub, given = MemoryHub(2), list[Shard]()

    def body(device: Device) -> None:
        def allocate(shard: Shard) -> torch.Tensor:
            given.append(shard)
            return device.targets[shard]

        transport = Late()
        journal = Journal(device.program, device.sources)
        move = LiveMove(journal, transport, staging_bytes=24, allocate=allocate, timeout_s=TIMEOUT_S)
        move.prepare()
        move.prepare()
        transport.own = hub.transport(device.program.device)
        found = move.run()
        device.check(found, {shard: tensor.stride() for shard, tensor in device.targets.items()})

    class Late:
        """Is connected later."""

        own: Transport = Unreachable()
        device = 0

        def takes_views(self, peer: int) -> bool:
            return False

        def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
            return self.own.post(sends, recvs)

        def close(self) -> None:
            pass

    in_threads([lambda d=device: body(d) for device in devices])  # type: ignore[misc]
    assert sorted(given) == sorted(shard for device in devices for shard in device.targets)


def test_what_is_wrong_with_a_tensor_is_said_when_the_move_is_prepared() -> None:
    device = two_devices(
        [[rows(WEIGHT, 0, 4)], [rows(WEIGHT, 4, 8)]], [[rows(WEIGHT, 4, 8)], [rows(WEIGHT, 0, 4)]], 64
    )[0]
    device.sources[rows(WEIGHT, 0, 4)] = torch.zeros(4, 5)
    journal = Journal(device.program, device.sources)
    move = LiveMove(journal, Unreachable(), staging_bytes=64, allocate=device.targets.__getitem__, timeout_s=TIMEOUT_S)
    with pytest.raises(Mismatch, match=r"shape \(4, 5\)"):
        move.prepare()


def test_rounds_that_were_compiled_for_more_staging_are_refused_and_nothing_is_sent() -> None:
    device = two_devices([[rows(WEIGHT, 0, 8)], []], [[], [rows(WEIGHT, 0, 8)]], 1 << 20)[0]
    device.sources = {shard: tensor.clone() for shard, tensor in device.sources.items()}
    device.staging_bytes = 100
    device.sources[rows(WEIGHT, 0, 8)] = device.sources[rows(WEIGHT, 0, 8)].t().contiguous().t()
    with pytest.raises(Mismatch, match=r"stages 192 bytes, half of the staging is 50"):
        device.moved(Unreachable())


def test_a_peer_that_dies_midway_leaves_every_source_as_it_was() -> None:
    devices = two_devices(
        [[rows(WEIGHT, 0, 5), columns(OTHER, 0, 2)], [rows(WEIGHT, 5, 8), columns(OTHER, 2, 6)]],
        [[columns(WEIGHT, 2, 6), rows(OTHER, 4, 8)], [columns(WEIGHT, 0, 2), rows(OTHER, 0, 4)]],
        16,
    )
    assert len(devices[1].program.rounds) > 4
    hub, raised = MemoryHub(2), threading.Event()

    def die(event: Event) -> None:
        if isinstance(event, RoundEnded) and event.index == event.rounds // 2:
            hub.cut(1)
            raise InterruptedError

    def survive() -> None:
        with pytest.raises(TransportError, match="device 1 is gone"):
            devices[0].run(hub.transport(0))
        raised.set()

    def fall() -> None:
        with pytest.raises(InterruptedError):
            devices[1].run(hub.transport(1), die)

    in_threads([survive, fall])
    assert raised.is_set()
    for device in devices:
        device.check_sources()


def test_the_free_memory_is_what_the_machine_says() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50


def move_over_gloo(send: Any, plans: list[tuple[Plan, int]], devices: int) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    store = dist.PrefixStore("move", member.store)
    transport = ProcessGroupTransport.gloo(store, member.device, devices, TIMEOUT_S)
    for number, (plan, staging_bytes) in enumerate(plans):
        pieces.DIRECT_BYTES = (1, 64, 1 << 20)[number % 3]  # type: ignore[attr-defined]  # all ranks alike
        pieces.MESSAGE_BYTES = (24, 40, 2 << 20)[number % 3] if staging_bytes < 100 else 1 << 16  # type: ignore[misc]
        if member.device in plan.devices:
            program = compile_programs(plan, staging_bytes)[member.device]
            Device.of(plan, program, staging_bytes, style_of(number)).run(transport, verify=number % 2 == 0)
    # A transport that closes would end a peer's last round.
    Control(member.store, member.device, TIMEOUT_S).gather("done", range(devices), b"", "test")
    transport.close()
    send(len(plans))


@pytest.fixture(scope="module")
def random_moves() -> list[Move]:
    """Moves of up to four ranks on up to four devices."""
    found: list[Move] = []

    @settings(max_examples=24, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(moves(most_ranks=4), growths(most_ranks=4)), st.lists(st.sampled_from(DTYPES), min_size=3, max_size=8)
    )
    def collect(move: Move, dtypes: list[str]) -> None:
        if max(*move.prev.devices, *move.devices) < 4:
            found.append(retyped(move, dtypes))

    collect()
    return found


def test_every_element_arrives_over_processes_too(random_moves: list[Move]) -> None:
    assert len(random_moves) >= 5
    big = Tensor(Kind.PARAM, "big", (3, 1 << 20), "float32", 4)
    halves = Layout(((columns(big, 0, 1 << 19),), (columns(big, 1 << 19, 1 << 20),)), (0, 1))
    thirds = Layout(tuple((rows(big, i, i + 1),) for i in range(3)), (0, 1, 2))
    large = Move(PlacedLayout(halves, (2, 0)), thirds, (0, 1, 2, 3))
    plans = [(planned(move), (16, 64, 1 << 20)[number % 3]) for number, move in enumerate(random_moves)]
    plans += [(planned(large), 4 << 20), (planned(large), 1 << 20)]
    whole = (rows(big, 0, 3),)
    chain = planned(Move(PlacedLayout(Layout((whole,), (0,)), (2,)), Layout((whole,), (0,) * 4), (0, 1, 2, 3)))
    assert chain.moves.hop.max() == 3
    plans += [(chain, 4 << 20), (chain, 500_000)]
    with LocalJob(4, move_over_gloo, (plans, 4), timeout_s=TIMEOUT_S, preload=["shardshift.elastic.opening"]) as job:
        assert [done for _, done in job.messages()] == [len(plans)] * 4
