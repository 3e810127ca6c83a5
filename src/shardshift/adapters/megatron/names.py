"""Logical names of what a Megatron model holds: the same whatever stage, chunk or expert rank a tensor is on.

1. Layers: the number of a layer within its chunk becomes its number within the model, which Megatron keeps in
   ``layer_number`` (``transformer_layer.py``; ``multi_token_prediction.py`` for its own stack).
2. Experts: the number of an expert within its rank becomes its number within the layer, ``ep rank * local experts + i``
   as in ``moe_layer.py`` (``local_expert_indices``).
3. Tied copies: an ``output_layer.weight`` that is marked ``shared`` *is* the embedding (``language_module.py``).

Names are those of ``named_parameters`` otherwise. Megatron's ``sharded_state_dict`` names were rejected: they differ
between versions and leave out what it does not save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VOCABULARY = (EMBEDDING, OUTPUT)
_LAYER = re.compile(r"^(?P<stack>(?:.*\.)?layers)\.(?P<local>\d+)$")
_EXPERT = re.compile(r"^(?P<stack>.*\.local_experts)\.(?P<local>\d+)$")

Where = tuple[int, str]
"""``(chunk, name)`` as ``named_parameters`` or ``named_buffers`` of that model chunk gives it."""


def reduced_by_experts(parameter: torch.Tensor) -> bool:
    """Whether gradients are reduced over the replicas of experts: not so without expert parallelism (``layers.py``)."""
    return getattr(parameter, "allreduce", True) is False


@dataclass(frozen=True, slots=True)
class Named:
    """One parameter or buffer of a model chunk.

    Attributes:
        name: logical.
        where: its place in the chunks.
        tensor: the live or meta tensor.
        is_parameter: else it is a buffer.
        is_expert: whether it is part of one expert, and so lies by expert coordinate.
    """

    name: str
    where: Where
    tensor: torch.Tensor
    is_parameter: bool
    is_expert: bool


def named_tensors(chunks: Sequence[torch.nn.Module], ep_rank: int = 0) -> Iterator[Named]:
    """Every parameter of the chunks, then every buffer, chunk by chunk; ``meta.is_state`` says which buffers are state.

    Args:
        chunks: model chunks of one rank, not wrapped.
        ep_rank: the rank's index along the expert axis.
    """
    for chunk, model in enumerate(chunks):
        modules = Modules(model, ep_rank)
        for local, parameter in model.named_parameters():
            name = EMBEDDING if local == OUTPUT and getattr(parameter, "shared", False) else modules.logical(local)
            yield Named(name, (chunk, local), parameter, True, modules.is_expert(local))
        for local, buffer in model.named_buffers():
            yield Named(modules.logical(local), (chunk, local), buffer, False, modules.is_expert(local))


def named_parameters(chunks: Sequence[torch.nn.Module], ep_rank: int = 0) -> Iterator[Named]:
    """The parameters among ``named_tensors``."""
    return (named for named in named_tensors(chunks, ep_rank) if named.is_parameter)


def named_modules(chunks: Sequence[torch.nn.Module], ep_rank: int = 0) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of the chunks by logical name; that of a chunk itself is empty."""
    for model in chunks:
        names = Modules(model, ep_rank)
        for local, module in names.modules.items():
            yield names.logical(local), module


class Modules:
    """The modules of one chunk whose numbers are local, and what the numbers are globally.

    Attributes:
        modules: all of the chunk's, by local name.
    """

    def __init__(self, model: torch.nn.Module, ep_rank: int) -> None:
        self._renamed: dict[str, str] = {}
        self._experts: set[str] = set()
        self.modules: dict[str, torch.nn.Module] = dict(model.named_modules())
        modules: Mapping[str, Any] = self.modules
        for local, module in modules.items():
            if (match := _LAYER.match(local)) and hasattr(module, "layer_number"):
                self._renamed[local] = str(int(module.layer_number) - 1)
            elif match := _EXPERT.match(local):
                count = getattr(modules[match["stack"].rpartition(".")[0]], "num_local_experts", None)
                if count is None:
                    continue  # a list of that name in a module of one's own
                self._renamed[local] = str(ep_rank * count + int(match["local"]))
                self._experts.add(local)

    def logical(self, local: str) -> str:
        """The global name of something inside."""
        parts = local.split(".")
        return ".".join(
            self._renamed.get(".".join(parts[: end + 1]), part) if part.isdigit() else part
            for end, part in enumerate(parts)
        )

    def is_expert(self, local: str) -> bool:
        """Whether something inside is part of one expert."""
        parts = local.split(".")
        return any(".".join(parts[:end]) in self._experts for end, part in enumerate(parts, 1) if part.isdigit())
