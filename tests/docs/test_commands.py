"""What the documentation says to type, and the example that it shows, are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.demo.test_demo import DOCUMENTED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    found: list[str] = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            found += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return list(dict.fromkeys(found))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", commands())
def test_a_documented_command_runs(command: str, tmp_path: Path) -> None:
    program, *arguments = command.split()
    if program == "make":
        # CI itself is `make test`, and the demo below is what `make demo` runs: here, that make knows the way.
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    assert program == ".venv/bin/shardshift"
    if arguments[0] == "demo" and "--help" not in arguments:
        assert arguments == DOCUMENTED.split(), "what tests/demo runs"
        return
    argv = [sys.executable, "-c", "from shardshift.cli import main; main()", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_no_page_has_a_place_left_to_fill_in() -> None:
    assert not [page.name for page in PAGES if "<!--" in page.read_text()]


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
