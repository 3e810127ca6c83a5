"""Records: what a Megatron job carries besides tensors that have a region.

1. Each rank gives one record: the steps and settings of the param groups whose parameters it speaks for (``groups``),
   the random streams (``rng``) and extra states of modules (``extras``) in which it differs from the first of its data
   parallel group, and its grad scalers. A rank that has nothing to add gives none, so that replicas cost nothing.
2. The first rank adds one record for the whole job: iteration, data position, counters, scheduler, micro-batch
   calculator, rerun state machine. That the others hold the same is seen first, by digests (``alike``).
3. Every rank of the new layout reads all records, which must agree, and takes what belongs to its coordinate.

After a loss nobody can ask the first ranks, or who is first: so each survivor gives all that it has, the record of the
job too (``alone``), and these are held against one another when they are read; ``early`` says which of them count.

Records are bytes of plain values and tensors (``plain``), and are read so that nothing in them can run code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...values import Mismatch, ParallelConfig, Unaccounted
from ..generators import Streams
from ..groups import GroupRecord, Groups
from ..plain import dump, load, pack, unpack
from . import alike, extras, scaler
from .early import EARLY, completed, parted
from .extras import ExtraState
from .rng import Origins

_JOB: Final = "job"
_RANK: Final = "rank"
_JOB_OF: Final = f"{_JOB}/{_RANK}"
_BY_RANK: Final = ("streams", "extra_state")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's companions.

    Attributes:
        rank: virtual rank in the layout before.
        groups: ``groups.describe``.
        streams: ``rng.published``.
        extra_state: ``extras.published``, packed.
        scalers: ``scaler.capture``, packed.
    """

    rank: int
    groups: Sequence[GroupRecord]
    streams: Streams
    extra_state: Mapping[str, Any]
    scalers: Mapping[str, Any]

    def to_bytes(self, *, first: bool) -> dict[str, bytes]:
        """Key and content; nothing if this rank is no first one (dp 0, cp 0) and has nothing to add."""
        if not (first or self.streams or self.extra_state or any(group.names for group in self.groups)):
            return {}
        record = {
            "rank": self.rank,
            "groups": [group.plain() for group in self.groups],
            "streams": self.streams,
            "extra_state": dict(self.extra_state),
            "scalers": dict(self.scalers),
        }
        return {f"{_RANK}{self.rank}": dump(record, f"rank {self.rank}")}

    @classmethod
    def from_bytes(cls, content: bytes) -> RankRecord:
        """The inverse of ``to_bytes``."""
        record = load(content)
        groups = [GroupRecord(**group) for group in record["groups"]]
        streams = {name: unpack(state) for name, state in record["streams"].items()}
        return cls(record["rank"], groups, streams, record["extra_state"], record["scalers"])


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The whole job's companions.

    Attributes:
        iteration: optimizer steps finished.
        consumed_samples: training samples used, over all ranks.
        generation: changes of layout before this one.
        scheduler: state of the learning rate scheduler, or None.
        counters: the user's counts by name: consumed_valid_samples, skipped_samples, floating_point_operations, ...
        microbatches: ``microbatches.capture``.
        rerun: ``rerun.capture``, packed.
        individual: random streams that an earlier change found to differ between ranks that could share them.
        global_batch_size: samples of the next step, over all ranks.
        micro_batch_size: samples per forward on one rank.
    """

    iteration: int
    consumed_samples: int
    generation: int
    scheduler: dict[str, Any] | None
    counters: Mapping[str, int | float]
    microbatches: dict[str, Any] | None = None
    rerun: dict[str, Any] | None = None
    individual: tuple[str, ...] = ()
    global_batch_size: int = 0
    micro_batch_size: int = 0

    def __post_init__(self) -> None:
        for name, value in self.counters.items():
            if type(value) not in (int, float):
                raise Unaccounted(
                    f"counter {name} is a {type(value).__name__}; nothing was moved. What to do: keep whole or "
                    "floating numbers in job.counters",
                    [name],
                )

    def values(self) -> dict[str, Any]:
        """What every rank must hold alike, by name: for ``alike.differing`` on the whole world."""
        own = ("counters", "rerun")  # the machine's largest values are those of its rank
        values = {name: getattr(self, name) for name in self.__slots__ if name not in own}
        return values | {f"counter {name}": value for name, value in self.counters.items()}

    def to_bytes(self) -> dict[str, bytes]:
        """Key and content."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return {_JOB: dump(record | {"counters": dict(self.counters)}, "the job")}

    @classmethod
    def from_bytes(cls, content: bytes) -> JobRecord:
        """The inverse of ``to_bytes``."""
        return cls(**{name: unpack(value) for name, value in load(content).items()})

    def frozen(self) -> JobRecord:
        """The same with values of its own, which the live job does not change."""
        scheduler = pack(self.scheduler, "the job: scheduler")
        return replace(self, scheduler=scheduler, counters=dict(self.counters))

    @classmethod
    def agreed(cls, records: Mapping[str, bytes]) -> JobRecord:
        """The one record that survivors of a loss have; of what may differ, the first one's.

        Raises:
            Mismatch: naming in what two of them differ.
        """
        (first, content), *others = sorted(records.items(), key=lambda item: int(item[0].removeprefix(_JOB_OF)))
        found = cls.from_bytes(content)
        digests = alike.digests(found.values())
        for key, other in others:
            theirs = cls.from_bytes(other)
            if names := alike.differing_from(digests, alike.digests(theirs.values())):
                raise Mismatch(
                    f"survivors hold different states of the job: {', '.join(names)} differ between ranks "
                    f"{first.removeprefix(_JOB_OF)} (iteration {found.iteration}) and {key.removeprefix(_JOB_OF)} "
                    f"(iteration {theirs.iteration}); nothing was moved. What to do: keep them alike on all ranks, as "
                    "a schedule or count that follows the global step is"
                )
        return found

    def next_generation(self) -> JobRecord:
        """The same one change of layout later."""
        return replace(self, generation=self.generation + 1)


def alone(job: JobRecord, rank: RankRecord, *, settled: bool) -> dict[str, bytes]:
    """What one rank gives after a loss: all that it has, under keys that no other rank gives.

    Args:
        job: the whole job's record, as this rank has it.
        rank: its own.
        settled: whether the loop was done with the step (``early``).
    """
    records = {f"{_JOB_OF}{rank.rank}": job.to_bytes()[_JOB], **rank.to_bytes(first=True)}
    return records if settled else {EARLY + key: content for key, content in records.items()}


@dataclass(frozen=True, slots=True)
class Companions:
    """All records of a job, read back and held against one another.

    Attributes:
        job: the whole job's.
        groups: steps and param groups.
        streams: random streams.
        extra_state: of modules.
        scalers: states of grad scalers by kind of part, packed.
        survivors: whether the records are those of the survivors of a loss.
    """

    job: JobRecord
    groups: Groups
    streams: Origins
    extra_state: ExtraState
    scalers: Mapping[str, Any]
    survivors: bool = False

    @classmethod
    def read(
        cls, records: Mapping[str, bytes], prev: ParallelConfig, differing: extras.Differing = "error"
    ) -> Companions:
        """From the bytes that every rank gave.

        Args:
            records: by key; of all ranks, or (``alone``) of those that have survived a loss.
            prev: the layout that gave them.
            differing: what is done with extra states that differ and cannot be kept apart.

        Raises:
            Mismatch: if a record is missing, or two contradict one another.
        """
        records, early = parted(records)
        of_jobs = {key: content for key, content in records.items() if key.startswith(_JOB_OF)}
        if _JOB not in records and not of_jobs:
            raise Mismatch(f"the record of the whole job is missing; there are {sorted(records)}")
        job = JobRecord.agreed(of_jobs) if of_jobs else JobRecord.from_bytes(records[_JOB])
        survivors = bool(of_jobs)
        begun = _by_rank(early)
        ranks = completed(_by_rank(records), begun, prev, job.individual)
        streams, states = ({rank: getattr(record, what) for rank, record in ranks.items()} for what in _BY_RANK)
        return cls(
            job,
            Groups({rank: record.groups for rank, record in ranks.items()}),
            Origins.read(prev, streams, job.individual, survivors=survivors, partial=begun),
            ExtraState.read(prev, states, differing, survivors=survivors),
            scaler.merge(record.scalers for record in ranks.values()),
            survivors,
        )

    def as_given_by(self, curr: ParallelConfig, rank: int) -> dict[str, bytes]:
        """What a rank of the new layout would give alone, its job built with these records or not."""
        individual = tuple(sorted(self.streams.individual))
        job = replace(self.job.next_generation(), individual=individual)
        states = {name: self.extra_state.at(name, curr, rank) for name in self.extra_state.copies}
        streams = self.streams.at(curr, rank, job.generation)
        packed = {name: pack(state, name) for name, state in states.items()}
        return alone(job, RankRecord(rank, self.groups.all, streams, packed, self.scalers), settled=False)

    def check(self, curr: ParallelConfig, names: Iterable[Iterable[str]] = ()) -> None:
        """Look for what ``rebuild`` could not take.

        Args:
            curr: the new layout.
            names: the logical names of each param group of this rank there, as far as they are known before it is
                built (each parameter by itself serves).

        Raises:
            Mismatch: naming it.
        """
        self.extra_state.check(curr)
        for of_group in names:
            wanted = list(of_group)
            untold = [name for name in wanted if self.survivors and not self.groups.tells(name)]
            if untold:
                raise Mismatch(
                    f"no survivor tells the optimizer step and settings of {', '.join(untold[:8])}; nothing was moved. "
                    "What to do: let whoever keeps a lost rank's tensors give its records too"
                )
            self.groups.settings(wanted)


def _by_rank(records: Mapping[str, bytes]) -> dict[int, RankRecord]:
    found = (RankRecord.from_bytes(content) for key, content in records.items() if key.startswith(_RANK))
    return {record.rank: record for record in found}
