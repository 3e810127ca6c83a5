from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from shardshift.coordination import Control, Pulse, as_peer_lost, diagnose, record_failure
from shardshift.coordination.pulse import _next_in_ring
from shardshift.transport import TransportError
from shardshift.values import PeerLost


def beating(store: dist.Store, device: int, timeout_s: float = 60.0) -> Pulse:
    pulse = Pulse(store, device, timeout_s, lambda: "train")
    pulse.start()
    return pulse


def await_failure(control: Control) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        control.fetch("never", 99, "test")
    return caught.value


def test_a_member_whose_beat_stands_still_is_recorded_as_lost_with_the_phase_of_the_watcher() -> None:
    store = dist.HashStore()
    pulse, other = beating(store, 0, 1.0), beating(store, 1)
    pulse.watch((0, 1))
    other.stop()
    lost = await_failure(Control(store, 0, 30.0))
    pulse.stop()
    assert (lost.ranks, lost.phase) == ((1,), "train")
    assert "no sign of life" in lost.reason


def test_members_that_beat_are_not_lost_and_others_are_not_watched() -> None:
    store = dist.HashStore()
    pulses = [beating(store, device, 1.0) for device in range(3)]
    for pulse in pulses[:2]:
        pulse.watch((0, 1))
    pulses[2].stop()
    threading.Event().wait(2.5)  # more than twice what a silent member would be given
    assert Control(store, 0, 1.0).failure() is None
    for pulse in pulses:
        pulse.stop()


def test_every_member_is_watched_by_others_at_a_bounded_cost() -> None:
    members = [9, 2, 5, 7, 1, 4]
    watched = {device: _next_in_ring(members, device) for device in members}
    assert all(len(others) == 3 and device not in others for device, others in watched.items())
    assert all(sum(device in others for others in watched.values()) == 3 for device in members)
    assert _next_in_ring(members, 8) == [9, 1, 2]  # a device that stands by watches, too
    assert _next_in_ring([3], 3) == []


def test_a_diagnosis_names_the_silent_and_those_who_never_came() -> None:
    store = dist.HashStore()
    alive, silent = beating(store, 1), beating(store, 2)
    silent.stop()
    lost = diagnose(store, 0, (0, 1, 2, 3), "move", "connection closed")
    alive.stop()
    assert (lost.ranks, lost.phase) == ((2, 3), "move")


def test_a_diagnosis_names_who_is_alive_but_has_not_met_the_trouble() -> None:
    store = dist.HashStore()
    pulses = [beating(store, device) for device in (1, 2)]
    Control(store, 1, 5.0).publish("trouble/1", b"")
    lost = diagnose(store, 0, (0, 1, 2), "train", "timed out")
    for pulse in pulses:
        pulse.stop()
    assert lost.ranks == (2,)
    assert "alive but did not take part; timed out" in lost.reason


def test_a_diagnosis_takes_over_what_is_recorded() -> None:
    store = dist.HashStore()
    record_failure(store, [7], "commit", "known")
    assert diagnose(store, 0, (0, 1), "train", "late").ranks == (7,)


@pytest.mark.parametrize(
    "error", [ValueError("gloo"), RuntimeError("shape mismatch"), PeerLost([1], "train", "known already")]
)
def test_an_error_of_ones_own_is_not_blamed_on_peers(error: Exception) -> None:
    assert as_peer_lost(error, Control(dist.HashStore(), 0, 1.0), (0, 1), "train") is None


@pytest.mark.parametrize(
    "error",
    [
        TransportError("device 0 with device 1"),
        RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        dist.DistStoreError("wait timeout"),
    ],
)
def test_an_error_of_the_wires_is_the_loss_of_a_peer(error: Exception) -> None:
    store = dist.HashStore()
    record_failure(store, [1], "train", "it died")
    lost = as_peer_lost(error, Control(store, 0, 1.0), (0, 1), "train")
    assert lost is not None
    assert lost.ranks == (1,)
