"""Many moves in a row: what a process has open, and how much memory it takes, after each of them.

Two ways: one mover for all moves, and a call of ``reshard`` each, which has a line of its own that it closes again.
Policies and directions take turns, so whatever one of them leaves behind adds up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from _processes import Rank, run_ranks
from _state import Size, change, check, held

from shardshift.engine import Mover, names_of, reshard
from shardshift.engine.line import Line
from shardshift.plan import Plan, make_plan
from shardshift.transport import ProcessGroupTransport, SameHostTransport
from shardshift.values import PlacedLayout

MOVES: Final = 50
SETTLED: Final = 10
SIZE: Final = Size(layers=4, hidden=64, vocab=256)
_STAGING_BYTES: Final = 1 << 20
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Open:
    """What a process has after a move.

    Attributes:
        fds: file descriptors.
        threads: of the kernel's, all.
        groups: lines and transports that live; counted after the tenth move and the last.
        rss_kib: resident memory.
    """

    fds: int
    threads: int
    groups: int
    rss_kib: float


def slope_kib(found: Sequence[Open]) -> float:
    """By how much memory grows from one move to the next, from the tenth on: the straight line of least squares."""
    after = found[SETTLED - 1 :]
    return float(np.polyfit(np.arange(len(after)), [one.rss_kib for one in after], 1)[0])


def differ(found: Sequence[Open]) -> int:
    """How many more or fewer of descriptors, threads and groups the last moves left than those up to the tenth.

    Of three moves the least: the kernel may list a thread a moment longer than Python waits for it.
    """
    first, last = (
        (min(one.fds for one in some), min(one.threads for one in some), some[-1].groups)
        for some in (found[SETTLED - 3 : SETTLED], found[-3:])
    )
    return sum(abs(b - a) for a, b in zip(first, last, strict=True))


def repeated(transport: str, *, one_shot: bool, moves: int = MOVES, devices: int = 4) -> list[list[Open]]:
    """Per process what it has after each of many moves.

    Args:
        transport: ``gloo`` or ``same-host``.
        one_shot: whether each is a call of ``reshard``.
        moves: how many.
        devices: processes.
    """
    forth = change(SIZE, f"pp{devices}", f"tp{devices}")
    back = make_plan(forth.curr, forth.prev.layout, devices=forth.devices, placement=forth.prev.devices)
    body = _one_shot if one_shot else _one_mover
    return run_ranks(devices, lambda rank: body(rank, transport, (forth, back), moves))


def _one_mover(rank: Rank, transport: str, plans: tuple[Plan, Plan], moves: int) -> list[Open]:
    _ask_no_name_server()
    store, devices = rank.store("repeats"), range(rank.count)
    with Mover(store, rank.index, devices, transport=transport, staging_bytes=_STAGING_BYTES) as mover:
        return _repeat(rank, plans, moves, mover.move)


def _one_shot(rank: Rank, transport: str, plans: tuple[Plan, Plan], moves: int) -> list[Open]:
    _ask_no_name_server()
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.index, world_size=rank.count)

    def move(
        prev: PlacedLayout, curr: PlacedLayout, state: dict[str, torch.Tensor], **options: object
    ) -> dict[str, torch.Tensor]:
        return reshard(prev, curr, state, transport=transport, staging_bytes=_STAGING_BYTES, **options)  # type: ignore[arg-type]

    return _repeat(rank, plans, moves, move)


def _repeat(
    rank: Rank, plans: tuple[Plan, Plan], moves: int, move: Callable[..., dict[str, torch.Tensor]]
) -> list[Open]:
    found: list[Open] = []
    plan = plans[0]
    names = names_of(plans[0].prev.shards_on(rank.index))
    tensors = held(plans[0], rank.index)
    state = {name: tensors[shard] for name, shard in names.items()}
    del tensors
    for number in range(moves):
        plan = plans[number % 2]
        state = move(plan.prev, plan.curr, state, policy="release" if number // 2 % 2 else "keep")
        rank.barrier()
        found.append(_open(number in (SETTLED - 1, moves - 1)))
        rank.barrier()  # nobody goes on, or closes its end, while another counts
    new = names_of(plan.curr.shards_on(rank.index))
    check(plan, rank.index, {shard: state[name] for name, shard in new.items()})
    return found


def _open(compared: bool) -> Open:
    groups = 0
    if compared:  # a second's work
        gc.collect()
        kinds = (Line, ProcessGroupTransport, SameHostTransport, dist.ProcessGroup)
        groups = sum(issubclass(type(one), kinds) for one in gc.get_objects())
    return Open(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        groups,
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _KIB,
    )


def _ask_no_name_server() -> None:
    """See ``faults``."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
