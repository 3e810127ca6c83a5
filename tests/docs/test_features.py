"""The table of Megatron-core's features has exactly what the script tries, and the script says what it sees."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "megatron_features.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_features", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows(page: str, script: ModuleType) -> list[tuple[str, ...]]:
    between = page.split(script.BEGIN, 1)[1].split(script.END, 1)[0]
    lines = [line for line in between.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines[2:]]


def test_the_page_has_every_feature_once_in_order_and_none_that_failed(script: ModuleType) -> None:
    found = rows(script.PAGE.read_text(), script)
    assert [name for name, *_ in found] == list(script.FEATURES)
    for name, tried, result, said in found:
        start, to = (str(script.ParallelConfig.parse(layout)) for layout in script.FEATURES[name].layouts)
        assert tried == f"{start} to {to}"
        assert result in script.RESULTS
        assert result != "failed"
        assert bool(said) == (result != "ran"), f"{name}: what does not run says why"


@pytest.mark.timeout(180)
def test_the_script_tells_what_runs_from_what_is_refused_and_what_cannot_be_built_here() -> None:
    expected = {
        "GQA": ("ran", ""),
        "layer-wise distributed optimizer": ("refused", "what to do"),
        "Mamba": ("cannot be built here", "ModuleNotFoundError"),
    }
    argv = [sys.executable, str(SCRIPT), "--json", "--only", *expected]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        result, words = expected.pop(row["feature"])
        assert row["result"] == result, row
        assert words in row["seen"]
    assert not expected


def test_a_table_replaces_the_one_between_the_marks_and_nothing_else(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    row = {
        "feature": "a feature",
        "from": "pp1tp1dp1",
        "to": "pp1tp2dp1",
        "result": "refused",
        "seen": "a|b\n`c` " * 99,
    }
    script.write(script.table([row]), page)  # there is none yet
    page.write_text(f"before\n{page.read_text()}after\n")
    for _ in range(2):
        script.write(script.table([row, row]), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert len(rows(text, script)) == 2
    assert all(len(cells) == 4 and cells[3].endswith("...`") for cells in rows(text, script))
