"""Programs in words, for ``shardshift explain --program RANK``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from ..values import Shard
from .peak import peak_extra_bytes
from .program import Copy, Forward, Instruction, Program, Recv, Refer, Round, Send


def describe(program: Program) -> Iterator[str]:
    """A program as lines: a summary, what stays, then per epoch what is new, each round, and what is given back."""
    kept_bytes = sum(refer.shard.nbytes for refer in program.refers)
    new_bytes = sum(shard.nbytes for shard in program.allocate)
    yield (
        f"device {program.device}: {len(program.refers)} shards stay ({kept_bytes:,} B), {len(program.allocate)} are "
        f"new ({new_bytes:,} B), {len(program.rounds)} rounds, at most {peak_extra_bytes(program):,} B beside the "
        f"old state; plan {program.digest}"
    )
    for refer in program.refers:
        yield f"  {_line(refer)}"
    index = 0
    for number, epoch in enumerate(program.epochs):
        if len(program.epochs) > 1:
            yield f"epoch {number}"
        for shard in epoch.allocate:
            yield f"  allocate {_sized(shard)}"
        for step in epoch.rounds:
            yield f"round {index}: {_totals(step)}"
            for instruction in (*step.copies, *step.sends, *step.recvs):
                yield f"  {_line(instruction)}"
            index += 1
        if epoch.release:
            yield "fence"
        for shard in epoch.release:
            yield f"  release  {_sized(shard)}"


def _totals(step: Round) -> str:
    sent_to, received_from = {send.peer for send in step.sends}, {recv.peer for recv in step.recvs}
    parts = [
        ("sends", _bytes(*(send.piece for send in step.sends)), f" to {_devices(sent_to)}"),
        ("receives", _bytes(*(recv.piece for recv in step.recvs)), f" from {_devices(received_from)}"),
        ("copies", _bytes(*(copy.piece for copy in step.copies)), ""),
    ]
    return ", ".join(f"{verb} {size:,} B{where}" for verb, size, where in parts if size) or "nothing"


def _line(instruction: Instruction) -> str:
    match instruction:
        case Refer(shard):
            return f"refer    {_sized(shard)}"
        case Copy(piece, source, target):
            return f"copy     {_sized(piece)} of {source.region} into {target.region}"
        case Send(piece, source, peer):
            return f"send     {_sized(piece)} of {source.region} to device {peer}"
        case Forward(piece, source, peer):
            return f"forward  {_sized(piece)} of new {source.region} to device {peer}"
        case Recv(piece, target, peer):
            return f"recv     {_sized(piece)} into {target.region} from device {peer}"
        case _:
            assert_never(instruction)


def _sized(shard: Shard) -> str:
    return f"{shard} ({shard.nbytes:,} B)"


def _bytes(*pieces: Shard) -> int:
    return sum(piece.nbytes for piece in pieces)


def _devices(peers: set[int]) -> str:
    return f"device {min(peers, default=0)}" if len(peers) == 1 else f"{len(peers)} devices"
