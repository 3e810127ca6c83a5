"""The parameters of a model: against published sizes, and against the models that Megatron-core itself builds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest

from shardshift.models import PRESETS, Experts, LatentAttention, Model, parameter_count, preset
from shardshift.models.parameters import parameters
from shardshift.values import ParallelConfig

# As their owners or Hugging Face's safetensors index give them. DeepSeek-V3's 671,026,419,200 without its multi-token
# prediction layer count the router's 58 x 256 expert biases, which are a buffer in Megatron.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items(), ids=PUBLISHED)
def test_presets_have_exactly_the_published_number_of_parameters(name: str, count: int) -> None:
    assert parameter_count(preset(name)) == count


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-2.7b", 2.65), ("gpt3-6.7b", 6.66), ("gpt3-32b", 4.24), ("gpt3-64b", 64.9)]
)
def test_the_papers_models_have_the_sizes_of_gpt3s_formula(name: str, billions: float) -> None:
    model = preset(name)
    matrices = 12 * model.layers * model.hidden**2 + (model.vocab + model.positions) * model.hidden
    vectors = 13 * model.layers * model.hidden + 2 * model.hidden
    assert parameter_count(model) == matrices + vectors
    assert parameter_count(model) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert parameter_count(Model.from_dimensions(layers=12, hidden=768, heads=12, positions=1024)) == 124_439_808


def test_every_parameter_of_every_preset_has_a_name_of_its_own() -> None:
    for model in PRESETS.values():
        names = [parameter.name for parameter in parameters(model)]
        assert len(set(names)) == len(names)


SMALL = {
    "gpt": Model.from_dimensions(layers=2, hidden=8, heads=2, vocab=50, positions=9),
    "llama": Model(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, ffn=10, vocab=50, qkv_bias=True, qk_norm=True),
    "experts": Model(
        layers=3,
        hidden=8,
        heads=2,
        kv_heads=2,
        head_dim=4,
        ffn=10,
        vocab=50,
        experts=Experts(2, 6, shared_ffn=12, first_dense=1),
        latent=LatentAttention(kv_lora=3, nope=4, rope=2, v=5, q_lora=7),
    ),
    "latent without low rank of queries": Model(
        layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=10, vocab=50, latent=LatentAttention(3, 4, 2, 5)
    ),
}


def built_by_megatron(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape by name of what Megatron-core builds on one rank, on the meta device."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from shardshift.adapters.megatron.world import virtual_rank

    latent, experts = model.latent, model.experts
    settings: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.qkv_bias,
        "gated_linear_unit": model.gated,
        "qk_layernorm": model.qk_norm or latent is not None,
        "normalization": "RMSNorm" if model.rms_norm else "LayerNorm",
        "use_cpu_initialization": True,
    }
    if latent is not None:
        settings |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.q_lora or None,
            "kv_lora_rank": latent.kv_lora,
            "qk_head_dim": latent.nope,
            "qk_pos_emb_head_dim": latent.rope,
            "v_head_dim": latent.v,
        }
    if experts is not None:
        settings |= {
            "num_moe_experts": experts.count,
            "moe_ffn_hidden_size": experts.ffn,
            "moe_shared_expert_intermediate_size": experts.shared_ffn,
            "moe_layer_freq": [int(model.has_experts(layer)) for layer in range(model.layers)],
        }
    # Without TransformerEngine its classes are None there, which isinstance does not take.
    absent = patch("megatron.core.transformer.multi_latent_attention.TELinear", torch.nn.Bilinear)
    with absent, virtual_rank(ParallelConfig(), 0), torch.device("meta"):
        config = (TransformerConfig if latent is None else MLATransformerConfig)(**settings)
        if experts is None:
            spec = get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=latent is not None,
                normalization=config.normalization,
            )
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        for layer in getattr(spec, "layer_specs", [spec]):
            # It has no parameters, and the local one does not take the head sizes of latent attention.
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
        built = GPTModel(
            config,
            spec,
            vocab_size=model.vocab,
            max_sequence_length=model.positions or 9,
            position_embedding_type="learned_absolute" if model.positions else "rope",
            share_embeddings_and_output_weights=model.tied,
        )
        return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def merged(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Elements by name in order; the experts of a layer, and the parts of a fused matrix, taken together."""
    sizes: dict[str, int] = {}
    for name, shape in shapes:
        whole = re.sub(r"\.local_experts\.\d+\.", ".", name).partition("[")[0]
        sizes[whole] = sizes.get(whole, 0) + math.prod(shape)
    return sizes


@pytest.mark.parametrize("name", SMALL)
def test_names_order_and_sizes_are_those_of_the_model_that_megatron_builds(name: str) -> None:
    model = SMALL[name]
    described = [(parameter.name, parameter.rule.shape) for parameter in parameters(model)]
    assert list(merged(described).items()) == list(merged(built_by_megatron(model).items()).items())
