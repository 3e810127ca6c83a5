"""The bar: figures while a move runs, on terminals and elsewhere."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from rich.console import Console
from tests.unit.made_events import MIB, at, round_of, rounds_of_devices, scale_out

from shardshift.engine.events import PhaseBegan, PhaseEnded, RoundEnded
from shardshift.report.progress import MoveProgress, progress_bar
from shardshift.values import PeerLost


def test_figures_grow_to_the_whole_of_the_move() -> None:
    done = MoveProgress()
    seen = [done.figures]
    for event in scale_out():
        if event.device == 0:
            done(event)
            if done.figures != seen[-1]:
                seen.append(done.figures)
    assert seen == [
        "",
        "0 B of 4.00 MiB",
        "3.00 MiB of 4.00 MiB, 1 of 2 rounds, 150.00 MiB/s",  # 25 to 45 ms
        "4.00 MiB of 4.00 MiB, 2 of 2 rounds, 100.00 MiB/s",  # 25 to 65 ms
    ]
    assert done.part == (4 * MIB, 4 * MIB)


@given(rounds_of_devices())
def test_bytes_are_those_of_all_devices_and_without_a_total_the_bar_counts_rounds(rounds: list[RoundEnded]) -> None:
    done = MoveProgress()
    for event in rounds:
        done(event)
    links = [link for event in rounds for link in event.links]
    by_hand = sum(link.sent_bytes + link.received_bytes for link in links) + sum(one.copied_bytes for one in rounds)
    assert done.done_bytes == by_hand
    assert done.part == (len(rounds), len(rounds))


def test_a_resumed_move_begins_at_its_round() -> None:
    done = MoveProgress()
    done(round_of(0, 6, 8, 0, 10, (1, MIB, 0)))
    assert done.rounds == (7, 8)


def test_the_next_move_begins_anew() -> None:
    done = MoveProgress()
    for event in scale_out():
        done(event)
    done(PhaseEnded(0, "move", at(20), at(70), "PeerLost"))
    done(PhaseBegan(0, "move", at(100), MIB))
    assert (done.done_bytes, done.total_bytes, done.error) == (0, MIB, "")


def test_a_move_of_other_devices_begins_anew_too_and_a_device_that_is_heard_late_belongs_to_it() -> None:
    done = MoveProgress()
    for event in scale_out():
        done(event)
    for event in (
        PhaseBegan(2, "agree", at(100)),
        PhaseBegan(2, "move", at(110), 2 * MIB),
        PhaseBegan(3, "agree", at(101)),  # of another process: its message took longer
        PhaseBegan(3, "move", at(111), MIB),
        round_of(3, 0, 1, 112, 120, (2, 0, MIB)),
    ):
        done(event)
    assert (done.part, done.rounds) == ((MIB, 3 * MIB), (1, 1))
    assert done.row["completed"] == MIB


def test_a_change_that_is_refused_leaves_the_figures_of_the_move_before() -> None:
    done = MoveProgress()
    for event in [*scale_out(), PhaseBegan(0, "agree", at(100)), PhaseEnded(0, "agree", at(100), at(101), "Mismatch")]:
        done(event)
    assert done.done_bytes == 7 * MIB


def test_off_a_terminal_there_is_one_line_at_the_end() -> None:
    file = io.StringIO()
    with progress_bar(Console(file=file, width=20)) as tell:
        for event in scale_out():
            tell(event)
            assert file.getvalue() == ""
    assert file.getvalue() == "move: 7.00 MiB of 7.00 MiB, 4 of 4 rounds, 159.09 MiB/s\n"


def test_off_a_terminal_a_failed_move_says_how_far_it_came_and_a_move_of_nothing_says_nothing() -> None:
    def fail() -> None:
        with progress_bar(Console(file=file)) as tell:
            tell(PhaseBegan(0, "move", at(0), 4 * MIB))
            tell(round_of(0, 0, 4, 0, 10, (1, MIB, 0)))
            tell(PhaseEnded(0, "move", at(0), at(10), "PeerLost"))
            raise PeerLost([1], "move", "silent")

    file = io.StringIO()
    with pytest.raises(PeerLost):
        fail()
    assert file.getvalue() == "move: PeerLost: 1.00 MiB of 4.00 MiB, 1 of 4 rounds, 100.00 MiB/s\n"
    with progress_bar(Console(file=(empty := io.StringIO()))):
        pass
    assert empty.getvalue() == ""


def test_on_a_terminal_the_last_picture_has_all_figures_and_no_thread_stays() -> None:
    before = threading.active_count()
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    with progress_bar(console) as tell:
        for event in scale_out():
            tell(event)
    last = file.getvalue().rpartition("move")[2]
    assert "7.00 MiB of 7.00 MiB, 4 of 4 rounds, 159.09 MiB/s" in last
    assert threading.active_count() == before
