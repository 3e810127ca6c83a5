"""What one rank of a Megatron job holds, by Megatron's own account: names, slices, what its optimizer keeps.

Part of the oracle: nothing here knows shardshift's regions, layouts or plans.
"""

from __future__ import annotations

from ..adapters import megatron as _standins_first  # noqa: F401

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from megatron.core import parallel_state

Cut = tuple[int, int, int, int]
"""How a local tensor is cut from the whole one: dim, segments, ways, index."""

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter of a model chunk.

    Attributes:
        name: its logical name, with global numbers of layers and experts.
        local_name: as ``named_parameters`` of the unwrapped chunk gives it.
        parameter: itself.
        cut: how it is cut from the whole parameter; None if it is whole.
    """

    name: str
    local_name: str
    parameter: Any
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class Owned:
    """What an optimizer keeps of a parameter on this rank.

    Attributes:
        main: the tensor that the torch optimizer steps: the parameter, its fp32 master, or a flat shard of either.
        state: of the torch optimizer: moments, and perhaps a step.
        group: the param group.
        span: where ``main`` and the moments lie in the flattened local parameter; None if they are as large as that.
    """

    main: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    span: tuple[int, int] | None


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named(model: Sequence[Any]) -> Iterator[Named]:
    """Every parameter of wrapped model chunks, but for an output layer that is never read."""
    for chunk in map(unwrap, model):
        numbers = dict(_numbers(chunk))
        tied = bool(getattr(chunk, "share_embeddings_and_output_weights", False))
        for local_name, parameter in chunk.named_parameters():
            name = _logical(local_name, numbers)
            if local_name == OUTPUT and tied:
                if getattr(chunk, "mtp_process", False):
                    continue
                name = EMBEDDING
            yield Named(name, local_name, parameter, _cut_of(parameter, name))


def named_logical(model: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Per parameter of wrapped model chunks: local name, parameter, logical name."""
    for one in named(model):
        yield one.local_name, one.parameter, one.name


def named_buffers(model: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Per lasting buffer of wrapped model chunks: logical name, the module that has it, its name there."""
    for chunk in map(unwrap, model):
        numbers = dict(_numbers(chunk))
        for path, module in chunk.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield _logical(f"{path}.{key}", numbers), module, key


def owned(optimizer: Any) -> dict[torch.Tensor, Owned]:
    """Per model parameter what this rank's optimizer keeps of it.

    From the lists in which Megatron itself pairs parameters and masters (``optimizer.py``,
    ``Float16OptimizerWithFloat16Params``; ``distrib_optimizer.py``, ``_build_model_and_main_param_groups``).
    """
    found: dict[torch.Tensor, Owned] = {}
    for part in parts(optimizer):
        base = part.optimizer
        if base is None:
            continue
        for index, group in enumerate(base.param_groups):
            for parameter, main in _pairs(part, index):
                span = None
                if hasattr(part, "gbuf_ranges"):
                    at = part._get_model_param_range_map(parameter)["param"]
                    span = (at.start, at.end)
                found[parameter] = Owned(main, base.state.get(main, {}), group, span)
    return found


def slice_of(whole: torch.Tensor, cut: Cut | None, shape: Sequence[int]) -> torch.Tensor:
    """The slice of a whole tensor that is cut so and has this shape; padding that the whole one lacks is zero."""
    if cut is None:
        return whole.clone()
    dim, segments, ways, index = cut
    rows = shape[dim] * ways
    if rows > whole.shape[dim]:  # padding of the vocabulary that this layout has in excess
        excess = list(whole.shape)
        excess[dim] = rows - whole.shape[dim]
        whole = torch.cat([whole, whole.new_zeros(excess)], dim)
    return torch.cat([part.chunk(ways, dim)[index] for part in whole.narrow(dim, 0, rows).chunk(segments, dim)], dim)


def whole_shape(one: Named) -> tuple[int, ...]:
    """The shape of the whole parameter that a local one is cut from, padding of this layout included."""
    shape = list(one.parameter.shape)
    if one.cut is not None:
        shape[one.cut[0]] *= one.cut[2]
    return tuple(shape)


def _numbers(chunk: Any) -> Iterator[tuple[str, int]]:
    """Global numbers of layers and experts by where they are in the chunk."""
    for path, module in chunk.named_modules():
        if path.rpartition(".")[0] == "decoder.layers":
            yield path, module.layer_number - 1
        if hasattr(module, "local_expert_indices") and hasattr(module, "experts"):
            for local, number in enumerate(module.local_expert_indices):
                yield f"{path}.experts.local_experts.{local}", number


def _logical(local_name: str, numbers: Mapping[str, int]) -> str:
    parts = local_name.split(".")
    return ".".join(str(numbers.get(".".join(parts[: i + 1]), part)) for i, part in enumerate(parts))


def _cut_of(parameter: Any, name: str) -> Cut | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    if ".local_experts." in name:  # not by ``allreduce``, which is True where EP is 1 (layers.py:886)
        ways, index = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    else:
        ways, index = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
    return parameter.partition_dim, parameter.partition_stride, ways, index


def _pairs(part: Any, group: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Model parameters and what the torch optimizer steps of them, of one param group."""
    if hasattr(part, "gbuf_ranges"):
        yield from zip(part.model_fp32_groups[group], part.shard_fp32_groups[group], strict=True)
        yield from zip(part.model_float16_groups[group], part.shard_fp32_from_float16_groups[group], strict=True)
    elif hasattr(part, "float16_groups"):
        yield from zip(part.fp32_from_fp32_groups[group], part.fp32_from_fp32_groups[group], strict=True)
        yield from zip(part.float16_groups[group], part.fp32_from_float16_groups[group], strict=True)
    else:
        parameters = part.optimizer.param_groups[group]["params"]
        yield from zip(parameters, parameters, strict=True)


def spanned(local: torch.Tensor, span: tuple[int, int] | None) -> torch.Tensor:
    """The flat range of a local tensor; itself for None."""
    return local if span is None else local.flatten()[span[0] : span[1]].clone()


def parts(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that a Megatron optimizer chains, or itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
