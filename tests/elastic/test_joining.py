"""A real job under ``shardshift run``: nodes join, leave and are lost, while it trains."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.elastic.test_launchers import environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/elastic/scripts/train.py"
MAIN = [sys.executable, "-c", "from shardshift.cli import main; main()"]
WAIT_S = 100.0


class Node:
    """One agent, and the lines that its workers print."""

    def __init__(self, folder: Path, *options: str, stop: Path, start: str, script: Path = SCRIPT) -> None:
        command = [*MAIN, "run", *options, str(script), start, str(stop)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=variables(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def says(self, *words: str) -> str:
        """Wait for a line with these words."""
        while True:
            line = self._queue.get(timeout=WAIT_S)
            assert line is not None, "".join(self.lines)
            self.lines.append(line)
            if all(word in line for word in words):
                return line

    def end(self) -> int:
        while (line := self._queue.get(timeout=WAIT_S)) is not None:
            self.lines.append(line)
        return self.process.wait(WAIT_S)


def variables(folder: Path) -> dict[str, str]:
    return environment() | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}


class Job:
    def __init__(self, folder: Path, start: str) -> None:
        self._folder, self._start, self.stop = folder, start, folder / "stop"
        self.nodes: list[Node] = []
        self._endpoint = ""

    def node(self, *options: str) -> Node:
        meet = ("--rdzv-endpoint", self._endpoint) if self._endpoint else ("--rdzv-endpoint", free_endpoint())
        self._endpoint = meet[1]
        node = Node(
            self._folder,
            *("--nnodes", "1:3", "--nproc-per-node", "2", "--job-name", "toy", *meet, *options),
            stop=self.stop,
            start=self._start,
        )
        self.nodes.append(node)
        return node

    @property
    def port(self) -> int:
        """Of the first store."""
        return int(self._endpoint.rpartition(":")[2])

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MAIN, *command], env=variables(self._folder), capture_output=True, text=True, timeout=WAIT_S
        )


def free_endpoint() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def running(folder: Path, start: str) -> Iterator[Job]:
    job = Job(folder, start)
    try:
        yield job
    finally:
        for node in job.nodes:
            node.process.kill()
            node.process.wait()


def pids(lines: Sequence[str]) -> dict[str, set[str]]:
    """Per rank every process id that it told."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if " trains " in line:
            rank, _, rest = line.partition(":")
            found.setdefault(rank, set()).add(rest.split()[-1])
    return found


@pytest.mark.timeout(180)
def test_a_node_joins_is_asked_to_leave_and_nobody_is_started_again(tmp_path: Path) -> None:
    import json

    with running(tmp_path, "pp2") as job:
        first = job.node()
        first.says("0: trains pp2tp1dp1 exact")
        second = job.node()
        first.says("0: trains pp2tp1dp2 exact")
        second.says("trains pp2tp1dp2 exact")
        asked = job.ask("resize", "toy", "--to", "pp1tp2dp2")
        assert asked.returncode == 0, asked.stdout + asked.stderr
        first.says("0: trains pp1tp2dp2 exact")
        refused = job.ask("resize", "toy", "--to", "pp4tp2dp1")
        assert refused.returncode == 3
        status = json.loads(job.ask("status", "toy", "--json").stdout)
        assert (status["config"], sorted(status["devices"]), status["changes"]) == (
            "pp1tp2dp2",
            [0, 1, 2, 3],
            {"done": 2, "refused": 0},
        )
        second.process.send_signal(signal.SIGTERM)
        first.says("0: trains pp1tp2dp1 exact")
        assert second.end() == 0, "".join(second.lines)
        job.stop.touch()
        assert first.end() == 0, "".join(first.lines)
        assert all(len(of) == 1 for of in pids(first.lines).values())
        assert "WRONG" not in "".join([*first.lines, *second.lines])
