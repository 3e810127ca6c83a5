"""What docs/elastic.md has a reader type is typed here, in one shell, block by block; and its Python is run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from tests.elastic.test_joining import free_endpoint
from tests.elastic.test_launchers import environment

from shardshift import Infeasible, Member, ParallelConfig, Resize, ResizeReport, ResizeSource, Topology

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/elastic.md").read_text()
WAIT_S = 90.0


class Shell:
    """A shell in a folder of its own, and what it and its jobs write there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._typed = folder, 0
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "bin").mkdir()
        command = folder / "bin/shardshift"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from shardshift.cli import main; main()" "$@"\n')
        command.chmod(0o755)
        variables = environment(XDG_RUNTIME_DIR=str(folder), PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
        with (folder / "shell.log").open("w") as said:
            self.process = subprocess.Popen(
                ["bash"],
                cwd=folder,
                env=variables,
                text=True,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def type(self, block: str) -> None:
        """Type a block, and wait until the shell is through with it."""
        assert self.process.stdin is not None
        self._typed += 1
        self.process.stdin.write(f"{block}\necho end of block {self._typed}\n")
        self.process.stdin.flush()
        self.see("shell.log", f"end of block {self._typed}\n")

    def see(self, file: str, words: str) -> None:
        """Wait until a file has these words, after what was seen in it before."""
        until_s = time.monotonic() + WAIT_S
        while words not in (said := self.read(file)):
            assert time.monotonic() < until_s, f"no {words!r} in {file}: {said[-2000:]}\n{self.read('shell.log')}"
            time.sleep(0.05)

    def read(self, file: str) -> str:
        path = self._folder / file
        return path.read_text() if path.exists() else ""


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    opened = Shell(folder)
    try:
        yield opened
    finally:
        os.killpg(opened.process.pid, signal.SIGKILL)  # agents with it, and workers with these
        opened.process.wait()


@pytest.mark.timeout(300)
def test_the_guide_leads_through_a_job_that_grows_changes_loses_a_node_and_lets_one_go(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    first, *blocks = re.findall(r"```sh\n(.*?)```", PAGE.partition("## Try it")[2].partition("\n## ")[0], re.DOTALL)
    join, ask, file, leave, third, kill, end = blocks
    with shell(tmp_path) as terminal:
        terminal.type(first.replace("localhost:29400", endpoint))
        terminal.see("node0.log", "step 1 in pp1tp1dp1: loss 5.")
        terminal.type(join)
        terminal.see("node1.log", " in pp1tp1dp2")
        terminal.type(ask)
        said = terminal.read("shell.log")
        for words in ("Job guide", "request 1 of job guide is queued", "done: pp2tp1dp1", "refused, status 3"):
            assert words in said
        assert "pp8tp1dp1 needs 8 devices, there are 2 (0-1)" in said
        terminal.see("node1.log", " in pp2tp1dp1")
        so_far = ["pp1tp1dp2", "pp2tp1dp1"]
        changes(terminal, *so_far)
        for block, config in ((file, "pp1tp1dp2"), (f"{leave}\nwait $second; echo second ended with $?", "pp1tp1dp1")):
            terminal.type(block)
            so_far.append(config)
            changes(terminal, *so_far)
        assert "second ended with 0" in terminal.read("shell.log")
        terminal.type(third)
        terminal.see("node2.log", " in pp1tp1dp2")
        terminal.type(kill)
        changes(terminal, *so_far, "pp1tp1dp2", "pp1tp1dp1")
        terminal.type(f"{end}\nwait $first; echo first ended with $?")
        assert f"first ended with {128 + signal.SIGINT}" in terminal.read("shell.log")


def changes(terminal: Shell, *configs: str) -> None:
    """Wait until the first node has logged so many changes, and they are to these configurations."""
    until_s = time.monotonic() + WAIT_S
    while True:
        lines = terminal.read("events/device0.jsonl").splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [event["curr"] for event in events if event["event"] == "changed"]
        if len(found) >= len(configs):
            assert found == [*configs]
            return
        assert time.monotonic() < until_s, (found, terminal.read("shell.log"))
        time.sleep(0.05)


def python(words: str) -> str:
    """The one block of Python with these words."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if words in block)
    return str(found)


def run(words: str, **names: Any) -> dict[str, Any]:
    exec(compile(python(words), "elastic.md", "exec"), names)
    return names


def test_every_block_of_python_is_run_here() -> None:
    assert len(re.findall("```python", PAGE)) == 4


def test_the_source_of_the_guide_takes_layouts_from_the_comment_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comment, squeue = tmp_path / "comment", tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {comment}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    comment.write_text("(null)\n")
    source: ResizeSource = run("class SlurmComment")["SlurmComment"](4711, every_s=0.05)

    def announced(iteration: int, text: str) -> Resize | None:
        """What it announces for a comment, asked step by step until it is about that."""
        part = tmp_path / "part"
        part.write_text(f"{text}\n")
        part.rename(comment)
        until_s = time.monotonic() + WAIT_S
        while (found := source.upcoming(iteration)) is None and text not in capsys.readouterr().out:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return found

    resize = announced(7, "pp4tp2dp1")
    assert resize == Resize(9, ParallelConfig.parse("pp4tp2dp1"))
    assert "--jobs=4711" in (tmp_path / "asked").read_text()
    assert source.upcoming(8) == source.upcoming(9) == resize  # the same until it is settled
    source.settled(resize, Infeasible("too few devices"))
    assert "pp4tp2dp1 is refused" in capsys.readouterr().out
    assert source.upcoming(9) is None
    assert announced(9, "please do not kill") is None
    assert announced(10, "pp2tp2dp2") == Resize(12, ParallelConfig.parse("pp2tp2dp2"))
    assert source.upcoming(13) is None  # its iteration has passed without it


def test_without_shardshift_run_a_signal_frees_a_nodes_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: list[Resize | None] = []

    def member(*, devices_per_node: int) -> Member:
        return Member(dist.PrefixStore("job", store), 8, Topology.of(16, devices_per_node))

    def train(member: Member, resizes: ResizeSource) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        until_s = time.monotonic() + WAIT_S
        while (resize := resizes.upcoming(3)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        told.append(resize)

    monkeypatch.setattr(Member, "from_launcher", member)
    import shardshift

    run("posting_on(", ss=shardshift, train=train)
    assert told == [Resize(5, ParallelConfig.parse("pp2tp2dp2"), tuple(range(8)))]


def test_logs_and_scalars_of_the_guide_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("shardshift")
    before = logger.level
    handler = run("JsonLines()")["handler"]
    logger.removeHandler(handler)
    logger.setLevel(before)
    handler.close()
    (line,) = map(json.loads, Path("events.jsonl").read_text().splitlines())
    assert (line["job"], line["iteration"], line["event"], line["seconds"]) == ("guide", 12, "checkpoint", 3.2)

    written: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written[tag] = (value, step)

    configs = ParallelConfig.parse("pp2"), ParallelConfig.parse("pp1dp2")
    report = ResizeReport(*configs, 40, (0, 1), "", 10, 5, 0, 5, 5, {"move": 0.25, "rebuild": 0.5})

    run("Scalars(writer)", writer=Writer(), session=SimpleNamespace(reports=[report]))
    assert written["shardshift/pause_s"] == (0.75, 40)
    assert written["shardshift/pause/move_s"] == (0.25, 40)
