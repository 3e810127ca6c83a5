"""What the ranks of a change tell one another, and what follows from it alike on all of them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ...values import Kind, Layout, Mesh, Mismatch, Shard, Tensor, Unaccounted
from ..account import Audit
from ..once import Records, digest_of, speaks, spoken
from .audit import audit
from .companions import Companions, record_of
from .described import Piece, Standing, Text, described, layout_of, pieces, with_state
from .installing import at
from .job import Job
from .live import Lives
from .ties import renamed

_NO_STATE: Final = (Kind.PARAM, Kind.BUFFER)


@dataclass(frozen=True, slots=True, eq=False)
class Old:
    """An old rank's side of a change.

    Attributes:
        text: how its tensors are cut.
        standing: where it stands in its meshes.
        views: its tensors by shard.
        companions: its record.
        audit: of its job.
    """

    text: Text
    standing: Standing
    views: Mapping[Shard, torch.Tensor]
    companions: bytes
    audit: Audit

    @classmethod
    def of(cls, job: Job, *, view: Callable[[torch.Tensor, Piece], torch.Tensor] | None = None) -> Old:
        """From a live job, whose modules come to rest.

        Args:
            job: the job.
            view: of a local tensor and a piece of it the shard; None for one that may be a copy.

        Raises:
            Mismatch, Unaccounted: naming what has no rule.
        """
        view = view or copied
        lives = Lives.of(job.models, job.optimizer)
        account = audit(job, lives)
        account.check()
        text, standing = described(lives.tensors, lives.held.ties, job.names)
        views = {
            piece.shard: view(each.local.detach(), piece)
            for entry, each in zip(text.entries, lives.tensors, strict=True)
            for piece in pieces(entry, standing)
        }
        companions = record_of(job, lives, text.entries) if view is copied else b""
        return cls(text, standing, views, companions, account)

    def views_under(self, names: Mapping[str, str]) -> Mapping[Shard, torch.Tensor]:
        """Its tensors by shard, with names given up (``ties.one_name_each``)."""
        if not names:
            return self.views
        pairs = zip(self.text.entries, renamed(self.text, names).entries, strict=True)
        return {
            after.shard: self.views[before.shard]
            for own, under in pairs
            for before, after in zip(pieces(own, self.standing), pieces(under, self.standing), strict=True)
        }

    def record(self, job: Job) -> dict[str, Any]:
        """What it tells first."""
        return {
            "mesh": [job.mesh.axes, job.mesh.ranks],
            "generation": job.generation,
            "text": self.text.digest,
            "standing": self.standing,
            "companions": digest_of(self.companions),
        }

    def bodies(self, rank: int, told: Records) -> dict[str, str]:
        """What it says of that second."""
        own = {"text": self.text.body, "companions": base64.b64encode(self.companions).decode()}
        return {f"{name}_body": body for name, body in own.items() if speaks(rank, told, name)}


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """The old job as all its ranks told it.

    Attributes:
        mesh: its mesh.
        generation: how many changes came before.
        texts: by digest.
        standings: by rank the digest of its text, and where it stands.
        companions: all records.
        layout: who holds what, by position in the mesh.
        tensors: by kind and logical name.
    """

    mesh: Mesh
    generation: int
    texts: Mapping[str, Text]
    standings: Mapping[int, tuple[str, Standing]]
    companions: Companions
    layout: Layout
    tensors: Mapping[tuple[Kind, str], Tensor]

    @classmethod
    def of(cls, told: Records, bodies: Records) -> Told:
        """From what the ranks told first and second.

        Raises:
            Mismatch: if they contradict one another.
        """
        mesh, generation = _one_job(told)
        texts = spoken(told, bodies, "text", Text.of_body)
        records = spoken(told, bodies, "companions", base64.b64decode)
        companions = Companions(mesh, {rank: records[told[rank]["companions"]] for rank in mesh.ranks})
        standings = {rank: (told[rank]["text"], as_standing(told[rank]["standing"])) for rank in mesh.ranks}
        return cls(mesh, generation, texts, standings, companions, *_laid_out(mesh, texts, standings))

    def under(self, names: Mapping[str, str]) -> Told:
        """The same with names given up (``ties.one_name_each``)."""
        if not names:
            return self
        texts = {digest: renamed(text, names) for digest, text in self.texts.items()}
        layout, tensors = _laid_out(self.mesh, texts, self.standings)
        return replace(self, texts=texts, layout=layout, tensors=tensors)

    def moving(self, text: Text, *, cast: bool) -> tuple[Text, dict[str, tuple[str, str]]]:
        """A new text as its tensors travel: with the state that exists, in the dtypes that they have.

        Returns:
            The text; and per tensor that changes its dtype from which to which.

        Raises:
            Mismatch: if a dtype changes and that was not asked for.
        """
        entries, casts = [], {}
        for entry in text.entries:
            of = [
                self.tensors[entry.kind, part.name] for part in entry.parts if (entry.kind, part.name) in self.tensors
            ]
            dtypes = {(tensor.dtype, tensor.itemsize) for tensor in of}
            if dtypes and dtypes != {(entry.dtype, entry.itemsize)}:
                found = " and ".join(sorted(dtype for dtype, _ in dtypes))
                if not cast or len(dtypes) > 1:
                    raise Mismatch(
                        f"{entry.kind}:{entry.name} is {found} in the old job and {entry.dtype} in the new one; "
                        "nothing was moved. What to do: build it in the same dtype, or give cast=True to convert its "
                        "values"
                    )
                casts[f"{entry.kind}:{entry.name}"] = (found, entry.dtype)
                dtype, itemsize = dtypes.pop()
                entry = replace(entry, dtype=dtype, itemsize=itemsize)
            entries.append(entry)
        state: dict[str, dict[Kind, Tensor]] = {}
        for (kind, name), tensor in self.tensors.items():
            if kind not in _NO_STATE:
                state.setdefault(name, {})[kind] = tensor
        return with_state(Text(tuple(entries), text.ties), state), casts


def shards(job: Job) -> dict[Shard, torch.Tensor]:
    """This rank's live tensors by shard, for ``shardshift.transfer``: views, so what is written to them the job has.

    Parameters, buffers, optimizer state and gradients, in the logical names that ``Job(names=)`` gives. Its modules
    come to rest first. Optimizer state that does not exist yet is left out: torch's ``get_state_dict`` makes it.

    Raises:
        Mismatch, Unaccounted: naming what has no rule, or no view.
    """
    return dict(Old.of(job, view=viewed).views)


def copied(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a local tensor in its shard's shape; a copy if it has to be."""
    return at(local, piece.local).reshape(piece.shard.region.shape)


def viewed(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The same as a view.

    Raises:
        Mismatch: if it has none.
    """
    try:
        return at(local, piece.local).view(piece.shard.region.shape)
    except RuntimeError as error:
        raise Mismatch(
            f"{piece.shard} has no view in a local tensor of shape {tuple(local.shape)} and strides {local.stride()}, "
            "so it cannot be written to; what to do: make the tensor contiguous, or give it other names"
        ) from error


def layout_by_position(texts: Mapping[str, Text], mesh: Mesh, standings: Mapping[int, tuple[str, Standing]]) -> Layout:
    """The layout of a mesh's positions from the digest of its text and the standing of each rank."""
    order: Sequence[str] = [*texts]
    of_ranks = [standings[rank] for rank in mesh.ranks]
    return layout_of(list(texts.values()), [(order.index(digest), standing) for digest, standing in of_ranks])


def _laid_out(
    mesh: Mesh, texts: Mapping[str, Text], standings: Mapping[int, tuple[str, Standing]]
) -> tuple[Layout, dict[tuple[Kind, str], Tensor]]:
    layout = layout_by_position(texts, mesh, standings)
    return layout, {(tensor.kind, tensor.name): tensor for tensor in layout.tensors}


def as_standing(record: Any) -> Standing:
    """A standing that has travelled as JSON."""
    return tuple((tuple(mesh), tuple(coordinate)) for mesh, coordinate in record)


def check_modules(lacking: Sequence[Sequence[str]]) -> None:
    """Hold it that each old module with extra state, or in evaluation, has a successor.

    Args:
        lacking: of each new rank those that it does not have.

    Raises:
        Unaccounted: naming those that no new rank has.
    """
    left = sorted(set.intersection(*map(set, lacking))) if lacking else []
    if left:
        raise Unaccounted(
            f"{', '.join(left[:8])} of the old job has extra state, or is in evaluation, and no module of the new job "
            "is called so and takes it; nothing was moved. What to do: let build give the same modules the same names",
            left,
        )


def check_target(told: Records, to: Mesh) -> None:
    """Hold it that all change to the same mesh, by the same options.

    Raises:
        Mismatch: naming a rank that does not.
    """
    wanted = [[list(axis) for axis in to.axes], list(to.ranks)]
    first = min(told)
    for rank, record in told.items():
        for name, value in record["options"].items():
            if value != told[first]["options"][name]:
                raise Mismatch(
                    f"rank {rank} changes with {name}={value!r}, rank {first} with {told[first]['options'][name]!r}; "
                    "nothing was moved. What to do: give the same options on all ranks"
                )
        if record["to"] != wanted:
            axes, ranks = record["to"]
            raise Mismatch(
                f"rank {rank} changes to a mesh of {axes} on ranks {ranks}, another one to {to}; nothing was moved. "
                "What to do: give the same mesh on all ranks"
            )


def _one_job(told: Records) -> tuple[Mesh, int]:
    """The old job's mesh and generation, which all must have alike."""
    jobs = {rank: (record["mesh"], record["generation"]) for rank, record in told.items() if "mesh" in record}
    (first, expected), *others = sorted(jobs.items())
    for rank, found in others:
        if found != expected:
            raise Mismatch(
                f"rank {rank} brings a job on {found[0]} of generation {found[1]}, rank {first} one on {expected[0]} "
                f"of generation {expected[1]}; nothing was moved. What to do: let all ranks change the same job"
            )
    (axes, ranks), generation = expected
    mesh = Mesh(dict(axes), ranks)
    if missing := [rank for rank in mesh.ranks if rank not in jobs]:
        raise Mismatch(
            f"rank {missing[0]} is in the old mesh ({mesh}) and brings no job; nothing was moved. What to do: give its "
            "job there, not None"
        )
    return mesh, generation
