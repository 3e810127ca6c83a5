from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.transport.conformance import FLAT, IDS, LONG_S, SCENARIOS, End, pattern, play, room

from shardshift.transport import MemoryHub, MemoryTransport, Message, TransportError, byte_view
from shardshift.transport.memory import POISON

HUBS: dict[str, Callable[[], MemoryHub]] = {
    "flat": lambda: MemoryHub(IDS),
    "views": lambda: MemoryHub(IDS, views=True),
    "deferred": lambda: MemoryHub(IDS, deferred=True),
    "views and deferred": lambda: MemoryHub(IDS, views=True, deferred=True),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in HUBS for name in (SCENARIOS if "views" in kind else FLAT)]
)
def test_it_keeps_the_contract_that(kind: str, name: str) -> None:
    hub, lock = HUBS[kind](), threading.Lock()
    barriers: defaultdict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(len(IDS), timeout=LONG_S))

    def meet(word: str) -> None:
        with lock:
            barrier = barriers[word]
        barrier.wait()

    def run(device: int) -> str | None:
        return play(name, End(hub.transport(device), meet, lambda: hub.cut(device)))

    with ThreadPoolExecutor(len(IDS)) as pool:
        assert [fault for fault in pool.map(run, IDS) if fault] == []
    assert hub.violations == []


def ends(hub: MemoryHub) -> list[MemoryTransport]:
    return [hub.transport(device) for device in hub.devices]


def test_what_the_sender_writes_after_sending_does_not_show_at_the_receiver() -> None:
    one, two = ends(MemoryHub(2))
    payload, received = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    one.post([Message.flat(1, payload)], []).complete(0.0)
    payload.zero_()
    two.post([], [Message.flat(0, received)]).complete(1.0)
    assert received.tolist() == [1, 1, 1, 1]


def test_cutting_a_device_ends_the_wait_of_a_peer_that_waits_already() -> None:
    hub = MemoryHub(2)
    one, _ = ends(hub)
    pending = one.post([], [Message.flat(1, room(1))])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.complete, 60.0)
        hub.cut(1)
        with pytest.raises(TransportError, match="device 1 is gone"):
            waiting.result(timeout=30)
    with pytest.raises(TransportError, match="device 1 is gone"):
        one.post([Message.flat(1, room(1))], [])


@pytest.mark.parametrize("kind", HUBS)
def test_a_size_that_the_two_ends_do_not_agree_on_is_an_error(kind: str) -> None:
    hub = HUBS[kind]()
    hub.transport(0).post([Message.flat(1, room(4))], [])
    with pytest.raises(TransportError, match="expected 5 bytes from device 0, got 4"):
        hub.transport(1).post([], [Message.flat(0, room(5))]).complete(1.0)


def test_a_device_outside_the_hub_is_refused() -> None:
    with pytest.raises(ValueError, match="not among the 2"):
        MemoryHub(2).transport(2)


def test_a_message_that_is_not_flat_is_refused_where_there_are_no_views() -> None:
    one, _ = ends(MemoryHub(2))
    with pytest.raises(ValueError, match="not flat"):
        one.post([Message(1, (torch.zeros(2), torch.zeros(2)))], [])


def test_a_deferred_target_holds_poison_until_its_round_is_complete() -> None:
    one, two = ends(MemoryHub(2, views=True, deferred=True))
    target = torch.zeros(3, 2)
    pending = two.post([], [Message(0, (target[:, 1],))])
    one.post([Message(1, (torch.arange(3.0),))], [])
    pending.wait(0.0)
    assert byte_view(target[:, 1].contiguous()).tolist() == [POISON] * 12
    pending.complete(1.0)
    assert target.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]


def test_a_deferred_source_that_is_written_after_the_wait_sends_what_it_then_holds() -> None:
    hub = MemoryHub(2, deferred=True)
    one, two = ends(hub)
    source, target = pattern(1, 100), room(100)
    sent = one.post([Message.flat(1, source)], [])
    sent.wait(1.0)  # an engine that trusts this ...
    source.fill_(9)  # ... thinks that the buffer is free
    two.post([], [Message.flat(0, target)]).complete(1.0)
    assert target.tolist() == [9] * 100
    (violation,) = hub.violations
    assert (violation.source, violation.target, violation.message, violation.what) == (0, 1, 0, "written")


def test_a_deferred_source_whose_memory_was_given_back_sends_poison() -> None:
    hub = MemoryHub(2, deferred=True)
    one, two = ends(hub)
    source, target = torch.ones(100, dtype=torch.uint8), room(100)
    one.post([Message.flat(1, source)], []).wait(1.0)
    source.untyped_storage().resize_(0)
    two.post([], [Message.flat(0, target)]).complete(1.0)
    assert target.tolist() == [POISON] * 100
    assert [violation.what for violation in hub.violations] == ["released"]


def test_a_deferred_sender_waits_until_its_message_was_asked_for() -> None:
    one, two = ends(MemoryHub(2, deferred=True))
    sent = one.post([Message.flat(1, room(4))], [])
    with pytest.raises(TransportError, match=r"device 0 waited 0\.0 s for device 1"):
        sent.complete(0.0)
    target = torch.zeros(4, dtype=torch.uint8)
    asked = two.post([], [Message.flat(0, target)])
    sent.complete(1.0)  # both ends are there: either may copy
    assert target.tolist() == [255] * 4
    asked.complete(0.0)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_flipped_bit_is_in_that_message_only_and_not_at_the_sender(deferred: bool) -> None:
    hub = MemoryHub(2, deferred=deferred)
    hub.flip(0, 1, number=1, bit=19)
    one, two = ends(hub)
    source, targets = torch.zeros(4, dtype=torch.uint8), [room(4) for _ in range(3)]
    one.post([Message.flat(1, source) for _ in range(3)], [])
    two.post([], [Message.flat(0, target) for target in targets]).complete(1.0)
    assert [target.tolist() for target in targets] == [[0] * 4, [0, 0, 8, 0], [0] * 4]
    assert source.tolist() == [0] * 4


def test_held_messages_come_after_their_release_in_their_order() -> None:
    hub = MemoryHub(2)
    one, two = ends(hub)
    hub.hold(0, 1)
    one.post([Message.flat(1, pattern(seed, 8)) for seed in range(2)], []).complete(1.0)
    targets = [room(8), room(8)]
    pending = two.post([], [Message.flat(0, target) for target in targets])
    with pytest.raises(TransportError, match="waited"):
        pending.complete(0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.complete, LONG_S)
        hub.release(0, 1)
        waiting.result(timeout=30)
    assert all(torch.equal(target, pattern(seed, 8)) for seed, target in enumerate(targets))


def test_a_post_that_was_made_to_fail_posts_nothing_and_the_next_one_works() -> None:
    hub = MemoryHub(2)
    hub.fail_post(0, 1)
    one, two = ends(hub)
    one.post([], [])
    with pytest.raises(TransportError, match="device 0: its post 1 was made to fail"):
        one.post([Message.flat(1, pattern(1, 4))], [])
    one.post([Message.flat(1, pattern(2, 4))], [])
    target = room(4)
    two.post([], [Message.flat(0, target)]).complete(1.0)
    assert torch.equal(target, pattern(2, 4))


def test_a_device_that_dies_at_a_post_is_gone_for_itself_and_for_others() -> None:
    hub = MemoryHub(3)
    hub.cut_at_post(0, 1)
    one, two, three = ends(hub)
    one.post([Message.flat(1, pattern(1, 4))], [])
    with pytest.raises(TransportError, match="device 0 is gone"):
        one.post([Message.flat(1, pattern(2, 4))], [])
    target = room(4)
    two.post([], [Message.flat(2, room(0))])
    with pytest.raises(TransportError, match="device 0 is gone"):
        two.post([], [Message.flat(0, target)])
    three.post([Message.flat(1, room(0))], []).complete(1.0)
