"""Wherever a move breaks: the survivors know whom they lost, and the state is whole, or all that they had is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.strategies import equal_layers, even_grid
from tests.unit.together import Values, coded, holds, state_on, together

from shardshift.engine import Event, Interrupted, Mover, Resumed, line
from shardshift.engine.events import FencePassed, PhaseBegan, RoundEnded
from shardshift.transport import MemoryHub, MemoryTransport, Transport
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    PeerLost,
    PlacedLayout,
    Region,
    Shard,
    StateLost,
    Tensor,
)

MODEL = equal_layers(12, width=12)
STAGING_BYTES = 24
TIMEOUT_S = 10.0


def placed(text: str) -> PlacedLayout:
    layout = even_grid(MODEL, text)
    return PlacedLayout(layout, tuple(range(layout.world_size)))


PIPES, SLICES = placed("pp2dp2"), placed("tp2dp2")
VALUES = coded(PIPES)


@pytest.fixture(autouse=True)
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink cannot break a move. Here it shall, since what it is told of are the places where a move may break."""
    monkeypatch.setattr(line, "guarded", lambda sink: sink)


class Gone(Exception):
    """Of one device; no other raises it."""


class Socket(MemoryTransport):
    """An end of the wires that breaks them when it is closed, as the sockets of processes do."""

    def __init__(self, hub: MemoryHub, device: int) -> None:
        super().__init__(hub, device)
        self._of = hub

    def close(self) -> None:
        self._of.cut(self.device)
        super().close()


class Wires:
    """In-memory wires, one hub for each set of members, and devices that go when an event comes the n-th time.

    Args:
        strikes: per device the event, and the number of its coming (from 0), at which it raises.
        error: what it raises.
    """

    def __init__(
        self, strikes: dict[int, tuple[Callable[[Event], bool], int]] | None = None, error: type[Exception] = Gone
    ) -> None:
        self.hubs: dict[tuple[int, ...], MemoryHub] = {}
        self._strikes, self._error, self._seen = strikes or {}, error, Counter[int]()

    def __call__(self, store: dist.Store, device: int, members: Sequence[int]) -> Transport:
        return Socket(self.hub(members), device)

    def hub(self, members: Collection[int]) -> MemoryHub:
        return self.hubs.setdefault(tuple(sorted(members)), MemoryHub(tuple(sorted(members))))

    def sink(self, event: Event) -> None:
        match, number = self._strikes.get(event.device, (lambda event: False, 0))
        if match(event):
            self._seen[event.device] += 1
            if self._seen[event.device] == number + 1:
                for members, hub in list(self.hubs.items()):
                    if event.device in members:
                        hub.cut(event.device)  # as its sockets close when a process ends
                raise self._error("it came to this")


def round_ends(event: Event) -> bool:
    return isinstance(event, RoundEnded)


def fence_passes(event: Event) -> bool:
    return isinstance(event, FencePassed)


def fence_begins(event: Event) -> bool:
    return isinstance(event, PhaseBegan) and event.phase in ("fence", "commit")


def run(wires: Wires, work: Callable[[Mover], Any], devices: Sequence[int] = range(4)) -> dict[int, Any]:
    options = {"transport": wires, "sink": wires.sink, "staging_bytes": STAGING_BYTES, "timeout_s": TIMEOUT_S}
    return together(devices, work, **options)


def check(found: dict[int, Any], victims: Collection[int]) -> list[Any]:
    """What the survivors found; each victim has raised its own error, and nobody else has raised any."""
    assert {device for device, one in found.items() if isinstance(one, Gone)} == {*victims}
    survivors = [one for device, one in found.items() if device not in victims]
    for one in survivors:
        if isinstance(one, Exception):
            raise one
    return survivors


def whole(layout: PlacedLayout) -> bool:
    return {shard.tensor for device in layout.devices for shard in layout.shards_on(device)} == {*VALUES}


def resumed(mover: Mover, victims: list[int], values: Values = VALUES, prev: PlacedLayout = PIPES) -> str:
    """Move, lose one, go on without it; as often as there are victims. Which way it went at last."""
    journal: object = None

    def begin() -> Resumed:
        state = state_on(mover.device, prev, values)
        return Resumed("whole", SLICES_OF[prev], mover.move(prev, SLICES_OF[prev], state, policy="release"))

    for victim in victims:
        with pytest.raises(PeerLost) as caught:
            _ = begin() if journal is None else mover.resume(journal)
        assert caught.value.ranks == (victim,)
        assert "Gone: it came to this" in caught.value.reason
        journal = caught.value.journal
        mover.exclude([victim])
        assert victim not in mover.devices
    found = mover.resume(journal)
    assert holds(mover.device, found.layout, values, found.state)
    assert whole(found.layout)
    assert mover.generation == 1
    return found.direction


SLICES_OF = {PIPES: SLICES, placed("pp2dp3"): placed("tp2dp3")}


def test_there_are_several_epochs_and_rounds() -> None:
    seen: list[Event] = []

    def sink(event: Event) -> None:
        seen.append(event)

    together(
        range(4),
        lambda mover: mover.move(PIPES, SLICES, state_on(mover.device, PIPES, VALUES), policy="release"),
        staging_bytes=STAGING_BYTES,
        sink=sink,
    )
    assert sum(isinstance(event, FencePassed) for event in seen) >= 4 * 3
    assert sum(isinstance(event, RoundEnded) for event in seen) >= 4 * 3


@pytest.mark.parametrize("event", [round_ends, fence_begins, fence_passes])
@pytest.mark.parametrize(("victim", "number"), [(0, 0), (1, 1), (2, 2), (3, 0)])
def test_a_device_may_go_at_any_round_and_fence_and_nothing_is_lost(
    victim: int, number: int, event: Callable[[Event], bool]
) -> None:
    wires = Wires({victim: (event, number)})
    directions = check(run(wires, lambda mover: resumed(mover, [victim])), [victim])
    assert len({*directions}) == 1


def test_the_way_is_back_at_the_first_fence_and_forward_near_the_last() -> None:
    ways = [
        check(run(Wires({3: (fence_passes, number)}), lambda mover: resumed(mover, [3])), [3])[0] for number in range(5)
    ]
    assert ways[0] == "back"
    assert ways[-1] == "forward"
    assert ways == sorted(ways)


def second_commit() -> Callable[[Event], bool]:
    """Whether an event is the commit of the second move that its device carries out."""
    moves = 0

    def match(event: Event) -> bool:
        nonlocal moves
        moves += isinstance(event, PhaseBegan) and event.phase == "move"
        return moves == 2 and isinstance(event, PhaseBegan) and event.phase == "commit"

    return match


@pytest.mark.parametrize("second", [0, 4])
def test_a_second_one_may_go_while_the_first_loss_is_mended(second: int) -> None:
    wires = Wires({5: (fence_passes, 1), second: (second_commit(), 0)})
    prev = placed("pp2dp3")

    def work(mover: Mover) -> str:
        return resumed(mover, [5, second] if mover.device != second else [5], coded(prev), prev)

    values = check(run(wires, work, range(6)), [5, second])
    assert len({*values}) == 1


def test_a_loss_before_all_agree_to_resume_leaves_the_journal_as_it_was() -> None:
    prev = placed("pp2dp3")
    # Everything that is agreed on has this phase: the move first, then the survivors' plan.
    agreeing = lambda event: isinstance(event, PhaseBegan) and event.phase == "agree"  # noqa: E731
    wires = Wires({5: (fence_passes, 1), 1: (agreeing, 1)})
    journals: dict[int, list[object]] = {}

    def work(mover: Mover) -> str:
        with pytest.raises(PeerLost) as caught:
            mover.move(prev, SLICES_OF[prev], state_on(mover.device, prev, coded(prev)), policy="release")
        first = caught.value.journal
        mover.exclude([5])
        if mover.device == 1:
            mover.resume(first)
        with pytest.raises(PeerLost) as caught:
            mover.resume(first)
        assert caught.value.ranks == (1,)
        assert caught.value.journal is first
        mover.exclude([1])
        found = mover.resume(first)
        assert holds(mover.device, found.layout, coded(prev), found.state)
        return found.direction

    # Outside a move nobody tells for the device that goes: the beats do, which takes the timeout.
    options = {"transport": wires, "sink": wires.sink, "staging_bytes": STAGING_BYTES, "timeout_s": 3.0}
    found = together(range(6), work, **options)
    assert len({*check(found, [5, 1])}) == 1
    assert journals == {}


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, MemoryError])
@pytest.mark.parametrize("event", [round_ends, fence_begins])
def test_what_one_device_raises_the_others_hear_of_with_its_reason_and_the_old_state_is_whole(
    kind: type[Exception], event: Callable[[Event], bool]
) -> None:
    """Case 64: half way, one raises; every other keeps its old state, and the generation does not change."""

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, PIPES, VALUES)
        tensors = dict(state)
        error: Any = None
        try:
            mover.move(PIPES, SLICES, state, policy="keep")
        except (PeerLost, kind) as caught:
            error = caught
        assert all(state[name] is tensor for name, tensor in tensors.items())
        assert holds(mover.device, PIPES, VALUES, state)
        assert mover.generation == 0
        return error

    found = run(Wires({2: (event, 0)}, kind), work)
    assert type(found[2]) is kind
    others = [found[device] for device in (0, 1, 3)]
    assert all(isinstance(error, PeerLost) and error.ranks == (2,) for error in others), others
    assert {error.reason for error in others} == {f"{kind.__name__}: it came to this"}
    assert all(error.journal is None for error in others)


def test_after_a_crash_the_next_move_is_not_disturbed_by_what_the_last_one_left() -> None:
    """Case 72: with the survivors of move n, and with a job that is started again on the same store."""

    def survivor(mover: Mover) -> bool:
        state = state_on(mover.device, PIPES, VALUES)
        with pytest.raises(PeerLost):
            mover.move(PIPES, SLICES, state, policy="keep")
        mover.exclude([1])
        devices = tuple(device for device in range(4) if device != 1)
        three = PlacedLayout(even_grid(MODEL, "pp3"), devices)
        found = mover.move(PIPES, three, state, lost=[1])
        again = mover.move(three, PlacedLayout(even_grid(MODEL, "tp3"), devices), found)
        assert mover.generation == 2
        return holds(mover.device, PlacedLayout(even_grid(MODEL, "tp3"), devices), VALUES, again)

    assert check(run(Wires({1: (round_ends, 0)}), survivor), [1]) == [True] * 3

    store, wires = dist.HashStore(), Wires({1: (round_ends, 0)})

    def started(mover: Mover) -> Any:
        return mover.move(PIPES, SLICES, state_on(mover.device, PIPES, VALUES), policy="release")

    def life(number: int, hubs: Wires) -> list[Any]:
        mine = dist.PrefixStore(f"life/{number}", store)

        def one(device: int) -> Any:
            try:
                with Mover(
                    mine, device, range(4), transport=hubs, sink=hubs.sink, staging_bytes=STAGING_BYTES
                ) as mover:
                    return started(mover)
            except (PeerLost, Gone) as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, range(4)))

    assert [type(one) for one in life(0, wires)] == [PeerLost, Gone, PeerLost, PeerLost]
    for device, state in enumerate(life(1, Wires())):
        assert holds(device, SLICES, VALUES, state)


@pytest.mark.parametrize("policy", ["keep", "release"])
def test_a_flipped_bit_is_named_not_committed_and_all_go_on_together(policy: Any) -> None:
    wires = Wires()
    wires.hub(range(4)).flip(0, 2, 1)

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, PIPES, VALUES)
        with pytest.raises(
            Mismatch, match=r"param:layers\.\d.* damaged on its way from device 0 to device 2"
        ) as caught:
            mover.move(PIPES, SLICES, state, policy=policy, verify=True)
        assert "[" in str(caught.value)  # the region
        assert mover.generation == 0
        if policy == "keep":
            assert caught.value.journal is None
            assert holds(mover.device, PIPES, VALUES, state)
            found = mover.move(PIPES, SLICES, state, policy=policy, verify=True)
            assert holds(mover.device, SLICES, VALUES, found)
        else:
            after = mover.resume(caught.value.journal, to=SLICES, verify=True)
            assert holds(mover.device, SLICES, VALUES, after.state)
        assert mover.generation == 1
        return str(caught.value)

    texts = run(wires, work)
    assert len({*texts.values()}) == 1, texts


def interrupted(mover: Mover) -> Interrupted:
    with pytest.raises(PeerLost) as caught:
        mover.move(PIPES, SLICES, state_on(mover.device, PIPES, VALUES), policy="release")
    mover.exclude(caught.value.ranks)
    journal = caught.value.journal
    assert isinstance(journal, Interrupted)
    return journal


def test_what_is_no_journal_or_a_used_one_or_another_moves_is_refused_on_all_and_nothing_is_lost_by_it() -> None:
    def work(mover: Mover) -> Any:
        journal = interrupted(mover)
        for wrong, text in ((None, "gives a NoneType, which is no journal"), ("gone", "gives a str")):
            with pytest.raises(Mismatch, match=f"device 2 {text}") as caught:
                mover.resume(wrong if mover.device == 2 else journal)
            assert caught.value.journal is (None if mover.device == 2 else journal)
        found = mover.resume(journal)
        assert holds(mover.device, found.layout, VALUES, found.state)
        with pytest.raises(Mismatch, match="give the journal of the last error"):
            mover.resume(journal)
        return True

    assert check(run(Wires({0: (fence_passes, 1)}), work), [0]) == [True] * 3


def test_one_cannot_go_on_without_oneself_or_without_nobody() -> None:
    def work(mover: Mover) -> Any:
        for lost in ([mover.device], [9], []):
            with pytest.raises(Infeasible, match="cannot go on without"):
                mover.exclude(lost)
        return len(mover.move(PIPES, SLICES, state_on(mover.device, PIPES, VALUES)))

    assert [*run(Wires(), work).values()] == [12] * 4


def test_what_only_the_lost_one_had_is_named_on_all_and_what_has_arrived_is_not_lost() -> None:
    pipes, slices = placed("pp4"), placed("tp4")

    def work(mover: Mover) -> Any:
        with pytest.raises(PeerLost) as caught:
            mover.move(pipes, slices, state_on(mover.device, pipes, coded(pipes)), policy="release")
        journal = caught.value.journal
        assert isinstance(journal, Interrupted)
        mover.exclude([1])
        with pytest.raises(StateLost) as lost:
            mover.resume(journal)
        assert lost.value.journal is journal
        return lost.value.names, [(str(shard.tensor), shard.region) for shard in journal.journal.held()]

    found = check(run(Wires({1: (fence_begins, 1)}), work), [1])
    (names,) = {names for names, _ in found}
    masks = {str(tensor): torch.zeros(tensor.shape, dtype=torch.bool) for tensor in VALUES}
    for _, held in found:
        for name, region in held:
            masks[name][tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))] = True
    assert sorted(names) == sorted(name for name, mask in masks.items() if not mask.all())
    assert names


def test_what_was_one_tensor_is_one_again_after_resume() -> None:
    def two(name: str) -> Shard:
        return Shard(Tensor(Kind.PARAM, name, (8, 2), "float32", 4), Region.whole((8, 2)))

    halves = ("emb", "head", "a", "b", "c", "d"), ("e", "f", "g", "h", "i", "j")
    one, other = (tuple(map(two, names)) for names in halves)
    before = PlacedLayout(Layout((one, other), (0, 0, 1, 1)), (0, 1, 2, 3))
    after = PlacedLayout(Layout((one, other), (1, 1, 0, 0)), (0, 1, 2, 3))
    left = PlacedLayout(Layout((one, other), (1, 1, 0)), (0, 1, 2))

    def work(mover: Mover) -> Any:
        emb = torch.arange(16.0).view(8, 2)
        state = {"emb": emb, "head": emb, **{name: emb + 1 for name in "abcd"}}
        if mover.device > 1:
            state = {name: emb + 1 for name in "efghij"}
        with pytest.raises(PeerLost) as caught:
            mover.move(before, after, state, policy="release")
        del emb, state
        mover.exclude([3])
        found = mover.resume(caught.value.journal, to=left).state
        assert holds(mover.device, left, values, found)
        pointers = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
        return len(pointers), found.get("emb") is found.get("head")

    emb = torch.arange(16.0).view(8, 2)
    of = {"emb": emb, "head": emb}
    values = {shard.tensor: of.get(shard.tensor.name, emb + 1) for shard in (*one, *other)}
    for number in range(3):
        assert check(run(Wires({3: (fence_begins, number)}), work), [3]) == [(6, True), (6, True), (5, True)]
