"""What every transport must do: one scenario a promise, each played by the devices ``IDS`` at once.

A transport's own test module plays the scenarios over its wires (``play`` at each end) and asserts ``None`` or the
text of what went wrong. Scenarios meet through ``End.meet``, which does not go over the transport. Those in ``VIEWS``
are played where the transport takes views. The ids have a gap, as those of survivors have.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pytest
import torch

from shardshift.transport import Foresees, Message, Transport, TransportError, byte_view

IDS: Final = (0, 1, 3)
LONG_S: Final = 30.0
SHORT_S: Final = 1.0
GRACE_S: Final = 5.0
_PERIOD: Final = 4_093  # a prime: what lands a page or a block further on is not what belongs there


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

    @property
    def others(self) -> list[int]:
        return [peer for peer in IDS if peer != self.device]

    def exchange(self, sends: list[Message], recvs: list[Message]) -> None:
        self.transport.post(sends, recvs).complete(LONG_S)


def pattern(seed: int, size_bytes: int) -> torch.Tensor:
    """Bytes that tell where they came from."""
    index = torch.arange(min(size_bytes, _PERIOD))
    block = ((index * 31 + seed * 101 + index // 251) % 256).to(torch.uint8)
    return block.repeat(max(-(-size_bytes // _PERIOD), 1))[:size_bytes]


def room(size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), 255, dtype=torch.uint8)


def messages_of_a_pair_match_in_the_order_of_the_lists(end: End) -> None:
    # Equal sizes, so that a swap shows as wrong bytes and not as a wrong size.
    sent = [pattern(seed, 64) for seed in range(20)]
    received = [room(64) for _ in sent]
    if end.device == IDS[0]:
        end.exchange([Message.flat(IDS[1], payload) for payload in sent], [])
    elif end.device == IDS[1]:
        end.exchange([], [Message.flat(IDS[0], payload) for payload in received])
        assert all(map(torch.equal, received, sent))


def messages_cross_both_ways_at_once_and_several_per_pair(end: End) -> None:
    size_bytes = 3 << 20  # more than sockets buffer: an end that sent before it received would wait for ever
    for step in range(3):

        def payload(source: int, target: int, index: int, step: int = step) -> torch.Tensor:
            return pattern(((step * 10 + source) * 10 + target) * 10 + index, size_bytes >> index * 4)

        sends = [Message.flat(peer, payload(end.device, peer, index)) for index in range(3) for peer in end.others]
        recvs = [
            Message.flat(peer, room(size_bytes >> index * 4)) for index in range(3) for peer in reversed(end.others)
        ]
        end.exchange(sends, recvs)
        expected = [payload(peer, end.device, index) for index in range(3) for peer in reversed(end.others)]
        assert all(torch.equal(message.parts[0], wanted) for message, wanted in zip(recvs, expected, strict=True))


def several_rounds_may_be_under_way_and_complete_in_any_order(end: End) -> None:
    rounds = []
    for step in range(6):
        size_bytes = (2 << 20) + step if step % 2 else 100 + step
        sends = [Message.flat(peer, pattern(step * 10 + end.device, size_bytes)) for peer in end.others]
        recvs = [Message.flat(peer, room(size_bytes)) for peer in end.others]
        rounds.append((end.transport.post(sends, recvs), recvs))
    order = range(6) if end.device == IDS[0] else reversed(range(6))
    for step in order:
        pending, recvs = rounds[step]
        pending.complete(LONG_S)
        for message in recvs:
            assert torch.equal(message.parts[0], pattern(step * 10 + message.peer, message.nbytes)), f"round {step}"


def a_round_is_complete_though_its_peer_waits_for_an_earlier_one(end: End) -> None:
    """What is posted moves, whichever round the two ends wait for: rounds are each device's own."""
    size_bytes = 4 << 20
    if end.device == IDS[2]:
        return
    other = end.others[0]
    received = room(size_bytes)
    first = end.transport.post([Message.flat(other, pattern(end.device, size_bytes))], [])
    second = end.transport.post([], [Message.flat(other, received)])
    first.complete(LONG_S)  # the other end asks for it in its second round, and waits for its first
    second.complete(LONG_S)
    assert torch.equal(received, pattern(other, size_bytes))


def one_end_may_have_one_round_where_the_other_has_several(end: End) -> None:
    sizes = (70_000, 3, 1 << 20)
    if end.device == IDS[0]:
        end.exchange([Message.flat(IDS[1], pattern(size, size)) for size in sizes], [])
    elif end.device == IDS[1]:
        for size in sizes:
            received = room(size)
            end.exchange([], [Message.flat(IDS[0], received)])
            assert torch.equal(received, pattern(size, size))


def waiting_and_then_completing_is_as_good_as_completing(end: End) -> None:
    received = {peer: room(100_000) for peer in end.others}
    pending = end.transport.post(
        [Message.flat(peer, pattern(end.device, 100_000)) for peer in end.others],
        [Message.flat(peer, payload) for peer, payload in received.items()],
    )
    pending.wait(LONG_S)
    pending.complete(LONG_S)
    pending.complete(0.0)  # and once more
    assert all(torch.equal(payload, pattern(peer, 100_000)) for peer, payload in received.items())


def a_round_without_messages_is_complete_at_once(end: End) -> None:
    end.transport.post([], []).complete(LONG_S)
    end.transport.post([], []).complete(0.0)


def messages_of_any_size_arrive_whole(end: End) -> None:
    place = IDS.index(end.device)
    target, source = IDS[(place + 1) % len(IDS)], IDS[place - 1]
    for size_bytes in (0, 1, 2, 7, 4095, 4097, 65_535, 65_536, 65_537, 1 << 20, 0, (17 << 20) + 3):
        received = room(size_bytes)
        end.exchange([Message.flat(target, pattern(end.device, size_bytes))], [Message.flat(source, received)])
        assert torch.equal(received, pattern(source, size_bytes)), f"{size_bytes} bytes"


def a_message_of_no_bytes_keeps_its_place_among_others(end: End) -> None:
    sizes = (0, 5, 0, 0, 100_000, 0)
    received = {peer: [room(size) for size in sizes] for peer in end.others}
    end.exchange(
        [Message.flat(peer, pattern(end.device, size)) for peer in end.others for size in sizes],
        [Message.flat(peer, payload) for peer in end.others for payload in received[peer]],
    )
    for peer, payloads in received.items():
        assert all(torch.equal(payload, pattern(peer, size)) for payload, size in zip(payloads, sizes, strict=True))


def views_into_larger_storages_are_sent_and_filled_in_place(end: End) -> None:
    if end.device == IDS[0]:
        end.exchange([Message.flat(IDS[1], pattern(5, 300)[100:200])], [])
    elif end.device == IDS[1]:
        storage = room(300)
        end.exchange([], [Message.flat(IDS[0], storage[50:150])])
        assert torch.equal(storage, torch.cat([room(50), pattern(5, 300)[100:200], room(150)]))


def posting_waits_for_nobody(end: End) -> None:
    go, answer = room(1), room(8)
    if end.device == IDS[0]:
        pending = end.transport.post([Message.flat(IDS[1], pattern(1, 1))], [Message.flat(IDS[1], answer)])
        end.meet("posted")  # the other posts nothing before
        pending.complete(LONG_S)
        assert torch.equal(answer, pattern(2, 8))
    else:
        end.meet("posted")
        if end.device == IDS[1]:
            end.exchange([Message.flat(IDS[0], pattern(2, 8))], [Message.flat(IDS[0], go)])


def posting_many_rounds_waits_for_nobody(end: End) -> None:
    """Nor where much is on its way: 300 rounds, 20 MiB, in small messages and large ones."""
    sizes = [size for _ in range(100) for size in (100, 60_000, 150_000)]
    if end.device == IDS[0]:
        sent = [end.transport.post([Message.flat(IDS[1], pattern(size, size))], []) for size in sizes]
        end.meet("posted")
        for pending in sent:
            pending.complete(LONG_S)
        return
    end.meet("posted")
    if end.device == IDS[1]:
        for size in sizes:
            received = room(size)
            end.exchange([], [Message.flat(IDS[0], received)])
            assert torch.equal(received, pattern(size, size))


def a_sent_buffer_may_be_reused_once_it_is_complete(end: End) -> None:
    buffer = room(1 << 20)
    for size_bytes in (1 << 20, 1000) * 3:
        if end.device == IDS[0]:
            buffer[:size_bytes].copy_(pattern(size_bytes, size_bytes))
            end.exchange([Message.flat(IDS[1], buffer[:size_bytes])], [])
            buffer.fill_(0)
        elif end.device == IDS[1]:
            end.exchange([], [Message.flat(IDS[0], buffer[:size_bytes])])
            assert torch.equal(buffer[:size_bytes], pattern(size_bytes, size_bytes))


def tensors_that_were_moved_can_give_their_memory_back(end: End) -> None:
    """Release empties storages, which torch refuses once one was lent out, to numpy for one."""
    for size_bytes in (10, 1 << 20):
        sent, received = torch.ones(size_bytes, dtype=torch.uint8), {peer: room(size_bytes) for peer in end.others}
        end.exchange(
            [Message.flat(peer, sent) for peer in end.others],
            [Message.flat(peer, payload) for peer, payload in received.items()],
        )
        for tensor in (sent, *received.values()):
            tensor.untyped_storage().resize_(0)


def parts_of_any_cut_make_up_one_message(end: End) -> None:
    """Each end cuts the bytes as it likes; strides and dtypes are its own affair."""
    whole = pattern(3, 5 * 7 * 2048 * 2)
    if end.device == IDS[0]:
        storage = torch.zeros(5, 7, 5000, dtype=torch.bfloat16)
        parts = storage[:, :, 100:2148]  # long runs
        parts.copy_(whole.view(torch.bfloat16).view(5, 7, 2048))
        turned = whole.view(torch.int16).view(70, 1024).t().contiguous().t()  # runs of one element
        end.exchange([Message(IDS[1], (parts[:2], parts[2:3, :, :1000], parts[2:3, :, 1000:], parts[3:]))], [])
        end.exchange([Message(IDS[1], (turned, turned[0, 0]))], [])
        end.exchange([Message(IDS[1], (turned[:0],) * 100), Message(IDS[1], ())], [])
    elif end.device == IDS[1]:
        landed = torch.zeros(3, len(whole), dtype=torch.uint8)
        end.exchange([], [Message(IDS[0], (landed[1, :100_001], landed[1, 100_001:100_001], landed[1, 100_001:]))])
        expected = whole.view(torch.bfloat16).view(5, 7, 2048)
        third = torch.cat(
            [byte_view(expected[2, :, :1000].contiguous()), byte_view(expected[2, :, 1000:].contiguous())]
        )
        assert torch.equal(
            landed[1],
            torch.cat([byte_view(expected[:2]), third, byte_view(expected[3:])]),
        )
        assert not landed[0].any()
        assert not landed[2].any()
        held = torch.full((1024, 2, 70), -1, dtype=torch.int16)
        into, last = held[:, 1].t(), torch.zeros((), dtype=torch.int16)
        end.exchange([], [Message(IDS[0], (into, last))])
        assert torch.equal(into, whole.view(torch.int16).view(70, 1024))
        assert last == into[0, 0]
        assert bool((held[:, 0] == -1).all())
        end.exchange([], [Message(IDS[0], ()), Message(IDS[0], (into[:0],) * 100)])


def messages_that_nobody_takes_yet_do_not_hold_up_another(end: End) -> None:
    """Views of short runs, which may be packed on their way: many for a device that waits for the one behind them."""
    views = [pattern(seed, 1 << 20).view(-1, 64)[:, ::2] for seed in range(24)]
    size = views[0].numel()
    if end.device == IDS[0]:
        held = [end.transport.post([Message(IDS[1], (view,))], []) for view in views]
        end.exchange([Message(IDS[2], (views[3],))], [])
        for pending in held:
            pending.complete(LONG_S)
    elif end.device == IDS[2]:
        received = room(size)
        end.exchange([], [Message.flat(IDS[0], received)])
        assert torch.equal(received, views[3].reshape(-1))
        end.exchange([Message.flat(IDS[1], received[:1].clone())], [])
    else:
        end.exchange([], [Message.flat(IDS[2], room(1))])
        for view in views:
            received = room(size)
            end.exchange([], [Message.flat(IDS[0], received)])
            assert torch.equal(received, view.reshape(-1))


def parts_of_middling_runs_land_in_runs_of_others(end: End) -> None:
    """Rows shorter and longer than what either end copies in one piece, more of them than one call takes."""
    for width_out, width_in in ((64, 8192), (512, 300), (3000, 64), (1500, 1500), (8192, 256), (20_000, 9000)):
        size = 1 << 20
        whole = pattern(width_out, size)
        if end.device == IDS[0]:
            rows = torch.zeros(-(-size // width_out), width_out + 3, dtype=torch.uint8)
            full = size // width_out
            rows[:full, :width_out] = whole[: full * width_out].view(full, width_out)
            rest = whole[full * width_out :]
            end.exchange([Message(IDS[1], (rows[:full, :width_out], rest))], [])
        elif end.device == IDS[1]:
            full = size // width_in
            rows = torch.full((full, width_in + 5), 7, dtype=torch.uint8)
            rest = torch.zeros(size - full * width_in, dtype=torch.uint8)
            end.exchange([], [Message(IDS[0], (rows[:, 5:], rest))])
            assert torch.equal(torch.cat([rows[:, 5:].reshape(-1), rest]), whole), f"{width_out} to {width_in}"
            assert bool((rows[:, :5] == 7).all())


def what_was_foreseen_is_sent_as_it_is_when_it_is_posted(end: End) -> None:
    """At one end, at both, at the other; small, in short runs, long ones, whole; written to in between."""

    def foreseen(message: Message, *, arrives: bool) -> Message:
        return end.transport.foresee(message, arrives=arrives) if isinstance(end.transport, Foresees) else message

    for at in ((0,), (0, 1), (1,)):
        for width, rows, gap in ((3, 4, 0), (3, 4, 1), (300, 9000, 1), (20_000, 150, 8), (1 << 20, 3, 0)):
            wanted = pattern(width + len(at), width * rows).view(rows, width)
            held = torch.zeros(rows, width + gap, dtype=torch.uint8)
            if end.device == IDS[0]:
                messages = [Message(IDS[1], (held[:, :width],)) for _ in range(2)]
                if 0 in at:
                    messages = [foreseen(message, arrives=False) for message in messages]
                held[:, :width] = wanted
                end.exchange(messages[:1], [])
                held += 1
                end.exchange(messages[1:], [])
            elif end.device == IDS[1]:
                into = [torch.zeros(width + gap, rows, dtype=torch.uint8).t()[:, :width] for _ in range(2)]
                messages = [Message(IDS[0], (view,)) for view in into]
                if 1 in at:
                    messages = [foreseen(message, arrives=True) for message in messages]
                end.exchange([], messages[:1])
                end.exchange([], messages[1:])
                assert torch.equal(into[0], wanted), (at, width)
                assert torch.equal(into[1], wanted + 1), (at, width)


def thousands_of_small_parts_make_up_one_message(end: End) -> None:
    sizes = [4096 if index % 7 else 12 for index in range(4096)]
    mine = {index: pattern(index, size) for index, size in enumerate(sizes)}
    place = IDS.index(end.device)
    target, source = IDS[(place + 1) % len(IDS)], IDS[place - 1]
    landed = [room(size) for size in sizes]
    end.exchange([Message(target, tuple(mine.values()))], [Message(source, tuple(landed))])
    assert all(torch.equal(payload, mine[index]) for index, payload in enumerate(landed))


def parameters_and_scalars_are_parts_like_others(end: End) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    if end.device == IDS[0]:
        model = torch.nn.Linear(4, 3)
        with torch.no_grad():
            model.weight.copy_(values)
            model.bias.fill_(7.0)
        end.exchange([Message(IDS[1], (model.weight, model.bias[0], model.weight.t()))], [])
    elif end.device == IDS[1]:
        model = torch.nn.Linear(4, 3)
        turned = torch.zeros(4, 3)
        end.exchange([], [Message(IDS[0], (model.weight, model.bias[1], turned))])
        assert torch.equal(model.weight, values)
        assert model.bias[1].item() == 7.0
        assert torch.equal(turned, values.t())


def parts_may_have_been_made_in_inference_mode(end: End) -> None:
    wanted = pattern(3, 4000).view(1000, 4)
    with torch.inference_mode():
        rows = torch.zeros(1000, 7, dtype=torch.uint8)
        if end.device == IDS[0]:
            rows[:, 2:6] = wanted
    if end.device == IDS[0]:
        end.exchange([Message(IDS[1], (rows[:, 2:6],))], [])
        end.exchange([Message(IDS[1], (wanted,))], [])
    elif end.device == IDS[1]:
        end.exchange([], [Message(IDS[0], (rows[:, 2:6],))])
        assert torch.equal(rows[:, 2:6], wanted)
        with torch.inference_mode():
            other = torch.zeros(1000, 9, dtype=torch.uint8)
            end.exchange([], [Message(IDS[0], (other[:, 5:],))])
        assert torch.equal(other[:, 5:], wanted)


def closing_twice_is_fine_and_posting_afterwards_is_an_error(end: End) -> None:
    end.meet("close")
    end.transport.close()
    end.transport.close()
    with pytest.raises(TransportError, match="closed"):
        end.transport.post([], [])


def closing_with_messages_under_way_does_not_hang(end: End) -> None:
    pending = end.transport.post(
        [Message.flat(peer, pattern(1, 1 << 20)) for peer in end.others],
        # The last of each pair is never sent. (Sizes that differ end a process that uses gloo.)
        [Message.flat(peer, room(size)) for size in (1 << 20, 8) for peer in end.others],
    )
    end.meet("posted")
    started_s = time.monotonic()
    end.transport.close()
    assert time.monotonic() - started_s < LONG_S
    del pending
    end.meet("closed")


def a_peer_that_is_too_slow_is_an_error_within_the_timeout(end: End) -> None:
    if end.device == IDS[0]:
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            end.transport.post([], [Message.flat(IDS[1], room(8))]).complete(SHORT_S)
        assert time.monotonic() - started_s < SHORT_S + GRACE_S
    end.meet("waited")


def a_peer_that_takes_too_long_to_receive_is_an_error_within_the_timeout(end: End) -> None:
    if end.device == IDS[0]:
        started_s = time.monotonic()
        pending = end.transport.post([], [Message.flat(IDS[1], room(8))])
        more = end.transport.post([Message.flat(IDS[1], pattern(1, 4 << 20))], [])
        with pytest.raises(TransportError):
            pending.complete(SHORT_S)
        with suppress(TransportError):  # what a transport buffers is complete
            more.complete(SHORT_S)
        assert time.monotonic() - started_s < 3 * SHORT_S + GRACE_S
    end.meet("waited")


def ask_often(end: End) -> None:
    for _ in range(5):  # up to four may have come before the peer was gone
        end.transport.post([], [Message.flat(IDS[2], room(8 << 20))]).complete(LONG_S)


def a_peer_that_is_gone_is_an_error_and_the_others_go_on(end: End) -> None:
    """Must be played last where ``leave`` ends the process."""
    received = room(1 << 20)
    if end.device == IDS[2]:
        if end.transport.takes_views(IDS[0]):
            # Others read it, or wait for it, while this process ends.
            for _ in range(4):
                end.transport.post([Message.flat(peer, pattern(9, 8 << 20)) for peer in end.others], [])
        end.leave()
        return
    other = next(peer for peer in end.others if peer != IDS[2])
    for _ in range(2):
        end.exchange([Message.flat(other, pattern(end.device, 1 << 20))], [Message.flat(other, received)])
        assert torch.equal(received, pattern(other, 1 << 20))
    started_s = time.monotonic()
    with pytest.raises(TransportError):
        ask_often(end)
    assert time.monotonic() - started_s < LONG_S, "it waited for the timeout, though the peer is known to be gone"
    with pytest.raises(TransportError):  # nor does it hang when asked again
        end.transport.post([], [Message.flat(IDS[2], room(8))]).complete(SHORT_S)


VIEWS: Final[dict[str, Callable[[End], None]]] = {
    scenario.__name__: scenario
    for scenario in (
        parts_of_any_cut_make_up_one_message,
        messages_that_nobody_takes_yet_do_not_hold_up_another,
        parts_of_middling_runs_land_in_runs_of_others,
        what_was_foreseen_is_sent_as_it_is_when_it_is_posted,
        thousands_of_small_parts_make_up_one_message,
        parameters_and_scalars_are_parts_like_others,
        parts_may_have_been_made_in_inference_mode,
    )
}
FLAT: Final[dict[str, Callable[[End], None]]] = {
    scenario.__name__: scenario
    for scenario in (
        messages_of_a_pair_match_in_the_order_of_the_lists,
        messages_cross_both_ways_at_once_and_several_per_pair,
        several_rounds_may_be_under_way_and_complete_in_any_order,
        a_round_is_complete_though_its_peer_waits_for_an_earlier_one,
        one_end_may_have_one_round_where_the_other_has_several,
        waiting_and_then_completing_is_as_good_as_completing,
        a_round_without_messages_is_complete_at_once,
        messages_of_any_size_arrive_whole,
        a_message_of_no_bytes_keeps_its_place_among_others,
        views_into_larger_storages_are_sent_and_filled_in_place,
        posting_waits_for_nobody,
        posting_many_rounds_waits_for_nobody,
        a_sent_buffer_may_be_reused_once_it_is_complete,
        tensors_that_were_moved_can_give_their_memory_back,
        closing_twice_is_fine_and_posting_afterwards_is_an_error,
        closing_with_messages_under_way_does_not_hang,
        a_peer_that_is_too_slow_is_an_error_within_the_timeout,
        a_peer_that_takes_too_long_to_receive_is_an_error_within_the_timeout,
        a_peer_that_is_gone_is_an_error_and_the_others_go_on,
    )
}
SCENARIOS: Final = VIEWS | FLAT
"""In an order in which one set of processes can play them, each over a transport of its own."""


def survivors(name: str) -> int:
    """How many ends tell how a scenario went."""
    return len(IDS) - (FLAT.get(name) is a_peer_that_is_gone_is_an_error_and_the_others_go_on)


def play(name: str, end: End) -> str | None:
    """Play one end of a scenario; None, or what went wrong."""
    try:
        SCENARIOS[name](end)
    except Exception:
        return f"device {end.device}: {traceback.format_exc()}"
    finally:
        end.transport.close()
    return None
