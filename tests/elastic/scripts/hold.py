"""As ``train.py``, but the last device holds all others up in the middle of a step once a file is there.

Arguments: the first layout, the file that ends it; beside that, a file named "hold" makes the step last.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.elastic.toy import ToyJob

_meet = ToyJob.meet


def meet(self: ToyJob) -> None:
    last = self.rank == self.config.world_size - 1 > 0
    if last and (Path(sys.argv[2]).parent / "hold").exists():
        os.write(1, f"{os.environ['RANK']}: holds\n".encode())
        signal.pause()
    _meet(self)


ToyJob.meet = meet  # type: ignore[method-assign]

import tests.elastic.scripts.train  # noqa: E402, F401  # it runs as it is imported
