"""A mesh of ranks as a value: named axes and the rank at each coordinate. No torch, no process groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .errors import Infeasible


@dataclass(frozen=True, init=False)
class Mesh:
    """Which ranks a job runs on, and how they are laid out along its parallel axes.

    Args:
        axes: per axis its size, outermost first, as the dims of torch's ``DeviceMesh``: ``{"dp": 4, "tp": 2}``.
        ranks: global ranks in row-major order of the axes; None for 0, 1, 2, ...

    Raises:
        Infeasible: if an axis is not a whole number above 0, an axis has no name, or the ranks are not as many as the
            axes make, are not whole numbers from 0 on, or repeat.

    Attributes:
        axes: (name, size) of each axis.
        ranks: in row-major order.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int], ranks: Iterable[int] | None = None) -> None:
        named = tuple(axes.items())
        for name, size in named:
            if not (_is(name, str) and name):
                raise Infeasible(f"a mesh has an axis named {name!r}; what to do: give each axis a text as its name")
            if not _is(size, int) or size < 1:
                raise Infeasible(f"axis {name} of a mesh has size {size!r}; what to do: give a whole number above 0")
        size = math.prod(size for _, size in named)
        given = tuple(range(size)) if ranks is None else tuple(ranks)
        shown = " x ".join(f"{name} {count}" for name, count in named) or "no axes"
        if len(given) != size:
            raise Infeasible(
                f"a mesh of {shown} has {size} ranks, but {len(given)} are given; what to do: give as many ranks as "
                "the axes make"
            )
        if strange := [rank for rank in given if not _is(rank, int) or rank < 0]:
            raise Infeasible(f"a mesh names rank {strange[0]!r}; what to do: give whole numbers from 0 on")
        if len(set(given)) != size:
            twice = next(rank for rank in given if given.count(rank) > 1)
            raise Infeasible(f"a mesh of {shown} names rank {twice} twice; what to do: give each rank one place")
        object.__setattr__(self, "axes", named)
        object.__setattr__(self, "ranks", given)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes."""
        return tuple(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The size of an axis; 1 if the mesh has none of this name."""
        return dict(self.axes).get(axis, 1)

    def position(self, rank: int) -> int | None:
        """Where a rank stands in row-major order; None if it is not in the mesh."""
        return self._positions.get(rank)

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's index along each axis.

        Raises:
            Infeasible: if the rank is not in the mesh.
        """
        at = self._positions.get(rank)
        if at is None:
            raise Infeasible(f"rank {rank} is not in the mesh {self}; what to do: ask for a rank of {self.ranks}")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            at, found[name] = divmod(at, size)
        return dict(reversed(found.items()))

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        if len(self.ranks) > 2 and self.ranks == tuple(range(self.ranks[0], self.ranks[-1] + 1)):
            ranks = f"{self.ranks[0]}-{self.ranks[-1]}"
        axes = " x ".join(f"{name} {size}" for name, size in self.axes) or "one rank"
        return f"{axes} on ranks {ranks}" if len(self.ranks) > 1 else f"{axes} on rank {ranks}"


def _is(value: object, kind: type) -> bool:
    """True and False are no numbers here."""
    return type(value) is kind
