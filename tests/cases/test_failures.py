"""A device that dies or fails in the middle: all others raise in time, hold everything, and go on from there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases.movers import Send, bits, is_right, mover_in, process, told, wanted
from tests.cases.moves import Values, box, tensor
from tests.unit.together import together

from shardshift import reshard
from shardshift.engine import Mover, names_of
from shardshift.engine.events import Event, RoundEnded
from shardshift.transport import MemoryHub, Message, Pending, Transport, connect
from shardshift.values import Layout, PeerLost, PlacedLayout, Shard, StateLost

VICTIM = 2
SHORT_S, LONG_S = 4.0, 20.0
"""The short one is waited for: that is how long it takes to miss a process."""


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


def state() -> Values:
    values = tensor("norm", torch.arange(5.0))
    for n, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.uint8)):
        values |= tensor(f"w{n}", (torch.arange(96) * 7 + n).to(dtype).reshape(8, 12))
    return values


def cut(values: Values, ways: int, dim: int, copies: int = 1) -> Layout:
    """Each matrix in so many parts along a dim, vectors whole; all of it so many times."""
    roles = []
    for r in range(ways):
        role = []
        for of in values:
            size = of.shape[dim] if len(of.shape) > 1 else 0
            bounds = [(0, n) for n in of.shape]
            if size:
                bounds[dim] = (size * r // ways, size * (r + 1) // ways)
            role.append(box(of, *bounds))
        roles.append(tuple(role))
    return Layout(tuple(roles), tuple(range(ways)) * copies)


def placed(layout: Layout) -> PlacedLayout:
    return PlacedLayout(layout, tuple(range(layout.world_size)))


def strided(shard: Shard, values: Values) -> torch.Tensor:
    """The shard's part, held by columns."""
    value = wanted(shard, values)
    return value.t().clone().t() if value.dim() == 2 else value.clone()


def given_to(device: int, layout: PlacedLayout, values: Values) -> dict[str, torch.Tensor]:
    return {name: strided(shard, values) for name, shard in names_of(layout.shards_on(device)).items()}


ONCE = placed(cut(state(), 4, 0)), placed(cut(state(), 4, 1))
TWICE = placed(cut(state(), 2, 0, copies=2)), placed(cut(state(), 2, 1, copies=2))


def move_and_lose(mover: Mover, policy: Any, two_copies: bool, limit_s: float) -> list[Any]:
    """Lose the victim on the way; then go on without it, if its state has another copy. What was seen of it."""
    values, (prev, curr) = state(), TWICE if two_copies else ONCE
    given = given_to(mover.device, prev, values)
    held = {name: (one, one.data_ptr(), one.stride(), bits(one)) for name, one in given.items()}
    began_s, generation = time.monotonic(), mover.generation
    try:
        mover.move(prev, curr, given, policy=policy)
    except PeerLost as error:
        lost = error
    except Unpicklable:
        assert mover.device == VICTIM
        lost = PeerLost([VICTIM], "", "itself")
    else:
        return ["no error"]
    seen: list[Any] = []
    if lost.ranks != (VICTIM,) or time.monotonic() - began_s > limit_s + 5.0:
        seen.append((str(lost), time.monotonic() - began_s))
    if mover.generation != generation:
        seen.append("generation")
    if policy == "keep":
        same = given.keys() == held.keys() and all(
            given[name] is one and (one.data_ptr(), one.stride(), bits(one)) == (at, stride, content)
            for name, (one, at, stride, content) in held.items()
        )
        seen += [] if same and lost.journal is None else ["the old state"]
    if mover.device == VICTIM:
        return seen
    mover.exclude([VICTIM])
    target = PlacedLayout(cut(values, 3, 1), tuple(device for device in prev.devices if device != VICTIM))
    if not two_copies:
        try:
            if policy == "keep":
                mover.move(prev, target, given, lost=[VICTIM])
            else:
                mover.resume(lost.journal)
        except StateLost as gone:
            return seen + ([] if gone.names else ["no names"])
        except PeerLost as again:
            return [*seen, str(again)]
        return seen if policy == "release" else [*seen, "nothing was lost"]
    if policy == "keep":
        found = mover.move(prev, target, given, policy=policy, lost=[VICTIM])
    else:
        resumed = mover.resume(lost.journal)
        target, found = resumed.layout, resumed.state
        if len(target.devices) != 3:
            seen.append(("devices", target.devices))
    if not is_right(mover.device, target, values, found):
        seen.append("the state after it")
    return seen


def survivors(found: dict[int, Any]) -> dict[int, Any]:
    return {device: seen for device, seen in found.items() if device != VICTIM}


class Failing:
    """A transport that raises at its post of that number (from 0), and at all later ones."""

    def __init__(self, inner: Transport, number: int = -1, at_close: Callable[[], None] = lambda: None) -> None:
        self._inner, self._left, self._at_close = inner, number, at_close
        self.device = inner.device
        self.takes_views = inner.takes_views

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._left == 0:
            raise Unpicklable("half way")
        self._left -= 1
        return self._inner.post(sends, recvs)

    def close(self) -> None:
        self._inner.close()
        self._at_close()


def failing_at(post: int) -> Callable[[dist.Store, int, Sequence[int]], Transport]:
    """In-memory transports, of which the victim's raises at a post. Who closes one is gone, as with a socket."""
    lock = threading.Lock()
    hubs: dict[tuple[int, ...], MemoryHub] = {}

    def transport(_: dist.Store, device: int, devices: Sequence[int]) -> Transport:
        with lock:
            hub = hubs.setdefault(tuple(devices), MemoryHub(4))
        return Failing(hub.transport(device), post if device == VICTIM else -1, lambda: hub.cut(device))

    return transport


@pytest.mark.parametrize("policy", ["keep", "release"])
@pytest.mark.parametrize("two_copies", [True, False])
def test_whatever_message_one_fails_at_all_others_hold_everything_or_are_told_what_is_lost(
    policy: str, two_copies: bool
) -> None:
    for last in range(0, 60, 2):
        found = together(
            range(4),
            lambda mover: move_and_lose(mover, policy, two_copies, LONG_S),
            transport=failing_at(last),
            timeout_s=LONG_S,
            staging_bytes=320,
        )
        if found == {device: ["no error"] for device in range(4)}:
            assert last > 4
            return
        assert found == {device: [] for device in range(4)}, f"after {last} posts"
    raise AssertionError("the move has more posts than expected")


def lose_in_a_process(send: Send, kind: str, policy: Any, how: str, two_copies: bool) -> None:
    def transport(store: dist.Store, device: int, devices: Sequence[int]) -> Transport:
        inner = connect(store, device, devices, SHORT_S, kind=kind)
        return Failing(inner, 5) if how == "raise" and device == VICTIM else inner

    def sink(event: Event) -> None:
        half = isinstance(event, RoundEnded) and event.index == event.rounds // 2 - 1
        if member.device == VICTIM and half and how != "raise":
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    with (
        process() as (member, meet),
        mover_in(member, 4, transport, staging_bytes=64, timeout_s=SHORT_S, sink=sink) as mover,
    ):
        send(move_and_lose(mover, policy, two_copies, SHORT_S))
        if member.device != VICTIM:
            meet.gather("done", (0, 1, 3), b"", "test")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "policy", "how", "two_copies"),
    [
        ("gloo", "keep", "kill", False),
        ("same-host", "keep", "kill", True),
        ("gloo", "release", "kill", True),
        ("same-host", "release", "kill", True),
        ("gloo", "keep", "raise", True),
        ("same-host", "release", "raise", True),
        ("gloo", "release", "stop", True),
    ],
)
def test_the_end_of_one_of_four_half_way_leaves_the_others_with_everything(
    kind: str, policy: str, how: str, two_copies: bool
) -> None:
    found = told(4, lose_in_a_process, kind, policy, how, two_copies, gone=[VICTIM])
    assert survivors(found) == {device: [[]] for device in (0, 1, 3)}


def open_things() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def lose_the_only_peer(send: Send, kind: str, policy: Any) -> None:
    with process() as (member, meet):
        device = member.device
        dist.init_process_group("gloo", store=dist.PrefixStore("world", member.store), rank=device, world_size=3)
        child = dist.new_group([1, 2])
        if device == 0:  # has no part in the child group, and is told of no failure
            meet.gather("begin", range(3), b"", "test")
            send(["beside"])
            return
        values, (prev, curr) = state(), (placed(cut(state(), 2, dim)) for dim in (0, 1))

        def sink(event: Event) -> None:
            if device == 2 and isinstance(event, RoundEnded) and event.index == event.rounds // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        assert child is not None
        reshard(prev, curr, given_to(device - 1, prev, values), child, transport=kind)
        meet.gather("begin", range(3), b"", "test")
        before, began_s = open_things(), time.monotonic()
        given = given_to(device - 1, prev, values)
        try:
            how: Any = {"policy": policy, "transport": kind, "timeout_s": LONG_S, "sink": sink}
            reshard(prev, curr, given, child, staging_bytes=64, **how)
        except PeerLost as lost:
            in_time = time.monotonic() - began_s < LONG_S + 5.0
            whole = policy == "release" or is_right(0, prev, values, given)
            lost.journal = None
            time_s = time.monotonic()
            dist.destroy_process_group(child)
            dist.destroy_process_group()
            send([lost.ranks, in_time, whole, time.monotonic() - time_s < 5.0, before, open_things()])


@pytest.mark.parametrize(("kind", "policy"), [("gloo", "keep"), ("same-host", "release")])
def test_whoever_moves_in_a_child_group_leaves_it_in_time_and_closes_all_when_its_only_peer_dies(
    kind: str, policy: str
) -> None:
    found = told(3, lose_the_only_peer, kind, policy, gone=[2])
    assert found[0] == [["beside"]]
    ((ranks_lost, in_time, whole, ended, before, after),) = found[1]
    assert ranks_lost == (1,)  # the devices are the group's ranks
    assert in_time
    assert whole
    assert ended
    assert after[0] <= before[0]
    assert after[1] <= before[1]
