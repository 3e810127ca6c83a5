"""The few errors that shardshift raises on purpose. Each says what, where, expected, actual, what to do.

An error that one rank meets must reach every other rank as the same class with the same text, also when the
original exception cannot be pickled. So each error is fully described by ``to_wire()``: plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import ClassVar


class ShardshiftError(Exception):
    """Base of all errors that shardshift raises on purpose.

    Attributes:
        journal: what a move that gave memory back step by step had done when it was interrupted, for
            ``Mover.resume``; None where the old state is whole. Never travels to another rank.
    """

    journal: object | None = None
    _by_name: ClassVar[dict[str, type[ShardshiftError]]] = {}

    def __init_subclass__(cls) -> None:
        ShardshiftError._by_name[cls.__name__] = cls

    def to_wire(self) -> str:
        """This error as JSON text; ``from_wire`` on another rank makes an equal one."""
        return json.dumps({"error": type(self).__name__, "text": str(self), **self._fields()})

    def _fields(self) -> dict[str, object]:
        return {}

    @classmethod
    def _rebuild(cls, text: str, fields: dict[str, object]) -> ShardshiftError:
        return cls(text)

    @staticmethod
    def from_wire(wire: str) -> ShardshiftError:
        """The error that ``to_wire`` described. An unknown class becomes the base class."""
        record = json.loads(wire)
        name, text = record.pop("error"), record.pop("text")
        if name == ShardshiftError.__name__:
            return ShardshiftError(text)
        kind = ShardshiftError._by_name.get(name)
        if kind is None:
            return ShardshiftError(f"{name}: {text}")
        return kind._rebuild(text, record)


class Infeasible(ShardshiftError):
    """A layout that cannot be: dims not divisible, too few devices, too little memory. Nothing was moved."""


class Mismatch(ShardshiftError):
    """Two things that must agree do not: shapes, dtypes, digests, generations. Nothing was moved."""


class Unaccounted(ShardshiftError):
    """State that no rule covers: a tensor only the source or only the target knows. Nothing was moved.

    Attributes:
        names: the logical names concerned.
    """

    def __init__(self, text: str, names: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)

    def _fields(self) -> dict[str, object]:
        return {"names": list(self.names)}

    @classmethod
    def _rebuild(cls, text: str, fields: dict[str, object]) -> ShardshiftError:
        names = fields["names"]
        assert isinstance(names, list)
        return cls(text, names)


class StateLost(Unaccounted):
    """Bytes that no living device holds any more. ``names`` are the logical tensors that are gone."""


class PeerLost(ShardshiftError):
    """A rank died, hung, or failed by itself; this rank did not.

    Attributes:
        ranks: the devices (process ids of the job, as in RANK) that are lost.
        phase: what the job was doing: "train", "agree", "move", "commit", "rebuild", ...
    """

    def __init__(self, ranks: Iterable[int], phase: str, reason: str) -> None:
        self.ranks = tuple(sorted(ranks))
        self.phase = phase
        self.reason = reason
        who = ", ".join(map(str, self.ranks)) if self.ranks else "unknown"
        super().__init__(
            f"lost rank {who} in phase '{phase}': {reason}. What to do: the state that this rank holds is as "
            "it was after the last finished step (or in this error's journal, if the move gave memory back as it "
            "went); restart the lost ranks, or the job from its last checkpoint"
        )

    def _fields(self) -> dict[str, object]:
        return {"ranks": list(self.ranks), "phase": self.phase, "reason": self.reason}

    @classmethod
    def _rebuild(cls, text: str, fields: dict[str, object]) -> ShardshiftError:
        ranks = fields["ranks"]
        assert isinstance(ranks, list)
        return cls(ranks, str(fields["phase"]), str(fields["reason"]))
