"""What one optimizer step of a job works through, whatever its layout; ``load`` says what a configuration makes of it.

A model's parameters are counted by place: a layer without and one with experts, and the two ends of the pipeline. So a
configuration's load is a few products, not a walk over parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from ..values import Infeasible, ParallelConfig
from .model import Model
from .parameters import Axis, End, Parameter, parameters

Recompute: TypeAlias = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Step:
    """What one optimizer step of a job works through, whatever its layout.

    Attributes:
        model: the model.
        sequence: tokens of a sample.
        global_batch: samples of a step, over all ranks.
        micro_batch: samples of a forward on one rank.
        topk: routed experts of a token.
        element_bytes: of a parameter's and an activation's element.
        gradient_bytes: of a gradient's element, as it is summed up and sent.
        masters: whether the optimizer keeps fp32 masters.
        moments: fp32 tensors that the optimizer keeps of each parameter: 2 for Adam.
        zero1: whether masters and moments are shared out over data parallel ranks.
        sequence_parallel: whether activations outside of tensor parallel regions are cut along the sequence.
        recompute: which activations are computed again in the backward: none, those of attention's core, or all.
        scores: whether attention keeps its scores for the backward; fused kernels do not.
        dropout: whether masks of dropout are kept.
    """

    model: Model
    sequence: int
    global_batch: int
    micro_batch: int
    topk: int = 1
    element_bytes: int = 2
    gradient_bytes: int = 4
    masters: bool = True
    moments: int = 2
    zero1: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    scores: bool = True
    dropout: bool = True

    @cached_property
    def parts(self) -> Parts:
        """The model's parameters by where they lie."""
        model = self.model
        first_of = {model.has_experts(layer): layer for layer in reversed(range(model.layers))}
        place_of: dict[int | End, str] = {End.FIRST: "first", End.BOTH: "first", End.LAST: "last"}
        place_of |= {layer: "moe" if has_experts else "dense" for has_experts, layer in first_of.items()}
        found: dict[str, list[Parameter]] = {"dense": [], "moe": [], "first": [], "last": []}
        for parameter in parameters(model):
            if parameter.place in place_of:
                found[place_of[parameter.place]].append(parameter)
        return Parts(**{place: _part(listed, self) for place, listed in found.items()})

    def micro_batches(self, dp: int) -> int:
        """Micro-batches of a step on each rank.

        Raises:
            Infeasible: if micro-batch x dp does not divide the global batch.
        """
        count, rest = divmod(self.global_batch, self.micro_batch * dp)
        if rest:
            raise Infeasible(
                f"dp {dp} x micro-batch {self.micro_batch} does not divide the global batch of {self.global_batch}; "
                f"what to do: choose a dp that divides {self.global_batch // self.micro_batch}"
            )
        return count


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters of one layer, or of one end of the pipeline, in elements.

    Attributes:
        cut: those that tensor parallel ranks share out, without the vocabulary.
        whole: those that each has.
        expert: those of experts.
        vocabularies: matrices of vocabulary x hidden.
        met: elements of matrices that each token is multiplied with, vocabularies left out.
    """

    cut: int
    whole: int
    expert: int
    vocabularies: int
    met: float

    def elements(self, step: Step, config: ParallelConfig) -> tuple[float, float]:
        """Elements on one rank: dense ones (padding included), and those of experts."""
        vocabulary = self.vocabularies * step.model.padded_vocab(config.tp) * step.model.hidden
        return (self.cut + vocabulary) / config.tp + self.whole, self.expert / (config.ep * config.expert_tp)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's parameters: of a dense layer, of a layer with experts, of first and last stage beside their layers."""

    dense: Part
    moe: Part
    first: Part
    last: Part


def _part(listed: Sequence[Parameter], step: Step) -> Part:
    cut = whole = expert = vocabularies = 0
    met = 0.0
    experts = step.model.experts
    for parameter in listed:
        axes = {axis for _, axis in parameter.rule.cuts}
        elements = math.prod(parameter.rule.shape)
        if Axis.VOCAB in axes:
            vocabularies += 1
            continue
        if parameter.rule.is_expert:
            expert += elements
        elif axes:
            cut += elements
        else:
            whole += elements
        if parameter.name.rpartition(".")[2].startswith("weight") and len(parameter.rule.shape) > 1:
            is_looked_up = "position_embeddings" in parameter.name
            share = step.topk / experts.count if parameter.rule.is_expert and experts else 0.0 if is_looked_up else 1.0
            met += share * elements
    return Part(cut, whole, expert, vocabularies, met)
