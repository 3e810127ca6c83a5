from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.read_trace import named, read
from typer.testing import CliRunner

from shardshift.cli import selftest
from shardshift.cli.app import app
from shardshift.engine import Sink
from shardshift.transport import Message, TransportError
from shardshift.values import Infeasible

RUNNER = CliRunner()


@pytest.mark.parametrize("path", ["--same-host", "--no-same-host"])
def test_it_passes_on_this_machine(path: str) -> None:
    done = RUNNER.invoke(app, ["selftest", path, "--devices", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert [check["fault"] for check in found["checks"]] == [""] * 7
    pairs = {(one["source"], one["target"]) for one in found["bandwidth"]}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(one["bytes_per_s"] > 0 for one in found["bandwidth"])
    assert {(one["source"], one["target"]) for one in found["links"]} == pairs
    assert all(one["moved_bytes"] > 0 and one["busy_s"] > 0 for one in found["links"])
    assert "device 0   device 1" in done.stderr


def test_a_trace_has_the_moves_of_all_processes_and_as_many_bytes_as_the_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("perfetto")
    path = tmp_path / "moves.pftrace"
    assert selftest.run_and_print("gloo", 2, same_host=True, as_json=True, trace=path)
    tracks = read(path.read_bytes())
    received_bytes = 0
    for device in range(2):
        (track,) = named(tracks, device)
        names = [name for *_, name in sorted(track.slices)]
        assert names == ["plan", "agree", "move", "commit"] * 3
        told = [one for lane in named(tracks, device, "rounds") for one in lane.told]
        received_bytes += sum(one["received_bytes"] for one in told)
    links = json.loads(capsys.readouterr().out)["links"]
    assert received_bytes == sum(one["moved_bytes"] for one in links) > 0


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "LocalJob", None)
    with pytest.raises(Infeasible, match="cannot write the trace"):
        selftest.run_and_print("gloo", 2, same_host=True, as_json=True, trace=tmp_path)
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(Infeasible, match="pip install"):
        selftest.run_and_print("gloo", 2, same_host=True, as_json=True, trace=tmp_path / "moves.pftrace")


def test_the_command_takes_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("perfetto")
    taken = []

    def passes(backend: str, devices: int | None, *, same_host: bool, sink: Sink) -> selftest.Outcome:
        taken.append(sink)
        return selftest.Outcome(backend, 2, ())

    monkeypatch.setattr(selftest, "run_selftest", passes)
    done = RUNNER.invoke(app, ["selftest", "--trace", str(tmp_path / "moves.pftrace")])
    assert done.exit_code == 0, done.output
    assert "moves.pftrace" in done.output.replace("\n", "")
    assert len(taken) == 1
    assert isinstance(RUNNER.invoke(app, ["selftest", "--trace", str(tmp_path)]).exception, Infeasible)


def test_what_is_wrong_is_told_by_name_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: str, devices: int | None, *, same_host: bool, sink: Sink) -> selftest.Outcome:
        heard = selftest._Heard()
        heard.take(0, selftest.Check("messages arrive", "", 0.5))
        heard.take(1, selftest.Check("messages arrive", "wrong bytes: 7 bytes from 0", 0.25))
        heard.take(2, selftest.Check("messages arrive", "TransportError: device 1 is gone", 0.75))
        heard.take(1, "a notice")
        return selftest.Outcome(backend, 3, tuple(heard.checks.values()), (), tuple(heard.notices))

    monkeypatch.setattr(selftest, "run_selftest", broken)
    done = RUNNER.invoke(app, ["selftest", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    (check,) = found["checks"]
    assert not found["passed"]
    assert check["fault"] == "wrong bytes: 7 bytes from 0; TransportError: device 1 is gone"
    assert check["seconds"] == 0.75
    assert found["notices"] == ["device 1: a notice"]


def test_bytes_from_the_wrong_place_are_a_fault() -> None:
    class Swapped:
        """Gives every peer's message the bytes of another one."""

        device = 0

        def takes_views(self, peer: int) -> bool:
            return False

        def post(self, sends: list[Message], recvs: list[Message]) -> Swapped:
            for message in recvs:
                message.parts[0].copy_(sends[0].parts[0])
            return self

        def wait(self, timeout_s: float) -> None:
            pass

        def complete(self, timeout_s: float) -> None:
            pass

        def close(self) -> None:
            pass

    end = selftest._End(Swapped(), 3, torch.device("cpu"))  # type: ignore[arg-type]  # lists will do here
    for name, check in selftest._CHECKS.items():
        with pytest.raises(AssertionError, match="wrong bytes"):
            check(end)
        assert name


def test_nccl_without_two_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for devices in (None, 2):
        with pytest.raises(Infeasible, match="2 processes with a GPU each, this machine has 1; what to do"):
            selftest.run_selftest("nccl", devices)


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(Infeasible, match="no backend 'mpi'; what to do: use one of gloo, nccl"):
        selftest.run_selftest("mpi")


def test_an_error_in_a_process_is_told_before_the_process_ends() -> None:
    said: list[object] = []
    with pytest.raises(TransportError), selftest._checked(said.append, "all processes meet"):
        raise TransportError("nobody came")
    (check,) = said
    assert isinstance(check, selftest.Check)
    assert check.fault == "TransportError: nobody came"
