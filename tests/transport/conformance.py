"""What every transport must do: one scenario a promise, each played by ``DEVICES`` ends at once.

A transport's own test module plays the scenarios over its wires (``play`` at each end) and asserts ``None`` or the
text of what went wrong. Scenarios meet through ``End.meet``, which does not go over the transport.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
import torch

from shardshift.transport import Message, Transport, TransportError

DEVICES: Final = 3
LONG_S: Final = 20.0
SHORT_S: Final = 1.0
GRACE_S: Final = 5.0


@dataclass(frozen=True)
class End:
    """One device's end.

    Attributes:
        transport: of this device, used by nothing before.
        meet: returns once all devices have called it with this word.
        leave: this device dies; may not return.
    """

    transport: Transport
    meet: Callable[[str], None]
    leave: Callable[[], None]

    @property
    def device(self) -> int:
        return self.transport.device


def pattern(seed: int, size_bytes: int) -> torch.Tensor:
    """Bytes that tell where they came from."""
    return ((torch.arange(size_bytes) * 31 + seed * 101 + torch.arange(size_bytes) // 251) % 256).to(torch.uint8)


def room(size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), 255, dtype=torch.uint8)


def messages_of_a_pair_match_in_the_order_of_the_lists(end: End) -> None:
    # Equal sizes, so that a swap shows as wrong bytes and not as a wrong size.
    sent = [pattern(seed, 64) for seed in range(20)]
    received = [room(64) for _ in sent]
    if end.device == 0:
        end.transport.post([Message(1, payload) for payload in sent], []).wait(LONG_S)
    elif end.device == 1:
        end.transport.post([], [Message(0, payload) for payload in received]).wait(LONG_S)
        assert all(map(torch.equal, received, sent))


def messages_cross_both_ways_at_once_and_several_per_pair(end: End) -> None:
    size_bytes = 3 << 20  # more than sockets buffer: an end that sent before it received would wait for ever
    peers = [peer for peer in range(DEVICES) if peer != end.device]
    for step in range(3):

        def payload(source: int, target: int, index: int, step: int = step) -> torch.Tensor:
            return pattern(((step * 10 + source) * 10 + target) * 10 + index, size_bytes >> index * 4)

        sends = [Message(peer, payload(end.device, peer, index)) for index in range(3) for peer in peers]
        recvs = [Message(peer, room(size_bytes >> index * 4)) for index in range(3) for peer in reversed(peers)]
        end.transport.post(sends, recvs).wait(LONG_S)
        expected = [payload(peer, end.device, index) for index in range(3) for peer in reversed(peers)]
        assert all(torch.equal(message.payload, wanted) for message, wanted in zip(recvs, expected, strict=True))


def a_round_without_messages_is_complete_at_once(end: End) -> None:
    end.transport.post([], []).wait(LONG_S)
    end.transport.post([], []).wait(0.0)


def messages_of_any_size_arrive_whole(end: End) -> None:
    for size_bytes in (1, 2, 7, 4095, 4097, 65_537, 1 << 20, (5 << 20) + 3):
        received = room(size_bytes)
        target, source = (end.device + 1) % DEVICES, (end.device - 1) % DEVICES
        end.transport.post([Message(target, pattern(end.device, size_bytes))], [Message(source, received)]).wait(LONG_S)
        assert torch.equal(received, pattern(source, size_bytes)), f"{size_bytes} bytes"


def views_into_larger_storages_are_sent_and_filled_in_place(end: End) -> None:
    if end.device == 0:
        end.transport.post([Message(1, pattern(5, 300)[100:200])], []).wait(LONG_S)
    elif end.device == 1:
        storage = room(300)
        end.transport.post([], [Message(0, storage[50:150])]).wait(LONG_S)
        assert torch.equal(storage, torch.cat([room(50), pattern(5, 300)[100:200], room(150)]))


def posting_waits_for_nobody(end: End) -> None:
    go, answer = room(1), room(8)
    if end.device == 0:
        pending = end.transport.post([Message(1, pattern(1, 1))], [Message(1, answer)])
        end.meet("posted")  # device 1 posts nothing before
        pending.wait(LONG_S)
        assert torch.equal(answer, pattern(2, 8))
    else:
        end.meet("posted")
        if end.device == 1:
            end.transport.post([Message(0, pattern(2, 8))], [Message(0, go)]).wait(LONG_S)


def a_sent_buffer_may_be_reused_after_the_wait(end: End) -> None:
    buffer = room(1 << 20)
    for step in range(4):
        if end.device == 0:
            buffer.copy_(pattern(step, 1 << 20))
            end.transport.post([Message(1, buffer)], []).wait(LONG_S)
        elif end.device == 1:
            end.transport.post([], [Message(0, buffer)]).wait(LONG_S)
            assert torch.equal(buffer, pattern(step, 1 << 20)), f"step {step}"


def closing_twice_is_fine_and_posting_afterwards_is_an_error(end: End) -> None:
    end.meet("close")
    end.transport.close()
    end.transport.close()
    with pytest.raises(TransportError, match="closed"):
        end.transport.post([], [])


def a_peer_that_is_too_slow_is_an_error_within_the_timeout(end: End) -> None:
    if end.device == 0:
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            end.transport.post([], [Message(1, room(8))]).wait(SHORT_S)
        assert time.monotonic() - started_s < SHORT_S + GRACE_S
    end.meet("waited")


def a_peer_that_is_gone_is_an_error_and_the_others_go_on(end: End) -> None:
    """Must be played last where ``leave`` ends the process."""
    received = room(1 << 20)
    if end.device == DEVICES - 1:
        end.leave()
        return
    other = 1 - end.device
    for _ in range(2):
        end.transport.post([Message(other, pattern(end.device, 1 << 20))], [Message(other, received)]).wait(LONG_S)
        assert torch.equal(received, pattern(other, 1 << 20))
    started_s = time.monotonic()
    with pytest.raises(TransportError):
        end.transport.post([], [Message(DEVICES - 1, room(8))]).wait(LONG_S)
    assert time.monotonic() - started_s < LONG_S, "it waited for the timeout, though the peer is known to be gone"
    with pytest.raises(TransportError):  # nor does it hang when asked again
        end.transport.post([], [Message(DEVICES - 1, room(8))]).wait(SHORT_S)


SCENARIOS: Final[dict[str, Callable[[End], None]]] = {
    scenario.__name__: scenario
    for scenario in (
        messages_of_a_pair_match_in_the_order_of_the_lists,
        messages_cross_both_ways_at_once_and_several_per_pair,
        a_round_without_messages_is_complete_at_once,
        messages_of_any_size_arrive_whole,
        views_into_larger_storages_are_sent_and_filled_in_place,
        posting_waits_for_nobody,
        a_sent_buffer_may_be_reused_after_the_wait,
        closing_twice_is_fine_and_posting_afterwards_is_an_error,
        a_peer_that_is_too_slow_is_an_error_within_the_timeout,
        a_peer_that_is_gone_is_an_error_and_the_others_go_on,
    )
}


def play(name: str, end: End) -> str | None:
    """Play one end of a scenario; None, or what went wrong."""
    try:
        SCENARIOS[name](end)
    except Exception:
        return f"device {end.device}: {traceback.format_exc()}"
    finally:
        end.transport.close()
    return None
