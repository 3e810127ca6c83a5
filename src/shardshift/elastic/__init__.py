"""The elastic runtime: membership and changes of layout while a job trains.

Everything is loaded on first use, so that asking a job for its status needs no torch. (``session``, the function, is
in ``opening``: here the name is that of a module.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent.guard import die_with_parent
    from .launcher import LocalJob, start_fork_server
    from .member import Member, job_store
    from .report import ResizeReport
    from .resize import Resize, ResizeSource, Script
    from .session import Session

_HOMES = {
    "LocalJob": "launcher",
    "Member": "member",
    "Resize": "resize",
    "ResizeReport": "report",
    "ResizeSource": "resize",
    "Script": "resize",
    "Session": "session",
    "die_with_parent": "agent.guard",
    "job_store": "member",
    "start_fork_server": "launcher",
}

__all__ = [
    "LocalJob",
    "Member",
    "Resize",
    "ResizeReport",
    "ResizeSource",
    "Script",
    "Session",
    "die_with_parent",
    "job_store",
    "start_fork_server",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardshift.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
