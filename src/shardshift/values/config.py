"""Parallel configurations: how many ways each axis of the mesh cuts the job, and which rank sits where.

The order of ranks is Megatron's default (``parallel_state.py``, ``order="tp-cp-ep-dp-pp"``): tensor parallel
varies fastest, then context, then data parallel, pipeline parallel slowest. Layers of experts lay the same ranks of
a stage out another way: expert tensor parallel fastest, then expert parallel, then expert data parallel.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, fields
from typing import Any

from .errors import Infeasible


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """Where one virtual rank sits: its index along each axis."""

    pp: int
    tp: int
    dp: int
    cp: int = 0

    def __str__(self) -> str:
        return f"pp{self.pp} tp{self.tp} dp{self.dp}" + (f" cp{self.cp}" if self.cp else "")


@dataclass(frozen=True, slots=True, order=True)
class ExpertCoordinate:
    """Where one virtual rank sits among the experts: pipeline stage, expert, expert tensor and expert data axis."""

    pp: int
    ep: int
    etp: int
    edp: int

    def __str__(self) -> str:
        return f"pp{self.pp} ep{self.ep} etp{self.etp} edp{self.edp}"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel axes, e.g. ``ParallelConfig.parse("pp4tp2dp1")``.

    Attributes:
        pp: pipeline stages.
        tp: tensor parallel ways.
        dp: data parallel ways.
        vpp: model chunks of a stage (interleaved schedule); chunk c of stage s is virtual stage c * pp + s.
        cp: context parallel ways; each holds all of the state that its tensor parallel index holds.
        ep: expert parallel ways, within the tp * cp * dp ranks of a stage.
        etp: tensor parallel ways inside an expert (Megatron's ``expert_tensor_parallel_size``); None means as many as
            tp. A size equal to tp is kept as None, so that equal configurations are equal; read ``expert_tp``.

    Raises:
        Infeasible: if a size is no whole number of 1 or more, or ep * etp does not divide tp * cp * dp.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        given: dict[str, Any] = {**self._sizes()}
        for axis, size in given.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise Infeasible(
                    f"axis {axis} has size {reprlib.repr(size)}, expected a whole number; what to do: give numbers, or "
                    "read a text like 'pp4tp2dp1' with ParallelConfig.parse"
                )
            if size < 1:
                raise Infeasible(f"axis {axis} has size {size}; what to do: give a size of 1 or more")
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)
        if self.stage_size % (self.ep * self.expert_tp):
            raise Infeasible(
                f"{self}: ep {self.ep} x etp {self.expert_tp} = {self.ep * self.expert_tp} does not divide the tp x cp "
                f"x dp = {self.stage_size} ranks of a stage; what to do: choose an ep and an etp (left out: {self.tp}, "
                "as tp) whose product does"
            )

    @classmethod
    def of(cls, given: ParallelConfig | str) -> ParallelConfig:
        """A configuration, or what its text says.

        Raises:
            Infeasible: if it is neither, or see ``parse``.
        """
        return given if isinstance(given, ParallelConfig) else cls.parse(given)

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """Read ``"pp4tp2dp1"``: axes in any order and case.

        Between axes may be ``-``, ``_``, ``,`` and spaces; between an axis and its size ``=``, ``_`` and spaces. A
        dash there would read as a sign, so it is refused.

        Raises:
            Infeasible: if the text is not of that form, names an axis twice, or names an unknown one.
        """
        known = [axis.name for axis in fields(cls)]
        advice = (
            f"what to do: write it like 'pp4tp2dp1'; known axes: {', '.join(known)}; left out means 1 (etp: as many "
            "as tp)"
        )
        given: Any = text  # by a user whom no type checker has told
        found = _PAIRS.fullmatch(text.lower()) if isinstance(given, str) else None
        if not found:
            raise Infeasible(f"not a parallel configuration: {reprlib.repr(text)}; {advice}")
        sizes: dict[str, int] = {}
        for axis, size in _PAIR.findall(found[0]):
            if axis not in known:
                raise Infeasible(f"unknown axis {axis!r} in {text!r}; {advice}")
            if axis in sizes:
                raise Infeasible(f"axis {axis!r} is given twice in {text!r}; {advice}")
            if len(size) > _MOST_DIGITS:
                raise Infeasible(f"axis {axis!r} has a size of {len(size)} digits; {advice}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def stage_size(self) -> int:
        """Virtual ranks of one pipeline stage; they are contiguous."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Virtual ranks in all."""
        return self.pp * self.stage_size

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ways inside an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert: the ranks of a stage ÷ (ep * etp)."""
        return self.stage_size // (self.ep * self.expert_tp)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a virtual rank.

        Raises:
            ValueError: if there is no such rank.
        """
        self._check(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(pp, tp, dp, cp)

    def expert_coordinate(self, rank: int) -> ExpertCoordinate:
        """Where a virtual rank sits among the experts.

        Raises:
            ValueError: if there is no such rank.
        """
        self._check(rank)
        pp, rest = divmod(rank, self.stage_size)
        rest, etp = divmod(rest, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoordinate(pp, ep, etp, edp)

    def rank(self, pp: int, tp: int, dp: int = 0, cp: int = 0) -> int:
        """The virtual rank at a coordinate; the inverse of ``coordinate``."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def _sizes(self) -> dict[str, int]:
        """Size by axis, where one is given."""
        sizes = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        return {axis: size for axis, size in sizes.items() if size is not None}

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in {self}, which has {self.world_size} ranks")

    def __str__(self) -> str:
        shown = {axis: size for axis, size in self._sizes().items() if axis in _ALWAYS or axis == "etp" or size > 1}
        return "".join(f"{axis}{size}" for axis, size in shown.items())


_ALWAYS = ("pp", "tp", "dp")
_MOST_DIGITS = 18
_PAIR = re.compile(r"([a-z]+)[\s_=]*([0-9]+)")
_PAIRS = re.compile(rf"[\s,_\-]*(?:{_PAIR.pattern}[\s,_\-]*)+")
