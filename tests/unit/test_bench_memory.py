"""The benchmark of memory at a tiny scale: that it runs, and that its figures are what they say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("memory")


def test_the_benchmark_of_memory_gives_a_peak_and_how_far_it_is_from_the_prediction(memory: Any) -> None:
    size = memory.Size(layers=4, hidden=256, vocab=512)
    scale, rows = memory.run(lambda line: None, size=size, staging_bytes=4 << 20, cases=[("pp2", "tp2", "release")])
    assert "4 layers" in scale
    over, off = rows
    assert over.goal == "ratio <= 1"
    assert over.theirs > 4
    assert off.unit == "%"
