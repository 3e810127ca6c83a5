"""Running a script in new processes, whose hash seeds differ: what must not depend on either."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator


def printed_in_new_processes(script: str) -> Iterator[str]:
    """What a script prints, once for each of two hash seeds."""
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(path or "." for path in ["", *sys.path])},
        )
        yield run.stdout.strip()
