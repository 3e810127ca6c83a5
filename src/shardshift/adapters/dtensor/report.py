"""What a change of a job came to, and what one would come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...values import Mesh

if TYPE_CHECKING:
    from ..account import Audit


@dataclass(frozen=True, slots=True)
class Figures:
    """A change in bytes, over the whole job: the same on all ranks.

    Attributes:
        prev: the mesh before.
        curr: the mesh after.
        state_bytes: the logical state, each tensor once.
        moved_bytes: sent between ranks.
        least_moved_bytes: the least that any order of the new ranks allows.
        kept_bytes: of shards that are the same before and after on their rank, so that their storage stays. What a rank
            copies within itself is neither kept nor moved.
    """

    prev: Mesh
    curr: Mesh
    state_bytes: int
    moved_bytes: int
    least_moved_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class Report(Figures):
    """One change, as this rank saw it.

    Attributes:
        casts: per tensor (kind and name) whose dtype changed, from which to which.
        seconds: of each part, on this rank: meet, tell, make, move, install.
        invalid: what of the old job cannot be used any more.
    """

    casts: Mapping[str, tuple[str, str]]
    seconds: Mapping[str, float]
    invalid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DryRun(Figures):
    """What a change would come to.

    Attributes:
        moved_bytes_of_rank: per rank what it would (send, receive).
        peak_bytes_of_rank: per rank the most state that it would hold at a time: old, new and staging.
        audit: of this rank's job.
        digest: of the plan.
    """

    moved_bytes_of_rank: Mapping[int, tuple[int, int]]
    peak_bytes_of_rank: Mapping[int, int]
    audit: Audit
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "prev": str(self.prev),
            "curr": str(self.curr),
            **{name: getattr(self, name) for name in ("state_bytes", "moved_bytes", "least_moved_bytes", "kept_bytes")},
            "moved_bytes_of_rank": {str(rank): list(of_rank) for rank, of_rank in self.moved_bytes_of_rank.items()},
            "peak_bytes_of_rank": {str(rank): size for rank, size in self.peak_bytes_of_rank.items()},
            "audit": {name: {"tensors": count, "bytes": size} for name, count, size in self.audit.rows()},
            "digest": self.digest,
        }

    def __str__(self) -> str:
        peak = max(self.peak_bytes_of_rank.values(), default=0)
        lines = [
            f"{self.prev} -> {self.curr}",
            f"state   {self.state_bytes:>16,} bytes",
            f"moved   {self.moved_bytes:>16,} bytes (the least is {self.least_moved_bytes:,})",
            f"kept    {self.kept_bytes:>16,} bytes",
            f"peak    {peak:>16,} bytes on the rank that needs most: old and new state, and staging",
            "",
            "this rank's job:",
            str(self.audit),
        ]
        return "\n".join(lines)
