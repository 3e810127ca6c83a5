"""How much memory a move may still take."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(sharers: int = 1) -> int:
    """Bytes that this process can allocate where it keeps its tensors: its GPU's, else its share of the machine's.

    Args:
        sharers: processes of the job, as far as known all on this machine. A GPU's memory is not shared.
    """
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes)
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024 // sharers
    raise OSError("/proc/meminfo does not say MemAvailable")
