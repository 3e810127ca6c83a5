"""The lines between two programs, as a guide shows and counts them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path


def lines_of(program: Path) -> list[str]:
    """Its lines."""
    return program.read_text().splitlines()


def _counted(lines: list[str]) -> list[str]:
    """Blank lines and comments do not count."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def check_difference(page: str, before: Path, after: Path, most_lines: int) -> None:
    """Hold it that a page shows the difference of two programs and counts it right, and that it is small enough."""
    old, new = lines_of(before), lines_of(after)
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    expected = difflib.unified_diff(old, new, before.name, after.name, n=1, lineterm="")
    assert shown[1].splitlines() == list(expected)
    changes = list(difflib.ndiff(_counted(old), _counted(new)))
    added = [line for line in changes if line.startswith("+ ")]
    removed = [line for line in changes if line.startswith("- ")]
    assert len(added) <= most_lines
    told = re.search(r"\*\*(\d+) lines are added or changed\*\*, (\d+) of the old ones go", page)
    assert told is not None
    assert [int(number) for number in told.groups()] == [len(added), len(removed)]
