from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from shardshift.elastic.operating.board import Board, BoardSource
from shardshift.elastic.operating.request import Request
from shardshift.elastic.operating.sources import FileSource, Sources, posting_on
from shardshift.elastic.resize import Resize, Script
from shardshift.values import Infeasible, ParallelConfig, ShardshiftError


class Watched:
    """A file and who watches it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "layout"
        self.store = dist.HashStore()
        self.board = Board(self.store)
        self.said: list[str] = []
        self.source = self.another()

    def another(self) -> FileSource:
        """As another rank has it."""
        return FileSource(self.path, Board(self.store), self.said.append)

    def write(self, content: str | bytes) -> None:
        """By rename, as it should be."""
        part = self.path.with_suffix(".part")
        part.write_bytes(content if isinstance(content, bytes) else content.encode())
        part.rename(self.path)

    def asked(self) -> list[Request]:
        return [self.board.request(number) for number in range(1, self.board.count() + 1)]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


# A watched file


@pytest.mark.parametrize(
    ("content", "request_"),
    [
        ("pp4tp2dp1\n", Request(to=ParallelConfig(pp=4, tp=2))),
        ("devices 6\n", Request(devices=6)),
        ("Devices: 6\r\n", Request(devices=6)),
        ("# the night shift\n\n  devices=6  # from 22:00\n", Request(devices=6)),
    ],
)
def test_a_line_asks_for_a_layout_or_a_number_of_devices(watched: Watched, content: str, request_: Request) -> None:
    assert watched.source.look() is None
    watched.write(content)
    assert watched.source.look() == 1
    assert watched.source.look() is None
    assert watched.asked() == [request_]
    assert watched.said == []


def test_a_file_that_is_replaced_asks_again(watched: Watched) -> None:
    for devices in (6, 4, 6):
        watched.write(f"devices {devices}\n")
        watched.source.look()
    assert [request.devices for request in watched.asked()] == [6, 4, 6]


def test_a_new_lead_does_not_ask_again_for_what_an_earlier_one_asked(watched: Watched) -> None:
    watched.write("devices 6\n")
    assert [watched.source.look(), watched.another().look()] == [1, None]
    watched.write("devices 4\n")
    assert watched.another().look() == 2


@pytest.mark.parametrize("content", ["devices\n", "pp4\npp8\n", "devices 6 nodes\n", b"\xff\xfe\n", "x" * 5000, "\0\n"])
def test_what_cannot_be_understood_is_said_once_and_ignored(watched: Watched, content: str | bytes) -> None:
    watched.write(content)
    for _ in range(4):
        assert watched.source.look() is None
    assert len(watched.said) == 1
    assert str(watched.path) in watched.said[0]
    assert watched.asked() == []
    watched.write("devices 6\n")
    assert watched.source.look() == 1


def test_a_line_without_an_end_is_taken_once_it_stays_as_it_is(watched: Watched) -> None:
    with watched.path.open("w") as file:  # not by rename, and slowly
        file.write("devices 1")
        file.flush()
        assert watched.source.look() is None
        file.write("2")
        file.flush()
        assert watched.source.look() is None
        file.write("\n")
    assert watched.source.look() == 1
    assert watched.asked() == [Request(devices=12)]
    watched.write("devices 7")
    assert [watched.source.look(), watched.source.look()] == [None, 2]


def test_a_file_that_is_emptied_or_removed_asks_for_nothing(watched: Watched) -> None:
    watched.write("")
    assert watched.source.look() is None
    watched.path.unlink()
    assert watched.source.look() is None
    assert (watched.asked(), watched.said) == ([], [])


def test_what_is_no_plain_file_is_said_once_and_costs_no_descriptor(watched: Watched) -> None:
    os.mkfifo(watched.path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert watched.source.look() is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert watched.said == [f"{watched.path}: it is no plain file; it is looked at again"]


def test_a_file_that_changes_while_it_is_read_is_read_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.write("devices 6\n")
    read = os.read

    def slow(descriptor: int, length: int) -> bytes:
        content = read(descriptor, length)
        with watched.path.open("a") as file:
            file.write("devices 7\n")
        return content

    monkeypatch.setattr(os, "read", slow)
    assert watched.source.look() is None
    monkeypatch.undo()
    watched.source.look()
    assert watched.asked() == []
    assert "2 lines" in watched.said[0]


def test_what_a_file_asks_for_comes_through_the_board(watched: Watched) -> None:
    source = Sources(watched.source, BoardSource(watched.board, lambda: range(8)))
    assert source.upcoming(3) is None
    watched.write("pp4tp2dp1\n")
    resize = source.upcoming(4)
    assert resize == Resize(6, ParallelConfig(pp=4, tp=2))
    source.settled(resize, None)
    answer = watched.board.answer(1)
    assert answer is not None
    assert answer.state == "done"


# Several sources


def test_of_several_sources_the_change_that_is_due_first_comes_first(watched: Watched) -> None:
    board = BoardSource(watched.board, lambda: range(8))
    source = Sources(Script({100: "pp8"}), board, Script({12: "pp2"}))
    assert source.upcoming(9) == Resize(12, ParallelConfig(pp=2))
    watched.board.post(Request(to=ParallelConfig(pp=4)))
    assert source.upcoming(9) == Resize(11, ParallelConfig(pp=4))
    source.settled(Resize(11, ParallelConfig(pp=4)), None)
    assert source.upcoming(11) == Resize(12, ParallelConfig(pp=2))
    assert source.upcoming(13) == Resize(100, ParallelConfig(pp=8))
    assert Sources().upcoming(0) is None


def test_of_changes_that_are_due_at_once_the_first_source_comes_first() -> None:
    assert Sources(Script({5: "pp2"}), Script({5: "pp4"})).upcoming(0) == Resize(5, ParallelConfig(pp=2))


def test_all_sources_hear_what_came_of_a_change() -> None:
    class Told:
        alike = False

        def __init__(self) -> None:
            self.heard: list[tuple[Resize, ShardshiftError | None]] = []

        def upcoming(self, iteration: int) -> Resize | None:
            return None

        def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
            self.heard.append((resize, refusal))

    first, second = Told(), Told()
    news = (Resize(1, ParallelConfig()), Infeasible("no"))
    Sources(first, second).settled(*news)
    assert first.heard == second.heard == [news]


# A signal

LEAVE = Request(leave=(4, 5), within_s=25.0)


def test_a_signal_posts_a_request_once(watched: Watched) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with posting_on((signal.SIGUSR1, signal.SIGUSR2), watched.board, LEAVE, watched.said.append) as posted:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert posted.wait(10)
        os.kill(os.getpid(), signal.SIGUSR2)
    assert watched.asked() == [LEAVE]
    assert watched.said == [f"signal {int(signal.SIGUSR1)}: posted as request 1"]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_without_a_signal_nothing_is_posted(watched: Watched) -> None:
    with posting_on((signal.SIGUSR1,), watched.board, LEAVE):
        pass
    assert watched.asked() == []


def test_a_store_that_fails_is_said(watched: Watched) -> None:
    class Broken:
        def add(self, key: str, value: int) -> int:
            raise dist.DistStoreError("gone")

    board = Board(Broken())  # type: ignore[arg-type]
    with posting_on((signal.SIGUSR1,), board, LEAVE, watched.said.append) as posted:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert posted.wait(10)
    assert watched.said == [f"signal {int(signal.SIGUSR1)}: could not be posted: DistStoreError: gone"]
