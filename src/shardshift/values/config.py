"""Parallel configurations: how many ways each axis of the mesh cuts the job, and which rank sits where.

The order of ranks is Megatron's default (``parallel_state.py``, ``order="tp-cp-ep-dp-pp"``): tensor parallel
varies fastest, pipeline parallel slowest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from .errors import Infeasible


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """Where one virtual rank sits: its index along each axis."""

    pp: int
    tp: int
    dp: int

    def __str__(self) -> str:
        return f"pp{self.pp} tp{self.tp} dp{self.dp}"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel axes, e.g. ``ParallelConfig.parse("pp4tp2dp1")``.

    Raises:
        Infeasible: if a size is less than 1.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if size < 1:
                raise Infeasible(f"axis {axis.name} has size {size}; what to do: give a size of 1 or more")

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """Read ``"pp4tp2dp1"``: any order, any case; ``-``, ``_``, ``,``, ``=`` and spaces may separate.

        Raises:
            Infeasible: if the text is not of that form, names an axis twice, or names an unknown one.
        """
        known = [axis.name for axis in fields(cls)]
        advice = f"what to do: write it like 'pp4tp2dp1'; known axes: {', '.join(known)}; left out means 1"
        compact = re.sub(r"[\s,_=\-]", "", text.lower())
        if not compact or not re.fullmatch(r"(?:[a-z]+\d+)+", compact):
            raise Infeasible(f"not a parallel configuration: {text!r}; {advice}")
        sizes: dict[str, int] = {}
        for axis, size in re.findall(r"([a-z]+)(\d+)", compact):
            if axis not in known:
                raise Infeasible(f"unknown axis {axis!r} in {text!r}; {advice}")
            if axis in sizes:
                raise Infeasible(f"axis {axis!r} is given twice in {text!r}; {advice}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """Virtual ranks in all."""
        return self.pp * self.tp * self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a virtual rank.

        Raises:
            ValueError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in {self}, which has {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(pp, tp, dp)

    def rank(self, pp: int, tp: int, dp: int = 0) -> int:
        """The virtual rank at a coordinate; the inverse of ``coordinate``."""
        return (pp * self.dp + dp) * self.tp + tp

    def __str__(self) -> str:
        return "".join(f"{axis.name}{getattr(self, axis.name)}" for axis in fields(self))
