"""Model descriptions: Hugging Face configurations, dimensions, presets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardshift.models import PRESETS, Catalogue, Experts, Model, parameter_count, preset
from shardshift.values import Infeasible, ParallelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0},
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
# The keys that count, as published: gpt2, Mistral-7B-v0.1, Qwen2-7B, Qwen3-8B, Mixtral-8x7B-v0.1, DeepSeek-V3.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (
        {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "mistral": (LLAMA | {"vocab_size": 32000, "sliding_window": 4096}, 7_241_732_096),
    "qwen2": (
        LLAMA
        | {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "qwen3": (
        LLAMA
        | {
            "attention_bias": False,
            "head_dim": 128,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "llama": (LLAMA, 8_030_261_248),
    "mixtral": (LLAMA | {"vocab_size": 32000, "num_local_experts": 8}, 46_702_792_704),
    "deepseek_v3": (
        {
            "attention_bias": False,
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "tie_word_embeddings": False,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        671_026_419_200 - 58 * 256,  # without the router's expert biases, which are a buffer
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configurations_give_the_published_number_of_parameters(kind: str) -> None:
    values, count = PUBLISHED[kind]
    assert parameter_count(Model.from_config_json({**values, "model_type": kind})) == count


@pytest.mark.parametrize(
    ("name", "kind"), [("llama3-8b", "llama"), ("mixtral-8x7b", "mixtral"), ("deepseek-v3", "deepseek_v3")]
)
def test_a_preset_is_what_its_configuration_says(name: str, kind: str) -> None:
    assert preset(name) == Model.from_config_json({**PUBLISHED[kind][0], "model_type": kind})


def test_a_file_and_its_folder_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert Model.from_config_json(file) == Model.from_config_json(str(tmp_path)) == preset("llama3-8b")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not read; .*gpt2, llama, mistral, qwen2, qwen3, mixtral, deep",
        ),
        ({}, "model_type None is not read"),
        ({"model_type": "llama", "hidden_size": 8, "vocab_size": None}, "lacks num_hidden_layers, .*vocab_size"),
        (LLAMA | {"attention_bias": True}, "attention_bias True with mlp_bias False is not described"),
        (LLAMA | {"model_type": "qwen3", "attention_bias": True}, "attention_bias True is not described"),
        (LLAMA | {"num_hidden_layers": 10**9}, "config.json: the model: layers is 1000000000; .* 10000 or fewer"),
        (LLAMA | {"vocab_size": 10**400}, "vocab is a number of 1329 bits"),
        (LLAMA | {"hidden_size": 4097}, "hidden 4097 is not divisible by 32 heads"),
        (LLAMA | {"num_key_value_heads": 7}, "32 heads are not a multiple of 7 kv_heads"),
    ],
)
def test_a_configuration_that_is_not_described_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Infeasible, match=reason) as caught:
        Model.from_config_json(values)
    assert "what to do" in str(caught.value)


DEEP: list[Any] = [[[[[[[[1]]]]]]]]


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize(
    "wrong", ["4", "", 4.0, 0, -1, True, [4], {"a": 4}, float("nan"), float("inf"), DEEP], ids=lambda value: repr(value)
)
def test_a_size_that_is_no_positive_whole_number_is_refused_by_file_key_and_value(
    tmp_path: Path, key: str, wrong: Any
) -> None:
    file = tmp_path / "my.json"
    file.write_text(json.dumps(LLAMA | {key: wrong}))
    with pytest.raises(Infeasible, match=rf"my\.json: {key}: expected a whole number of at least 1, got .*what to do"):
        Model.from_config_json(file)


def refusal(values: dict[str, Any]) -> str:
    try:
        Model.from_config_json(values)
    except Infeasible as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_whatever_a_key_holds_a_configuration_is_read_or_refused_in_words(kind: str) -> None:
    values = {**PUBLISHED[kind][0], "model_type": kind}
    anything: list[Any] = ["no", 1.5, -1, 0, True, [1], {}, None, 10**30, DEEP]
    for key in values:
        for wrong in anything:
            refused = refusal(values | {key: wrong})
            assert not refused or "what to do" in refused


@pytest.mark.parametrize("wrong", ["no", "false", 0, 1, []])
def test_a_flag_that_is_neither_true_nor_false_is_refused(wrong: Any) -> None:
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        with pytest.raises(Infeasible, match=rf"{key}: expected true or false, got"):
            Model.from_config_json(LLAMA | {key: wrong})


def test_a_key_that_is_null_is_as_one_left_out() -> None:
    null = dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "head_dim"))
    assert Model.from_config_json(LLAMA | null) == preset("llama3-8b")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hidden": "64"}, "hidden is '64'"),
        ({"heads": 4.0}, "heads is 4.0"),
        ({"heads": True}, "heads is True"),
        ({"heads": 0}, "heads is 0"),
        ({"layers": 10_001}, "layers is 10001; what to do: give 10000 or fewer"),
        ({"vocab": 10**5000}, "vocab is a number of 16610 bits"),
        ({"ffn": None, "hidden": 2**62}, "hidden is a number of 63 bits"),
    ],
)
def test_dimensions_that_are_no_sizes_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(Infeasible, match=says):
        Model.from_dimensions(**{"layers": 2, "hidden": 8, "heads": 2} | sizes)


def test_a_state_that_64_bits_do_not_count_is_refused_before_arrays_are_made_of_it() -> None:
    for sizes in ({"vocab": 2**61}, {"hidden": 2**34}, {"ffn": 2**58}):
        model = Model.from_dimensions(**{"layers": 2, "hidden": 8, "heads": 2} | sizes)
        with pytest.raises(Infeasible, match=r"takes the model's state to .* bytes or more, the most is 2\*\*62"):
            Catalogue.of(model)
    padded = replace(Model.from_dimensions(layers=2, hidden=8, heads=2), vocab_divisor=2**61)
    with pytest.raises(Infeasible, match="padded to a multiple"):
        Catalogue.of(padded).layout(ParallelConfig(tp=2))


@pytest.mark.parametrize("text", ["{", "[1]", None, "[" * 100_000, '{"a": ' * 100_000, "9" * 5000])
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Infeasible, match=r"other\.json.*what to do"):
        Model.from_config_json(file)


def test_dimensions_have_the_usual_defaults() -> None:
    model = Model.from_dimensions(layers=2, hidden=8, heads=2)
    assert (model.ffn, model.kv_heads, model.head_dim, model.vocab) == (32, 2, 4, 50257)
    assert (model.tied, model.bias, model.gated, model.experts) == (True, True, False, None)
    mixture = Model.from_dimensions(layers=2, hidden=8, heads=2, kv_heads=1, ffn=6, vocab=9, experts=4)
    assert (mixture.kv_heads, mixture.experts, mixture.bias) == (1, Experts(4, 6), False)


def test_experts_with_biases_are_refused() -> None:
    with pytest.raises(Infeasible, match="experts and biases"):
        Model(layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=8, bias=True, experts=Experts(2, 4))


def test_experts_are_in_the_layers_that_the_frequency_says() -> None:
    experts = Experts(2, 4, first_dense=1, every=2)
    model = Model(layers=6, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=8, experts=experts)
    assert [model.has_experts(layer) for layer in range(6)] == [False, False, True, False, True, False]


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200)])
def test_the_vocabulary_is_padded_as_in_megatron(vocab: int, tp: int, rows: int) -> None:
    assert Model.from_dimensions(layers=1, hidden=8, heads=2, vocab=vocab).padded_vocab(tp) == rows


def test_a_name_that_is_no_preset_is_refused_with_the_names() -> None:
    assert preset("LLAMA3-8B") == PRESETS["llama3-8b"]
    with pytest.raises(Infeasible, match=r"'gpt5'.*gpt3-2\.7b, .*deepseek-v3"):
        preset("gpt5")
