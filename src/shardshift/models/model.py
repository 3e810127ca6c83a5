"""Descriptions of GPT-family models: the sizes that say which parameters there are, and no parameter.

A description is enough to plan a change of layout for a job that does not run here: ``parameters`` turns it into
logical tensors, ``Catalogue`` into layouts. It covers what Megatron-core's ``GPTModel`` builds for GPT, Llama,
Mistral, Qwen, Mixtral and DeepSeek; multi-token prediction heads and the router's expert bias (a buffer) are not
described. Keeping the names of a framework's options was rejected: each has its own, and some hide two facts in one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from ..values import Infeasible

MOST_LAYERS: Final = 10_000
"""Layers of a model at most, some ten times as many as any has: a catalogue lists the tensors of each."""
_MOST_BITS: Final = 62
"""Of a size: bytes are counted in 64 bits."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts.

    Attributes:
        count: routed experts of a layer.
        ffn: intermediate size of one routed expert.
        shared_ffn: intermediate size of all shared experts together; 0 if there are none.
        first_dense: so many first layers have a dense MLP.
        every: of the others, layers whose number (from 0) it divides have experts.
    """

    count: int
    ffn: int
    shared_ffn: int = 0
    first_dense: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self, "experts", may_be_zero=("shared_ffn", "first_dense"))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek; ``multi_latent_attention.py`` of Megatron-core).

    Attributes:
        kv_lora: rank of the latent of keys and values.
        nope: dims of a query or key head without position.
        rope: dims of a query head with position, and of the one key that all heads share.
        v: dims of a value head.
        q_lora: rank of the latent of queries; 0 if queries come from the hidden state directly.
    """

    kv_lora: int
    nope: int
    rope: int
    v: int
    q_lora: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self, "latent attention", may_be_zero=("q_lora",))


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT-family model.

    Attributes:
        layers: transformer layers; 0 is legal.
        hidden: hidden size.
        heads: query heads.
        kv_heads: key and value heads (query groups); divides ``heads``.
        head_dim: size of one head.
        ffn: intermediate size of a dense MLP.
        vocab: rows of the vocabulary, without padding.
        tied: whether embedding and head are one matrix.
        positions: rows of the learned position embedding; 0 with rotary positions.
        rms_norm: RMSNorm (a weight) rather than LayerNorm (weight and bias).
        bias: whether all linear layers have biases.
        qkv_bias: whether the query, key and value projections have biases, even if the others have not.
        gated: SwiGLU ([gate | up]) rather than one matrix.
        qk_norm: whether query and key heads are normalised.
        experts: the mixture of experts, or None.
        latent: the latent attention, or None.
        vocab_divisor: the padded vocabulary is a multiple of this times TP (Megatron's
            ``make_vocab_size_divisible_by``).

    Raises:
        Infeasible: if a size is no positive whole number, there are more than ``MOST_LAYERS`` layers, heads are no
            multiple of kv_heads, or experts have biases.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    positions: int = 0
    rms_norm: bool = True
    bias: bool = False
    qkv_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    vocab_divisor: int = 128

    def __post_init__(self) -> None:
        _check_sizes(self, "the model", may_be_zero=("layers", "positions"))
        if self.layers > MOST_LAYERS:
            raise Infeasible(
                f"the model: layers is {self.layers}; what to do: give {MOST_LAYERS} or fewer, each "
                "tensor of each layer is listed"
            )
        if self.heads % self.kv_heads:
            raise Infeasible(
                f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads; what to do: each key and value "
                "head must serve as many query heads"
            )
        if self.experts is not None and self.bias:
            raise Infeasible(
                "a model with experts and biases in all linear layers is not described; what to do: set bias to False "
                "(qkv_bias is possible)"
            )

    @classmethod
    def from_config_json(cls, source: str | Path | Mapping[str, Any]) -> Model:
        """Read a Hugging Face ``config.json``: its path, its folder, or its values.

        Raises:
            Infeasible: if it cannot be read, its ``model_type`` is not known, keys are missing, or it describes
                parameters that have no rule here.
        """
        from .huggingface import read_config  # which makes models

        return read_config(source)

    @classmethod
    def from_dimensions(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        ffn: int | None = None,
        vocab: int = 50257,
        experts: int | None = None,
        positions: int = 2048,
    ) -> Model:
        """A model of GPT-3's kind: LayerNorm, biases, GELU, learned positions, tied embedding.

        With ``experts``, every layer's MLP is that many experts of intermediate size ``ffn``, and linear layers have
        no biases.

        Args:
            layers: transformer layers.
            hidden: hidden size.
            heads: query heads; must divide ``hidden``.
            kv_heads: key and value heads; as many as ``heads`` by default.
            ffn: intermediate size; 4 * hidden by default.
            vocab: rows of the vocabulary; GPT-2's by default.
            experts: experts of a layer; none by default.
            positions: rows of the learned position embedding; 0: rotary positions.

        Raises:
            Infeasible: if a size is not positive or heads do not divide hidden.
        """
        head_dim = head_size(hidden, heads)  # which checks both
        ffn = 4 * hidden if ffn is None else ffn
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            tied=True,
            positions=positions,
            rms_norm=False,
            bias=experts is None,
            gated=False,
            experts=None if experts is None else Experts(experts, ffn),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer (from 0) is a mixture of experts."""
        experts = self.experts
        return experts is not None and layer >= experts.first_dense and layer % experts.every == 0

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary with padding (Megatron's ``vocab_size_with_padding``)."""
        multiple = self.vocab_divisor * tp
        return -(-self.vocab // multiple) * multiple


def head_size(hidden: int, heads: int) -> int:
    """Size of a head where none is given.

    Raises:
        Infeasible: if heads do not divide hidden, or either is no positive whole number.
    """
    for name, size in (("hidden", hidden), ("heads", heads)):
        _check_size("the model", name, size)
    if hidden % heads:
        raise Infeasible(
            f"hidden {hidden} is not divisible by {heads} heads; what to do: choose heads that divide it, or give the "
            "size of a head"
        )
    return hidden // heads


def _check_sizes(value: Experts | LatentAttention | Model, what: str, may_be_zero: tuple[str, ...]) -> None:
    for field in fields(value):
        size = getattr(value, field.name)
        if field.type == "int":
            _check_size(what, field.name, size, 0 if field.name in may_be_zero else 1)
        elif field.type == "bool" and not isinstance(size, bool):
            raise Infeasible(f"{what}: {field.name} is {reprlib.repr(size)}; what to do: give True or False")


def _check_size(what: str, name: str, size: object, least: int = 1) -> None:
    # A bool is an int to isinstance; where a size is annotated it is a mistake.
    if not isinstance(size, int) or isinstance(size, bool):
        raise Infeasible(f"{what}: {name} is {reprlib.repr(size)}; what to do: give a whole number")
    if size.bit_length() > _MOST_BITS:
        raise Infeasible(f"{what}: {name} is a number of {size.bit_length()} bits; what to do: give less than 2**62")
    if size < least:
        raise Infeasible(f"{what}: {name} is {size}; what to do: give {least} or more")
