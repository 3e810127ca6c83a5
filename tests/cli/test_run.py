"""``shardshift run`` in processes of its own, held against torchrun, and what it makes of its options."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch.distributed as dist
from tests.cli.shell import Shell, make_shell
from tests.elastic.test_launchers import PROGRAM, environment

import shardshift
from shardshift.cli.run import Asked, _command, _control, _endpoint, _hosts, _name, _nodes, _per_node, run_node
from shardshift.elastic.agent.roster import Terms
from shardshift.elastic.agent.store import open_store
from shardshift.elastic.operating.jobfile import find
from shardshift.transport.nccl import require_settings
from shardshift.values import Infeasible, ShardshiftError

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[2]
SHARDSHIFT = [sys.executable, "-c", "from shardshift.cli import main; main()", "run", "--control", "none"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SHOW = """
import json, os, sys
os.write(1, (json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n").encode())
"""
# A job's own: its name, its store, its files; and a variable by which torch's launcher sets up its own signals.
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
# Where torchrun lets NCCL end the survivors of a lost rank.
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=variables(), capture_output=True, text=True, timeout=90)


def variables() -> dict[str, str]:
    """This process's, without those that a launcher sets unless the user has."""
    return {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}


def shown(folder: Path, launcher: Sequence[str], *command: str) -> list[Any]:
    done = run(folder, *launcher, *command)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: int(line[1]["RANK"]))


def test_workers_find_what_they_find_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    command = ("--standalone", "--nproc_per_node", "2", "show.py", "--nnodes", "7", "${local_rank}", "--", "-m")
    ours, theirs = (shown(tmp_path, launcher, *command) for launcher in (SHARDSHIFT, TORCHRUN))
    assert [arguments for arguments, _ in ours] == [arguments for arguments, _ in theirs]
    for (_, our), (_, their) in zip(ours, theirs, strict=True):
        assert OWN & our.keys() == OWN & their.keys() - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert our.pop("SHARDSHIFT_JOB").startswith("show-")
        require_settings(our)
        apart = OWN | NCCL
        assert {name: our[name] for name in our.keys() - apart} == {name: their[name] for name in their.keys() - apart}


def test_streams_are_copied_and_kept_as_torchrun_does(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import sys; print('hello'); print('world', file=sys.stderr)")
    done = run(tmp_path, *SHARDSHIFT, "--tee", "1", "-r", "3", "--log-dir", "logs", "--role", "trainer", "-m", "hello")
    assert (done.returncode, done.stdout) == (0, "[trainer0]:hello\n"), done.stderr
    assert [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/0/stderr.log")] == ["world\n"]


def test_a_script_that_fails_is_one_error_and_1(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(7)")
    done = run(tmp_path, *SHARDSHIFT, "fail.py")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: node 0: device 0 (process ")
    assert "ended with exit code 7; what to do: " in line


def test_sigterm_reaches_the_script_of_a_node_that_is_alone(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal; print('there', flush=True); signal.pause()")
    command = [*SHARDSHIFT, "wait.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.slow
def test_a_session_changes_its_layout_under_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run(tmp_path, *SHARDSHIFT, "--nproc-per-node", "3", "train.py")
    assert done.returncode == 0, done.stderr
    finished = sorted(line for line in done.stdout.splitlines() if line.startswith("finished"))
    assert finished == ["finished pp2tp1dp1", "finished pp2tp1dp1", "finished standing by"]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return make_shell(monkeypatch, capsys)


def asked(**more: Any) -> Asked:
    return Asked("train.py", ("--steps", "3"), **more)


@pytest.mark.parametrize(("text", "nodes"), [("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_numbers_of_nodes(text: str, nodes: tuple[int, int]) -> None:
    assert _nodes(text) == nodes


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"nnodes": "2"}, "--rdzv-endpoint HOST:PORT"),
        ({"rdzv_backend": "etcd"}, "--rdzv-backend etcd"),
        ({"rdzv_conf": "is_host=perhaps"}, "is_host=perhaps"),
        ({"rdzv_endpoint": "host:port"}, "give --rdzv-endpoint HOST:PORT"),
        ({"module": True, "no_python": True}, "exclude one another"),
        ({"control": "here"}, "--control 'here'"),
        ({"control": "127.0.0.1:99999"}, "--control '127.0.0.1:99999'"),
        ({"tee": "9"}, "--tee 9"),
        ({"local_ranks_filter": "x"}, "--local-ranks-filter x"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(more: dict[str, Any], text: str) -> None:
    with pytest.raises(Infeasible, match=r"(?is)what to do: ") as refused:
        run_node(asked(**more))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--nnodes", text) for text in ("abc", "0", "3:2", "1:2:3")]
    + [("--nproc-per-node", text) for text in ("abc", "0")],
)
def test_a_number_that_is_none_is_wrong_usage(shell: Shell, option: str, text: str) -> None:
    done = shell("run", option, text, "train.py")
    assert done.code == 2
    assert option in done.err
    assert f"'{text}' is n" in done.err


def test_the_version_is_that_of_the_package(shell: Shell) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = shell("--version")
    assert (done.code, done.out) == (0, f"shardshift {version}\n")
    assert shardshift.__version__ == version


@pytest.mark.parametrize(
    ("host", "reason"),
    [("nowhere.invalid", "no host is known by the name 'nowhere.invalid'"), ("127.0.0.1", "nothing")],
)
def test_who_waits_for_a_store_says_at_once_for_what(host: str, reason: str) -> None:
    class Enough(Exception):
        pass

    said: list[str] = []

    def pause() -> None:
        raise Enough

    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"{host}:{free.getsockname()[1]}"
    with pytest.raises(Enough):
        open_store(
            Terms("job", 1, 1, 1), endpoint, hosts=False, timeout_s=600, silence_s=5, say=said.append, pause=pause
        )
    (line,) = said
    assert line.startswith(f"waits up to 600 s for the job's store at {endpoint}: {reason}")
    with pytest.raises(ShardshiftError, match=f"{reason}.*what to do"):
        open_store(
            Terms("job", 1, 1, 1), endpoint, hosts=False, timeout_s=-1, silence_s=5, say=said.append, pause=pause
        )


def test_the_command_of_a_worker_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "python9")
    assert _command(asked()) == ("python9", "-u", "train.py", "--steps", "3")
    assert _command(asked(module=True)) == ("python9", "-u", "-m", "train.py", "--steps", "3")
    assert _command(asked(no_python=True)) == ("train.py", "--steps", "3")


def test_a_job_has_its_scripts_name_unless_it_has_one() -> None:
    assert _name("/a/b/train gpt.py", own=False) == "train-gpt"
    assert _name("package.train", own=False) == "package"
    assert _name("train.py", own=True) != _name("train.py", own=True)
    assert _name("??.py", own=False) == "job"


def test_without_an_endpoint_the_store_is_this_nodes_own() -> None:
    assert _endpoint(asked(), 1) == ("localhost:0", True)
    assert _endpoint(asked(standalone=True, rdzv_endpoint="a:1"), 1) == ("localhost:0", True)
    assert _endpoint(asked(rdzv_endpoint="a:1"), 2) == ("a:1", False)


def test_who_hosts_the_store_can_be_said_as_to_torchrun() -> None:
    assert [_hosts(text) for text in ("", "is_host=1", "timeout=3,is_host=false")] == [None, True, False]


def test_as_many_workers_as_processors() -> None:
    assert _per_node("cpu") == len(os.sched_getaffinity(0))


def test_the_host_of_the_store_serves_the_jobs_endpoint(tmp_path: Path) -> None:
    control = _control(asked(runtime_dir=tmp_path / "jobs"), "train")
    assert control is not None
    with control(dist.HashStore()):
        contact = find(tmp_path / "jobs", "train")
        address = urlsplit(contact.url)
        assert address.hostname is not None
        line = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        line.request("GET", "/requests/1", headers={"Authorization": f"Bearer {contact.token}"})
        assert line.getresponse().status == 404
        line.close()
    with pytest.raises(Infeasible, match="no job named 'train'"):
        find(tmp_path / "jobs", "train")


def test_without_an_address_there_is_no_endpoint() -> None:
    assert _control(asked(control="none"), "train") is None
