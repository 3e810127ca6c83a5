"""Programs: what one device does, round by round.

Rounds are global: round r of every program is the same round, and both ends of a piece meet in it. Nothing but
the order of the lists says which message is which, since NCCL knows no tags; so both ends must list the pieces
of a pair in the same order, and do, because both are written from one global sequence:

1. Order the transfers by need: parameters first, in the order in which the target's next forward reads them,
   then buffers, fp32 masters and moments (the first forward after a move needs none of these).
2. Cut every transfer into pieces that fit the staging bound.
3. Put each piece into the earliest round in which its source and its target both have room, but never before
   the piece of the same pair that precedes it.
4. Local copies take no staging and run under the wire: they fill the rounds in order of need too.

Greedy placement was kept because it is short and near the bound: the busiest device is rarely idle. Edge
colouring of the transfer graph would need the fewest rounds, but gives up the order of need. What later
schedules add (releases between rounds, forwarding) are further fields of ``Round``, over the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..plan import Plan, Transfer
from ..values import Infeasible, Kind, PlacedLayout, Region, Shard

_NEED: Final = {Kind.PARAM: 0, Kind.BUFFER: 1, Kind.MASTER: 2, Kind.EXP_AVG: 3, Kind.EXP_AVG_SQ: 4}


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
class Recv:
    """Receive ``piece`` of ``target`` from device ``peer``."""

    piece: Shard
    target: Shard
    peer: int


Instruction: TypeAlias = Refer | Copy | Send | Recv


@dataclass(frozen=True, slots=True)
class Round:
    """What a device does in one round. Per peer, the order of the pieces is the order of the messages."""

    copies: tuple[Copy, ...] = ()
    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """All that one device does.

    Attributes:
        device: who runs it.
        refers: shards that stay as they are.
        allocate: new shards that need storage, in order of need.
        rounds: as many as in every other program of the plan.
        digest: the fingerprint of the plan.
    """

    device: int
    refers: tuple[Refer, ...]
    allocate: tuple[Shard, ...]
    rounds: tuple[Round, ...]
    digest: str


def compile_programs(plan: Plan, staging_bytes: int) -> dict[int, Program]:
    """The programs of all devices of a plan, those that leave included.

    Args:
        plan: a proved plan.
        staging_bytes: the most that a device sends, and the most that it receives, in one round.

    Raises:
        Infeasible: if one element is larger than ``staging_bytes``.
    """
    return _compile(plan, staging_bytes, plan.devices)


def compile_program(plan: Plan, device: int, staging_bytes: int) -> Program:
    """The program of one device: ``compile_programs(plan, staging_bytes)[device]``.

    Raises:
        Infeasible: if one element is larger than ``staging_bytes``.
        KeyError: if the plan does not know the device.
    """
    if device not in plan.devices:
        raise KeyError(f"device {device} is not in the plan, whose devices are {plan.devices}")
    return _compile(plan, staging_bytes, (device,))[device]


def peak_extra_bytes(program: Program) -> int:
    """Bytes that a device needs on top of its old state, under the policy ``keep``.

    Old shards live until commit, so this is all newly allocated shards at once, plus the largest round's staging:
    the bytes it sends and receives, each taken to be staged once (strided or packed pieces are; large contiguous
    ones are not, so this errs upwards). Referred shards cost nothing. Allocator rounding, the transport's own
    buffers and a framework's padding are not in it.
    """
    staging_bytes = (
        sum(send.piece.nbytes for send in step.sends) + sum(recv.piece.nbytes for recv in step.recvs)
        for step in program.rounds
    )
    return sum(shard.nbytes for shard in program.allocate) + max(staging_bytes, default=0)


def _compile(plan: Plan, staging_bytes: int, devices: tuple[int, ...]) -> dict[int, Program]:
    if staging_bytes < 1:
        raise Infeasible(f"a staging bound of {staging_bytes} bytes moves nothing; what to do: give some MiB")
    scheduled = list(_scheduled(plan, staging_bytes))
    rounds = max((index + 1 for index, _, _ in scheduled), default=1 if plan.copies else 0)
    sends: dict[int, list[list[Send]]] = {device: [[] for _ in range(rounds)] for device in devices}
    recvs: dict[int, list[list[Recv]]] = {device: [[] for _ in range(rounds)] for device in devices}
    for index, transfer, piece in scheduled:
        if transfer.source_device in sends:
            sends[transfer.source_device][index].append(Send(piece, transfer.source, transfer.target_device))
        if transfer.target_device in recvs:
            recvs[transfer.target_device][index].append(Recv(piece, transfer.target, transfer.source_device))

    need = _order_of_need(plan.curr)
    copies: dict[int, list[list[Copy]]] = {device: [[] for _ in range(rounds)] for device in devices}
    copied_bytes = dict.fromkeys(devices, 0)
    for copy in sorted(plan.copies, key=lambda copy: need(copy.device, copy.target)):
        if copy.device in copies:
            # As much a round as the wire carries; what is left when the wire is done comes with the last round.
            index = min(copied_bytes[copy.device] // staging_bytes, rounds - 1)
            copied_bytes[copy.device] += copy.piece.nbytes
            copies[copy.device][index].append(Copy(copy.piece, copy.source, copy.target))

    refers: dict[int, list[Shard]] = {device: [] for device in devices}
    for refer in plan.refers:
        if refer.device in refers:
            refers[refer.device].append(refer.shard)
    programs = {}
    for device in devices:
        kept = set(refers[device])
        programs[device] = Program(
            device,
            tuple(Refer(shard) for shard in refers[device]),
            tuple(shard for shard in plan.curr.shards_on(device) if shard not in kept),
            tuple(
                Round(tuple(copied), tuple(sent), tuple(received))
                for copied, sent, received in zip(copies[device], sends[device], recvs[device], strict=True)
            ),
            plan.digest,
        )
    return programs


def _order_of_need(curr: PlacedLayout) -> Callable[[int, Shard], tuple[int, int]]:
    """The sort key of (device, new shard): kind, then place in the role of the device that waits for it."""
    places = [{shard: (_NEED[shard.tensor.kind], i) for i, shard in enumerate(role)} for role in curr.layout.roles]

    def key(device: int, target: Shard) -> tuple[int, int]:
        return places[curr.layout.role_of_rank[curr.rank_of_device[device]]][target]

    return key


def _scheduled(plan: Plan, staging_bytes: int) -> Iterator[tuple[int, Transfer, Shard]]:
    """Every piece of every transfer with its round; within a round in order of need."""
    need = _order_of_need(plan.curr)
    sent: dict[int, list[int]] = {device: [] for device in plan.devices}
    received: dict[int, list[int]] = {device: [] for device in plan.devices}
    last: dict[tuple[int, int], int] = {}
    for transfer in sorted(plan.transfers, key=lambda transfer: need(transfer.target_device, transfer.target)):
        tensor, ends = transfer.piece.tensor, (transfer.source_device, transfer.target_device)
        out, into = sent[ends[0]], received[ends[1]]
        for region in _pieces(transfer.piece, staging_bytes):
            size_bytes = region.numel * tensor.itemsize
            index = last.get(ends, 0)
            while _at(out, index) + size_bytes > staging_bytes or _at(into, index) + size_bytes > staging_bytes:
                index += 1
            for used in (out, into):
                used += [0] * (index + 1 - len(used))
                used[index] += size_bytes
            last[ends] = index
            yield index, transfer, transfer.piece if region == transfer.piece.region else Shard(tensor, region)


def _at(used: list[int], index: int) -> int:
    return used[index] if index < len(used) else 0


def _pieces(piece: Shard, staging_bytes: int) -> Iterator[Region]:
    most_numel = staging_bytes // piece.tensor.itemsize
    if most_numel < 1:
        raise Infeasible(
            f"{piece}: one element has {piece.tensor.itemsize} bytes, the staging bound is {staging_bytes}; "
            "what to do: allow more staging"
        )
    return piece.region.pieces(most_numel)
