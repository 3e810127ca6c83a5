"""Hugging Face's ``config.json`` to a model description.

Each architecture has a function below that says which parameters its modelling code in transformers builds; keys that
only steer the computation (rope scaling, sliding windows, top-k) are not read. What transformers takes as default
where a key is left out is taken here too, but only where all published configurations agree with it; other keys
must be there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..values import Infeasible
from .model import Experts, LatentAttention, Model, head_size

Values = Mapping[str, Any]


def read_config(source: str | Path | Values) -> Model:
    """The model that a ``config.json`` (path, folder, or values) describes.

    Raises:
        Infeasible: see ``Model.from_config_json``.
    """
    values = source if isinstance(source, Mapping) else _load(Path(source))
    kind = values.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise Infeasible(
            f"model_type {kind!r} is not read; what to do: give a config.json of one of {', '.join(_READERS)}, or "
            "dimensions"
        )
    missing = [key for key in reader.needs if values.get(key) is None]
    if missing:
        raise Infeasible(
            f"config.json of a {kind} model lacks {', '.join(missing)}; what to do: add them, or give the file as "
            "published"
        )
    return reader.make(values)


def _load(path: Path) -> Values:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Infeasible(
            f"{path} cannot be read as a model's config.json: {error}; what to do: give the path of one"
        ) from error
    if not isinstance(values, dict):
        raise Infeasible(f"{path} holds a JSON {type(values).__name__}; what to do: give a model's config.json")
    return values


@dataclass(frozen=True, slots=True)
class _Reader:
    """Keys that must be there, and what to make of them."""

    needs: tuple[str, ...]
    make: Callable[[Values], Model]


def _gpt2(values: Values) -> Model:
    hidden, heads = values["n_embd"], values["n_head"]
    return Model(
        layers=values["n_layer"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden, heads),
        ffn=values.get("n_inner") or 4 * hidden,
        vocab=values["vocab_size"],
        tied=values.get("tie_word_embeddings", True),
        positions=values["n_positions"],
        rms_norm=False,
        bias=True,
        gated=False,
    )


def _decoder(values: Values, **more: Any) -> Model:
    """What Llama and all that came after it share: RMSNorm, SwiGLU, rotary positions, grouped queries."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    settings: dict[str, Any] = {
        "layers": values["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or head_size(hidden, heads),
        "ffn": values["intermediate_size"],
        "vocab": values["vocab_size"],
        "tied": values.get("tie_word_embeddings", False),
    }
    return Model(**settings | more)


def _llama(values: Values) -> Model:
    attention, mlp = values.get("attention_bias", False), values.get("mlp_bias", False)
    if attention != mlp:
        raise Infeasible(
            f"attention_bias {attention} with mlp_bias {mlp} is not described; what to do: Megatron-core has biases in "
            "all linear layers or in none (but for query, key and value)"
        )
    return _decoder(values, bias=bool(attention))


def _qwen3(values: Values) -> Model:
    _refuse(values, "attention_bias")
    return _decoder(values, qk_norm=True, head_dim=values.get("head_dim") or 128)


def _mixtral(values: Values) -> Model:
    return _decoder(values, experts=Experts(values["num_local_experts"], values["intermediate_size"]))


def _deepseek(values: Values) -> Model:
    _refuse(values, "attention_bias")
    expert_ffn = values["moe_intermediate_size"]
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    return _decoder(
        values,
        kv_heads=values["num_attention_heads"],
        head_dim=nope + rope,
        experts=Experts(
            count=values["n_routed_experts"],
            ffn=expert_ffn,
            shared_ffn=expert_ffn * (values.get("n_shared_experts") or 0),
            first_dense=values["first_k_dense_replace"],
            every=values.get("moe_layer_freq", 1),
        ),
        latent=LatentAttention(
            kv_lora=values["kv_lora_rank"],
            nope=nope,
            rope=rope,
            v=values["v_head_dim"],
            q_lora=values.get("q_lora_rank") or 0,
        ),
    )


def _refuse(values: Values, key: str) -> None:
    if values.get(key):
        raise Infeasible(f"{key} {values[key]} is not described; what to do: give dimensions or another model")


_GPT2: Final = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
_DECODER: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_LATENT: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK: Final = ("n_routed_experts", "moe_intermediate_size", "first_k_dense_replace")

_READERS: Final[Mapping[str, _Reader]] = {
    "gpt2": _Reader(_GPT2, _gpt2),
    "llama": _Reader(_DECODER, _llama),
    "mistral": _Reader(_DECODER, _decoder),
    "qwen2": _Reader(_DECODER, lambda values: _decoder(values, qkv_bias=True)),
    "qwen3": _Reader(_DECODER, _qwen3),
    "mixtral": _Reader((*_DECODER, "num_local_experts"), _mixtral),
    "deepseek_v3": _Reader((*_DECODER, *_LATENT, *_DEEPSEEK), _deepseek),
}
