"""What ranks have in common travels once: each tells its digest, and of those who have one the lowest says it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Records: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Per rank what it said."""


def digest_of(content: bytes) -> str:
    """What stands for a content that several ranks may have."""
    return hashlib.sha256(content).hexdigest()[:16]


def speaks(rank: int, told: Records, name: str) -> bool:
    """Whether a rank is the lowest of those who told a digest."""
    return rank == min(each for each, record in told.items() if record.get(name) == told[rank][name])


def spoken(told: Records, bodies: Records, name: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """What each digest stands for, in order of the ranks."""
    body = f"{name}_body"
    return {told[rank][name]: read(record[body]) for rank, record in bodies.items() if body in record}
