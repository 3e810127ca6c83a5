"""How much memory a move may still take."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes() -> int:
    """Bytes that can be allocated where this process keeps its tensors: its GPU's, else the machine's."""
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes)
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo does not say MemAvailable")
