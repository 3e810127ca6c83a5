"""Early records: what a rank tells of a step before its training loop is done with it.

A loop counts and draws after ``commit_step`` too, and all of that belongs to the step: so a mark is taken once more as
the next turn begins. A loss may come between the two marks, and a buddy's copy of a rank that is lost is always of the
first. Early records would contradict those of ranks that went further, and what only they tell is needed:

1. where a survivor's record is not early, early ones count for nothing that it tells as well;
2. where all are early, nothing is: what the loop did after the step is lost with the loop's turn.

What others tell as well: a param group's settings and step by parameter, a random stream by its home, extra state of a
module by rank but for data and context parallelism, a grad scaler by kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ...values import ParallelConfig
from ..groups import GroupRecord
from .rng import home

if TYPE_CHECKING:
    from .records import RankRecord

EARLY: Final = "early/"
"""Before the key of an early record."""


def parted(records: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The records that count, and the early ones that only complete them, without the prefix; any number of ranks'."""
    early = {key.removeprefix(EARLY): content for key, content in records.items() if key.startswith(EARLY)}
    settled = {key: content for key, content in records.items() if not key.startswith(EARLY)}
    return (settled, early) if settled else (early, {})


def completed(
    settled: Mapping[int, RankRecord],
    early: Mapping[int, RankRecord],
    config: ParallelConfig,
    individual: Collection[str],
) -> dict[int, RankRecord]:
    """Records by rank: the settled ones, and of the early ones what no settled one tells.

    Args:
        settled: by virtual rank.
        early: by virtual rank.
        config: the layout that they are of.
        individual: random streams that each rank has for itself.
    """
    names = {name for record in settled.values() for group in record.groups for name in group.names}
    streams = {
        (name, home(name, config, rank, individual=name in individual))
        for rank, record in settled.items()
        for name in record.streams
    }
    states = {(name, _cut(config, rank)) for rank, record in settled.items() for name in record.extra_state}
    kinds = {kind for record in settled.values() for kind in record.scalers}
    return dict(settled) | {
        rank: replace(
            record,
            groups=list(_but(record.groups, names)),
            streams={
                name: state
                for name, state in record.streams.items()
                if (name, home(name, config, rank, individual=name in individual)) not in streams
            },
            extra_state={
                name: state for name, state in record.extra_state.items() if (name, _cut(config, rank)) not in states
            },
            scalers={kind: state for kind, state in record.scalers.items() if kind not in kinds},
        )
        for rank, record in early.items()
    }


def _but(groups: Collection[GroupRecord], told: Collection[str]) -> Iterator[GroupRecord]:
    """Groups without the parameters that are told elsewhere, if any is left."""
    for group in groups:
        names = [name for name in group.names if name not in told]
        if names:
            steps = [(step, [name for name in of_step if name in names]) for step, of_step in group.steps]
            yield replace(group, names=names, steps=steps)


def _cut(config: ParallelConfig, rank: int) -> tuple[int, int, int]:
    at, among = config.coordinate(rank), config.expert_coordinate(rank)
    return at.tp, among.ep, among.etp
