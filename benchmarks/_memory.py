"""What a process has in memory: resident, as the kernel counts it, and in tensors that live; also over time.

1. *Resident*: ``/proc/self/statm``. It knows pages that were touched, so memory that was asked for and not yet written
   is not in it.
2. *Tensors*: bytes of storages, each once, among those that were reported to a ``Tally`` and still live. Torch counts
   no CPU memory, so what allocates is wrapped; a storage counts until its last tensor goes.
3. ``Watch`` reads both every few milliseconds in a thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process, as of now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def trim() -> None:
    """Let the C library give free memory back to the kernel, where it can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Tally:
    """Bytes of tensors that live, of those that it was told of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}
        self.nbytes = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's storage until it is gone; a storage that is counted already counts once."""
        storage = tensor.untyped_storage()
        # The address of the C++ storage: Python's objects for it come and go.
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known:
                return tensor
            self._known[key] = nbytes
            self.nbytes += nbytes
        weakref.finalize(tensor, self._gone, key)
        return tensor

    def _gone(self, key: int) -> None:
        with self._lock:
            self.nbytes -= self._known.pop(key, 0)

    def counting(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``allocate``, whose tensors are counted."""

        def call(*args: Any, **named: Any) -> torch.Tensor:
            return self.add(allocate(*args, **named))

        return call


class Watch:
    """Reads some figures every so often in a thread; a context manager.

    Args:
        figures: by name, what to read.
        every_s: seconds between two readings.

    Attributes:
        seen: (seconds since the beginning, figures by name), in order.
    """

    def __init__(self, figures: dict[str, Callable[[], int]], every_s: float = 0.002) -> None:
        self._figures, self._every_s = figures, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began_s = time.perf_counter()
        self.seen: list[tuple[float, dict[str, int]]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.read()

    def read(self) -> None:
        """Read once."""
        now_s = time.perf_counter() - self._began_s
        self.seen.append((now_s, {name: figure() for name, figure in self._figures.items()}))

    def _run(self) -> None:
        while not self._ended.is_set():
            self.read()
            self._ended.wait(self._every_s)
