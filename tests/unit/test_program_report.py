"""A program's summary by peer, held against its instructions."""

from __future__ import annotations

import io

from rich.console import Console

from shardshift.report.program import peer_bytes, peer_table
from shardshift.schedule import Epoch, Forward, Program, Recv, Round, Send
from shardshift.values import Kind, Region, Shard, Tensor

TENSOR = Tensor(Kind.PARAM, "w", (1024,), "float32", 4)


def piece(low: int, high: int) -> Shard:
    return Shard(TENSOR, Region((low,), (high - low,)))


def program(*rounds: Round) -> Program:
    return Program(0, (), (Epoch((), rounds),), "digest")


def text(one: Program) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(peer_table(one))
    return captured.get()


def test_bytes_are_summed_by_peer_and_what_is_passed_on_is_part_of_what_is_sent() -> None:
    whole = piece(0, 1024)
    one = program(
        Round(sends=(Send(piece(0, 256), whole, 2),), recvs=(Recv(piece(256, 512), whole, 1),)),
        Round(sends=(Forward(piece(256, 512), whole, 2), Send(piece(0, 1), whole, 3))),
    )
    assert peer_bytes(one) == {1: (0, 1024, 0), 2: (2048, 0, 1024), 3: (4, 0, 0)}
    assert "device 2" in text(one)
    assert "all" in text(one)


def test_a_program_without_peers_has_a_sum_of_nothing() -> None:
    assert peer_bytes(program()) == {}
    assert "0 B" in text(program())
