"""The command line on what it is written to: a full disk, a pipe that nobody reads, an encoding of ASCII."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = ["--layers", "8", "--hidden", "64", "--heads", "8", "--vocab", "100"]


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """A command line in a process of its own, whose words come as bytes."""
    argv = [sys.executable, "-c", "from shardshift.cli import main; main()", *arguments]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    done: subprocess.CompletedProcess[bytes] = subprocess.run(argv, timeout=60, check=False, **streams)
    return done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full is Linux's")
@pytest.mark.parametrize("more", [["--json"], []])
def test_a_full_disk_is_one_line_on_stderr_and_1(more: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = command("plan", "pp2dp2", "pp2", *SMALL, *more, stdout=full)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].startswith("error: the output: ")
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes of POSIX")
@pytest.mark.parametrize("more", [["--json"], []])
def test_a_pipe_that_nobody_reads_ends_the_command_in_silence_as_it_ends_cat(more: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as pipe:
        done = command("explain", "pp2dp2", "pp2", *SMALL, *more, stdout=pipe)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_an_encoding_of_ascii_gets_ascii() -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    for asked in ("plan", "explain"):
        done = command(asked, "pp2", "pp4", *SMALL, "--devices-per-node", "2", env=ascii_only)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"pp2tp1dp1 -> pp4tp1dp1" in done.stdout
        done.stdout.decode("ascii")
    refused = command("plan", "pp2", "✓", env=ascii_only)
    assert refused.returncode == 3
    refused.stderr.decode("ascii")
