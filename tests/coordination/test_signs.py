from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from shardshift.coordination import Control, Pulse, signs
from shardshift.coordination.signs import Beats, Looks, diagnose, show
from shardshift.values import PeerLost


class Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(signs, "time", found)
    return found


def test_time_counts_while_one_looks_and_hardly_while_one_cannot(clock: Clock) -> None:
    looks, spent = Looks(), []
    for passed_s in (0.5, 0.5, 30.0, 0.25):
        clock.now_s += passed_s
        spent.append(looks.look())
    assert spent == [0.5, 1.0, 2.0, 2.25]


def test_a_beat_stands_still_from_the_look_that_first_showed_it(clock: Clock) -> None:
    store = dist.HashStore()
    beats = Beats(store)
    show(store, 1, 0)
    show(store, 2, 0)
    beats.look((1, 2, 3))
    clock.now_s += 0.5
    show(store, 2, 1)
    beats.look((1, 2, 3))
    assert beats.still_s() == {1: 0.5, 2: 0.0}  # 3 has never shown one
    clock.now_s += 0.5
    beats.look((1, 2))
    assert beats.still_s() == {1: 1.0, 2: 0.5}
    beats.look((2,))
    assert beats.still_s() == {2: 0.5}


def test_when_the_store_stands_still_nobody_is_blamed_for_it(clock: Clock) -> None:
    """Seen: c10d looked up a client's name for 5 s, no beat moved, and living devices were named as lost."""
    store = dist.HashStore()
    beats = Beats(store)
    show(store, 1, 0)
    beats.look((1,))
    clock.now_s += 60.0  # the store answers again, before the others have come to count up
    beats.look((1,))
    assert beats.still_s()[1] < 2.0


def test_a_diagnosis_after_a_standstill_looks_long_enough_to_see_who_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    pulses = [Pulse(store, device, 60.0, lambda: "move") for device in (1, 2)]
    for pulse in pulses:
        pulse.start()
    pulses[1].stop()

    class Clogged(Clock):
        def monotonic(self) -> float:
            self.now_s += 5.0  # each look takes so long
            return self.now_s

    monkeypatch.setattr(signs, "time", Clogged())
    monkeypatch.setattr(signs, "_VERDICT_S", 8.0)  # eight looks, of a second at most
    lost = diagnose(store, 0, (0, 1, 2), "move", "connection closed")
    pulses[0].stop()
    assert lost.ranks == (2,)


def test_of_those_that_do_not_come_the_living_are_not_named_if_another_is_silent() -> None:
    """Whoever waits for bytes of the lost one does not come, either."""
    store = dist.HashStore()
    pulses = [Pulse(store, device, 60.0, lambda: "move") for device in (1, 2)]
    for pulse in pulses:
        pulse.start()
    pulses[1].stop()
    with pytest.raises(PeerLost, match="did not come to 'fence'") as caught:
        Control(store, 0, 0.2).gather("fence", (0, 1, 2), b"", "commit")
    pulses[0].stop()
    assert caught.value.ranks == (2,)


def test_if_all_that_do_not_come_live_and_have_trouble_all_are_named() -> None:
    store = dist.HashStore()
    for device in (1, 2):
        store.set(f"trouble/{device}", "")
    stopping = threading.Event()

    def beat() -> None:
        count = 0
        while not stopping.wait(0.2):
            count += 1
            show(store, 1, count)
            show(store, 2, count)

    thread = threading.Thread(target=beat)
    thread.start()
    lost = diagnose(store, 0, (0, 1, 2), "move", "timed out")
    stopping.set()
    thread.join()
    assert lost.ranks == (1, 2)
