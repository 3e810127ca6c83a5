"""Companions: what a Megatron job carries besides tensors that have a region.

Each (pp, tp) coordinate gives one record (from its first DP replica): optimizer step and param group of every
parameter by logical name, the groups' settings, and its random streams. The first rank adds one record for the
whole job: iteration, data position, scheduler. Records are ``torch.save`` bytes of plain values and tensors, and
are read with ``weights_only``, so nothing in them can run code.

Param groups are matched by the parameters that they hold, never by their order: the order differs between
pipeline stages.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...values import Mismatch, Unaccounted
from .rng import Streams

_JOB = "job"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One coordinate's companions.

    Attributes:
        coordinate: (pp, tp).
        steps: per logical name the optimizer's step, if it has one.
        group_of: per logical name the index of its param group.
        groups: per param group its settings (lr, weight decay, ...), without the parameters.
        streams: random streams.
    """

    coordinate: tuple[int, int]
    steps: dict[str, Any]
    group_of: dict[str, int]
    groups: list[dict[str, Any]]
    streams: Streams

    def to_bytes(self) -> tuple[str, bytes]:
        """Key and content."""
        pp, tp = self.coordinate
        return f"pp{pp}tp{tp}", _dump({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The whole job's companions.

    Attributes:
        iteration: optimizer steps finished.
        consumed_samples: samples used, over all ranks.
        generation: changes of layout before this one.
        scheduler: state of the learning rate scheduler, or None.
    """

    iteration: int
    consumed_samples: int
    generation: int
    scheduler: dict[str, Any] | None

    def to_bytes(self) -> tuple[str, bytes]:
        """Key and content."""
        return _JOB, _dump({name: getattr(self, name) for name in self.__slots__})

    def next_generation(self) -> JobRecord:
        """The same one change of layout later."""
        return replace(self, generation=self.generation + 1)


@dataclass(frozen=True, slots=True)
class Companions:
    """All records of a job, read back."""

    job: JobRecord
    ranks: tuple[RankRecord, ...]

    @classmethod
    def read(cls, records: Mapping[str, bytes]) -> Companions:
        """From the bytes that every rank gave.

        Raises:
            Mismatch: if the whole job's record is missing.
        """
        if _JOB not in records:
            raise Mismatch(f"the record of the whole job is missing; there are {sorted(records)}")
        ranks = [RankRecord(**_load(content)) for key, content in sorted(records.items()) if key != _JOB]
        return cls(JobRecord(**_load(records[_JOB])), tuple(ranks))

    @property
    def streams(self) -> dict[tuple[int, int], Streams]:
        """Random streams by (pp, tp)."""
        return {record.coordinate: record.streams for record in self.ranks}

    def step(self, name: str) -> Any:
        """The optimizer's step of a logical parameter; a step that only some copies have serves for all.

        Raises:
            Mismatch: if two copies disagree.
        """
        steps = [record.steps[name] for record in self.ranks if name in record.steps]
        for other in steps[1:]:
            if float(other) != float(steps[0]):
                raise Mismatch(f"{name}: one copy is at optimizer step {float(steps[0])}, another at {float(other)}")
        return deepcopy(steps[0]) if steps else None

    def group_settings(self, names: Iterable[str]) -> dict[str, Any] | None:
        """The settings of the group that held these parameters; None if no rank had any of them.

        Raises:
            Mismatch: if they were in groups of different settings.
        """
        found: dict[str, Any] | None = None
        first = ""
        for name in names:
            for record in self.ranks:
                if name not in record.group_of:
                    continue
                settings = record.groups[record.group_of[name]]
                if found is None:
                    found, first = settings, name
                elif settings != found:
                    differing = sorted(k for k in found.keys() | settings.keys() if found.get(k) != settings.get(k))
                    raise Mismatch(
                        f"the new optimizer puts {first} and {name} into one param group, but their settings "
                        f"differ in {differing}; what to do: let wrap make the same groups whatever the layout"
                    )
        return deepcopy(found)  # a tensor-valued lr is not shared between groups


def _dump(record: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(record, buffer)
    content = buffer.getvalue()
    try:
        _load(content)
    except pickle.UnpicklingError as error:
        raise Unaccounted(
            "the optimizer's groups or the scheduler's state hold a value that is neither plain nor a tensor; nothing "
            f"was moved. What to do: keep numbers, texts and tensors there. torch says: {error}",
            ["param_groups", "scheduler"],
        ) from error
    return content


def _load(content: bytes) -> dict[str, Any]:
    record: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return record
