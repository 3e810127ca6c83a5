"""The benchmark of FSDP2 jobs against torch's checkpoints, at a tiny scale."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("benchmarks")]


def load() -> Any:
    """The module, under a name that is not that of a package."""
    path = Path(__file__).parents[2] / "benchmarks" / "dcp.py"
    spec = importlib.util.spec_from_file_location("benchmark_dcp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_dcp"] = module
    spec.loader.exec_module(module)
    return module


def test_every_change_has_its_rows_beside_the_checkpoint_in_memory_and_on_disk() -> None:
    module = load()
    _, rows = module.run(lambda _: None, module.Scale(hidden=32, layers=1, runs=1))
    with_goals = [row.case for row in rows if row.goal]
    assert len(with_goals) == 2 * len(module.CASES)
    assert all(row.theirs and row.ours > 0 for row in rows)
    for case in module.CASES:
        for transport in ("same-host", "gloo"):
            compared = {row.baseline for row in rows if row.case == f"{case.name}: migrate, {transport}"}
            assert compared == {"checkpoint, /dev/shm", "checkpoint, disk"}
