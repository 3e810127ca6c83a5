"""State that belongs to a rank's place in the mesh and not to a tensor: random streams, extras.

Each old rank gives its value; a new rank gets the one of its place:

1. All alike: everybody gets it.
2. Else the *axes that matter* are found: those along which two old ranks that differ in nothing else have different
   values. A new rank's place is its index along these.
3. A place that was there before goes on with its value.
4. A new place of a random stream (the axis has grown) begins from a seed derived from the stream at the first place,
   its name, the number of the change and the place (``generators.begun``): alike for all who share the place, and no
   stream that anybody had. State of an extra is never made up: where an axis that matters changes its size, or is
   gone, the change is refused, unless the user says how states are merged.

If a stream matters along an axis that the new mesh has not, places are counted through in row-major order instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...values import Infeasible, Mesh
from ..generators import begun
from ..plain import digest_of_packed, unpack

Place = tuple[int, ...]
_POSITION: Final = "position"
_OF_ONE_RANK: Final = frozenset({"_snapshot", "_num_yielded", "_sampler_iter_yielded"})
"""Keys by which the state of torchdata's StatefulDataLoader is known."""
_NOT_OF_DATA: Final = ("tp", "pp", "cp", "ep")
"""Axes along which ranks see the same samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """What the old ranks said of one thing.

    Attributes:
        name: of the thing.
        mesh: the old mesh.
        values: by rank, packed.
        axes: those that matter.
        places: per place along these the lowest rank that stands there.
    """

    name: str
    mesh: Mesh
    values: Mapping[int, Any]
    axes: tuple[str, ...]
    places: Mapping[Place, int]

    @classmethod
    def of(cls, name: str, mesh: Mesh, values: Mapping[int, Any]) -> Spread:
        """From what each rank said; a rank may have said nothing."""
        marks = {rank: digest_of_packed(value) for rank, value in values.items()}
        axes: tuple[str, ...] = ()
        if len(set(marks.values())) > 1:
            axes = tuple(axis for axis in mesh.names if _matters(axis, mesh, marks))
        places = _places(mesh, values, axes)
        # Where some ranks have told nothing, two that differ may differ in several axes at once.
        if any(marks[rank] != marks[places[_place(mesh.coordinate(rank), axes)]] for rank in values):
            axes = mesh.names
            places = _places(mesh, values, axes)
        return cls(name, mesh, values, axes, places)

    def stream(self, mesh: Mesh, rank: int, generation: int) -> Any:
        """A random stream at a rank of the new mesh.

        Args:
            mesh: the new mesh.
            rank: of it.
            generation: number of the change, for streams that begin.
        """
        first = unpack(self.values[min(self.values)])
        if not self.axes:
            return first
        if all(axis in mesh.names for axis in self.axes):
            place = _place(mesh.coordinate(rank), self.axes)
            before = self.places.get(place)
            where = " ".join(f"{axis}{index}" for axis, index in zip(self.axes, place, strict=True))
        else:
            position = mesh.position(rank)
            assert position is not None  # it is a rank of the new mesh
            ranks = [self.places[place] for place in sorted(self.places)]
            before = ranks[position] if position < len(ranks) else None
            where = f"{_POSITION}{position}"
        return unpack(self.values[before]) if before is not None else begun(self.name, first, where, generation)

    def state(
        self, mesh: Mesh, rank: int, merge: Callable[..., Any] | None, axes: tuple[str, ...] | None = None
    ) -> Any:
        """The state of an extra at a rank of the new mesh.

        Args:
            mesh: the new mesh.
            rank: of it.
            merge: of all old states, in order of their places, (new index, new count) the state there; None to refuse.
            axes: see ``PerRank``.

        Raises:
            Infeasible: naming the axis.
        """
        along, places = self.axes, self.places
        if not along and merge is not None:  # states of one rank each, that happen to be alike
            along = tuple(axis for axis in self.mesh.names if axis not in _NOT_OF_DATA)
            places = _places(self.mesh, self.values, along)
        if not along:
            found = unpack(self.values[min(self.values)])
            if merge is None and isinstance(found, dict) and not _OF_ONE_RANK.isdisjoint(found):
                self._refuse_other_data_ranks(mesh)
            return found
        if all(self.mesh.size(axis) == mesh.size(axis) and axis in mesh.names for axis in along):
            before = places.get(_place(mesh.coordinate(rank), along))
            if before is not None:  # a rank may have told nothing
                return unpack(self.values[before])
        if merge is None:
            was = " x ".join(f"{axis} {self.mesh.size(axis)}" for axis in self.axes)
            becomes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in self.axes)
            raise Infeasible(
                f"the state of extra {self.name!r} differs along {', '.join(self.axes)} ({was} before, {becomes} "
                f"after), and {len(self.places)} places have told theirs, so there is none for the new ones; nothing "
                "was moved. What to do: let it say the same on all ranks (a data position counted over the whole job), "
                "or give shardshift.fsdp.PerRank(object, merge=...)"
            )
        counted = along if axes is None else axes
        if gone := [axis for axis in counted if axis not in mesh.names]:
            raise Infeasible(
                f"the state of extra {self.name!r} is counted along {', '.join(gone)}, which the new mesh ({mesh}) "
                "has not; nothing was moved. What to do: say along which of its axes the states shall be merged: "
                "shardshift.fsdp.PerRank(object, merge=..., axes=(...)), () for one state on all ranks"
            )
        coordinate = mesh.coordinate(rank)
        index, count = 0, 1
        for axis in mesh.names:
            if axis in counted:
                index, count = index * mesh.size(axis) + coordinate[axis], count * mesh.size(axis)
        return merge([unpack(self.values[places[place]]) for place in sorted(places)], index, count)

    def _refuse_other_data_ranks(self, mesh: Mesh) -> None:
        """A StatefulDataLoader counts what its rank has seen: alike on all ranks, and still not of the whole job."""
        names = dict.fromkeys((*self.mesh.names, *mesh.names))
        changed = [name for name in names if name not in _NOT_OF_DATA and self.mesh.size(name) != mesh.size(name)]
        if changed:
            raise Infeasible(
                f"extra {self.name!r} is a StatefulDataLoader, which counts the samples of its own rank, and "
                f"{changed[0]} changes from {self.mesh.size(changed[0])} to {mesh.size(changed[0])}; nothing was "
                "moved. What to do: keep the place in the data as a count over the whole job, or give "
                "shardshift.fsdp.PerRank(loader, merge=...)"
            )


def _matters(axis: str, mesh: Mesh, marks: Mapping[int, bytes]) -> bool:
    others: dict[tuple[tuple[str, int], ...], bytes] = {}
    for rank, mark in marks.items():
        rest = tuple((name, index) for name, index in mesh.coordinate(rank).items() if name != axis)
        if others.setdefault(rest, mark) != mark:
            return True
    return False


def _places(mesh: Mesh, ranks: Iterable[int], axes: tuple[str, ...]) -> dict[Place, int]:
    places: dict[Place, int] = {}
    for rank in sorted(ranks):
        places.setdefault(_place(mesh.coordinate(rank), axes), rank)
    return places


def _place(coordinate: Mapping[str, int], axes: tuple[str, ...]) -> Place:
    return tuple(coordinate[axis] for axis in axes)
