"""Slots: local tensors of a rank, and where each lies in a logical tensor.

All that a slot needs is declared. Megatron marks a parameter with ``tensor_model_parallel``, ``partition_dim`` and
``partition_stride`` (``tensor_parallel/layers.py``); the distributed optimizer says which flat range of a parameter it
owns (``distributed/param_and_grad_buffer.py``). The global shape comes from the same model built with all axes 1 on the
meta device, never from local size times ranks.

1. Fused matrices: a parameter of stride s (SwiGLU's ``[gate | up]``, s = 2) has s segments, each cut by itself; the
   logical tensor has one dim more, of size s, in front of the partitioned one.
2. Padding: the padded vocabulary changes with TP. Rows that both layouts have are state: Megatron counts their logits
   in the loss and trains them. Rows that only the new layout has are zero, rows that only the old one has are dropped;
   neither lies in any region. Rows below ``vocab_size`` are never dropped.
3. Flat ranges: elements a to b of the local parameter, padding included, are at most 2n - 1 boxes of it. Each is a
   *piece* of the slot: contiguous in the flat tensor, and one box of the logical tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engine.pages import empty
from ...values import Kind, Mismatch, Region, Shard, Tensor, flat_range
from .names import VOCABULARY, Named, Where


@dataclass(frozen=True, slots=True)
class Whole:
    """A logical tensor as the model with all axes 1 declares it; the shape includes padding."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """How many ways the tensors of a rank are cut, and its index among them."""

    ways: int
    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a logical tensor inside a slot's local tensor.

    Attributes:
        shard: the box, in global coordinates.
        start: where it begins in the flat local tensor, in elements.
        memory: shape that its memory has there, padding included; as long as the box or longer in each dim.
    """

    shard: Shard
    start: int
    memory: tuple[int, ...]

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The box in a contiguous local tensor: what is written to it is written to ``local``."""
        data = local.view(-1)[self.start : self.start + math.prod(self.memory)].view(self.memory)
        for dim, size in enumerate(self.shard.region.shape):
            data = data.narrow(dim, 0, size)
        return data


@dataclass(frozen=True, slots=True)
class Slot:
    """One local tensor of a rank.

    Attributes:
        kind: what it is.
        name: logical name of the parameter or buffer.
        where: the parameter or buffer that it is, or is optimizer state of.
        shape: its own shape, padding included; a flat range has one dim.
        dtype: of its elements.
        pieces: what of it is data; none if it is padding alone.
        flat: the range of the parameter that it is, if the distributed optimizer cut it.
    """

    kind: Kind
    name: str
    where: Where
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    flat: tuple[int, int] | None = None

    def empty(self) -> torch.Tensor:
        """A new local tensor: padding is zero, the rest is for the caller to write."""
        local = empty(self.shape, self.dtype, _memory())
        if sum(piece.shard.region.numel for piece in self.pieces) != local.numel():
            local.zero_()
        return local

    def views(self, local: torch.Tensor) -> dict[Shard, torch.Tensor]:
        """The data of a local tensor by shard, as views without padding."""
        contiguous = local.detach()
        return {piece.shard: piece.view(contiguous) for piece in self.pieces}

    def allocate(self, shard: Shard) -> torch.Tensor:
        """Memory for one shard of this slot.

        A slot of one piece gets its local tensor, padding and all. The pieces of a range (it begins or ends inside a
        row) get memory of their own, and ``join`` copies all of them, those that have not changed too.
        """
        if len(self.pieces) == 1:
            return self.pieces[0].view(self.empty())
        return empty(shard.region.shape, self.dtype, _memory())

    def join(self, tensors: Mapping[Shard, torch.Tensor]) -> torch.Tensor:
        """The local tensor of which these are the shards: the one that a single shard is in place of, else a copy."""
        if len(self.pieces) == 1:
            piece = self.pieces[0]
            data = tensors[piece.shard]
            if piece.start == 0 and self._in_place(piece, data):
                return data.as_strided(self.shape, torch.empty(self.shape, device="meta").stride())
        local = self.empty()
        for piece in self.pieces:
            piece.view(local).copy_(tensors[piece.shard])
        return local

    def _in_place(self, piece: Piece, data: torch.Tensor) -> bool:
        """Whether the storage of ``data`` is a local tensor of this slot and no more: a part would keep the rest."""
        stride = torch.empty(piece.memory, device="meta").stride()
        fits = all(a == b for a, b, size in zip(data.stride(), stride, data.shape, strict=True) if size > 1)
        size_bytes = math.prod(self.shape) * data.element_size()
        return fits and data.storage_offset() == 0 and data.untyped_storage().nbytes() == size_bytes


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter or buffer of one stage, as every rank of the stage has it, and how ranks cut the whole.

    Attributes:
        named: from the meta model of the stage's first rank; an expert's name is that of the first expert rank.
        trainable: whether an optimizer keeps state of it.
        master: whether the optimizer keeps an fp32 master of it.
        owned: per data parallel owner the flat range of it that this one's optimizer has, in elements of the local
            tensor; None without the distributed optimizer.
        by_experts: whether the owners are the replicas of the experts, rather than of the dense layers.
    """

    named: Named
    trainable: bool
    master: bool
    owned: Mapping[int, tuple[int, int]] | None
    by_experts: bool


def weight(local: Local, name: str, wholes: Mapping[str, Whole], cut: Cut, vocab_rows: int | None) -> Slot:
    """The slot of a parameter or buffer on one rank.

    Args:
        local: as the stage has it.
        name: logical name on that rank.
        wholes: every logical tensor by name.
        cut: how it is cut if it is marked as cut, and the rank's index.
        vocab_rows: rows of the vocabulary that both layouts of a change have; None if it is not padded.

    Raises:
        Mismatch: if it does not fit its logical shape.
    """
    tensor = local.named.tensor
    whole, shape = wholes.get(name), tuple(tensor.shape)
    if whole is None:
        raise Mismatch(
            f"{name} is in the model of this rank, but not in the same model built with all axes 1; what to do: let "
            "build_model build the same model whatever the layout"
        )
    here, there = (tensor.dtype, local.trainable), (whole.dtype, whole.trainable)
    if here != there:
        raise Mismatch(
            f"{name}: dtype and whether it is trained are {here} in the model of this rank, {there} in the same model "
            "built with all axes 1; what to do: let build_model and wrap treat every copy alike, whatever the layout"
        )
    marks: Any = tensor  # with Megatron's attributes
    if not getattr(marks, "tensor_model_parallel", False):
        dim, stride, cut = 0, 1, Cut(1, 0)
    else:
        dim, stride = marks.partition_dim, marks.partition_stride
    segmented, total = segment(shape, dim, stride), list(segment(whole.shape, dim, stride))
    at = dim + (stride > 1)
    if name in VOCABULARY and vocab_rows is not None:
        total[0] = vocab_rows
        fits = segmented[at] * cut.ways >= vocab_rows
    else:
        fits = not total or segmented[at] * cut.ways == total[at]
    if (
        not fits
        or len(segmented) != len(total)
        or any(a != b for d, (a, b) in enumerate(zip(segmented, total, strict=True)) if d != at)
    ):
        raise Mismatch(
            f"{name}: local shape {shape}, cut {cut.ways} ways along dim {dim}, does not make the global shape "
            f"{whole.shape} that the model has with all axes 1; what to do: declare partition_dim on the parameter as "
            "it is really cut, and give vocab_size to the adapter where the vocabulary is padded"
        )
    offsets, size = [0] * len(total), list(total)
    if total:
        offsets[at] = min(cut.index * segmented[at], total[at])
        size[at] = min(segmented[at], total[at] - offsets[at])
    kind = Kind.PARAM if local.named.is_parameter else Kind.BUFFER
    logical = Tensor(kind, name, tuple(total), str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize)
    piece = Piece(Shard(logical, Region(tuple(offsets), tuple(size))), 0, segmented)
    return Slot(kind, name, local.named.where, shape, tensor.dtype, (piece,))


def state_of(parameter: Slot, kind: Kind, dtype: torch.dtype, flat: tuple[int, int] | None) -> Slot:
    """The slot of a parameter's optimizer state that has its shape, or a flat range of it.

    Args:
        parameter: the parameter's own slot.
        kind: of the state.
        dtype: of the state.
        flat: the elements of the local parameter that this rank's optimizer owns; None for all of it.
    """
    (whole,) = parameter.pieces
    logical = replace(whole.shard.tensor, kind=kind, dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize)
    if flat is None:
        piece = replace(whole, shard=Shard(logical, whole.shard.region))
        return replace(parameter, kind=kind, dtype=dtype, pieces=(piece,))
    pieces = tuple(_boxes(whole, logical, *flat))
    return Slot(kind, parameter.name, parameter.where, (flat[1] - flat[0],), dtype, pieces, flat)


def segment(shape: Sequence[int], dim: int, stride: int) -> tuple[int, ...]:
    """A shape with one dim more, of size ``stride``, in front of ``dim``, which is cut into so many segments."""
    if stride == 1:
        return tuple(shape)
    if shape[dim] % stride:
        raise Mismatch(f"a parameter of shape {tuple(shape)} cannot have {stride} segments along dim {dim}")
    return (*shape[:dim], stride, shape[dim] // stride, *shape[dim + 1 :])


def _boxes(whole: Piece, logical: Tensor, start: int, stop: int) -> list[Piece]:
    """The pieces of a flat range of a local parameter; what is padding lies in none."""
    data = Region.whole(whole.shard.region.shape)
    found: list[Piece] = []
    at = 0
    for box in flat_range(whole.memory, start, stop):
        inside = box.intersect(data)
        if inside is not None and inside.numel:
            offsets = tuple(a + b for a, b in zip(inside.offsets, whole.shard.region.offsets, strict=True))
            found.append(Piece(Shard(logical, Region(offsets, inside.shape)), at, box.shape))
        at += box.numel
    return found


def _memory() -> torch.device:
    """Where a job's tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
