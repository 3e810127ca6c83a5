"""From a plan to the program of one device, by looks at that device alone.

At a hundred thousand devices nobody can lay all pieces out in rounds, so there are no global rounds: each device has
rounds of its own. Nothing but the order of the lists says which message is which, since NCCL knows no tags; so both
ends must list the pieces of a pair alike, and put the same small ones into one message. Both write from one order:

1. *Position*: each piece of the plan begins at a place of the move, by need (``need``), and so that no device is
   asked by all at once (``timetable``). It hangs on the cell and the tensor alone: both ends, and every hop, have the
   same.
2. *Slot*: positions are cut at every ``round_bytes``. What begins in one such stretch has its number, plus the hop: a
   piece that comes to a device in slot s leaves it in slot s + 1 at the earliest. So a chain is a pipeline, and no
   round both receives and forwards a piece. A transfer is cut into pieces at slots' ends, on whole rows where rows are
   short against a slot (*granules*, below), so slots are evenly full: a chain is as slow as its fullest slot.
3. *Key* of a piece: slot, rank of need, offsets, source, target.
4. *Unit*: the pieces of one (source, target, slot), in order of keys; more than one unit where they exceed the
   staging bound, cut when the next piece does not fit. Both ends know all pieces of the pair, so both cut alike.
   Units are ordered by the key of their first piece.
5. *Round*: a device goes through its units in that order. A round closes at the end of a slot, and when the next
   unit would make it send, or receive, more than the staging bound. Two units of a pair never share a round, since
   they do not fit one.
6. Local copies take no staging and run under the wire: they fill the rounds in order of need too.

No deadlock: let a message complete only when both ends are in the round that holds it, and a device go on only when
its round is complete. Take the first unfinished unit in the order of all units. At either end, all earlier units are
finished, and rounds are runs of consecutive units of the device; so every earlier round is complete, and the device
is in this unit's round, as it cannot have gone past it. Both ends meet, the unit completes. What a forward reads came
in an earlier slot, hence in an earlier round. All this needs of positions that both ends have the same, and that a
piece's next hop has a later slot: any order of cells will do.

Global rounds were rejected for their cost; a list of pieces without rounds was, since the bound on staging and the
packing of small pieces need some point at which a device waits. Cutting every transfer into equal pieces was, too: a
slot would then hold anything up to twice its bytes, and a chain would run at the pace of the fullest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..plan import Plan
from ..plan import Transfer as PlannedTransfer
from ..plan.timing import piece_bytes
from ..values import Infeasible, Region, Shard, Tensor, flat_range
from .need import NeedOrder
from .program import Copy, Forward, Program, Recv, Refer, Round, Send
from .timetable import Timetable, numbered

_Key: TypeAlias = tuple[int, int, tuple[int, ...], int, int]
"""Slot, rank of need, offsets, source, target. No two pieces of a plan have the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What the programs of a plan have in common. Make it once, then ask for programs.

    Attributes:
        plan: the plan.
        staging_bytes: the most that a device sends, and the most that it receives, in one round.
        round_bytes: the length of a slot.
        need: the order of need of the new layout.
        timetable: where each piece stands in the move.
    """

    plan: Plan
    staging_bytes: int
    round_bytes: int
    need: NeedOrder
    timetable: Timetable

    @classmethod
    def of(cls, plan: Plan, staging_bytes: int, round_bytes: int | None = None) -> Schedule:
        """The schedule of a plan under a staging bound.

        Args:
            plan: a proved plan.
            staging_bytes: see ``compile_program``.
            round_bytes: the length of a slot. None chooses: half the staging bound, less where chains are long.

        Raises:
            Infeasible: if ``staging_bytes`` or ``round_bytes`` is less than 1.
        """
        if staging_bytes < 1:
            raise Infeasible(f"a staging bound of {staging_bytes} bytes moves nothing; what to do: give some MiB")
        if round_bytes is None:
            round_bytes = _round_bytes(plan, staging_bytes)
        elif round_bytes < 1:
            raise Infeasible(f"rounds of {round_bytes} bytes move nothing; what to do: give some MiB")
        need = NeedOrder.of(plan.curr.layout)
        return cls(plan, staging_bytes, round_bytes, need, Timetable.of(plan, need))

    def program(self, device: int) -> Program:
        """The program of one device.

        Raises:
            Infeasible: if one element is larger than the staging bound.
            KeyError: if the plan does not know the device.
        """
        plan = self.plan
        if not any((placed.device_ids == device).any() for placed in (plan.prev, plan.curr)):
            raise KeyError(f"device {device} is not in the plan, which has {len(plan.devices)} devices")
        rounds = list(_rounds(self._units(device), device, self.staging_bytes))
        copies = [Copy(copy.piece, copy.source, copy.target) for copy in plan.copies_of(device)]
        if copies:
            rounds = self._with_copies(rounds, copies)
        refers = tuple(Refer(refer.shard) for refer in plan.refers_of(device))
        return Program(device, refers, tuple(plan.allocated_of(device)), tuple(rounds), plan.digest)

    def _units(self, device: int) -> list[_Unit]:
        """All messages of a device, in the order of all units."""
        pieces: list[tuple[_Key, Send | Forward | Recv]] = []
        cuts: dict[int, tuple[Shard, list[tuple[int, Shard]]]] = {}
        moves = self.plan.moves
        places: dict[tuple[Tensor, tuple[int, ...]], int] = {}
        for cell in np.unique(moves.cell[(moves.source == device) | (moves.target == device)]).tolist():
            places |= self.timetable.places(cell)
        for transfer in self.plan.transfers_of(device):
            rank, _ = self.need.at[transfer.piece.tensor]
            # A piece that comes and is forwarded is often one object: it is cut once. The dict keeps it alive.
            if id(transfer.piece) not in cuts:
                start_bytes = places[transfer.piece.tensor, transfer.piece.region.offsets]
                cuts[id(transfer.piece)] = transfer.piece, list(self._cut(transfer.piece, start_bytes))
            ends, make = (transfer.source_device, transfer.target_device), _maker(transfer, device)
            pieces += [
                ((slot + transfer.hop, rank, piece.region.offsets, *ends), make(piece))
                for slot, piece in cuts[id(transfer.piece)][1]
            ]
        pieces.sort(key=lambda entry: entry[0])
        units: list[_Unit] = []
        open_units: dict[tuple[int, int, int], _Unit] = {}
        for (slot, _, _, source, target), instruction in pieces:
            size_bytes = instruction.piece.nbytes
            unit = open_units.get((slot, source, target))
            if unit is None or unit.nbytes + size_bytes > self.staging_bytes:
                unit = open_units[slot, source, target] = _Unit(slot, source == device)
                units.append(unit)
            unit.nbytes += size_bytes
            unit.instructions.append(instruction)
        return units

    def _cut(self, piece: Shard, start_bytes: int) -> Iterator[tuple[int, Shard]]:
        """The pieces of a piece, each with its slot before hops are added."""
        tensor = piece.tensor
        if tensor.itemsize > self.staging_bytes:
            raise Infeasible(
                f"{piece}: one element has {tensor.itemsize} bytes, the staging bound is {self.staging_bytes}; "
                "what to do: allow more staging"
            )
        most_numel = self.staging_bytes // tensor.itemsize
        for slot, region in cut_by_slots(piece.region, tensor.itemsize, start_bytes, self.round_bytes):
            for part in region.pieces(most_numel):
                yield slot, piece if part == piece.region else Shard(tensor, part)

    def _with_copies(self, rounds: list[Round], copies: list[Copy]) -> list[Round]:
        rounds = rounds or [Round()]
        by_round: list[list[Copy]] = [[] for _ in rounds]
        copied_bytes = 0
        for copy in sorted(copies, key=lambda copy: self.need.at[copy.piece.tensor]):
            # As much a round as the wire carries; what is left when the wire is done comes with the last round.
            by_round[min(copied_bytes // self.staging_bytes, len(rounds) - 1)].append(copy)
            copied_bytes += copy.piece.nbytes
        return [Round(tuple(copied), step.sends, step.recvs) for copied, step in zip(by_round, rounds, strict=True)]


def compile_programs(plan: Plan, staging_bytes: int, round_bytes: int | None = None) -> dict[int, Program]:
    """The programs of all devices of a plan, those that leave included. For tests and simulations.

    Args and errors are those of ``compile_program``.
    """
    schedule = Schedule.of(plan, staging_bytes, round_bytes)
    return {device: schedule.program(device) for device in plan.devices}


def compile_program(plan: Plan, device: int, staging_bytes: int, round_bytes: int | None = None) -> Program:
    """The program of one device: ``compile_programs(plan, staging_bytes, round_bytes)[device]``.

    Args:
        plan: a proved plan.
        device: one of its devices.
        staging_bytes: the most that a device sends, and the most that it receives, in one round. The same on all
            devices, or both ends of a piece would not meet.
        round_bytes: see ``Schedule.of``; the same on all devices, too.

    Raises:
        Infeasible: if one element is larger than ``staging_bytes``.
        KeyError: if the plan does not know the device.
    """
    return Schedule.of(plan, staging_bytes, round_bytes).program(device)


def cut_by_slots(region: Region, itemsize: int, start_bytes: int, round_bytes: int) -> Iterator[tuple[int, Region]]:
    """Cut a region at slots' ends.

    The region is taken as *granules* in row-major order: the largest blocks of whole trailing dims (or the region as
    a whole) of at most an eighth of a slot, or else single elements. A granule belongs to the slot in which it begins.

    Args:
        region: the elements.
        itemsize: bytes of one.
        start_bytes: the position of the first.
        round_bytes: the length of a slot.

    Yields:
        (slot, box) in row-major order: one box a slot if a row of the first dim is a granule, else up to 2n - 1 for
        the n leading dims that are cut.
    """
    first, last = start_bytes // round_bytes, (start_bytes + region.numel * itemsize - 1) // round_bytes
    if first == last or region.numel * itemsize * 8 <= round_bytes or region.numel == 1:
        yield first, region
        return
    shape, dims = region.shape, len(region.shape)
    block_numel = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    cut = next((dim for dim in range(dims) if block_numel[dim] * itemsize * 8 <= round_bytes), dims - 1)
    granule_bytes, leading = block_numel[cut] * itemsize, shape[: cut + 1]
    count, begin = math.prod(leading), 0
    for slot in range(first, last + 1):
        end = min(-(-((slot + 1) * round_bytes - start_bytes) // granule_bytes), count)
        if begin == end:
            continue
        boxes = flat_range(leading, begin, end) if cut else (Region((begin,), (end - begin,)),)
        for box in boxes:
            offsets = tuple(a + b for a, b in zip(region.offsets, box.offsets, strict=False))
            yield slot, Region((*offsets, *region.offsets[cut + 1 :]), (*box.shape, *shape[cut + 1 :]))
        begin = end


def _round_bytes(plan: Plan, staging_bytes: int) -> int:
    """The length of a slot: half the staging, less where chains are long."""
    most_bytes = max(staging_bytes // 2, 1)  # a slot that is unevenly full is then still one round
    moves = plan.moves
    deepest = int(moves.hop.max(initial=1))
    if deepest == 1:
        return most_bytes
    received_bytes = np.bincount(numbered(moves)[1], plan.cells.nbytes[moves.cell])
    return piece_bytes(int(received_bytes.max()), deepest, most_bytes)


@dataclass(slots=True)
class _Unit:
    """One message of a device: pieces that leave for, or come from, one peer."""

    slot: int
    leaves: bool
    nbytes: int = 0
    instructions: list[Send | Forward | Recv] = field(default_factory=list)


def _maker(transfer: PlannedTransfer, device: int) -> Callable[[Shard], Send | Forward | Recv]:
    """What a device does with the pieces of a transfer of which it is an end."""
    if device == transfer.target_device:
        return lambda piece: Recv(piece, transfer.target, transfer.source_device)
    if transfer.hop == 1:
        return lambda piece: Send(piece, transfer.source, transfer.target_device)
    return lambda piece: Forward(piece, transfer.source, transfer.target_device)


def _rounds(units: list[_Unit], device: int, staging_bytes: int) -> Iterator[Round]:
    """Units in their order, as many a round as fit."""
    held: list[_Unit] = []
    sent_bytes = received_bytes = 0
    for unit in units:
        sent_bytes += unit.nbytes if unit.leaves else 0
        received_bytes += 0 if unit.leaves else unit.nbytes
        if held and (unit.slot != held[0].slot or max(sent_bytes, received_bytes) > staging_bytes):
            yield _round(held)
            held = []
            sent_bytes, received_bytes = (unit.nbytes, 0) if unit.leaves else (0, unit.nbytes)
        held.append(unit)
    if held:
        yield _round(held)


def _round(units: list[_Unit]) -> Round:
    sends: list[Send | Forward] = []
    recvs: list[Recv] = []
    for unit in units:
        for instruction in unit.instructions:
            if isinstance(instruction, Recv):
                recvs.append(instruction)
            else:
                sends.append(instruction)
    return Round((), tuple(sends), tuple(recvs))
