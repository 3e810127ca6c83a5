"""Python's garbage collector, kept out of the pause: a full collection of a training process takes 0.3 s and more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """Collect nothing inside; what has become unreachable is collected after it as always."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
