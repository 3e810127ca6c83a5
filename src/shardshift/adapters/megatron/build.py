"""Building Megatron models: on the meta device as some virtual rank would, and for real around given tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from ...values import Infeasible, Mismatch, ParallelConfig, ShardshiftError, Unaccounted
from .job import RankLayout
from .slots import Slot, Whole, logical_parameters, named_parameters, slots
from .world import on_meta, virtual_rank

_FEATURES: Final = {
    "num_moe_experts": ("mixture of experts", 0),
    "mtp_num_layers": ("multi-token prediction", 0),
    "multi_latent_attention": ("multi-latent attention", False),
    "virtual_pipeline_model_parallel_size": ("virtual pipeline stages", 1),
    "context_parallel_size": ("context parallelism", 1),
}
"""Settings of ``TransformerConfig`` whose state no rule covers yet: what they are, and the value that is plain."""

BuildModel = Callable[[RankLayout], Sequence[torch.nn.Module]]


class MetaModels:
    """The user's model as each virtual rank would build it, on the meta device.

    Built once per configuration and kept for as long as the adapter: the models depend on the user's function
    alone, not on the world, and take no memory.
    """

    def __init__(self, build_model: BuildModel) -> None:
        self._build_model = build_model
        self._stages: dict[ParallelConfig, tuple[Sequence[torch.nn.Module], ...]] = {}

    def stages(self, config: ParallelConfig) -> tuple[Sequence[torch.nn.Module], ...]:
        """Per pipeline stage the model chunks of its first tensor rank.

        Raises:
            Infeasible: if the model cannot be built so; the text is Megatron's.
            Unaccounted: if the model holds tensors that are not parameters.
        """
        config = replace(config, dp=1)  # data parallel replicas build the same
        if config not in self._stages:
            self._stages[config] = tuple(self._build(config, stage) for stage in range(config.pp))
        return self._stages[config]

    @property
    def whole(self) -> Sequence[torch.nn.Module]:
        """The model chunks with TP 1 and PP 1."""
        return self.stages(ParallelConfig())[0]

    @property
    def transformer_config(self) -> TransformerConfig:
        """The ``TransformerConfig`` of the model built whole."""
        return self.whole[0].config

    def slots(self, config: ParallelConfig, vocab_rows: int | None) -> dict[tuple[int, int], tuple[Slot, ...]]:
        """The slots of every (pp, tp) coordinate, in order of the forward."""
        wholes: Mapping[str, Whole] = logical_parameters(self.whole)
        stages = self.stages(config)
        _refuse_repeated(stages)
        return {
            (stage, tp): slots(chunks, wholes, config.tp, tp, vocab_rows)
            for stage, chunks in enumerate(stages)
            for tp in range(config.tp)
        }

    def _build(self, config: ParallelConfig, stage: int) -> Sequence[torch.nn.Module]:
        rank = config.rank(pp=stage, tp=0)
        with virtual_rank(config, rank), on_meta():
            try:
                chunks = self._build_model(RankLayout(config, rank))
            except ShardshiftError:
                raise
            except Exception as error:  # Megatron refuses with assertions, ValueErrors and RuntimeErrors alike
                reason = str(error) or f"{type(error).__name__} without a text"
                raise Infeasible(
                    f"the model cannot be built as pp{config.pp}tp{config.tp} (stage {stage}): {reason}; what to do: "
                    "choose a configuration that divides the model"
                ) from error
        if not isinstance(chunks, Sequence):
            raise Mismatch(f"build_model returned a {type(chunks).__name__}; what to do: return a list of model chunks")
        for chunk in chunks:
            _check_built(chunk, config, stage)
        refuse_unknown(chunks)
        return chunks


def _check_built(chunk: torch.nn.Module, config: ParallelConfig, stage: int) -> None:
    """Refuse a model that was built for another layout than the one asked for."""
    settings: Any = getattr(chunk, "config", None)
    found = (
        getattr(settings, "tensor_model_parallel_size", config.tp),
        getattr(settings, "pipeline_model_parallel_size", config.pp),
        getattr(chunk, "pre_process", stage == 0),
        getattr(chunk, "post_process", stage == config.pp - 1),
    )
    expected = (config.tp, config.pp, stage == 0, stage == config.pp - 1)
    if found != expected:
        raise Mismatch(
            f"build_model was asked for stage {stage} of pp{config.pp}tp{config.tp}, which is (tp, pp, pre_process, "
            f"post_process) = {expected}; it built {found}. What to do: take them from the layout that it is given, "
            "not from the arguments that the job was started with"
        )


def _refuse_repeated(stages: Sequence[Sequence[torch.nn.Module]]) -> None:
    """Refuse one logical name on several stages, unless Megatron marks it as a tied copy."""
    seen: dict[str, int] = {}
    for stage, chunks in enumerate(stages):
        for name, _, parameter in named_parameters(chunks):
            if seen.setdefault(name, stage) != stage and not getattr(parameter, "shared", False):
                raise Unaccounted(
                    f"parameter {name} is on pipeline stages {seen[name]} and {stage}, and nothing marks it as one "
                    "shared tensor; nothing was moved. What to do: give parameters of different stages different names",
                    [name],
                )


def refuse_unknown(chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse a model with state that no rule covers, by name.

    Raises:
        Unaccounted: for features that no rule covers, persistent buffers, extra state, expert parameters, and for
            tensors that are neither parameters nor rebuilt with data (they are still on the meta device).
    """
    unknown = [
        f"{what} ({setting}={value})"
        for chunk in chunks
        for setting, (what, plain) in _FEATURES.items()
        if (value := getattr(getattr(chunk, "config", None), setting, plain)) not in (plain, None, False)
    ]
    for name, module in _modules(chunks):
        lasting = {
            key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set
        }
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state and module.get_extra_state() is not None:
            unknown.append(f"{name} (extra state of {type(module).__name__})")
        loose = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        passing = {key: value for key, value in module._buffers.items() if key not in lasting}
        unknown += [f"{name}.{key} (buffer)" for key, value in lasting.items() if value is not None]
        unknown += [
            f"{name}.{key} (no data after building on the meta device)"
            for key, value in {**loose, **passing}.items()
            if value is not None and value.is_meta
        ]
        unknown += [
            f"{name}.{key} (expert parameter)"
            for key, value in module._parameters.items()
            if value is not None and getattr(value, "allreduce", True) is False
        ]
    if unknown:
        raise Unaccounted(
            f"the model holds state that shardshift cannot move yet: {', '.join(unknown)}. Nothing was moved. What to "
            "do: train without it, or build such tensors on an explicit device if they are derived",
            unknown,
        )


def materialise(chunks: Sequence[torch.nn.Module], values: Mapping[tuple[int, str], torch.Tensor]) -> None:
    """Replace the parameters of chunks that were built on the meta device by parameters around given tensors.

    Args:
        chunks: the model chunks; tied parameters stay tied, attributes that Megatron set are kept.
        values: per (chunk, local name) the tensor; no copy is made.
    """
    for index, chunk in enumerate(chunks):
        names = {id(parameter): name for name, parameter in chunk.named_parameters()}
        real: dict[int, torch.nn.Parameter] = {}
        for _, module in _modules([chunk]):
            for key, meta in module._parameters.items():
                if meta is None:
                    continue
                if id(meta) not in real:
                    made = torch.nn.Parameter(values[index, names[id(meta)]], requires_grad=meta.requires_grad)
                    made.__dict__.update(meta.__dict__)
                    real[id(meta)] = made
                module._parameters[key] = real[id(meta)]


def release(chunk: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """Let go of what a wrapped chunk and its optimizers hold, once they are done with: tensors and process groups.

    Models are full of cycles, so without this their groups would live on, each with its threads and sockets, until
    Python happens to collect its oldest generation.
    """
    for parameter in chunk.parameters():
        parameter.data = parameter.data.new_empty(0)
        parameter.grad = None
        parameter.__dict__.clear()  # main_grad: a view of the gradient buffer
    own = vars(chunk)  # where DDP has its buffers; a bare module has a method of that name
    buffers = [buffer for key in ("buffers", "expert_parallel_buffers") for buffer in own.get(key, ())]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    bucket_groups = [group for key in ("bucket_groups", "expert_parallel_bucket_groups") for group in own.get(key, ())]
    for part in (*buffers, *buckets):
        part.grad_data = None
    for holder in (*chunk.modules(), *buffers, *buckets, *bucket_groups, *optimizers):
        for key, value in list(vars(holder).items()):
            if isinstance(value, dist.ProcessGroup | ProcessGroupCollection):
                delattr(holder, key)
    # Methods under lru_cache hold their modules, and these their groups (rotary_pos_embedding.py, forward).
    for kind in {type(module) for module in chunk.modules()}:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for chunk in chunks:
        yield from chunk.named_modules()
