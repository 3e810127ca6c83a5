"""examples/torchtitan: torchtitan's Llama debug model changes its layout, as if it had gone through a checkpoint.

``make test`` puts torchtitan and what it needs into a folder of their own, which goes first on ``PYTHONPATH`` of the
processes that this test starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fsdp.md").read_text()
PINS = (ROOT / "constraints" / "torchtitan.txt").read_text()
RELEASE = re.search(r"^torchtitan==(\S+)$", PINS, re.MULTILINE)
FOLDER = ROOT / ".venv" / f"torchtitan-{RELEASE[1] if RELEASE else ''}"


def steps_in(text: str) -> dict[int, str]:
    found = re.findall(r"^step (\d+): (.*)$", text, re.MULTILINE)
    assert len(found) == len({number for number, _ in found}), "a step was made twice"
    return {int(number): rest for number, rest in found}


def saved_in(folder: Path) -> dict[str, Any]:
    """A checkpoint of torchtitan's: all tensors, whole, and all else."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    found: dict[str, Any] = torch.load(folder / "whole.pt", weights_only=False)
    shutil.rmtree(folder)  # it is large, and pytest keeps what a test leaves
    return found


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_every_package_is_pinned_exactly() -> None:
    lines = [line for line in PINS.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==\d[\w.]*", line)] == []


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="make test (or make setup) puts torchtitan into .venv")
@pytest.mark.timeout(300)
def test_all_that_torchtitan_saves_after_a_change_is_what_it_saves_after_its_own_checkpoint_to_the_last_bit(
    tmp_path: Path,
) -> None:
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(str(ROOT / "tests" / "docs" / "titan_by_checkpoint.py"), str(tmp_path)),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        },
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    changed, through_checkpoint = map(steps_in, process.stdout.split("through a checkpoint:\n"))
    assert list(changed) == list(range(1, 7))
    assert changed == through_checkpoint
    states = [saved_in(folder / "checkpoint" / "step-6") for folder in (tmp_path, tmp_path / "oracle")]
    assert {"train_state", "dataloader", "lr_scheduler", "layers"} <= {key.partition(".")[0] for key in states[0]}
    assert states[0].keys() == states[1].keys()
    assert [key for key, value in states[0].items() if not is_same(value, states[1][key])] == []
    assert {rest.rpartition(", ")[2] for rest in changed.values()} == {
        "dp_shard 2 x tp 2 on ranks 0-3",
        "pp 2 x dp_shard 2 on ranks 0-3",
    }
    assert f"PYTHONPATH=.venv/{FOLDER.name} " in PAGE
    shown = steps_in("\n".join(re.findall(r"^step \d+: loss \S+, norm .*$", PAGE, re.MULTILINE)))
    assert list(shown) == list(changed)
    for number, rest in shown.items():
        for one, other in zip(re.findall(r"\d+\.\d+", rest), re.findall(r"\d+\.\d+", changed[number]), strict=True):
            assert float(one) == pytest.approx(float(other), abs=1e-2)
