"""The demo end to end, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.read_trace import named, read

from shardshift.adapters.megatron import DataPosition, RankLayout
from shardshift.cli.demo import run_and_report
from shardshift.demo import run
from shardshift.demo.text import Corpus, read_text
from shardshift.values import Infeasible, ParallelConfig

TRANSITION_KEYS = {
    "prev",
    "curr",
    "state_bytes",
    "referred_bytes",
    "copied_bytes",
    "moved_bytes",
    "least_moved_bytes",
    "move_s",
    "pause_s",
    "checkpoint_s",
    "speedup",
    "bit_exact",
    "same_losses_as_checkpoint",
}


DOCUMENTED = "demo --quick --trace demo.pftrace"
"""As the documentation says it; ``tests/docs`` leaves it to the test here, which looks at what comes out."""


def shardshift(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from shardshift.cli import main; main()", *arguments]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(300)
def test_every_change_of_the_demo_is_exact_and_moves_the_least(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 64)
    done = shardshift(*DOCUMENTED.split(), "--data", "text.txt", "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "here" / "report.json").read_text())
    assert (tmp_path / "here" / "loss.png").read_bytes().startswith(b"\x89PNG")

    transitions = report["transitions"]
    route = [(t["prev"], t["curr"]) for t in transitions]
    assert route == [
        ("pp2tp2dp1", "pp4tp2dp1"),
        ("pp4tp2dp1", "pp2tp2dp2"),
        ("pp2tp2dp2", "pp2tp4dp1"),
        ("pp2tp4dp1", "pp4tp1dp1"),
    ]
    for transition in transitions:
        assert transition.keys() >= TRANSITION_KEYS
        assert transition["bit_exact"] is True
        assert transition["same_losses_as_checkpoint"] is True
        assert transition["moved_bytes"] == transition["least_moved_bytes"]
        assert transition["speedup"] == pytest.approx(transition["checkpoint_s"] / transition["pause_s"])
    went = [(t["pids_kept"], t["joined"], t["left"]) for t in transitions]
    assert went == [(4, 4, 0), (8, 0, 0), (8, 0, 0), (4, 0, 4)], "who trains on is the same process"
    # pp2tp2dp2 has every tp2 half on two devices: each keeps another half of it, so nothing travels.
    assert transitions[2]["moved_bytes"] == 0

    tracks = read((tmp_path / "demo.pftrace").read_bytes())
    changes = [
        [name for *_, name in sorted(named(tracks, device)[0].slices) if name[:3] == "to "] for device in range(8)
    ]
    assert changes[0] == [f"to {transition['curr']}" for transition in transitions], "the ranks that train say it"
    assert {"plan", "agree", "move", "commit", "rebuild"} <= {name for *_, name in named(tracks, 0)[0].slices}
    lanes = [track for device in range(8) for track in named(tracks, device, "rounds")]
    assert sum(told["received_bytes"] for lane in lanes for told in lane.told) == sum(
        transition["moved_bytes"] for transition in transitions
    )

    elastic, fixed = report["loss"]["elastic"], report["loss"]["fixed"]
    assert len(elastic) == len(fixed) == 10
    assert elastic[:2] == fixed[:2], "before the first change both runs are the same"
    assert elastic == pytest.approx(fixed, rel=1e-4), "another layout adds up in another order, no more"


def test_text_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = shardshift("demo", "--quick", "--data", "nowhere.txt", cwd=tmp_path)
    assert done.returncode == 3
    assert "no such file or folder: nowhere.txt" in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(Infeasible, match="nothing to read"):
        read_text(tmp_path / "empty.txt")


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt"):
        with pytest.raises(Infeasible, match="not a file"):
            read_text(path)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="no such file or folder"):
        read_text(tmp_path / ("x" * 300))


def test_a_result_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "out" / "report.json").mkdir(parents=True)
    done = shardshift("demo", "--quick", cwd=tmp_path)
    assert done.returncode == 3
    assert "cannot write into out" in done.stderr


def test_a_trace_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_demo", None)
    console = Console(file=io.StringIO())
    with pytest.raises(Infeasible, match="cannot write the trace"):
        run_and_report(console, steps=5, data=None, out=tmp_path / "out", trace=tmp_path)
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(Infeasible, match=r"pip install 'shardshift\[trace\]'"):
        run_and_report(console, steps=5, data=None, out=tmp_path / "out", trace=tmp_path / "demo.pftrace")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no permission stops.
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.txt").write_text("text")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Infeasible, match=r"cannot read .*secret\.txt: Permission denied"):
        read_text(tmp_path / "secret.txt")


def test_text_shorter_than_one_sample_is_refused() -> None:
    with pytest.raises(Infeasible, match="one sample needs 65"):
        Corpus(b"x" * 64, 64, seed=1)


def batches(dp: int, consumed: int, steps: int, global_batch: int = 8, micro: int = 2) -> list[list[int]]:
    """Per step the samples that all replicas together use, in the order of the corpus' own index."""
    corpus = Corpus(bytes(range(200)), 8, seed=3)  # 24 samples, all different
    rows = [corpus.sample(i)[0].tolist() for i in range(24)]
    microbatches = global_batch // (micro * dp)
    found: list[list[int]] = [[] for _ in range(steps)]
    for replica in range(dp):
        layout = RankLayout(ParallelConfig(dp=dp), replica)
        stream = corpus.micro_batches(layout, DataPosition(consumed, global_batch, micro, microbatches))
        for step in range(steps):
            for _ in range(microbatches):
                tokens, _labels = next(stream)
                found[step] += [rows.index(row) for row in tokens.tolist()]
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_sample_is_used_once_and_in_order_of_steps_whatever_the_data_parallel_size(dp: int) -> None:
    first = [sorted(step) for step in batches(dp, consumed=0, steps=1)]
    rest = [sorted(step) for step in batches(dp, consumed=8, steps=2)]
    assert first + rest == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]


def test_too_few_steps_are_wrong_usage(tmp_path: Path) -> None:
    done = shardshift("demo", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "--steps" in done.stderr
