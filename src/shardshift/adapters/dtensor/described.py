"""What the tensors of a job are like, whatever rank it is: the text that ranks tell one another, and layouts from it.

1. An *entry* is a tensor's kind, name, global shape, dtype, cuts, and which of the rank's meshes they are along.
   Ranks of one pipeline stage have the same entries, so their text travels once, whatever their number.
2. Where a rank stands in its meshes (sizes and coordinate) is its own, and short.
3. From both follow the boxes that any rank holds, by arithmetic (``cuts``, ``parts``), and so the layout. Tensors
   that every stage cuts alike are one bundle, so a layout of a thousand ranks is some ten thousand rows.

Rejected: each rank lists its boxes (a thousand ranks times a thousand tensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from ...values import Kind, Layout, Mismatch, Region, Shard, Tensor, Unaccounted
from ...values.rows import Rows, columns
from ..once import digest_of
from .cuts import Cut, boxes
from .live import Live
from .parts import Filled, Names, matches, parts_of

Standing: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Per mesh of a rank the sizes of its axes, and the rank's coordinate."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a job.

    Attributes:
        kind: what it is.
        name: the qualified name; of the parameter, for its state and gradient.
        shape: of the whole tensor.
        dtype: as ``values.Tensor`` has it.
        itemsize: bytes of one element.
        mesh: which of the rank's meshes the cuts are along; -1 for none.
        cuts: how it is cut.
        parts: what it is in logical names.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    mesh: int
    cuts: tuple[Cut, ...]
    parts: tuple[Filled, ...]

    def to_json(self) -> list[Any]:
        """Plain JSON values."""
        cuts = [[cut.dim, cut.axis, cut.factor] for cut in self.cuts]
        plain = self.parts == parts_of(self.name, self.shape, None)
        parts = None if plain else [[p.name, p.shape, *_listed(p.box), *_listed(p.at)] for p in self.parts]
        return [self.kind, self.name, self.shape, self.dtype, self.itemsize, self.mesh, cuts, parts]

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> Entry:
        """The inverse of ``to_json``."""
        kind, name, shape, dtype, itemsize, mesh, cuts, given = record
        parts = parts_of(name, tuple(shape), None)
        if given is not None:
            parts = tuple(
                Filled(part, tuple(whole), Region(tuple(a), tuple(b)), Region(tuple(c), tuple(d)))
                for part, whole, a, b, c, d in given
            )
        return cls(Kind(kind), name, tuple(shape), dtype, itemsize, mesh, tuple(Cut(*cut) for cut in cuts), parts)


def _listed(box: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.shape


@dataclass(frozen=True)
class Text:
    """The entries of a rank, and which of its tensors have several names.

    Attributes:
        entries: parameters, buffers, state, gradients.
        ties: names that are one tensor.
    """

    entries: tuple[Entry, ...]
    ties: tuple[tuple[str, ...], ...]

    @cached_property
    def body(self) -> str:
        """As it travels."""
        return json.dumps({"entries": [entry.to_json() for entry in self.entries], "ties": self.ties})

    @classmethod
    def of_body(cls, text: str) -> Text:
        """The inverse of ``body``."""
        record = json.loads(text)
        return cls(tuple(map(Entry.from_json, record["entries"])), tuple(map(tuple, record["ties"])))

    @cached_property
    def digest(self) -> str:
        """Of what travels."""
        return digest_of(self.body.encode())


def described(tensors: Iterable[Live], ties: tuple[tuple[str, ...], ...], names: Names | None) -> tuple[Text, Standing]:
    """The text of this rank's tensors, and where it stands.

    Raises:
        Mismatch: if a local part has not the shape that its placements say, or ``names`` gives parts that do not fit.
    """
    meshes: dict[DeviceMesh, int] = {}
    standing: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    parts: dict[str, tuple[Filled, ...]] = {}
    entries = []
    for each in tensors:
        if each.mesh is None:
            mesh = -1
        else:
            at = each.mesh.get_coordinate()
            if at is None:
                raise Mismatch(
                    f"{each} lies on a mesh of ranks {each.mesh.mesh.flatten().tolist()}, and this rank is none of "
                    "them; nothing was moved. What to do: give each rank the modules that it has a part in"
                )
            mesh = meshes.setdefault(each.mesh, len(meshes))
            if mesh == len(standing):
                _check_groups(each.mesh, at, str(each))
                standing.append((tuple(each.mesh.shape), tuple(at)))
        if each.name not in parts:
            parts[each.name] = parts_of(each.name, each.shape, names)
        dtype = str(each.local.dtype).removeprefix("torch.")
        entry = Entry(
            each.kind, each.name, each.shape, dtype, each.local.element_size(), mesh, each.cuts, parts[each.name]
        )
        _check_local(entry, each.local, standing)
        entries.append(entry)
    return Text(tuple(entries), ties), tuple(standing)


def _check_groups(mesh: DeviceMesh, at: Sequence[int], what: str) -> None:
    """Hold it that this rank's place along each axis is its rank in the axis's group: FSDP2 goes by that one."""
    try:
        groups = mesh.get_all_groups()
    except RuntimeError:  # a mesh without groups is for arithmetic alone
        return
    for axis, (group, index) in enumerate(zip(groups, at, strict=True)):
        if group.size() > 1 and group.rank() != index:
            raise Mismatch(
                f"{what} lies on a mesh of ranks {mesh.mesh.flatten().tolist()}; along axis {axis} this rank is number "
                f"{index} of the mesh and {group.rank()} of the group, so what it holds is not what the placements say "
                "(torch sorts the ranks of groups that it makes for a mesh); nothing was moved. What to do: let ranks "
                "ascend along each axis, and do not flatten or unflatten a mesh in which they do not"
            )


def _check_local(
    entry: Entry, local: torch.Tensor, standing: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    found = local_shape(entry, tuple(standing))
    if found != tuple(local.shape):
        where = "" if entry.mesh < 0 else f" on a mesh of {standing[entry.mesh][0]} at {standing[entry.mesh][1]}"
        raise Mismatch(
            f"{entry.kind}:{entry.name} of global shape {entry.shape}{where} should have {found} on this rank, and has "
            f"{tuple(local.shape)}; nothing was moved. What to do: give DTensors their global shape "
            "(DTensor.from_local with shape= and stride= where shards are uneven)"
        )


def local_shape(entry: Entry, standing: Standing) -> tuple[int, ...]:
    """What a rank's local part of a tensor measures."""
    stops = [box.local.stops for box in entry_boxes(entry, standing)]
    return tuple(map(max, zip(*stops, strict=True)))


def entry_boxes(entry: Entry, standing: Standing) -> tuple[Any, ...]:
    """``cuts.boxes`` of a tensor on a rank."""
    mesh, at = standing[entry.mesh] if entry.mesh >= 0 else ((), ())
    return boxes(entry.shape, entry.cuts, mesh, at)


@dataclass(frozen=True, slots=True)
class Piece:
    """A logical shard, and where it lies in a rank's local tensor.

    Attributes:
        shard: the shard.
        local: the box of the local tensor, of as many elements in the same order.
    """

    shard: Shard
    local: Region


def pieces(entry: Entry, standing: Standing) -> Iterator[Piece]:
    """The pieces of a rank's local part of a tensor; an empty part is an empty piece of each logical tensor."""
    for part, whole, local in _logical(entry, standing):
        tensor = Tensor(entry.kind, part.name, part.shape, entry.dtype, entry.itemsize)
        yield Piece(Shard(tensor, whole), local)


def _logical(entry: Entry, standing: Standing) -> Iterator[tuple[Filled, Region, Region]]:
    found = entry_boxes(entry, standing)
    if not any(box.whole.numel for box in found):
        box = found[0]
        for first in {part.name: part for part in reversed(entry.parts)}.values():
            alike = first.box.shape == entry.shape == first.shape
            yield first, box.whole if alike else Region(first.box.offsets, (0,) * len(first.shape)), box.local
        return
    for box in found:
        for part in entry.parts:
            for match in matches(part, box.whole):
                inside = match.live.relative_to(box.whole)
                offsets = tuple(a + b for a, b in zip(inside.offsets, box.local.offsets, strict=True))
                yield part, match.logical, Region(offsets, inside.shape)


def layout_of(texts: Sequence[Text], ranks: Sequence[tuple[int, Standing]]) -> Layout:
    """The layout of a job.

    Args:
        texts: those that its ranks have, each once.
        ranks: per virtual rank the index of its text, and where it stands.

    Raises:
        Mismatch: if ranks describe one tensor differently, or hold a part of it twice.
    """
    tensors: dict[tuple[Kind, str], Tensor] = {}
    cut: dict[tuple[Kind, str], list[tuple[int, tuple[Any, ...]]]] = {}
    for index, text in enumerate(texts):
        for entry in text.entries:
            for part in dict.fromkeys((part.name, part.shape) for part in entry.parts):
                tensor = Tensor(entry.kind, *part, entry.dtype, entry.itemsize)
                known = tensors.setdefault((entry.kind, part[0]), tensor)
                if known != tensor:
                    raise Mismatch(
                        f"{tensor} has global shape {tensor.shape} and dtype {tensor.dtype} on some ranks, "
                        f"{known.shape} and {known.dtype} on others; nothing was moved. What to do: let all ranks "
                        "build the same model"
                    )
                own = tuple(one for one in entry.parts if one.name == part[0])
                cut.setdefault((entry.kind, part[0]), []).append((index, (entry, own)))
    ordered = sorted(tensors, key=lambda key: _NEED.get(key[0], len(_NEED)))
    bundles: dict[tuple[Any, ...], int] = {}
    bundle_of: list[int] = []
    example: list[list[tuple[int, tuple[Any, ...]]]] = []
    for key in ordered:
        how = tuple((index, _like(entry, own)) for index, (entry, own) in cut[key])
        bundle = bundles.setdefault((tensors[key].shape, how), len(bundles))
        if bundle == len(example):
            example.append(cut[key])
        bundle_of.append(bundle)
    return _of_rows([tensors[key] for key in ordered], bundle_of, example, ranks)


_NEED = {Kind.PARAM: 0, Kind.BUFFER: 1, Kind.MASTER: 2, Kind.EXP_AVG: 3, Kind.EXP_AVG_SQ: 4}


def _like(entry: Entry, own: Sequence[Filled]) -> tuple[Any, ...]:
    """What of an entry decides its boxes: all but names and dtypes."""
    return entry.shape, entry.mesh, entry.cuts, tuple((part.shape, part.box, part.at) for part in own)


def _of_rows(
    tensors: Sequence[Tensor],
    bundle_of: Sequence[int],
    example: Sequence[Sequence[tuple[int, tuple[Any, ...]]]],
    ranks: Sequence[tuple[int, Standing]],
) -> Layout:
    """Columns: what ranks have in common is one role."""
    roles: dict[tuple[tuple[int, tuple[Region, ...]], ...], int] = {}
    known: dict[tuple[int, Standing], int] = {}
    role_of_rank = []
    for rank in ranks:
        if rank not in known:
            text, standing = rank
            held = tuple(
                (bundle, tuple(sorted(_shares(entry, own, standing))))
                for bundle, users in enumerate(example)
                for index, (entry, own) in users
                if index == text
            )
            joined: dict[int, tuple[Region, ...]] = {}
            for bundle, regions in held:
                joined[bundle] = joined.get(bundle, ()) + regions
            known[rank] = roles.setdefault(tuple(joined.items()), len(roles))
        role_of_rank.append(known[rank])
    table = [(role, bundle, box) for held, role in roles.items() for bundle, regions in held for box in regions]
    dims = max((len(tensor.shape) for tensor in tensors), default=0) or 1
    rows = Rows(
        np.array([role for role, _, _ in table], np.int32),
        np.array([bundle for _, bundle, _ in table], np.int32),
        columns([box.offsets for _, _, box in table], dims, 0),
        columns([box.stops for _, _, box in table], dims, 1),
    )
    return Layout.of_rows(
        tensors, np.array(bundle_of, np.int32), rows, np.array(role_of_rank, np.int32).reshape(len(ranks), 1)
    )


def _shares(entry: Entry, own: Sequence[Filled], standing: Standing) -> Iterator[Region]:
    for _, whole, _ in _logical(replace(entry, parts=tuple(own)), standing):
        yield whole


def parts_by_name(entries: Iterable[Entry], ties: Iterable[tuple[str, ...]] = ()) -> dict[str, tuple[str, ...]]:
    """Per live parameter its logical names, with the further ones that it is tied under (``ties``)."""
    tied = {tie[0]: tie for tie in ties}
    found = {}
    for entry in entries:
        if entry.kind is Kind.PARAM:
            names = tuple(part.name for part in entry.parts)
            found[entry.name] = tied.get(entry.name, names) if names == (entry.name,) else names
    return found


def with_state(text: Text, state: Mapping[str, Mapping[Kind, Tensor]]) -> Text:
    """A new job's text with the state that its parameters will have.

    Args:
        text: parameters and buffers, as the new job was built.
        state: per logical parameter the kinds of state that exist, as tensors.

    Raises:
        Unaccounted: if a parameter joins logical ones that have different kinds of state, or of other dtypes.
    """
    found = list(text.entries)
    for entry in text.entries:
        if entry.kind is not Kind.PARAM:
            continue
        kinds = [{kind: (t.dtype, t.itemsize) for kind, t in state.get(part.name, {}).items()} for part in entry.parts]
        if any(of_part != kinds[0] for of_part in kinds):
            names = ", ".join(part.name for part in entry.parts)
            raise Unaccounted(
                f"{entry.name} joins {names}, whose optimizer states differ ({[sorted(each) for each in kinds]}); "
                "nothing was moved. What to do: join only parameters that the same optimizer has stepped",
                [entry.name],
            )
        found += [
            replace(entry, kind=kind, dtype=dtype, itemsize=itemsize) for kind, (dtype, itemsize) in kinds[0].items()
        ]
    return Text(tuple(found), text.ties)
