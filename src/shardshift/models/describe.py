"""Model and configuration to layout: which rank holds what, by Megatron-core's rules.

A layout is made as columns, never shard by shard:

1. The catalogue lists a model's tensors once, whatever the configuration, and numbers the distinct rules by which
   they are cut (about a dozen, however many layers).
2. Per rule: the box of each index along the axes that cut it.
3. Per rule and stage: a bundle of all tensors of that rule on that stage. Layers of a stage fold into one bundle, and
   so do a parameter, its master and its moments. A tied embedding is one bundle that first and last stage hold.
4. Rows are (bundle, index); the role is the stage's, at that index. Data and context parallel replicas share roles.
5. With ZeRO-1, masters and moments lie in ranges instead (``zero.py``): a role for each rank of its own.

Heads of keys and values that are fewer than TP are held whole by several ranks each, as TransformerEngine has them
and other frameworks too; Megatron-core 0.16 cuts the rows of the fused matrix instead (``transformer/attention.py``)
and gathers activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import numpy as np
from numpy.typing import NDArray

from ..values import Infeasible, Kind, Layout, ParallelConfig, Rows, Tensor
from ..values.boxes import expand
from .model import Model
from .parameters import Axis, End, Parameter, Rule, parameters
from .stages import virtual_stage_of
from .zero import Buffers, Cut, flat_rows

Ints = NDArray[np.int64]

_OPTIMIZER: Final = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
_STATE_BYTES: Final = 2 + 3 * 4
"""Bytes of a parameter's state: bf16, fp32 master and both moments."""
_MOST_BYTES: Final = 2**62
"""Bytes are counted in 64 bits; no sum over a state, padded, may come near the end of them."""
_MOST_CUTS: Final = 2**21
"""Ranks, and virtual stages, that a layout is made for: a slip of the keyboard must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The logical tensors of a model; layouts of one catalogue share them.

    Attributes:
        model: the model.
        parameters: in order of need.
        rules: the distinct (rule, whether first and last stage both hold it).
        rule_of: per parameter its rule's index, shape (parameters,).
        tensors: all parameters (bf16), then, with moments, all fp32 masters, exp_avg, exp_avg_sq.
    """

    model: Model
    parameters: tuple[Parameter, ...]
    rules: tuple[tuple[Rule, bool], ...]
    rule_of: Ints
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: Model, *, moments: bool = True) -> Catalogue:
        """The catalogue of a model, with or without optimizer state.

        Raises:
            Infeasible: if its state is of ``_MOST_BYTES`` or more.
        """
        listed = tuple(parameters(model))
        _require_countable(model, listed)
        rules: dict[tuple[Rule, bool], int] = {}
        rule_of = [rules.setdefault((p.rule, p.place is End.BOTH), len(rules)) for p in listed]
        tensors = [Tensor(Kind.PARAM, p.name, p.rule.shape, "bfloat16", 2) for p in listed]
        for kind in _OPTIMIZER if moments else ():
            tensors += [Tensor(kind, p.name, p.rule.shape, "float32", 4) for p in listed]
        return cls(model, listed, tuple(rules), np.array(rule_of), tuple(tensors))

    def layout(
        self, config: ParallelConfig | str, *, zero1: bool = False, split: Sequence[int] | None = None
    ) -> Layout:
        """The layout of the model under a configuration, or its text; see ``describe``."""
        if isinstance(config, str):
            config = ParallelConfig.parse(config)
        _check(self.model, config)
        virtual = np.concatenate([virtual_stage_of(self.model.layers, config, split), [0, config.pp * config.vpp - 1]])
        layers = self.model.layers
        ends = {End.FIRST: layers, End.BOTH: layers, End.LAST: layers + 1}
        place = np.array([p.place if isinstance(p.place, int) else ends[p.place] for p in self.parameters])
        virtual_of = virtual[place]

        dims = max(len(rule.shape) for rule, _ in self.rules)
        cuts = [_cut(rule, dims, config, self.model) for rule, _ in self.rules]
        expert_roles = config.pp * config.tp
        own_roles = expert_roles + config.pp * config.ep * config.expert_tp * self._has_experts

        code, bundle_of = np.unique(self.rule_of * config.pp + virtual_of % config.pp, return_inverse=True)
        bundle_of = bundle_of.reshape(-1)
        rule, stage = np.divmod(code, config.pp)
        bundle = np.arange(len(code))
        if config.pp > 1:  # the last stage's copy of a tied embedding
            both = np.flatnonzero(np.array([on_both for _, on_both in self.rules])[rule])
            rule, bundle = np.append(rule, rule[both]), np.append(bundle, bundle[both])
            stage = np.append(stage, np.full(len(both), config.pp - 1))

        ways = np.array([len(cut.low) for cut in cuts])
        start = np.cumsum(ways) - ways
        is_expert = np.array([rule.is_expert for rule, _ in self.rules])
        entry, at = expand(start[rule], ways[rule])
        role = np.where(is_expert, expert_roles, 0)[rule] + stage * ways[rule]
        role = role[entry] + at - start[rule][entry]
        low, high = np.concatenate([cut.low for cut in cuts]), np.concatenate([cut.high for cut in cuts])
        parts = [(role, bundle[entry], low[at], high[at])]

        kinds = len(self.tensors) // len(self.parameters)
        bundles = np.tile(bundle_of, kinds)
        ranks = np.arange(config.world_size)
        in_stage = ranks % config.stage_size
        columns = [ranks // config.stage_size * config.tp + ranks % config.tp]
        if self._has_experts:
            ways_of_experts = config.ep * config.expert_tp
            columns.append(expert_roles + ranks // config.stage_size * ways_of_experts + in_stage % ways_of_experts)
        if zero1 and kinds > 1:
            columns.append(own_roles + ranks)
            bundles[len(self.parameters) :] = np.tile(len(code) + np.arange(len(self.parameters)), kinds - 1)
            buffers = Buffers.of(self.parameters, self.rule_of, virtual_of, config)
            own_rank, parameter, box_low, box_high = flat_rows(buffers, cuts, config)
            parts.append((own_roles + own_rank, len(code) + parameter, box_low, box_high))
        return Layout.of_rows(
            self.tensors, bundles.astype(np.int32), _rows(parts), np.stack(columns, axis=1).astype(np.int32)
        )

    @property
    def _has_experts(self) -> bool:
        return any(rule.is_expert for rule, _ in self.rules)


def describe(
    model: Model,
    config: ParallelConfig | str,
    *,
    zero1: bool = False,
    split: Sequence[int] | None = None,
    moments: bool = True,
) -> Layout:
    """Which rank holds what of a model's state, under a configuration.

    To describe several configurations of a model, make one ``Catalogue`` and ask it.

    Args:
        model: the model.
        config: all axes count; ep and etp do nothing to a model without experts. A text is parsed.
        zero1: whether each rank owns a range of the optimizer state (Megatron's distributed optimizer).
        split: layers per virtual stage (chunk c of stage s is c * pp + s); None: as even as can be.
        moments: whether there is optimizer state: fp32 masters and both moments of Adam.

    Raises:
        Infeasible: if an axis does not divide what it cuts, the split is not one of the model's layers, or sizes are
            beyond what is counted.
    """
    return Catalogue.of(model, moments=moments).layout(config, zero1=zero1, split=split)


def _rows(parts: Sequence[tuple[Ints, Ints, Ints, Ints]]) -> Rows:
    role, bundle, low, high = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(role, kind="stable")
    return Rows(role[order].astype(np.int32), bundle[order].astype(np.int32), low[order], high[order])


def _cut(rule: Rule, dims: int, config: ParallelConfig, model: Model) -> Cut:
    """The boxes of one rule: per index along its axes, expert tensor parallel varying fastest."""
    ways = config.ep * config.expert_tp if rule.is_expert else config.tp
    index = np.arange(ways)
    shape = np.array([*rule.shape, *(1,) * (dims - len(rule.shape))], dtype=np.int64)
    low, high, memory = np.zeros((ways, dims), np.int64), np.tile(shape, (ways, 1)), shape.copy()
    for dim, axis in rule.cuts:
        size = rule.shape[dim]
        match axis:
            case Axis.TP:
                first, count = index * (size // ways), size // ways
            case Axis.KV:
                first, count = index * size // ways, max(size // ways, 1)
            case Axis.VOCAB:
                count = model.padded_vocab(config.tp) // config.tp
                first = index * count
            case Axis.EP:
                count = size // config.ep
                first = index // config.expert_tp * count
            case Axis.ETP:
                count = size // config.expert_tp
                first = index % config.expert_tp * count
            case _:
                assert_never(axis)
        low[:, dim], high[:, dim] = np.minimum(first, size), np.minimum(first + count, size)
        memory[dim] = count
    return Cut(low, high, memory)


def _require_countable(model: Model, listed: Sequence[Parameter]) -> None:
    """Refuse sizes that are beyond what is counted, before an array is made of them."""
    sizes: dict[Rule, int] = {}
    total = 0
    for parameter in listed:
        rule = parameter.rule
        if rule not in sizes:
            sizes[rule] = math.prod(rule.shape)
        total += sizes[rule] * _STATE_BYTES
        if total >= _MOST_BYTES:
            raise Infeasible(
                f"{parameter.name} of shape {rule.shape} takes the model's state to {total:.3g} bytes or more, the "
                f"most is 2**62; what to do: check the sizes of the model (hidden {model.hidden}, vocabulary "
                f"{model.vocab})"
            )


def _check(model: Model, config: ParallelConfig) -> None:
    """Refuse what an axis does not divide, before anything, by the first parameter that it would cut."""
    for what, count in (("ranks", config.world_size), ("virtual stages", config.pp * config.vpp)):
        if count > _MOST_CUTS:
            raise Infeasible(f"{config} has {count} {what}, the most is {_MOST_CUTS}; what to do: choose smaller axes")
    if model.padded_vocab(config.tp) * model.hidden * _STATE_BYTES >= _MOST_BYTES:
        raise Infeasible(
            f"{config}: the vocabulary of {model.vocab}, padded to a multiple of {model.vocab_divisor} x tp {config.tp}"
            f", and hidden {model.hidden} make more than 2**62 bytes; what to do: check these sizes"
        )
    experts = model.experts
    # The first layer of either sort: dense, and with experts.
    first = {model.has_experts(layer): layer for layer in reversed(range(model.layers))}
    attention = "self_attention." + ("linear_qkv" if model.latent is None else "linear_proj")
    cut = [("heads", model.heads, "tp", config.tp, 0, attention)] if model.layers else []
    if model.layers and model.latent is None and config.tp % model.kv_heads:
        cut.append(("kv_heads", model.kv_heads, "tp", config.tp, 0, attention))
    if False in first:
        cut.append(("ffn", model.ffn, "tp", config.tp, first[False], "mlp.linear_fc1"))
    if True in first and experts is not None:
        layer, fc1 = first[True], "mlp.experts.linear_fc1"
        cut.append(("experts", experts.count, "ep", config.ep, layer, fc1))
        cut.append(("ffn of an expert", experts.ffn, "etp", config.expert_tp, layer, fc1))
        shared = experts.shared_ffn
        cut.append(("ffn of the shared experts", shared, "tp", config.tp, layer, "mlp.shared_experts.linear_fc1"))
    for what, size, axis, ways, layer, name in cut:
        if size % ways:
            also = ", or a multiple of it" if what == "kv_heads" else ""
            raise Infeasible(
                f"{config}: {what} {size} is not divisible by {axis} {ways}, which cuts decoder.layers.{layer}.{name}"
                f".weight and others; what to do: choose a {axis} that divides it{also}"
            )
