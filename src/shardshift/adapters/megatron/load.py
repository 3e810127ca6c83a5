"""What a Megatron job costs in a configuration, out of the user's own model.

1. What a step works through is read off the ``TransformerConfig`` and the modules of the model as ``meta`` builds it
   whole: sizes, experts, recomputing, whether attention keeps its scores, buckets' dtype.
2. State is counted on the stage that ``meta`` builds in that configuration: bytes of storages of parameters and of
   gradient buffers, padding included, and what each owner's ranges of the optimizer hold. These are the same facts that
   make the layout (``grid.py``), summed up without writing it out. No formula, so nothing is approximate.
3. Operations, activations and traffic are arithmetic (``models/load.py``), alike whether state was counted or not, so
   that an order by time does not hang on how closely one has looked.

A model with layers of its own is described as a GPT of the same ``TransformerConfig``: its state is exact all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from ...models import Experts, LatentAttention, Model
from ...models.load import State
from ...models.step import Recompute, Step
from ...values import ParallelConfig
from .meta import MetaJobs, Stage
from .names import VOCABULARY

_FP32_BYTES: Final = 4


def step_of(meta: MetaJobs, global_batch: int, micro_batch: int) -> Step:
    """What a step of the job works through.

    Args:
        meta: the job as it is built in any configuration.
        global_batch: samples of a step over all ranks.
        micro_batch: samples of a forward on one rank.
    """
    whole, config = meta.whole, meta.transformer_config
    chunk: Any = whole.chunks[0]
    trains = [local for local in whole.locals if local.trainable]
    return Step(
        _model(whole, config),
        int(getattr(chunk, "max_sequence_length", 1)),
        global_batch,
        micro_batch,
        topk=config.moe_router_topk if config.num_moe_experts else 1,
        element_bytes=config.params_dtype.itemsize,
        gradient_bytes=max((_gradient(one).dtype.itemsize for one in _trained(whole)), default=_FP32_BYTES),
        masters=any(local.master for local in trains),
        moments=len(whole.makes),
        zero1=any(local.owned is not None for local in trains),
        sequence_parallel=_is_sequence_parallel(meta),
        recompute=_recompute(config),
        scores=any(type(module).__name__ == "DotProductAttention" for module in chunk.modules()),
        dropout=bool(config.hidden_dropout or config.attention_dropout),
    )


def states_of(config: ParallelConfig, stages: Sequence[Stage]) -> tuple[State, ...]:
    """Per pipeline stage the state of its fullest rank, once the optimizer has made its first step."""
    return tuple(_state(config, stage) for stage in stages)


def _state(config: ParallelConfig, stage: Stage) -> State:
    buffers = [local.named.tensor for local in stage.locals if not local.named.is_parameter]
    parameters = [local.named.tensor for local in stage.locals if local.named.is_parameter]
    shared, dense, expert = 0, dict[int, int](), dict[int, int]()
    for local in stage.locals:
        tensor = local.named.tensor
        moment_bytes = _FP32_BYTES if local.master else tensor.dtype.itemsize
        each_bytes = _FP32_BYTES * local.master + moment_bytes * len(stage.makes) * local.trainable
        if local.owned is None:
            shared += each_bytes * tensor.numel()
            continue
        owners = expert if local.by_experts else dense
        for owner, (start, stop) in local.owned.items():
            owners[owner] = owners.get(owner, 0) + each_bytes * (stop - start)
    optimizer_bytes = shared + _fullest(config, dense, expert)
    gradients = [_gradient(parameter) for parameter in _trained(stage)]
    return State(_storage_bytes([*parameters, *buffers]), _storage_bytes(gradients), optimizer_bytes)


def _fullest(config: ParallelConfig, dense: dict[int, int], expert: dict[int, int]) -> int:
    """The most that one rank of a stage owns, of dense layers and of experts together."""
    if not expert:
        return max(dense.values(), default=0)
    owners = {
        (at.dp * config.cp + at.cp, config.expert_coordinate(rank).edp)
        for rank in range(config.stage_size)
        for at in [config.coordinate(rank)]
    }
    return max(dense.get(one, 0) + expert.get(other, 0) for one, other in owners)


def _trained(stage: Stage) -> Iterator[torch.Tensor]:
    return (local.named.tensor for local in stage.locals if local.trainable)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Where a parameter's gradient is summed up: a view of Megatron's buffer, or a tensor like the parameter."""
    gradient: torch.Tensor = getattr(parameter, "main_grad", parameter)
    return torch.empty_like(parameter) if gradient is parameter else gradient


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages in which tensors lie, each once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _model(whole: Stage, config: Any) -> Model:
    rows = [local.named.tensor.shape[0] for local in whole.locals if local.named.name in VOCABULARY]
    heads, latent = config.num_attention_heads, None
    if config.multi_latent_attention:
        latent = LatentAttention(
            config.kv_lora_rank,
            config.qk_head_dim,
            config.qk_pos_emb_head_dim,
            config.v_head_dim,
            q_lora=config.q_lora_rank or 0,
        )
    experts = _experts(config)
    return Model(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_query_groups or heads,
        head_dim=config.kv_channels or config.hidden_size // heads,
        ffn=config.ffn_hidden_size,
        vocab=max(rows, default=1),
        tied=bool(getattr(whole.chunks[0], "share_embeddings_and_output_weights", False)),
        rms_norm=config.normalization == "RMSNorm",
        bias=bool(config.add_bias_linear) and experts is None,
        gated=config.gated_linear_unit,
        experts=experts,
        latent=latent,
        vocab_divisor=1,  # rows are padded already
    )


def _experts(config: Any) -> Experts | None:
    """The experts; where layers with and without come in no simple order, those without are taken as the first."""
    if not config.num_moe_experts:
        return None
    frequency = config.moe_layer_freq
    every, first_dense = (frequency, 0) if isinstance(frequency, int) else (1, frequency.count(0))
    return Experts(
        config.num_moe_experts,
        config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        first_dense=first_dense,
        every=every,
    )


def _is_sequence_parallel(meta: MetaJobs) -> bool:
    """Whether the job cuts activations along the sequence under TP, which a config may say only where TP is used."""
    config = meta.transformer_config
    if config.sequence_parallel or config.num_attention_heads % 2:
        return bool(config.sequence_parallel)
    try:
        (stage,) = meta.stages(ParallelConfig(tp=2))
    except Exception:  # such a job cannot be built so: then it is not known, and memory is taken as if it were not
        return False
    chunk: Any = stage.chunks[0]
    return bool(chunk.config.sequence_parallel)


def _recompute(config: Any) -> Recompute:
    if config.recompute_granularity == "full":
        return "full"
    modules = getattr(config, "recompute_modules", None) or ["core_attn"]
    return "selective" if config.recompute_granularity == "selective" and "core_attn" in modules else "none"
