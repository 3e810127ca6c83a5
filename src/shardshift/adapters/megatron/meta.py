"""The user's job as each pipeline stage would build it, on the meta device: shapes without memory.

Both layouts of a change are needed before anything of the new one exists, on every rank, for every rank. So the user's
own ``build_model`` and ``wrap`` are run for the first rank of each stage in an imagined world. What Megatron makes of
them is what counts: dtypes after wrapping, which parameters have masters, how gradient buffers are cut into buckets.
The other ranks of a stage follow: tensor and expert ranks build the same shapes, and the ranges of the distributed
optimizer's owners are equal parts of each bucket (``distrib_optimizer.py``, ``_build_model_gbuf_range``).

Working the buckets out from a description was rejected: they depend on settings that only ``wrap`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Final

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from ...values import Infeasible, Kind, Mismatch, ParallelConfig, ShardshiftError, Unaccounted
from ..reach import reach
from . import optimizer as optim
from . import scaler
from .audit import by_path
from .features import features, refuse
from .job import RankLayout, unwrapped
from .names import named_tensors, reduced_by_experts
from .slots import Local, Whole
from .versions import declare_fused_halves
from .world import on_meta, virtual_rank

BuildModel = Callable[[RankLayout], Sequence[torch.nn.Module]]
Wrapped = tuple[Sequence[torch.nn.Module], Any, Any]
Wrap = Callable[[Sequence[torch.nn.Module], RankLayout], Wrapped]


_WHOLE: Final = ParallelConfig()
_NO_REFUSALS: Final = (NameError, TypeError, AttributeError, KeyError, ImportError)
"""Errors by which no layout is refused, but code is wrong, or does not find what it needs."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage.

    Attributes:
        chunks: model chunks of its first rank, not wrapped, on the meta device.
        locals: what of them is state, in order of the forward.
        makes: the kinds of state that its optimizer makes at the first step.
        scalers: the kinds of part of it that have a grad scaler.
        schedules: whether ``wrap`` makes a scheduler.
        groups: logical names of the parameters of each param group, whoever owns them.
        derived: what the chunks reach by path, for ``audit``: with data it follows from the configuration.
    """

    chunks: tuple[torch.nn.Module, ...]
    locals: tuple[Local, ...]
    makes: tuple[Kind, ...]
    scalers: frozenset[str]
    schedules: bool
    groups: tuple[tuple[str, ...], ...]
    derived: Mapping[str, Any]


class MetaJobs:
    """The user's job in each configuration.

    Built once per configuration and kept for as long as the adapter: it depends on the user's functions alone, not on
    the world, and takes no memory.
    """

    def __init__(self, build_model: BuildModel, wrap: Wrap) -> None:
        self._build_model, self._wrap = build_model, wrap
        self._stages: dict[ParallelConfig, tuple[Stage, ...]] = {}
        self._configs: dict[int, Any] = {}

    def stages(self, config: ParallelConfig) -> tuple[Stage, ...]:
        """The pipeline stages of a configuration.

        Raises:
            Infeasible: if the model cannot be built so; the text is Megatron's.
            Mismatch: if ``build_model`` or ``wrap`` has an error, or does not return what it should.
            Unaccounted: if the optimizer is not known, or the model holds experts that no rule covers.
        """
        if config not in self._stages:
            self._stages[config] = tuple(self._stage(config, stage) for stage in range(config.pp))
        return self._stages[config]

    @property
    def whole(self) -> Stage:
        """The model with all axes 1."""
        return self.stages(_WHOLE)[0]

    @property
    def transformer_config(self) -> TransformerConfig:
        """The ``TransformerConfig`` of the model built whole."""
        return self.whole.chunks[0].config

    def wholes(self) -> dict[str, Whole]:
        """Every logical tensor by name."""
        return {
            local.named.name: Whole(tuple(local.named.tensor.shape), local.named.tensor.dtype, local.trainable)
            for local in self.whole.locals
        }

    def refuse_shared(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Refuse chunks that share a ``TransformerConfig`` with those of an earlier call of ``build_model``.

        ``wrap`` writes functions of its job into it (``grad_scale_func``, ``no_sync_func``): those of an imagined job
        would take their place in the running one.

        Raises:
            Mismatch: if they do.
        """
        configs = {id(each.config): each.config for each in chunks if hasattr(each, "config")}
        if configs.keys() & self._configs.keys():
            raise Mismatch(
                "two calls of build_model gave models with one and the same TransformerConfig object, into which "
                "Megatron and wrap write functions of their own job (grad_scale_func, no_sync_func); what to do: make "
                "it anew in each call"
            )

    def _stage(self, config: ParallelConfig, stage: int) -> Stage:
        layout = RankLayout(config, config.rank(pp=stage, tp=0))
        with virtual_rank(config, layout.rank):
            called = "build_model"
            try:
                with on_meta():
                    chunks = as_chunks(self._build_model(layout))
                self.refuse_shared(chunks)
                self._configs |= {id(each.config): each.config for each in chunks if hasattr(each, "config")}
                declare_fused_halves(chunks)  # older releases do not
                called = "wrap"
                with on_meta(wrapping=True), _groups_as_made() as made:
                    wrapped, optimizer, scheduler = checked(self._wrap(chunks, layout))
            except ShardshiftError:
                raise
            except Exception as error:
                raise _failed(called, config, stage, error) from error
            refuse(features(reach({"model": list(wrapped), "optimizer": optimizer})))
            inside = tuple(unwrapped(wrapped))
            keep_router_bias(inside)
            if any(parameter.device.type != "meta" for chunk in inside for parameter in chunk.parameters()):
                raise Mismatch(
                    f"build_model or wrap gave parameters with data where the job is built as {config} on the meta "
                    "device; what to do: make no device explicit for parameters"
                )
            return Stage(
                inside,
                tuple(_locals(inside, optimizer)),
                optim.makes(optimizer),
                scaler.kinds(optimizer),
                scheduler is not None,
                tuple(_named_groups(inside, optimizer, made)),
                by_path(inside),
            )


def _failed(called: str, config: ParallelConfig, stage: int, error: Exception) -> Infeasible | Mismatch:
    """What one of the user's functions has raised: Megatron refuses a layout, or the function is wrong."""
    said = f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} without a text"
    if isinstance(error, _NO_REFUSALS):
        last = extract_tb(error.__traceback__)[-1]
        return Mismatch(
            f"{called} failed for {config} (stage {stage}, on the meta device) with {said}, at {last.filename}, line "
            f"{last.lineno}; nothing was moved. What to do: mend {called}, or what it calls: no layout is refused so"
        )
    advice = "choose a configuration that divides the model; build_model and wrap must not touch data"
    if config == _WHOLE:
        advice = (
            "whatever its layout, a job is also built whole, all axes 1, to learn its tensors: set by the layout what "
            "an axis has to allow, e.g. sequence_parallel = layout.config.tp > 1; build_model and wrap must not touch "
            "data"
        )
    # Megatron refuses with assertions, ValueErrors and RuntimeErrors alike.
    return Infeasible(
        f"the job cannot be built as {config} (stage {stage}, on the meta device): {said}; what to do: {advice}"
    )


@contextmanager
def _groups_as_made() -> Iterator[list[list[torch.Tensor]]]:
    """Note the param groups that distributed optimizers are given, before each rank cuts out what it owns."""
    made: list[list[torch.Tensor]] = []
    cut = DistributedOptimizer.__dict__["_build_optimizer_group_ranges"]

    def noting(kind: Any, param_groups: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> Any:
        made.extend(list(group["params"]) for group in param_groups)
        return cut.__func__(kind, param_groups, *args, **kwargs)

    DistributedOptimizer._build_optimizer_group_ranges = classmethod(noting)
    try:
        yield made
    finally:
        DistributedOptimizer._build_optimizer_group_ranges = cut


def _named_groups(
    chunks: Sequence[torch.nn.Module], optimizer: Any, made: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[str, ...]]:
    names = {named.tensor: named.name for named in named_tensors(chunks)}
    of_key = {holding.key: names[parameter] for parameter, holding in optim.holdings(optimizer).items()}
    for part in optim.wrappers(optimizer):
        if not isinstance(part, DistributedOptimizer):
            for group in part.optimizer.param_groups:
                yield tuple(of_key[key] for key in group["params"])
    for group in made:
        yield tuple(names[parameter] for parameter in group)


def as_chunks(built: Any) -> tuple[torch.nn.Module, ...]:
    """What ``build_model`` returned, if it is what it should be.

    Raises:
        Mismatch: if not.
    """
    chunks = tuple(built) if isinstance(built, Iterable) else ()
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        inside = ", ".join(sorted({type(chunk).__name__ for chunk in chunks}))
        raise Mismatch(
            "build_model must return a list of this rank's model chunks, of one where a stage has no virtual ones; it "
            f"returned {type(built).__name__}" + (f" of {inside}" if inside else "")
        )
    return chunks


def checked(wrapped: Any) -> Wrapped:
    """What ``wrap`` returned, if it is what it should be.

    Raises:
        Mismatch: if not.
    """
    if not (isinstance(wrapped, tuple) and len(wrapped) == 3 and isinstance(wrapped[0], Sequence)):
        raise Mismatch(
            "wrap must return (list of wrapped chunks, Megatron optimizer, scheduler or None); it returned "
            f"{type(wrapped).__name__}"
        )
    return wrapped


def keep_router_bias(chunks: Sequence[torch.nn.Module]) -> None:
    """Bring the routers' expert bias to fp32, as Megatron does before a forward and a save (``moe/router.py``)."""
    for chunk in chunks:
        for module in chunk.modules():
            keep = getattr(module, "_maintain_float32_expert_bias", None)
            if keep is not None:
                keep()


def is_state(module: torch.nn.Module, key: str) -> bool:
    """Whether a buffer of a module that was built on the meta device has to be carried.

    Persistent ones have; and others that have no data after such a build: nothing would give them any.
    """
    buffer = module._buffers[key]
    return buffer is not None and (key not in module._non_persistent_buffers_set or buffer.is_meta)


def _locals(chunks: Sequence[torch.nn.Module], optimizer: Any) -> Iterator[Local]:
    held = {parameter: part for part in optim.wrappers(optimizer) for parameter in optim.trained(part)}
    owned = _owned(optimizer)
    for named in named_tensors(chunks):
        if not named.is_parameter:
            module, _, key = named.where[1].rpartition(".")
            if is_state(chunks[named.where[0]].get_submodule(module), key):
                yield Local(named, False, False, None, False)
            continue
        by_experts = reduced_by_experts(named.tensor)
        if by_experts and not named.is_expert:
            raise Unaccounted(
                f"{named.name} is an expert parameter of a module other than SequentialMLP, which no rule covers; "
                "nothing was moved. What to do: use local experts that are modules of their own",
                [named.name],
            )
        part = held.get(named.tensor)
        master = part is not None and not isinstance(part, FP32Optimizer) and named.tensor.dtype != torch.float32
        yield Local(named, part is not None, master, owned.get(named.tensor), by_experts)


def _owned(optimizer: Any) -> dict[torch.Tensor, Mapping[int, tuple[int, int]]]:
    """Per parameter in a buffer of a distributed optimizer its owners' ranges.

    An owner has one equal range of each bucket, whatever parameters lie there.
    """
    found: dict[torch.Tensor, Mapping[int, tuple[int, int]]] = {}
    for part in optim.wrappers(optimizer):
        if not isinstance(part, DistributedOptimizer):
            continue
        if part.ddp_config.num_distributed_optimizer_instances > 1:
            raise Unaccounted(
                "several optimizer instances (num_distributed_optimizer_instances) share out state within a part of "
                "the data parallel ranks, which no rule covers; nothing was moved. What to do: use one instance",
                ["num_distributed_optimizer_instances"],
            )
        for buffer in part.buffers:
            owners = buffer.data_parallel_world_size
            for parameter, (start, stop, bucket_id) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_id]
                share = bucket.grad_data.numel() // owners
                begin = start - bucket.offset
                first, last = begin // share, (stop - bucket.offset - 1) // share
                found[parameter] = {
                    owner: (
                        max(owner * share - begin, 0),
                        min((owner + 1) * share - begin, stop - start),
                    )
                    for owner in range(first, last + 1)
                }
    return found
