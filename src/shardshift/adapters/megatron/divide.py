"""Which sizes of a model the axes of a configuration have to divide; megatron-core finds some of them too late."""

from __future__ import annotations

from typing import Any

from ...values import Infeasible, ParallelConfig


def refuse_indivisible(model: Any, config: ParallelConfig) -> None:
    """Refuse a configuration that cuts through a head, a fused part or an expert.

    Args:
        model: the ``TransformerConfig`` of the model built whole.
        config: the configuration.

    Raises:
        Infeasible: saying which number does not fit.
    """
    sizes = [("attention heads", model.num_attention_heads, "tp", config.tp)]
    groups = model.num_query_groups or model.num_attention_heads
    if not model.multi_latent_attention and config.tp % groups:  # fewer groups than tp share a head (attention.py)
        sizes.append(("query groups", groups, "tp", config.tp))
    if not model.num_moe_experts or model.moe_layer_freq != 1:
        sizes.append(("rows of each part of mlp.linear_fc1 (ffn size)", model.ffn_hidden_size, "tp", config.tp))
    if model.num_moe_experts:
        sizes.append(("experts", model.num_moe_experts, "ep", config.ep))
        expert_ffn = model.moe_ffn_hidden_size or model.ffn_hidden_size
        sizes.append(("rows of each part of an expert's linear_fc1", expert_ffn, "etp", config.expert_tp))
        if shared := model.moe_shared_expert_intermediate_size:
            sizes.append(("rows of each part of shared_experts.linear_fc1", shared, "tp", config.tp))
    elif config.ep > 1:
        raise Infeasible(f"{config}: the model has no experts; what to do: leave ep out")
    if model.num_moe_experts and config.ep == 1 and config.expert_tp != config.tp:
        raise Infeasible(
            f"{config}: without expert parallelism megatron-core reduces gradients of experts as those of dense layers "
            f"(tensor_parallel/layers.py, allreduce), which is wrong where etp {config.expert_tp} is not tp {config.tp}"
            "; what to do: leave etp out, or choose an ep of 2 or more"
        )
    for what, size, axis, ways in sizes:
        if size % ways:
            raise Infeasible(
                f"{config}: {size} {what} are not divisible by {axis} {ways}; what to do: choose a {axis} that "
                f"divides {size}"
            )
