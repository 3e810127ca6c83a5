"""Links: bytes, joined times and rates, against counting milliseconds one by one."""

from __future__ import annotations

import io
import logging
from collections import Counter

import pytest
from hypothesis import given
from rich.console import Console
from tests.unit.made_events import MIB, at, round_of, rounds_of_devices, scale_out

from shardshift.engine.events import PhaseBegan, PhaseEnded, RoundEnded
from shardshift.report.links import Link, links_of, links_table, log_links


@given(rounds_of_devices())
def test_links_are_what_counting_gives(rounds: list[RoundEnded]) -> None:
    bytes_of: dict[bool, Counter[tuple[int, int]]] = {True: Counter(), False: Counter()}
    busy_ms: dict[bool, set[tuple[int, int, int]]] = {True: set(), False: set()}
    for one in rounds:
        for link in one.links:
            for received, ends, count in (
                (True, (link.peer, one.device), link.received_bytes),
                (False, (one.device, link.peer), link.sent_bytes),
            ):
                if count:
                    bytes_of[received][ends] += count
                    during = range(round(one.began_s * 1000), round(one.ended_s * 1000))
                    busy_ms[received] |= {(*ends, tick) for tick in during}
    found = links_of(rounds)
    assert [(used.source, used.target) for used in found] == sorted(bytes_of[True].keys() | bytes_of[False].keys())
    for used in found:
        ends = (used.source, used.target)
        by_receiver = ends in bytes_of[True]
        assert used.moved_bytes == bytes_of[by_receiver][ends]
        ticks = sum(1 for source, target, _ in busy_ms[by_receiver] if (source, target) == ends)
        assert used.busy_s == pytest.approx(ticks / 1000)
        assert used.bytes_per_s == pytest.approx(used.moved_bytes / (ticks / 1000) if ticks else 0)


def test_time_in_which_two_rounds_overlap_counts_once_and_the_receiver_has_the_word() -> None:
    (link,) = links_of(scale_out())
    assert (link.source, link.target, link.moved_bytes) == (0, 1, 3 * MIB)
    assert link.busy_s == pytest.approx(0.044)  # 22 to 66 ms on device 1; device 0 says 25 to 65
    (alone,) = links_of(event for event in scale_out() if event.device == 0)
    assert alone.busy_s == pytest.approx(0.040)


def test_the_table_has_a_row_for_each_link_and_their_sum() -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(links_table([Link(0, 1, 3 * MIB, 2.0), Link(2, 1, MIB, 0.0)]))
    rows = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert rows[-4:-1] == [
        "device 0 device 1 3.00 MiB 2.00 s 1.50 MiB/s",
        "device 2 device 1 1.00 MiB 0.0 ms 0 B/s",
        "all 4.00 MiB",
    ]


def test_each_link_of_a_move_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tell = log_links(logging.getLogger("links"))
    with caplog.at_level(logging.INFO, "links"):
        for event in scale_out():
            tell(event)
    assert caplog.messages == [
        "device 0 -> device 1: 3.00 MiB in 40.0 ms, 75.00 MiB/s",  # as device 0 saw it
        "device 0 -> device 1: 3.00 MiB in 44.0 ms, 68.18 MiB/s",  # as device 1 saw it
    ]


def test_the_log_has_the_links_of_a_move_that_failed_and_none_of_the_move_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell = log_links(logging.getLogger("links"))
    with caplog.at_level(logging.INFO, "links"):
        tell(PhaseBegan(0, "move", at(0)))
        tell(round_of(0, 0, 9, 0, 10, (1, MIB, 0)))
        tell(PhaseEnded(0, "move", at(0), at(10), "PeerLost"))
        tell(PhaseBegan(0, "move", at(20)))
        tell(round_of(0, 0, 1, 20, 30, (2, 0, MIB)))
        tell(PhaseEnded(0, "move", at(20), at(30)))
        tell(PhaseEnded(1, "move", at(20), at(30)))
    assert [line.partition(":")[0] for line in caplog.messages] == ["device 0 -> device 1", "device 2 -> device 0"]
