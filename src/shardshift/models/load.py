"""What the ranks of a configuration cost: bytes of state and activations, operations, and bytes on the wire.

A ``Step`` says what one optimizer step of a job works through, whatever its layout; ``load_of`` says what each pipeline
stage has of it in one configuration. All of it is arithmetic, some 100 us a configuration, so that a policy can look at
every one. Sources:

1. *Operations*: twice the elements of each matrix that a token meets, and of its attention scores and their sum over
   values; the backward costs twice the forward (Narayanan et al. 2021, arXiv 2104.04473, appendix; with all layers
   recomputed it gives their formula 96 B s l h^2 (1 + s / 6h + V / 16lh), which Megatron-LM's
   ``num_floating_point_operations`` came from). Scores are counted whole, causal or not, as there.
2. *Activations*: Korthikanti et al. 2022, arXiv 2205.05198, section 4 and appendix B, by the tensor that each term of
   theirs stands for, so that grouped queries, gated MLPs and fp32 follow. In flight are as many micro-batches as 1F1B
   has warming up, or chunks as Megatron's interleaved schedule has (``schedules.py``).
3. *Tensor parallel traffic*: 8 b s h (t - 1) / t elements a layer and micro-batch (Narayanan et al., section 3.2); the
   same with sequence parallelism (Korthikanti et al., section 4.2.2). *Pipeline*: b s h a border. *Data parallel*: a
   ring, 2 (d - 1) / d of the gradients, or with ZeRO-1 (d - 1) / d of gradients and of parameters. *Experts*: four
   all-to-alls a layer. *Context*: keys and values go around the ring, twice as much backward.
4. *State*: by the model's description here, where an adapter does not know better: ``states`` of ``load_of``.

Left out: multi-token prediction, workspace of kernels and of communicators, the allocator's rounding, imbalance of
experts. A table of measured layers (as AMP or Alpa profile) was rejected: it has to be made on the very devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..values import Infeasible, ParallelConfig
from .model import Model
from .stages import layers_of
from .step import Step

_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of state on the fullest rank of a stage, padding included."""

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.param_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends within a group of ranks: bytes, and how many messages or collectives they are."""

    sent_bytes: float = 0.0
    messages: float = 0.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one rank of a pipeline stage has to hold and to do; the fullest rank of the stage.

    Attributes:
        state: parameters, gradients and optimizer.
        activation_bytes: at the worst moment of a step.
        flops: operations of one micro-batch, forward and backward.
        tp: sent over tensor parallel ranks, per micro-batch.
        cp: over context parallel ranks, per micro-batch.
        ep: over expert parallel ranks, per micro-batch.
        pp: to neighbouring stages, per micro-batch.
        dp: over data and context parallel ranks, per step.
        edp: over the replicas of experts, per step.
        ends: between first and last stage, for a tied embedding, per step.
    """

    state: State
    activation_bytes: int
    flops: float
    tp: Traffic
    cp: Traffic
    ep: Traffic
    pp: Traffic
    dp: Traffic
    edp: Traffic
    ends: Traffic

    @property
    def memory_bytes(self) -> int:
        """State and activations together."""
        return self.state.total_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What a configuration costs: per pipeline stage the fullest rank's load, and micro-batches of a step."""

    config: ParallelConfig
    stages: tuple[StageLoad, ...]
    micro_batches: int

    @property
    def memory_bytes(self) -> int:
        """State and activations of the fullest rank of all."""
        return max(stage.memory_bytes for stage in self.stages)


def load_of(step: Step, config: ParallelConfig, states: Sequence[State] | None = None) -> Load:
    """The load of a configuration.

    Args:
        step: what is to be done.
        config: how it is shared out.
        states: per pipeline stage its state, where the caller knows it exactly; None: by the description.

    Raises:
        Infeasible: if micro-batch x dp does not divide the global batch, or there are more virtual stages than layers
            and both ends (embedding and head may be stages of their own).
    """
    count = step.micro_batches(config.dp)
    if config.pp * config.vpp > step.model.layers + _ENDS:
        raise Infeasible(
            f"{config}: {step.model.layers} layers and both ends of the model are fewer than the "
            f"{config.pp * config.vpp} virtual stages; what to do: choose a smaller pp or vpp"
        )
    stages = tuple(_stage(step, config, stage, count, states) for stage in range(config.pp))
    return Load(config, stages, count)


def step_flops(step: Step) -> float:
    """Operations of a step over all ranks, forward and backward and what is computed again."""
    load = load_of(step, ParallelConfig())
    return load.stages[0].flops * load.micro_batches


def _stage(
    step: Step, config: ParallelConfig, stage: int, micro_batches: int, states: Sequence[State] | None
) -> StageLoad:
    model, parts, virtual = step.model, step.parts, config.pp * config.vpp
    sizes = layers_of(model.layers, config)
    moe = 0
    if model.experts is not None:
        chunks = [range(sum(sizes[:chunk]), sum(sizes[: chunk + 1])) for chunk in range(stage, virtual, config.pp)]
        moe = sum(model.has_experts(layer) for chunk in chunks for layer in chunk)
    layers = sum(sizes[stage :: config.pp])
    counts = (layers - moe, moe)
    is_first, is_last = stage == 0, stage == config.pp - 1

    dense = expert = 0.0
    ends = (int(is_first), int(is_last))
    for number, part in zip((*counts, *ends), (parts.dense, parts.moe, parts.first, parts.last), strict=True):
        own, of_experts = part.elements(step, config)
        dense, expert = dense + number * own, expert + number * of_experts
    tied = model.tied and config.pp > 1 and (is_first or is_last)
    vocabulary = model.padded_vocab(config.tp) * model.hidden / config.tp
    if tied and not is_first:
        dense += vocabulary

    tokens = step.micro_batch * step.sequence / config.cp
    in_flight = _in_flight(config, stage, micro_batches)
    layer_bytes = [_layer_bytes(step, config, tokens, has_experts) for has_experts in (False, True)]
    kept_bytes = sum(number * kept for number, (kept, _) in zip(counts, layer_bytes, strict=True))
    again_bytes = max((again for number, (_, again) in zip(counts, layer_bytes, strict=True) if number), default=0.0)
    end_bytes = _end_bytes(step, config, tokens, is_first, is_last, in_flight)
    activation_bytes = kept_bytes * in_flight + again_bytes + end_bytes

    met = counts[0] * parts.dense.met + counts[1] * parts.moe.met
    scores = layers * step.sequence * (sum(_heads(model)[::2]))
    passes = {"none": (3, 3), "selective": (3, 4), "full": (4, 4)}[step.recompute]
    operations = passes[0] * met + passes[1] * scores + (3 * model.padded_vocab(config.tp) * model.hidden) * is_last
    return StageLoad(
        states[stage] if states else _state(step, config, dense, expert),
        math.ceil(activation_bytes),
        2 * tokens * operations / config.tp,
        _tp(step, config, tokens, layers, is_first + is_last),
        _cp(step, config, tokens, layers),
        _ep(step, config, tokens, moe),
        _pp(step, config, tokens, stage),
        _reduced(step, dense, config.dp * config.cp),
        _reduced(step, expert, config.expert_dp),
        Traffic(vocabulary * step.gradient_bytes, 1) if tied else Traffic(),
    )


def _heads(model: Model) -> tuple[int, int, int]:
    """Elements of all queries, of all keys, and of attention's output, per token."""
    if (latent := model.latent) is not None:
        size = model.heads * (latent.nope + latent.rope)
        return size, size, model.heads * latent.v
    return model.heads * model.head_dim, model.kv_heads * model.head_dim, model.heads * model.head_dim


def _in_flight(config: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at most, in units of all its layers (Megatron's schedules.py)."""
    if config.vpp == 1:
        return min(config.pp - stage, micro_batches)
    chunks = 2 * (config.pp - stage - 1) + (config.vpp - 1) * config.pp + 1
    return min(chunks, micro_batches * config.vpp) / config.vpp


def _layer_bytes(step: Step, config: ParallelConfig, tokens: float, has_experts: bool) -> tuple[float, float]:
    """Activations of a layer and micro-batch on one rank: what is kept, and what is there again in its backward."""
    model, size, experts = step.model, step.element_bytes, step.model.experts
    mask = 1 if step.dropout else 0
    outside = config.tp if step.sequence_parallel else 1
    query, key, value = _heads(model)
    value_kept = value if model.latent is not None else key
    # Inputs of two norms, of the projection of queries, keys and values, and of the MLP; two masks.
    whole = model.hidden * (4 * size + 2 * mask)
    attention = size * (query + key + value_kept + value)
    first = 2 if model.gated else 1
    if has_experts and experts is not None:
        # What is sent to experts; the two matrices' inputs of those that a token meets, and of the shared ones.
        mlp = step.topk * (model.hidden * config.expert_tp + (first + 1) * experts.ffn)
        mlp += (first + 1) * experts.shared_ffn
    else:
        mlp = (first + 1) * model.ffn
    # Softmax, its dropout and that one's mask, per query head and pair of tokens.
    scores = model.heads * step.sequence * (size + mask * (size + 1)) if step.scores else 0
    every = tokens * (whole / outside + (attention + size * mlp + scores) / config.tp)
    match step.recompute:
        case "none":
            return every, 0.0
        case "selective":
            again = tokens * scores / config.tp
            return every - again, again
        case "full":
            return tokens * size * model.hidden / outside, every


def _end_bytes(
    step: Step, config: ParallelConfig, tokens: float, is_first: bool, is_last: bool, in_flight: float
) -> float:
    model, outside = step.model, config.tp if step.sequence_parallel else 1
    total = in_flight * tokens * model.hidden / outside if is_first and step.dropout else 0.0  # the mask
    if is_last:  # the last norm's input, the head's, and fp32 logits
        total += tokens * 2 * step.element_bytes * model.hidden / outside
        total += tokens * 4 * model.padded_vocab(config.tp) / config.tp
    return total


def _state(step: Step, config: ParallelConfig, dense: float, expert: float) -> State:
    each_bytes = 4 * (step.masters + step.moments)
    optimizer = dense + expert
    if step.zero1:
        optimizer = dense / (config.dp * config.cp) + expert / config.expert_dp
    every = dense + expert
    sizes = every * step.element_bytes, every * step.gradient_bytes, optimizer * each_bytes
    return State(*(math.ceil(size) for size in sizes))


def _tp(step: Step, config: ParallelConfig, tokens: float, layers: int, ends: int) -> Traffic:
    """All-reduces: two a layer forward, two backward, two more where it is computed again; one at each end."""
    count = layers * (6 if step.recompute == "full" else 4) + ends
    share = 2 * (config.tp - 1) / config.tp
    sent_bytes = count * share * tokens * step.model.hidden * step.element_bytes
    return Traffic(sent_bytes, count) if config.tp > 1 else Traffic()


def _cp(step: Step, config: ParallelConfig, tokens: float, layers: int) -> Traffic:
    _, key, value = _heads(step.model)
    each_bytes = tokens * (key + (value if step.model.latent else key)) / config.tp * step.element_bytes
    rounds = 3 * layers * (config.cp - 1)
    return Traffic(rounds * each_bytes, rounds)


def _ep(step: Step, config: ParallelConfig, tokens: float, layers: int) -> Traffic:
    if config.ep == 1:
        return Traffic()
    each_bytes = tokens / config.tp * step.topk * step.model.hidden * step.element_bytes
    return Traffic(4 * layers * each_bytes * (config.ep - 1) / config.ep, 4 * layers)


def _pp(step: Step, config: ParallelConfig, tokens: float, stage: int) -> Traffic:
    """Activations go forward out of every virtual stage but the last, their gradients back out of all but the first."""
    if config.pp == 1:
        return Traffic()
    messages = 2 * config.vpp - (stage == 0) - (stage == config.pp - 1)
    outside = config.tp if step.sequence_parallel else 1
    return Traffic(messages * tokens * step.model.hidden * step.element_bytes / outside, messages)


def _reduced(step: Step, elements: float, ways: int) -> Traffic:
    if ways == 1 or not elements:
        return Traffic()
    share = (ways - 1) / ways * elements
    if step.zero1:
        return Traffic(share * (step.gradient_bytes + step.element_bytes), 2)
    return Traffic(2 * share * step.gradient_bytes, 1)
