"""shardshift moves the state of a running LLM training job to another parallel layout, without a checkpoint.

The names below are the public face; everything is loaded on first use, so that planning needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adapters import audit, megatron
    from .adapters import dtensor as fsdp
    from .adapters.dtensor.dry_run import dry_run
    from .adapters.dtensor.migrate import migrate
    from .adapters.transfer import transfer
    from .elastic import Member, Resize, ResizeReport, ResizeSource, Script, Session
    from .elastic.opening import session
    from .engine import Mover, Resumed, mover_of, names_of, reshard
    from .values import (
        Infeasible,
        Kind,
        Layout,
        Mesh,
        Mismatch,
        ParallelConfig,
        PeerLost,
        PlacedLayout,
        Region,
        Shard,
        ShardshiftError,
        StateLost,
        Tensor,
        Topology,
        Unaccounted,
    )

__version__: str
_HOMES = {
    **dict.fromkeys(("audit", "fsdp", "megatron"), "adapters"),
    **{name: f"adapters.dtensor.{name}" for name in ("dry_run", "migrate")},
    "transfer": "adapters.transfer",
    **dict.fromkeys(("Member", "Resize", "ResizeReport", "ResizeSource", "Script", "Session"), "elastic"),
    "session": "elastic.opening",
    **dict.fromkeys(("Mover", "Resumed", "mover_of", "names_of", "reshard"), "engine"),
    **dict.fromkeys(
        (
            "Infeasible",
            "Kind",
            "Layout",
            "Mesh",
            "Mismatch",
            "ParallelConfig",
            "PeerLost",
            "PlacedLayout",
            "Region",
            "Shard",
            "ShardshiftError",
            "StateLost",
            "Tensor",
            "Topology",
            "Unaccounted",
        ),
        "values",
    ),
}

_PACKAGES = {"fsdp": "shardshift.adapters.dtensor", "megatron": "shardshift.adapters.megatron"}

__all__ = [
    "Infeasible",
    "Kind",
    "Layout",
    "Member",
    "Mesh",
    "Mismatch",
    "Mover",
    "ParallelConfig",
    "PeerLost",
    "PlacedLayout",
    "Region",
    "Resize",
    "ResizeReport",
    "ResizeSource",
    "Resumed",
    "Script",
    "Session",
    "Shard",
    "ShardshiftError",
    "StateLost",
    "Tensor",
    "Topology",
    "Unaccounted",
    "audit",
    "dry_run",
    "fsdp",
    "megatron",
    "migrate",
    "mover_of",
    "names_of",
    "reshard",
    "session",
    "transfer",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardshift' has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    return getattr(importlib.import_module(f"shardshift.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
