"""The parameters of a model as logical tensors, and the rule that cuts each.

Names, order and shapes are those of Megatron-core's ``GPTModel`` with the local layer specs
(``models/gpt/gpt_layer_specs.py``), as ``named_parameters`` gives them, with these differences:

1. Layers have global numbers.
2. Fused matrices are taken apart, so that each part is cut by itself: ``[gate | up]`` has one dim more, of size 2;
   ``linear_qkv`` is two tensors, queries ``[q]`` of shape (heads, head_dim, hidden) and keys and values ``[kv]`` of
   shape (kv_heads, 2 * head_dim, hidden). In Megatron's memory they alternate, one query group after the other
   (``transformer/attention.py``); ``Parameter.fused`` says so.
3. The experts of a layer are one stacked tensor, with a dim of experts in front.
4. Padding of the vocabulary is no part of a shape.

A rule names, per dim that is cut, the axis that cuts it. Parameters of one rule are cut alike, whatever their layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from .model import Experts, LatentAttention, Model

Shape: TypeAlias = tuple[int, ...]


class Axis(Enum):
    """What cuts a dim."""

    TP = auto()
    """Equal parts over tensor parallel ranks."""
    KV = auto()
    """Heads of keys and values: as TP; where TP is more, each head is held by tp ÷ kv_heads neighbours."""
    VOCAB = auto()
    """As TP, of the padded vocabulary; the last shards may be short or empty."""
    EP = auto()
    """Equal parts over expert parallel ranks."""
    ETP = auto()
    """Equal parts over expert tensor parallel ranks."""


class End(Enum):
    """Where a parameter that is in no layer lies."""

    FIRST = auto()
    LAST = auto()
    BOTH = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """A global shape, and the dims of it that are cut: none for a replicated tensor."""

    shape: Shape
    cuts: tuple[tuple[int, Axis], ...] = ()

    @property
    def is_expert(self) -> bool:
        """Whether it lies by expert coordinate."""
        return any(axis in (Axis.EP, Axis.ETP) for _, axis in self.cuts)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical parameter.

    Attributes:
        name: with global layer number.
        place: layer (from 0) or end of the pipeline.
        rule: how it is cut.
        fused: whether it shares a parameter of Megatron's with the one before it, group by group.
    """

    name: str
    place: int | End
    rule: Rule
    fused: bool = False


def parameters(model: Model) -> Iterator[Parameter]:
    """All parameters: embedding, layers in ascending order, final norm, head; a tied head is the embedding."""
    vocabulary = Rule((model.vocab, model.hidden), ((0, Axis.VOCAB),))
    yield Parameter("embedding.word_embeddings.weight", End.BOTH if model.tied else End.FIRST, vocabulary)
    if model.positions:
        yield Parameter("embedding.position_embeddings.weight", End.FIRST, Rule((model.positions, model.hidden)))
    parts = {moe: tuple(_layer(model, moe)) for moe in {model.has_experts(layer) for layer in range(model.layers)}}
    for layer in range(model.layers):
        for name, rule, fused in parts[model.has_experts(layer)]:
            yield Parameter(f"decoder.layers.{layer}.{name}", layer, rule, fused)
    for name, rule, _ in _norm(model, "final_layernorm", model.hidden):
        yield Parameter(f"decoder.{name}", End.LAST, rule)
    if not model.tied:
        yield Parameter("output_layer.weight", End.LAST, vocabulary)


def parameter_count(model: Model) -> int:
    """Parameters in all, without padding; a tied embedding counts once."""
    return sum(math.prod(parameter.rule.shape) for parameter in parameters(model))


_Part: TypeAlias = tuple[str, Rule, bool]


def _layer(model: Model, moe: bool) -> Iterator[_Part]:
    yield from _norm(model, "input_layernorm", model.hidden)
    attention = _attention(model) if model.latent is None else _latent_attention(model, model.latent)
    for name, rule, fused in attention:
        yield f"self_attention.{name}", rule, fused
    yield from _norm(model, "pre_mlp_layernorm", model.hidden)
    if moe and model.experts is not None:
        yield from _experts(model, model.experts)
    else:
        yield from _mlp(model, "mlp", model.ffn)


def _norm(model: Model, name: str, size: int) -> Iterator[_Part]:
    yield f"{name}.weight", Rule((size,)), False
    if not model.rms_norm:
        yield f"{name}.bias", Rule((size,)), False


def _attention(model: Model) -> Iterator[_Part]:
    # Attention.__init__ makes linear_proj; the subclass makes linear_qkv after it.
    yield from _row(model, "linear_proj", model.heads * model.head_dim)
    q, kv = (model.heads, model.head_dim), (model.kv_heads, 2 * model.head_dim)
    wide: list[tuple[str, Shape]] = [("weight", (model.hidden,))]
    if model.bias or model.qkv_bias:
        wide.append(("bias", ()))
    for name, tail in wide:
        yield f"linear_qkv.{name}[q]", Rule((*q, *tail), ((0, Axis.TP),)), False
        yield f"linear_qkv.{name}[kv]", Rule((*kv, *tail), ((0, Axis.KV),)), True
    if model.qk_norm:
        yield from _norm(model, "q_layernorm", model.head_dim)
        yield from _norm(model, "k_layernorm", model.head_dim)


def _latent_attention(model: Model, latent: LatentAttention) -> Iterator[_Part]:
    def heads(name: str, size: int, rank: int) -> _Part:
        return f"{name}.weight", Rule((model.heads, size, rank), ((0, Axis.TP),)), False

    yield from _row(model, "linear_proj", model.heads * latent.v)
    if latent.q_lora:
        yield "linear_q_down_proj.weight", Rule((latent.q_lora, model.hidden)), False
        yield heads("linear_q_up_proj", latent.nope + latent.rope, latent.q_lora)
    else:
        yield heads("linear_q_proj", latent.nope + latent.rope, model.hidden)
    yield "linear_kv_down_proj.weight", Rule((latent.kv_lora + latent.rope, model.hidden)), False
    yield heads("linear_kv_up_proj", latent.nope + latent.v, latent.kv_lora)
    if latent.q_lora:
        yield from _norm(model, "q_layernorm", latent.q_lora)
    yield from _norm(model, "kv_layernorm", latent.kv_lora)


def _mlp(model: Model, name: str, ffn: int) -> Iterator[_Part]:
    front: Shape = (2,) if model.gated else ()
    cuts = ((len(front), Axis.TP),)
    yield f"{name}.linear_fc1.weight", Rule((*front, ffn, model.hidden), cuts), False
    if model.bias:
        yield f"{name}.linear_fc1.bias", Rule((*front, ffn), cuts), False
    yield from _row(model, f"{name}.linear_fc2", ffn)


def _row(model: Model, name: str, width: int) -> Iterator[_Part]:
    """A row parallel matrix: cut along its inputs, its bias replicated."""
    yield f"{name}.weight", Rule((model.hidden, width), ((1, Axis.TP),)), False
    if model.bias:
        yield f"{name}.bias", Rule((model.hidden,)), False


def _experts(model: Model, experts: Experts) -> Iterator[_Part]:
    yield "mlp.router.weight", Rule((experts.count, model.hidden)), False
    front: Shape = (experts.count, 2) if model.gated else (experts.count,)
    fc1 = Rule((*front, experts.ffn, model.hidden), ((0, Axis.EP), (len(front), Axis.ETP)))
    fc2 = Rule((experts.count, model.hidden, experts.ffn), ((0, Axis.EP), (2, Axis.ETP)))
    yield "mlp.experts.linear_fc1.weight", fc1, False
    yield "mlp.experts.linear_fc2.weight", fc2, False
    if experts.shared_ffn:
        yield from _mlp(model, "mlp.shared_experts", experts.shared_ffn)
