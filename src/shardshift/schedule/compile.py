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
4. *Unit*: the pieces of one (source, target, slot), in order of keys; more than one unit where they exceed half the
   staging bound, cut when the next piece does not fit. Both ends know all pieces of the pair, so both cut alike.
   Units are ordered by the key of their first piece.
5. *Round*: a device goes through its units in that order. A round closes at the end of a slot, and when with the next
   unit its sends and receives together would exceed half the staging bound: two rounds are in flight at most
   (``staging``). Two units of a pair never share a round, since they do not fit one.
6. Local copies take no staging and run under the wire: they fill the rounds in order of need too.
7. *Epoch*: under the policy ``release`` tensors move in epochs (``epochs``), and steps 1 to 6 are done for each by
   itself. ``keep`` has one epoch. Between epochs is a fence, for which all devices wait.

No deadlock within an epoch: let a message complete only when both ends are in the round that holds it, and a device go
on only when its round is complete. Take the first unfinished unit in the order of all units. At either end, all earlier
units are finished, and rounds are runs of consecutive units of the device; so every earlier round is complete, and the
device is in this unit's round, as it cannot have gone past it. Both ends meet, the unit completes. What a forward reads
came in an earlier slot of the epoch, hence in an earlier round. All this needs of positions that both ends have the
same, and that a piece's next hop has a later slot: any order of cells will do. Hence every device comes to its fence,
and as all have as many epochs, all pass it.

Global rounds were rejected for their cost; a list of pieces without rounds was, since the bound on staging and the
packing of small pieces need some point at which a device waits. Cutting every transfer into equal pieces was, too: a
slot would then hold anything up to twice its bytes, and a chain would run at the pace of the fullest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np

from ..plan import Plan
from ..plan import Transfer as PlannedTransfer
from ..plan.timing import piece_bytes_of
from ..values import Infeasible, Shard, Tensor
from .cuts import cut_by_slots
from .epochs import assign_epochs
from .need import NeedOrder
from .peak import Peak, Storage, peak_of
from .program import Copy, Epoch, Forward, Program, Recv, Refer, Round, Send
from .timetable import Timetable, numbered

Policy: TypeAlias = Literal["keep", "release"]
"""``keep``: the old state stays whole until the commit. ``release``: it is given back epoch by epoch."""
_Key: TypeAlias = tuple[int, int, int, tuple[int, ...], int, int]
"""Epoch, slot, rank of need, offsets, source, target. No two pieces of a plan have the same."""


_Any = TypeVar("_Any")


class Options(TypedDict, total=False):
    """The policy of ``Schedule.of``, and what goes with it; the same on all devices, or the ends do not meet."""

    policy: Policy
    storages: Collection[Collection[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What the programs of a plan have in common. Make it once, then ask for programs.

    Attributes:
        plan: the plan.
        staging_bytes: the most that a device stages at any time, for sends and receives together.
        round_bytes: the length of a slot.
        policy: when old shards are given back.
        need: the order of need of the new layout.
        timetable: where each piece stands in the move.
        epochs: how many epochs every program has.
        epoch_of: per tensor its epoch. Under ``release``, tensors that all devices keep as they are have none.
    """

    plan: Plan
    staging_bytes: int
    round_bytes: int
    policy: Policy
    need: NeedOrder
    timetable: Timetable
    epochs: int
    epoch_of: Mapping[Tensor, int]

    @classmethod
    def of(
        cls,
        plan: Plan,
        staging_bytes: int,
        round_bytes: int | None = None,
        *,
        policy: Policy = "keep",
        storages: Collection[Collection[Tensor]] = (),
    ) -> Schedule:
        """The schedule of a plan under a staging bound.

        Args:
            plan: a proved plan.
            staging_bytes: the most that a device stages at any time. The sends and receives of a round are at most
                half of it together, direct ones included.
            round_bytes: the length of a slot. None chooses: a quarter of the staging bound, so that a slot's sends and
                receives fill a round; less where chains are long.
            policy: whether old shards are kept until the commit, or given back as the move goes on.
            storages: under ``release``, groups of tensors that share one storage on some device, before or after:
                they move in one epoch.

        Raises:
            Infeasible: if ``staging_bytes`` or ``round_bytes`` is too little to move anything; under ``release``, if
                no order of the tensors was found that keeps memory within its bound (``epochs``).
        """
        if staging_bytes < 2:
            raise Infeasible(f"a staging bound of {staging_bytes} bytes moves nothing; what to do: give some MiB")
        if round_bytes is not None and round_bytes < 1:
            raise Infeasible(f"rounds of {round_bytes} bytes move nothing; what to do: give some MiB")
        need = NeedOrder.of(plan.curr.layout)
        if policy == "keep":
            epoch, epochs, epoch_of = None, 1, dict.fromkeys(need.at, 0)
        else:
            epoch = assign_epochs(plan, need, staging_bytes, storages)
            epochs = max(int(epoch.max(initial=0)) + 1, 1)
            epoch_of = {t: e for t, e in zip(plan.curr.layout.tensors, epoch.tolist(), strict=True) if e >= 0}
        if round_bytes is None:
            round_bytes = _round_bytes(plan, staging_bytes, epochs)
        timetable = Timetable.of(plan, need, epoch)
        return cls(plan, staging_bytes, round_bytes, policy, need, timetable, epochs, epoch_of)

    def program(self, device: int) -> Program:
        """The program of one device.

        Raises:
            Infeasible: if one element is larger than half the staging bound.
            KeyError: if the plan does not know the device.
        """
        plan = self.plan
        if not any((placed.device_ids == device).any() for placed in (plan.prev, plan.curr)):
            raise KeyError(f"device {device} is not in the plan, which has {len(plan.devices)} devices")
        rounds: list[list[Round]] = [[] for _ in range(self.epochs)]
        for epoch, units in groupby(self._units(device), key=lambda unit: unit.epoch):
            rounds[epoch] = list(_rounds(units, self.staging_bytes // 2))
        copied = (Copy(copy.piece, copy.source, copy.target) for copy in plan.copies_of(device))
        copies = self._by_epoch(copied, lambda copy: copy.piece.tensor)
        allocate = self._by_epoch(plan.allocated_of(device), lambda shard: shard.tensor)
        refers = tuple(Refer(refer.shard) for refer in plan.refers_of(device))
        release: list[list[Shard]] = [[] for _ in range(self.epochs)]
        if self.policy == "release":
            kept = {refer.shard for refer in refers}
            gone = (shard for shard in self.held(device) if shard not in kept)
            release = self._by_epoch(gone, lambda shard: shard.tensor)
        epochs = tuple(
            Epoch(tuple(new), tuple(self._with_copies(steps, local) if local else steps), tuple(old))
            for new, steps, local, old in zip(allocate, rounds, copies, release, strict=True)
        )
        return Program(device, refers, epochs, plan.digest)

    def held(self, device: int) -> tuple[Shard, ...]:
        """What a device holds before the move; nothing, if it is lost."""
        return () if device in self.plan.lost else self.plan.prev.shards_on(device)

    def peak(
        self,
        device: int,
        *,
        program: Program | None = None,
        prev_storages: Sequence[Storage] = (),
        curr_storages: Sequence[Storage] = (),
    ) -> Peak:
        """What a device's state takes at the worst moment; see ``peak_of``.

        Args:
            device: the device.
            program: its program, if it is there already.
            prev_storages: how old shards lie in storages.
            curr_storages: how new shards do.
        """
        program = program or self.program(device)
        return peak_of(program, self.held(device), prev_storages=prev_storages, curr_storages=curr_storages)

    def peak_extra_bytes(self, device: int) -> int:
        """What a device needs beside its old state at the worst moment, each shard a storage of its own."""
        return self.peak(device).beside_prev_bytes

    def _by_epoch(self, found: Iterable[_Any], tensor_of: Callable[[_Any], Tensor]) -> list[list[_Any]]:
        by_epoch: list[list[_Any]] = [[] for _ in range(self.epochs)]
        for one in found:
            by_epoch[self.epoch_of[tensor_of(one)]].append(one)
        return by_epoch

    def _units(self, device: int) -> list[_Unit]:
        """All messages of a device, epoch by epoch, in the order of all units."""
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
            epoch = self.epoch_of[transfer.piece.tensor]
            pieces += [
                ((epoch, slot + transfer.hop, rank, piece.region.offsets, *ends), make(piece))
                for slot, piece in cuts[id(transfer.piece)][1]
            ]
        pieces.sort(key=lambda entry: entry[0])
        units: list[_Unit] = []
        open_units: dict[tuple[int, int, int, int], _Unit] = {}
        for (epoch, slot, _, _, source, target), instruction in pieces:
            size_bytes = instruction.piece.nbytes
            unit = open_units.get((epoch, slot, source, target))
            if unit is None or unit.nbytes + size_bytes > self.staging_bytes // 2:
                unit = open_units[epoch, slot, source, target] = _Unit(epoch, slot)
                units.append(unit)
            unit.nbytes += size_bytes
            unit.instructions.append(instruction)
        return units

    def _cut(self, piece: Shard, start_bytes: int) -> Iterator[tuple[int, Shard]]:
        """The pieces of a piece, each with its slot before hops are added."""
        tensor, most_bytes = piece.tensor, self.staging_bytes // 2
        if tensor.itemsize > most_bytes:
            raise Infeasible(
                f"{piece}: one element has {tensor.itemsize} bytes, a round has {most_bytes}, half of the staging "
                f"bound of {self.staging_bytes}; what to do: allow more staging"
            )
        most_numel = most_bytes // tensor.itemsize
        for slot, region in cut_by_slots(piece.region, tensor.itemsize, start_bytes, self.round_bytes):
            for part in region.pieces(most_numel):
                yield slot, piece if part == piece.region else Shard(tensor, part)

    def _with_copies(self, rounds: list[Round], copies: list[Copy]) -> list[Round]:
        rounds = rounds or [Round()]
        by_round: list[list[Copy]] = [[] for _ in rounds]
        copied_bytes = 0
        for copy in sorted(copies, key=lambda copy: self.need.at[copy.piece.tensor]):
            # As much a round as the wire carries; what is left when the wire is done comes with the last round.
            by_round[min(2 * copied_bytes // self.staging_bytes, len(rounds) - 1)].append(copy)
            copied_bytes += copy.piece.nbytes
        return [Round(tuple(copied), step.sends, step.recvs) for copied, step in zip(by_round, rounds, strict=True)]


def compile_programs(
    plan: Plan, staging_bytes: int, round_bytes: int | None = None, **options: Unpack[Options]
) -> dict[int, Program]:
    """The programs of all devices of a plan, those that leave included. For tests and simulations.

    Args and errors are those of ``Schedule.of`` and ``Schedule.program``.
    """
    schedule = Schedule.of(plan, staging_bytes, round_bytes, **options)
    return {device: schedule.program(device) for device in plan.devices}


def compile_program(
    plan: Plan, device: int, staging_bytes: int, round_bytes: int | None = None, **options: Unpack[Options]
) -> Program:
    """The program of one device: ``compile_programs(plan, staging_bytes, ...)[device]``.

    Args and errors are those of ``Schedule.of`` and ``Schedule.program``.
    """
    return Schedule.of(plan, staging_bytes, round_bytes, **options).program(device)


def _round_bytes(plan: Plan, staging_bytes: int, epochs: int) -> int:
    """The length of a slot: a quarter of the staging, less where chains are long for what an epoch moves."""
    most_bytes, moves = max(staging_bytes // 4, 1), plan.moves
    if moves.hop.max(initial=1) == 1:
        return most_bytes
    receivers = numbered(moves)[1]
    return piece_bytes_of(plan.cells.nbytes, moves.cell, receivers, moves.hop, most_bytes, epochs=epochs)


@dataclass(slots=True)
class _Unit:
    """One message of a device: pieces that leave for, or come from, one peer."""

    epoch: int
    slot: int
    nbytes: int = 0
    instructions: list[Send | Forward | Recv] = field(default_factory=list)


def _maker(transfer: PlannedTransfer, device: int) -> Callable[[Shard], Send | Forward | Recv]:
    """What a device does with the pieces of a transfer of which it is an end."""
    if device == transfer.target_device:
        return lambda piece: Recv(piece, transfer.target, transfer.source_device)
    if transfer.hop == 1:
        return lambda piece: Send(piece, transfer.source, transfer.target_device)
    return lambda piece: Forward(piece, transfer.source, transfer.target_device)


def _rounds(units: Iterable[_Unit], most_bytes: int) -> Iterator[Round]:
    """Units in their order, as many a round as fit."""
    held: list[_Unit] = []
    held_bytes = 0
    for unit in units:
        held_bytes += unit.nbytes
        if held and (unit.slot != held[0].slot or held_bytes > most_bytes):
            yield _round(held)
            held, held_bytes = [], unit.nbytes
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
