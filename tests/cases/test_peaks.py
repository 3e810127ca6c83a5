"""Resident memory of real processes while state moves: 64 tensors, a small staging, fewer replicas than before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.movers import Send, mover_in, process, told
from tests.cases.moves import box, ranks

from shardshift.engine import names_of
from shardshift.values import Kind, Layout, PlacedLayout, Shard, Tensor

MIB = 1 << 20
STAGING_BYTES = 4 * MIB
NOISE_BYTES = 6 * MIB
"""What Python, threads and the allocator's leftovers may add."""

MOMENTS = [
    *(Tensor(Kind.EXP_AVG, f"m{n}", (4, MIB // 16), "float32", 4) for n in range(60)),
    *(Tensor(Kind.EXP_AVG, f"m{n}", (4, MIB // 2), "float32", 4) for n in range(60, 64)),
]
PARAMS = [Tensor(Kind.PARAM, f"w{n}", (64, 64), "float32", 4) for n in range(8)]


def with_params(*moments: Sequence[Shard]) -> Layout:
    """Parameters are whole on all ranks."""
    return ranks(*[[*map(box, PARAMS), *own] for own in moments])


def by_rows(ways: int) -> Layout:
    cuts = [(4 * r // ways, 4 * (r + 1) // ways) for r in range(ways)]
    return with_params(*[[box(of, cut) for of in MOMENTS] for cut in cuts])


def whole_ones(ways: int) -> Layout:
    return with_params(*[[box(of) for of in MOMENTS[r::ways]] for r in range(ways)])


def by_columns(ways: int) -> Layout:
    """No piece of what was cut by rows is contiguous."""
    return with_params(
        *[
            [box(of, (0, 4), (of.shape[1] * r // ways, of.shape[1] * (r + 1) // ways)) for of in MOMENTS]
            for r in range(ways)
        ]
    )


LAYOUTS = {"rows": by_rows, "whole": whole_ones, "columns": by_columns}


def in_status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status[status.index(name) :].split()[1]) * 1024


def filled(shard: Shard) -> torch.Tensor:
    """Row r of moment n is full of 8 n + r."""
    if shard.tensor.kind is Kind.PARAM:
        return torch.zeros(shard.region.shape)
    first, rows = shard.region.offsets[0], shard.region.shape[0]
    made = torch.empty(shard.region.shape)
    for row in range(rows):
        made[row] = 8.0 * int(shard.tensor.name[1:]) + first + row
    return made


def is_filled(shard: Shard, found: torch.Tensor) -> bool:
    if shard.tensor.kind is Kind.PARAM:
        return not found.any()
    number, first = 8.0 * int(shard.tensor.name[1:]), shard.region.offsets[0]
    return all(bool(found[row].eq(number + first + row).all()) for row in range(len(found)))


def shrink(send: Send, kind: str, policy: Any, before: str, after: str) -> None:
    with process() as (member, meet), mover_in(member, 4, kind, staging_bytes=STAGING_BYTES) as mover:
        device = member.device
        (scrap,) = [Tensor(Kind.PARAM, "scrap", (4, 4), "float32", 4)]
        warm = ranks(*[[box(scrap, (r, r + 1))] for r in range(4)]), ranks([box(scrap)], [], [], [])
        mover.move(*warm, {"scrap": torch.zeros(1, 4)}, policy=policy)

        placed = PlacedLayout(LAYOUTS[before](4), (0, 1, 2, 3))
        curr = mover.place(placed, LAYOUTS[after](2))
        then = names_of(placed.shards_on(device))
        state = {name: filled(shard) for name, shard in then.items()}
        where = {name: (state[name].data_ptr(), shard) for name, shard in then.items()}
        now = names_of(curr.shards_on(device))
        then_bytes, now_bytes = (sum(shard.nbytes for shard in shards.values()) for shards in (then, now))
        meet.gather("ready", range(4), b"", "test")
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory counts from here
        resident_bytes = in_status("VmRSS")
        found = mover.move(placed, curr, state, policy=policy, compare_copies=False)
        peak_bytes = in_status("VmHWM") - resident_bytes
        stayed = {name for name, (_, shard) in where.items() if now.get(name) == shard}
        new_bytes = sum(shard.nbytes for name, shard in now.items() if name not in stayed)
        largest_bytes = max(shard.nbytes for shard in (*then.values(), *now.values()))
        allowed_bytes = new_bytes if policy == "keep" else max(now_bytes - then_bytes, 0)
        right = found.keys() == now.keys() and all(is_filled(shard, found[name]) for name, shard in now.items())
        same = all(found[name].data_ptr() == where[name][0] for name in stayed)
        send((peak_bytes - allowed_bytes - largest_bytes - STAGING_BYTES, right, same, len(stayed)))
        meet.gather("done", range(4), b"", "test")


@pytest.mark.parametrize(
    ("before", "after", "policy", "kind"),
    [
        ("rows", "rows", "keep", "gloo"),
        ("rows", "rows", "release", "gloo"),
        ("rows", "columns", "release", "gloo"),
        ("whole", "whole", "release", "same-host"),
        ("rows", "columns", "keep", "same-host"),
    ],
)
def test_the_peak_is_the_staging_and_one_piece_and_what_stays_keeps_its_memory(
    before: str, after: str, policy: str, kind: str
) -> None:
    found = told(4, shrink, kind, policy, before, after)
    for ((excess_bytes, right, same, _),) in found.values():
        assert right
        assert same
        assert excess_bytes <= NOISE_BYTES
    counts = sorted(stayed for ((*_, stayed),) in found.values())
    assert counts == ([0, 0, 24, 24] if before == "whole" else [0, 0, 8, 8])
