"""A device's program in short: what it sends to whom, receives from whom, and passes on."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ..schedule import Forward, Program
from .plan import amount


def peer_bytes(program: Program) -> dict[int, tuple[int, int, int]]:
    """Per peer, ascending: bytes sent to it in all, received from it, and, of those sent, forwarded."""
    found: dict[int, list[int]] = {}
    for step in program.rounds:
        for send in step.sends:
            totals = found.setdefault(send.peer, [0, 0, 0])
            totals[0] += send.piece.nbytes
            totals[2] += send.piece.nbytes * isinstance(send, Forward)
        for recv in step.recvs:
            found.setdefault(recv.peer, [0, 0, 0])[1] += recv.piece.nbytes
    return {peer: (sent, received, passed) for peer, (sent, received, passed) in sorted(found.items())}


def peer_table(program: Program) -> Table:
    """One row a peer, and their sum."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("peer", no_wrap=True)
    for heading in ("sent", "received", "of sent: forwarded"):
        table.add_column(heading, justify="right", no_wrap=True)
    peers = peer_bytes(program)
    for peer, totals in peers.items():
        table.add_row(f"device {peer}", *map(amount, totals))
    if len(peers) != 1:
        table.add_row("all", *(amount(sum(column)) for column in zip((0, 0, 0), *peers.values(), strict=True)))
    return table
