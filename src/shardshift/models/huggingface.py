"""Hugging Face's ``config.json`` to a model description.

Each architecture has a function below that says which parameters its modelling code in transformers builds; keys that
only steer the computation (rope scaling, sliding windows, top-k) are not read. What transformers takes as default
where a key is left out is taken here too, but only where all published configurations agree with it; other keys
must be there. What steers nothing but the computation may be anything; every value that is read has its type checked,
since ``"no"`` for a flag would be true.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..values import Infeasible
from .model import Experts, LatentAttention, Model, head_size


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a configuration, and where they are from; an error names that, the key and the value."""

    where: str
    values: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; ``default`` where the key is left out or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refused(key, f"a whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; ``default`` where the key is left out or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def refused(self, key: str, expected: str) -> Infeasible:
        actual = reprlib.repr(self.values.get(key))
        return Infeasible(f"{self.where}: {key}: expected {expected}, got {actual}; what to do: correct it")

    def refuse_if_set(self, key: str) -> None:
        if self.flag(key):
            raise Infeasible(f"{key} True is not described; what to do: give dimensions or another model")


def read_config(source: str | Path | Mapping[str, Any]) -> Model:
    """The model that a ``config.json`` (path, folder, or values) describes.

    Raises:
        Infeasible: see ``Model.from_config_json``.
    """
    given = _Values("config.json", source) if isinstance(source, Mapping) else _load(Path(source))
    kind = given.values.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise Infeasible(
            f"{given.where}: model_type {reprlib.repr(kind)} is not read; what to do: give a config.json of one of "
            f"{', '.join(_READERS)}, or dimensions"
        )
    missing = [key for key in reader.needs if given.values.get(key) is None]
    if missing:
        raise Infeasible(
            f"{given.where} of a {kind} model lacks {', '.join(missing)}; what to do: add them, or give the file as "
            "published"
        )
    try:
        return reader.make(given)
    except Infeasible as error:
        # What a model refuses is said of the model; whoever gave a file looks for it there.
        raise error if str(error).startswith(given.where) else Infeasible(f"{given.where}: {error}") from error


def _load(path: Path) -> _Values:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Infeasible(
            f"{path} cannot be read as a model's config.json: {error}; what to do: give the path of one"
        ) from error
    if not isinstance(values, dict):
        raise Infeasible(f"{path} holds a JSON {type(values).__name__}; what to do: give a model's config.json")
    return _Values(str(path), values)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Keys that must be there, and what to make of them."""

    needs: tuple[str, ...]
    make: Callable[[_Values], Model]


def _gpt2(values: _Values) -> Model:
    hidden, heads = values.size("n_embd"), values.size("n_head")
    return Model(
        layers=values.size("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden, heads),
        ffn=values.size("n_inner", 4 * hidden),
        vocab=values.size("vocab_size"),
        tied=values.flag("tie_word_embeddings", True),
        positions=values.size("n_positions"),
        rms_norm=False,
        bias=True,
        gated=False,
    )


def _decoder(values: _Values, **more: Any) -> Model:
    """What Llama and all that came after it share: RMSNorm, SwiGLU, rotary positions, grouped queries."""
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    settings: dict[str, Any] = {
        "layers": values.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": values.size("num_key_value_heads", heads),
        "ffn": values.size("intermediate_size"),
        "vocab": values.size("vocab_size"),
        "tied": values.flag("tie_word_embeddings"),
    } | more
    if "head_dim" not in settings:
        given = values.values.get("head_dim") is not None
        settings["head_dim"] = values.size("head_dim") if given else head_size(hidden, heads)
    return Model(**settings)


def _llama(values: _Values) -> Model:
    attention, mlp = values.flag("attention_bias"), values.flag("mlp_bias")
    if attention != mlp:
        raise Infeasible(
            f"attention_bias {attention} with mlp_bias {mlp} is not described; what to do: Megatron-core has biases in "
            "all linear layers or in none (but for query, key and value)"
        )
    return _decoder(values, bias=attention)


def _qwen3(values: _Values) -> Model:
    values.refuse_if_set("attention_bias")
    return _decoder(values, qk_norm=True, head_dim=values.size("head_dim", 128))


def _mixtral(values: _Values) -> Model:
    return _decoder(values, experts=Experts(values.size("num_local_experts"), values.size("intermediate_size")))


def _deepseek(values: _Values) -> Model:
    values.refuse_if_set("attention_bias")
    expert_ffn = values.size("moe_intermediate_size")
    nope, rope = values.size("qk_nope_head_dim"), values.size("qk_rope_head_dim")
    return _decoder(
        values,
        kv_heads=values.size("num_attention_heads"),
        head_dim=nope + rope,
        experts=Experts(
            count=values.size("n_routed_experts"),
            ffn=expert_ffn,
            shared_ffn=expert_ffn * values.size("n_shared_experts", 0, least=0),
            first_dense=values.size("first_k_dense_replace", least=0),
            every=values.size("moe_layer_freq", 1),
        ),
        latent=LatentAttention(
            kv_lora=values.size("kv_lora_rank"),
            nope=nope,
            rope=rope,
            v=values.size("v_head_dim"),
            q_lora=values.size("q_lora_rank", 0, least=0),
        ),
    )


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
