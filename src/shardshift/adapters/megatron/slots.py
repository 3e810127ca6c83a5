"""Slots: how the parameters of Megatron model chunks lie in logical tensors.

A slot ties one local parameter to one region of one logical tensor. All that it needs is declared: Megatron
marks a parameter with ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``
(``tensor_parallel/layers.py``), numbers layers globally in ``layer_number`` (``transformer_layer.py``), and
marks the copy of a tied embedding with ``shared``. The global shape comes from the same model built with
TP 1 and PP 1 on the meta device, never from local size times ranks.

1. Names: the number of a layer within its stage becomes its number within the model.
2. Tied copies: the last stage's ``output_layer.weight`` that is a copy *is* the embedding.
3. Fused matrices: a parameter of stride s (SwiGLU's ``[gate | up]``, s = 2) has s segments, each cut by itself;
   the logical tensor has one dim more, of size s, in front of the partitioned one.
4. Padding: the padded vocabulary changes with TP. Rows that both layouts have are state: Megatron counts their
   logits in the loss and trains them. Rows that only the new layout has are zero, rows that only the old one
   has are dropped; neither lies in any region. Rows below ``vocab_size`` are never dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.pages import empty
from ...values import Mismatch, Region

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_VOCABULARY = (_EMBEDDING, _OUTPUT)
_LAYER = re.compile(r"^(?P<stack>.*\.layers)\.(?P<local>\d+)$")


@dataclass(frozen=True, slots=True)
class Slot:
    """One local parameter and where it lies.

    Attributes:
        name: logical name, with global layer numbers.
        local_name: ``(chunk, name)`` as ``named_parameters`` of that model chunk gives it.
        local_shape: the parameter's own shape, padding included.
        segmented_shape: ``local_shape`` with one dim more where the matrix is fused.
        global_shape: shape of the logical tensor, without padding that only one layout has.
        region: which part of the logical tensor this is.
        dtype: of the parameter.
        trainable: whether the optimizer keeps moments for it.
    """

    name: str
    local_name: tuple[int, str]
    local_shape: tuple[int, ...]
    segmented_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    trainable: bool

    def empty(self) -> torch.Tensor:
        """A new local tensor: padding is zero, the rest is for the caller to write."""
        local = empty(self.local_shape, self.dtype)
        if self.region.shape != self.segmented_shape:
            local.zero_()
        return local

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The data of a local tensor (parameter or moment), without padding, in the shape of the region.

        A view of the same storage: what is written to it is written to ``local``.
        """
        data = local.view(self.segmented_shape)
        for dim, size in enumerate(self.region.shape):
            data = data.narrow(dim, 0, size)
        return data

    def local(self, data: torch.Tensor) -> torch.Tensor:
        """The inverse of ``view``: the local tensor, padding included, of which ``data`` is the view.

        Where ``data`` lies in memory of another padding, a new local tensor is made and the data copied.
        """
        stride = torch.empty(self.segmented_shape, device="meta").stride()
        end = data.storage_offset() + math.prod(self.local_shape)
        in_place = all(a == b for a, b, n in zip(data.stride(), stride, data.shape, strict=True) if n > 1)
        if in_place and data.untyped_storage().nbytes() == end * data.element_size():
            return data.as_strided(self.segmented_shape, stride).view(self.local_shape)
        local = self.empty()
        self.view(local).copy_(data)
        return local


@dataclass(frozen=True, slots=True)
class Whole:
    """A logical parameter as the model with TP 1 and PP 1 declares it; the shape includes padding."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


def logical_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, Whole]:
    """Every logical parameter, from the model built whole (TP 1, PP 1)."""
    return {
        name: Whole(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, _, parameter in named_parameters(chunks)
    }


def slots(
    chunks: Sequence[torch.nn.Module], wholes: Mapping[str, Whole], tp_size: int, tp_rank: int, vocab_rows: int | None
) -> tuple[Slot, ...]:
    """The slots of one rank's model chunks, live or on the meta device, in order of the forward.

    Args:
        chunks: model chunks of one virtual rank, not wrapped.
        wholes: ``logical_parameters`` of the model.
        tp_size: ways of tensor parallelism that the chunks were built for.
        tp_rank: this rank's index among them. Chunks of tensor rank 0 serve for every other rank too.
        vocab_rows: rows of the vocabulary that both layouts of a change have; None if it is not padded.

    Raises:
        Mismatch: if a parameter does not fit its logical shape.
    """
    return tuple(
        _slot(name, local_name, parameter, wholes, tp_size, tp_rank, vocab_rows)
        for name, local_name, parameter in named_parameters(chunks)
    )


def padded_vocabulary(chunks: Sequence[torch.nn.Module], tp_size: int) -> set[int]:
    """Rows of the padded vocabulary, as the embedding and output layer of these chunks have it; often one number."""
    return {
        parameter.shape[0] * (tp_size if getattr(parameter, "tensor_model_parallel", False) else 1)
        for name, _, parameter in named_parameters(chunks)
        if name in _VOCABULARY
    }


def named_parameters(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, tuple[int, str], torch.nn.Parameter]]:
    """Per parameter of the chunks: logical name, (chunk, local name), the parameter itself."""
    for chunk, model in enumerate(chunks):
        stacks = {
            local_name: f"{match['stack']}.{int(module.layer_number) - 1}"
            for local_name, module in model.named_modules()
            if (match := _LAYER.match(local_name)) and hasattr(module, "layer_number")
        }
        for local_name, parameter in model.named_parameters():
            yield _logical_name(local_name, parameter, stacks), (chunk, local_name), parameter


def _logical_name(local_name: str, parameter: torch.nn.Parameter, stacks: Mapping[str, str]) -> str:
    if local_name == _OUTPUT and getattr(parameter, "shared", False):
        return _EMBEDDING
    parts = local_name.split(".")
    for length in range(len(parts) - 1, 1, -1):
        layer = stacks.get(".".join(parts[:length]))
        if layer is not None:
            return ".".join([layer, *parts[length:]])
    return local_name


def _slot(
    name: str,
    local_name: tuple[int, str],
    parameter: torch.nn.Parameter,
    wholes: Mapping[str, Whole],
    tp_size: int,
    tp_rank: int,
    vocab_rows: int | None,
) -> Slot:
    whole, local = wholes.get(name), tuple(parameter.shape)
    if whole is None:
        raise Mismatch(
            f"parameter {name} is in the model of this rank, but not in the same model built with TP 1 and PP 1; "
            "what to do: let build_model build the same model whatever the layout"
        )
    here, there = (parameter.dtype, parameter.requires_grad), (whole.dtype, whole.trainable)
    if here != there:
        raise Mismatch(
            f"parameter {name}: dtype and requires_grad are {here} in the model of this rank, {there} in the same "
            "model built with TP 1 and PP 1; what to do: let build_model treat every copy alike, whatever the layout"
        )
    marks: Any = parameter  # with Megatron's attributes
    if not getattr(marks, "tensor_model_parallel", False):
        dim, stride, ways, index = 0, 1, 1, 0
    else:
        dim, stride, ways, index = marks.partition_dim, marks.partition_stride, tp_size, tp_rank
    segmented, total = _segment(local, dim, stride), list(_segment(whole.shape, dim, stride))
    cut = dim + (stride > 1)
    if name in _VOCABULARY and vocab_rows is not None:
        total[0] = vocab_rows
        fits = segmented[cut] * ways >= vocab_rows
    else:
        fits = not total or segmented[cut] * ways == total[cut]
    if not fits or any(a != b for d, (a, b) in enumerate(zip(segmented, total, strict=True)) if d != cut):
        raise Mismatch(
            f"parameter {name}: local shape {local}, cut {ways} ways along dim {dim}, does not make the global shape "
            f"{whole.shape} that the model has with TP 1 and PP 1; what to do: declare partition_dim on the "
            "parameter as it is really cut, and give vocab_size to the adapter where the vocabulary is padded"
        )
    offsets, shape = [0] * len(total), list(total)
    if total:
        offsets[cut] = min(index * segmented[cut], total[cut])
        shape[cut] = min(segmented[cut], total[cut] - offsets[cut])
    region = Region(tuple(offsets), tuple(shape))
    return Slot(name, local_name, local, segmented, tuple(total), region, parameter.dtype, parameter.requires_grad)


def _segment(shape: tuple[int, ...], dim: int, stride: int) -> tuple[int, ...]:
    if stride == 1:
        return shape
    if shape[dim] % stride:
        raise Mismatch(f"a parameter of shape {shape} cannot have {stride} segments along dim {dim}")
    return (*shape[:dim], stride, shape[dim] // stride, *shape[dim + 1 :])
