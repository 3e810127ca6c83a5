"""The proposal of one change: what the lead decides, and every rank proves for itself.

Only the small decision travels: configurations and which device takes which virtual rank. Each rank derives
both layouts and the whole plan from it and compares digests. Sending the plan itself was rejected: it grows
with the job, and a rank that derives it has proved it. (Two solver versions may break ties differently, so the
pairing is decided once; everything after it is deterministic.)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..coordination import opened, to_record
from ..values import ParallelConfig


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change of layout to agree on.

    Attributes:
        prev: configuration before.
        curr: configuration after.
        prev_devices: per virtual rank of ``prev`` its device.
        curr_devices: per virtual rank of ``curr`` its device.
        usable: the devices that could have run a rank of ``curr``; what is the least hangs on them.
        lost: devices of ``prev`` that are gone.
        wires: number of the wires that the move goes over.
        ends: the devices that they join.
        iteration: optimizer steps finished.
        kinds: of optimizer state that there is to move.
        digest: of the lead's plan.
        copies: (lost device, device that gives the buddy copies of it), of those whose copies are needed.
        afresh: what is lost, if therefore nothing moves and the job starts from its checkpoint; else empty.
    """

    prev: ParallelConfig
    curr: ParallelConfig
    prev_devices: tuple[int, ...]
    curr_devices: tuple[int, ...]
    usable: tuple[int, ...]
    lost: tuple[int, ...]
    wires: int
    ends: tuple[int, ...]
    iteration: int
    kinds: tuple[str, ...]
    digest: str
    copies: tuple[tuple[int, int], ...] = ()
    afresh: str = ""

    @property
    def participants(self) -> tuple[int, ...]:
        """Every device that has something to do."""
        return tuple(sorted({*self.prev_devices, *self.curr_devices}.difference(self.lost)))

    def to_wire(self) -> bytes:
        """As a control record."""
        return to_record(
            prev=str(self.prev),
            curr=str(self.curr),
            prev_devices=self.prev_devices,
            curr_devices=self.curr_devices,
            usable=self.usable,
            lost=self.lost,
            wires=self.wires,
            ends=self.ends,
            iteration=self.iteration,
            kinds=self.kinds,
            digest=self.digest,
            copies=self.copies,
            afresh=self.afresh,
        )

    @classmethod
    def from_wire(cls, wire: bytes) -> Proposal:
        """The proposal that a record holds.

        Raises:
            ShardshiftError: the error that the record holds instead, as the lead met it.
        """
        record = opened(wire)
        return cls(
            ParallelConfig.parse(record["prev"]),
            ParallelConfig.parse(record["curr"]),
            tuple(record["prev_devices"]),
            tuple(record["curr_devices"]),
            tuple(record["usable"]),
            tuple(record["lost"]),
            record["wires"],
            tuple(record["ends"]),
            record["iteration"],
            tuple(record["kinds"]),
            record["digest"],
            tuple((lost, giver) for lost, giver in record["copies"]),
            record["afresh"],
        )
