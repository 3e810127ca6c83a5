"""Programs: what one device does, round by round; the form in which they are run, exchanged and shown.

A program is instructions as values, one type each, so that whoever reads one (``engine/run.py``,
``simulator/execute.py``) matches on the type and cannot forget one. How a plan becomes programs is in ``compile``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from ..values import Kind, Region, Shard, Tensor


@dataclass(frozen=True, slots=True)
class Refer:
    """Keep this shard's storage as it is."""

    shard: Shard


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``piece`` from ``source``, held before, into ``target``."""

    piece: Shard
    source: Shard
    target: Shard


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``piece`` of ``source``, held before, to device ``peer``."""

    piece: Shard
    source: Shard
    peer: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Send ``piece`` of ``source``, a new shard into which it came in an earlier round, to device ``peer``."""

    piece: Shard
    source: Shard
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive ``piece`` of ``target`` from device ``peer``."""

    piece: Shard
    target: Shard
    peer: int


Instruction: TypeAlias = Refer | Copy | Send | Forward | Recv


@dataclass(frozen=True, slots=True)
class Round:
    """What a device does before it waits. Per peer and direction, the order of the pieces is that of the messages."""

    copies: tuple[Copy, ...] = ()
    sends: tuple[Send | Forward, ...] = ()
    recvs: tuple[Recv, ...] = ()


@dataclass(frozen=True, slots=True)
class Epoch:
    """A part of the move that ends with a fence: no device goes on before all have come to its end.

    Whole tensors move in an epoch. So at any time some tensors are where they were, some are where they will be, and
    those of the epoch under way are still where they were as well.

    Attributes:
        allocate: new shards that get storage when the epoch begins, in order of need.
        rounds: the device's own; other devices may have more or fewer in this epoch.
        release: old shards whose storage is given back after the fence. Empty under the policy ``keep``.
    """

    allocate: tuple[Shard, ...] = ()
    rounds: tuple[Round, ...] = ()
    release: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """All that one device does.

    Attributes:
        device: who runs it.
        refers: shards that stay as they are.
        epochs: as many as in every other program of the plan; one under the policy ``keep``.
        digest: the fingerprint of the plan.
    """

    device: int
    refers: tuple[Refer, ...]
    epochs: tuple[Epoch, ...]
    digest: str

    @property
    def allocate(self) -> tuple[Shard, ...]:
        """All new shards that need storage."""
        return tuple(shard for epoch in self.epochs for shard in epoch.allocate)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """All rounds."""
        return tuple(step for epoch in self.epochs for step in epoch.rounds)

    @property
    def work_bytes(self) -> int:
        """All that the device sends, receives and copies."""
        return sum(
            one.piece.nbytes
            for epoch in self.epochs
            for step in epoch.rounds
            for one in (*step.copies, *step.sends, *step.recvs)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives an equal program.

        Shards are numbers in the list ``shards``, whose entries are (number in ``tensors``, offsets, shape).
        """
        table = _Table()
        return {
            "device": self.device,
            "digest": self.digest,
            "refers": [table.number(refer.shard) for refer in self.refers],
            "epochs": [
                {
                    "allocate": [table.number(shard) for shard in epoch.allocate],
                    "rounds": [
                        [_record(one, table) for one in (*step.copies, *step.sends, *step.recvs)]
                        for step in epoch.rounds
                    ],
                    "release": [table.number(shard) for shard in epoch.release],
                }
                for epoch in self.epochs
            ],
            "shards": table.shard_records,
            "tensors": [[t.kind, t.name, list(t.shape), t.dtype, t.itemsize] for t in table.tensors],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Program:
        """The program that ``to_json`` described."""
        tensors = [Tensor(Kind(kind), name, tuple(shape), *rest) for kind, name, shape, *rest in record["tensors"]]
        shards = [Shard(tensors[of], Region(tuple(low), tuple(shape))) for of, low, shape in record["shards"]]
        return cls(
            record["device"],
            tuple(Refer(shards[number]) for number in record["refers"]),
            tuple(
                Epoch(
                    tuple(shards[number] for number in epoch["allocate"]),
                    tuple(_round(step, shards) for step in epoch["rounds"]),
                    tuple(shards[number] for number in epoch["release"]),
                )
                for epoch in record["epochs"]
            ),
            record["digest"],
        )


class _Table:
    """Shards and tensors, each written once."""

    def __init__(self) -> None:
        self.tensors: dict[Tensor, int] = {}
        self.shard_records: list[list[Any]] = []
        self._shards: dict[Shard, int] = {}

    def number(self, shard: Shard) -> int:
        found = self._shards.setdefault(shard, len(self._shards))
        if found == len(self.shard_records):
            tensor = self.tensors.setdefault(shard.tensor, len(self.tensors))
            self.shard_records.append([tensor, list(shard.region.offsets), list(shard.region.shape)])
        return found


def _record(one: Copy | Send | Forward | Recv, table: _Table) -> dict[str, Any]:
    piece = {"piece": table.number(one.piece)}
    match one:
        case Copy():
            return {"do": "copy", **piece, "source": table.number(one.source), "target": table.number(one.target)}
        case Send():
            return {"do": "send", **piece, "source": table.number(one.source), "peer": one.peer}
        case Forward():
            return {"do": "forward", **piece, "source": table.number(one.source), "peer": one.peer}
        case Recv():
            return {"do": "recv", **piece, "target": table.number(one.target), "peer": one.peer}
        case _:
            assert_never(one)


def _round(records: list[dict[str, Any]], shards: list[Shard]) -> Round:
    copies: list[Copy] = []
    sends: list[Send | Forward] = []
    recvs: list[Recv] = []
    for record in records:
        piece = shards[record["piece"]]
        match record["do"]:
            case "copy":
                copies.append(Copy(piece, shards[record["source"]], shards[record["target"]]))
            case "send":
                sends.append(Send(piece, shards[record["source"]], record["peer"]))
            case "forward":
                sends.append(Forward(piece, shards[record["source"]], record["peer"]))
            case "recv":
                recvs.append(Recv(piece, shards[record["target"]], record["peer"]))
            case other:
                raise ValueError(f"no such instruction: {other!r}")
    return Round(tuple(copies), tuple(sends), tuple(recvs))
