"""``shardshift resize`` and ``shardshift status`` as they are typed, against an endpoint of this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.cli.shell import Shell, make_shell

from shardshift.cli.control import runtime_folder
from shardshift.elastic.operating import endpoint as endpoint_module
from shardshift.elastic.operating.board import STATUS_KEY, Board, BoardSource
from shardshift.elastic.operating.endpoint import Endpoint
from shardshift.elastic.operating.jobfile import JobFile
from shardshift.elastic.operating.request import Request
from shardshift.values import Infeasible, ParallelConfig

STATUS = {
    "iteration": 120,
    "config": "pp4tp2dp1",
    "devices": [0, 1, 2, 3, 4, 5, 6, 7],
    "generation": 3,
    "era": 1,
    "standby": [],
    "step_s": 0.5,
    "last_change": {"phases_s": {"plan": 0.01, "move": 0.25}, "moved_bytes": 3 * 2**20},
    "changes": {"done": 3, "refused": 2},
    "tolerates": {"param": 1, "optimizer": 0},
}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    """Run a command line in this process."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return make_shell(monkeypatch, capsys)


def policy(devices: Sequence[int]) -> ParallelConfig:
    if len(devices) % 2:
        raise Infeasible(f"batch 8 on {len(devices)} devices; what to do: ask for an even number")
    return ParallelConfig(pp=2, dp=len(devices) // 2)


@dataclass
class Led(Board):
    """A board whose lead answers as soon as something is posted; or never, if it is asleep."""

    store: dist.Store
    asleep: bool = False
    source: BoardSource = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(self.store)
        self.source = BoardSource(Board(self.store), lambda: range(8), policy)

    def post(self, request: Request) -> int:
        number = super().post(request)
        if not self.asleep and (resize := self.source.upcoming(10)) is not None:
            self.source.settled(resize, None)
        return number


@dataclass
class Served:
    board: Led
    file: JobFile
    endpoint: Endpoint


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A job named ``night`` in a runtime folder."""
    monkeypatch.setattr(endpoint_module, "_POLL_S", 0.005)
    board = Led(dist.HashStore())
    with JobFile.claim(tmp_path / "shardshift", "night") as file, Endpoint(board, file.token) as endpoint:
        file.publish(endpoint.url)
        yield Served(board, file, endpoint)


def test_a_layout_is_asked_for_and_waited_for(shell: Shell, served: Served) -> None:
    done = shell("resize", "night", "--to", "pp4tp2dp1")
    assert (done.code, done.err) == (0, "")
    assert done.out == "request 1 of job night is queued\ndone: pp4tp2dp1\n"
    assert served.board.request(1) == Request(to=ParallelConfig(pp=4, tp=2))


def test_a_number_of_devices_is_the_policys_choice(shell: Shell, served: Served) -> None:
    done = shell("resize", "night", "--devices", "6", "--json")
    assert done.code == 0
    assert json.loads(done.out) == {
        "request": 1,
        "state": "done",
        "reason": "",
        "iteration": 12,
        "config": "pp2tp1dp3",
    }
    assert "done: pp2tp1dp3" in done.err


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--devices", "5"], "batch 8 on 5 devices; what to do: ask for an even number"),
        (["--to", "pp16"], "pp16tp1dp1 needs 16 devices, there are 8 (0-7)"),
    ],
)
def test_what_cannot_be_is_refused_with_3_and_the_reason(
    shell: Shell, served: Served, asked: list[str], reason: str
) -> None:
    done = shell("resize", "night", *asked, "--json")
    assert done.code == 3
    assert reason in done.err
    assert "the job trains on" in done.err
    assert json.loads(done.out)["state"] == "refused"


def test_who_does_not_wait_gets_the_number(shell: Shell, served: Served) -> None:
    served.board.asleep = True
    done = shell("resize", "night", "--to", "pp4", "--no-wait", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"request": 1, "state": "queued"})
    assert shell("resize", "night", "--to", "pp8", "--no-wait").out == "request 2 of job night is queued\n"


def test_a_wait_that_is_over_leaves_the_request_in_the_queue(shell: Shell, served: Served) -> None:
    served.board.asleep = True
    done = shell("resize", "night", "--to", "pp4", "--timeout", "0")
    assert done.code == 1
    assert "request 1 of job night is still queued after 0 s; it stays in the queue" in done.err
    assert list(served.board.pending()) == [1]


@pytest.mark.parametrize("asked", [[], ["--to", "pp2", "--devices", "2"], ["--devices", "0"], ["--devices", "x"]])
def test_wrong_usage_is_2(shell: Shell, served: Served, asked: list[str]) -> None:
    assert shell("resize", "night", *asked).code == 2
    assert served.board.count() == 0


def test_a_layout_that_is_none_is_3_before_anything_is_asked(shell: Shell, served: Served) -> None:
    done = shell("resize", "night", "--to", "ppx")
    assert done.code == 3
    assert "not a parallel configuration" in done.err
    assert served.board.count() == 0


def test_the_status_is_a_table_or_the_record(shell: Shell, served: Served) -> None:
    early = shell("status", "night")
    assert early.code == 1
    assert "job night: it does not train yet; what to do" in early.err
    served.board.store.set(STATUS_KEY, json.dumps(STATUS))
    done = shell("status", "night")
    assert done.code == 0
    rows = dict(line.split(None, 1) for line in done.out.splitlines()[1:] if line.strip())
    assert "Job night" in done.out
    assert rows["layout"].strip() == "pp4tp2dp1"
    assert rows["devices"].strip() == "8: 0, 1, 2, 3, 4, 5, 6, 7"
    assert rows["standby"].strip() == "none"
    assert rows["step"].strip() == "500 ms"
    assert "260 ms (plan 10 ms, move 250 ms)" in done.out
    assert "3.0 MiB" in done.out
    assert "param 1, optimizer 0 (losses)" in done.out
    as_json = shell("status", "night", "--json")
    assert json.loads(as_json.out) == STATUS
    assert "pp4tp2dp1" in as_json.err


def test_a_record_that_says_little_is_a_short_table(shell: Shell, served: Served) -> None:
    served.board.store.set(STATUS_KEY, json.dumps({"config": "pp1tp1dp1", "changes": 2, "standby": 3}))
    done = shell("status", "night")
    assert [line.split() for line in done.out.splitlines() if line.strip()][1:] == [
        ["layout", "pp1tp1dp1"],
        ["standby", "3"],
        ["changes", "2"],
    ]


@pytest.mark.parametrize("command", [["status"], ["resize", "--to", "pp2"]])
def test_a_job_that_is_not_there_is_3_and_those_that_are_are_named(
    shell: Shell, served: Served, command: list[str]
) -> None:
    done = shell(*command, "day")
    assert done.code == 3
    assert "no job named 'day' runs here" in done.err
    assert "that do: night" in done.err


def test_an_endpoint_that_is_gone_is_1_and_no_traceback(shell: Shell, served: Served) -> None:
    served.endpoint.close()
    done = shell("status", "night")
    assert done.code == 1
    assert f"job night does not answer at {served.endpoint.url} (ConnectionRefusedError" in done.err
    assert "Traceback" not in done.err


def test_a_job_that_was_started_again_meanwhile_has_another_token(shell: Shell, served: Served) -> None:
    served.file.token = "x" * 43
    served.file.publish(served.endpoint.url)
    done = shell("status", "night")
    assert done.code == 1
    assert "a token is needed" in done.err


def test_another_runtime_folder_can_be_named(shell: Shell, served: Served, tmp_path: Path) -> None:
    assert shell("status", "night", "--runtime-dir", str(tmp_path / "elsewhere")).code == 3
    served.board.store.set(STATUS_KEY, json.dumps(STATUS))
    assert shell("status", "night", "--runtime-dir", str(tmp_path / "shardshift")).code == 0


def test_without_a_runtime_folder_of_the_system_there_is_one_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder(None).name == f"shardshift-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert runtime_folder(None) == Path("/run/user/1000/shardshift")
    assert runtime_folder(Path("/x")) == Path("/x")


def test_no_proxy_of_the_environment_gets_the_token(
    shell: Shell, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert shell("resize", "night", "--to", "pp4").code == 0


def test_the_token_is_in_no_process_list(served: Served, tmp_path: Path) -> None:
    """The command as a process of its own: its arguments and environment, and all that it says."""
    served.board.asleep = True
    argv = [sys.executable, "-c", "from shardshift.cli import main; main()", "resize", "night", "--to", "pp4"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    with process, process.stdout as said:
        first = said.readline()  # the token has been used
        lists = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ", "comm"))
        process.terminate()
        rest = said.read()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert first == b"request 1 of job night is queued\n"
    assert served.file.token.encode() not in lists + first + rest
