"""Workloads: what a rank holds in the paper's words, such as ``3.ab`` (arXiv 2607.04749v1, III-B, III-C, Fig. 7).

1. Stages cut the layers, evenly or by a split that is given.
2. A layer has LCM(prev TP, curr TP) slices, so that a TP rank of either side holds whole slices.
3. A workload is a set of (layer, slice). It has a value's set operations, and prints as the paper's figures do.

For explanation and as the oracle of the cost matrices, which are made from intervals (``plan/paper.py``): sets of a
thousand ranks are slow. Labels as the form that is computed with were rejected: text has no order beyond z.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise
from string import ascii_lowercase

from ..values import Infeasible, Mismatch, ParallelConfig

_AXES = ("pp", "tp", "dp")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a rank holds: pairs (layer, slice), of ``slices`` slices a layer.

    Supports ``len``, ``&``, ``|``, ``-`` and ``in``. Prints as the paper does, ``3.ab, 4.ab``: layer 3, slices a
    and b. With one slice a layer it is the layer alone, ``3``. Letters would be ambiguous beyond 26 slices; there
    slices are numbers from 0, in runs: ``3.0-15``, ``3.0-3+8``.

    Raises:
        Mismatch: if two workloads of unequal ``slices`` are combined.
    """

    items: frozenset[tuple[int, int]]
    slices: int

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: object) -> bool:
        return item in self.items

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self.items))

    def __and__(self, other: Workload) -> Workload:
        return Workload(self.items & self._alike(other), self.slices)

    def __or__(self, other: Workload) -> Workload:
        return Workload(self.items | self._alike(other), self.slices)

    def __sub__(self, other: Workload) -> Workload:
        return Workload(self.items - self._alike(other), self.slices)

    def _alike(self, other: Workload) -> frozenset[tuple[int, int]]:
        if self.slices != other.slices:
            raise Mismatch(
                f"a workload of {self.slices} slices a layer meets one of {other.slices}; "
                "what to do: make both with slices=lcm(prev tp, curr tp)"
            )
        return other.items

    @property
    def labels(self) -> tuple[str, ...]:
        """One label a layer, by ascending layer."""
        return tuple(
            self._label(layer, [piece for _, piece in group])
            for layer, group in groupby(self, key=lambda item: item[0])
        )

    def _label(self, layer: int, pieces: list[int]) -> str:
        if self.slices == 1:
            return str(layer)
        if self.slices <= len(ascii_lowercase):
            return f"{layer}.{''.join(ascii_lowercase[piece] for piece in pieces)}"
        runs: list[list[int]] = []
        for piece in pieces:
            if runs and runs[-1][-1] == piece - 1:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return f"{layer}." + "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

    def __str__(self) -> str:
        return ", ".join(self.labels)


def require_paper_axes(config: ParallelConfig) -> None:
    """Check that a configuration uses only the axes that the paper knows.

    Raises:
        Infeasible: naming the others.
    """
    others = [axis for axis in fields(config) if axis.name not in _AXES]
    if strange := [axis.name for axis in others if getattr(config, axis.name) != axis.default]:
        raise Infeasible(
            f"{config} uses {', '.join(strange)}; the paper's planner knows only {', '.join(_AXES)}; "
            "what to do: use the exact method"
        )


def stages(pp: int, layers: int | Sequence[int]) -> tuple[range, ...]:
    """The layers of each pipeline stage. Where they do not divide, the first stages take one more.

    Args:
        pp: stages.
        layers: layers in all, or layers of each stage (a stage may then have none).

    Raises:
        Infeasible: if a stage would have no layer, or a split has a negative number.
        Mismatch: if a split is not of ``pp`` stages.
    """
    if isinstance(layers, int):
        if layers < pp:
            raise Infeasible(f"{layers} layers do not fill {pp} stages; what to do: give a split, or fewer stages")
        each, more = divmod(layers, pp)
        layers = [each + (stage < more) for stage in range(pp)]
    if len(layers) != pp:
        raise Mismatch(f"the split {list(layers)} has {len(layers)} stages, expected {pp}; what to do: one number each")
    if min(layers) < 0:
        raise Infeasible(f"the split {list(layers)} has a negative number; what to do: give 0 or more layers a stage")
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(layers, initial=0)))


def workload(config: ParallelConfig, layers: int | Sequence[int], rank: int, *, slices: int | None = None) -> Workload:
    """The workload of one rank (III-B, III-C).

    Args:
        config: the configuration that it is a rank of.
        layers: layers in all, or per stage.
        rank: the virtual rank.
        slices: slices a layer, LCM(prev TP, curr TP) where two configurations are compared; None means ``config.tp``.

    Raises:
        Infeasible: if the configuration uses an axis that the paper does not know.
        Mismatch: if TP does not divide ``slices``.
    """
    require_paper_axes(config)
    slices = config.tp if slices is None else slices
    if slices < 1 or slices % config.tp:
        raise Mismatch(f"{slices} slices a layer for tp {config.tp}; what to do: give a multiple of {config.tp}")
    at, wide = config.coordinate(rank), slices // config.tp
    pieces = range(at.tp * wide, (at.tp + 1) * wide)
    return Workload(frozenset((layer, i) for layer in stages(config.pp, layers)[at.pp] for i in pieces), slices)
