"""The oracle: the job's logical state, gathered and sliced by other means than shardshift's.

Nothing here knows regions, layouts or plans. Each rank writes its own tensors with Megatron's attributes, coordinates
and ranges to a file; one process joins them with ``torch.cat``; fresh processes take their part with ``torch.chunk``.
That is slow and plain on purpose: it decides whether a change of layout was exact.

1. A tensor of a rank is whole (a parameter, a moment of the plain optimizers) or a flat piece of that (what the
   distributed optimizer keeps of masters and moments: ``distrib_optimizer.py``, ``_get_model_param_range_map``).
2. Pieces that fill a local tensor become that tensor; ranks that hold the same one must agree in every bit.
3. Local tensors become the whole one by ``partition_dim`` and ``partition_stride``, over tensor parallel ranks, or
   over expert tensor parallel ranks for what is inside an expert. Experts are named by their global number.
4. A 16-bit parameter must be its fp32 master, cast.

Left out: the output layer that GPTModel allocates on the stage of multi-token prediction although the embedding is
tied, and then never reads (``gpt_model.py``, ``shared_embedding_or_output_weight``).
"""

from __future__ import annotations

from ..adapters.megatron import Job, rng

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from ..values import ParallelConfig
from .held import EMBEDDING, OUTPUT, Cut, named, named_buffers, owned, parts, slice_of, spanned
from .held import named_logical as named_logical

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""The kinds of an fp32 job with Adam."""
MASTER, BUFFER = "master", "buffer"
Logical = dict[tuple[str, str], torch.Tensor]
"""Whole tensors by (kind, logical name)."""


def save_rank(job: Job, folder: Path, *, settled: bool = True) -> None:
    """Write what this rank holds to a file of its own, as plain tensors and values.

    Args:
        job: the job, between two steps.
        folder: where to.
        settled: whether parameters are current. Where the distributed optimizer gathers them in the next forward
            they are not, except for the part that this rank steps: only that is written then.
    """
    kept = owned(job.optimizer)
    tensors = []
    for one in named(job.model):
        own = kept.get(one.parameter)
        found, spans, step = {"param": one.parameter.detach().clone()}, {}, None
        if own is not None:
            moments = {kind: value for kind, value in own.state.items() if kind != "step" and value is not None}
            step = float(own.state["step"]) if "step" in own.state else None
            if own.main.dtype != one.parameter.dtype:
                moments[MASTER] = own.main
            found |= {kind: value.detach().clone() for kind, value in moments.items()}
            if own.span is not None:
                spans = dict.fromkeys(moments, own.span)
        if not settled and _gathers_later(job.model[0]) and one.parameter.requires_grad:
            start, end = spans["param"] = (0, 0) if own is None or own.span is None else own.span
            found["param"] = found["param"].flatten()[start:end].clone()
        shape = tuple(one.parameter.shape)
        tensors.append((one.name, one.cut, found, step, {"shape": shape, "spans": spans}))
    for name, module, key in named_buffers(job.model):
        value = module._buffers[key].detach().clone()
        tensors.append((name, None, {BUFFER: value}, None, {"shape": tuple(value.shape), "spans": {}}))
    record = {
        "rank": torch.distributed.get_rank(),
        "config": str(job.config),
        "coordinate": (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        ),
        "tensors": tensors,
        "groups": [_values(group) for group in _groups(job)],
        "settings": {one.name: _values(kept[one.parameter].group) for one in named(job.model) if one.parameter in kept},
        "scalers": [_scaler(part) for part in parts(job.optimizer)],
        "scheduler": job.scheduler.state_dict(),
        "iteration": job.iteration,
        "consumed_samples": job.position.consumed_samples,
        "streams": rng.capture(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(record, folder / f"rank{record['rank']}.pt")


def read_ranks(folder: Path, *, weights_only: bool = True) -> list[dict[str, Any]]:
    """What every rank wrote, in order of ranks.

    Args:
        folder: with a file a rank.
        weights_only: hold the files to plain values. That takes five times as long, as its unpickler is in Python.
    """
    files = sorted(folder.glob("rank*.pt"), key=lambda file: int(file.stem[4:]))
    return [torch.load(file, weights_only=weights_only) for file in files]


def assemble(records: Sequence[Mapping[str, Any]]) -> Logical:
    """Whole tensors from what all ranks wrote.

    Raises:
        ValueError: if two ranks hold different bits of what must be one tensor, if a part of a tensor is missing, or
            if a 16-bit parameter is not its master, cast.
    """
    locals_: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    written: dict[tuple[str, str, int], torch.Tensor] = {}
    cuts: dict[str, Cut | None] = {}
    for record in records:
        for name, cut, tensors, _, more in record["tensors"]:
            cuts[name] = cut
            for kind, tensor in tensors.items():
                index = 0 if cut is None else cut[3]
                held = locals_.setdefault((kind, name), {})
                if index not in held:
                    held[index] = tensor.new_zeros(more["shape"])
                    written[kind, name, index] = torch.zeros(held[index].numel(), dtype=torch.bool)
                whole, seen = held[index].view(-1), written[kind, name, index]
                start, end = more["spans"].get(kind, (0, whole.numel()))
                piece = tensor.reshape(-1)
                if piece.numel() != end - start or piece.dtype != whole.dtype:
                    raise ValueError(f"{kind} of {name}: {piece.numel()} elements of {piece.dtype} for {start}..{end}")
                known = seen[start:end]
                if not same_bits(piece[known], whole[start:end][known]):
                    raise ValueError(f"{kind} of {name}: two ranks that hold slice {index} differ")
                whole[start:end] = piece
                seen[start:end] = True
    for (kind, name, index), seen in written.items():
        if not seen.all():
            raise ValueError(f"{kind} of {name}: {int((~seen).sum())} elements of slice {index} are on no rank")
    logical = {(kind, name): _join(held, kind, name, cuts[name]) for (kind, name), held in locals_.items()}
    for (kind, name), master in logical.items():
        if kind == MASTER and not same_bits(logical["param", name], master.to(logical["param", name].dtype)):
            raise ValueError(f"param of {name} is not its master, cast")
    return logical


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (NaN and minus zero included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def same_state(before: Logical, after: Logical) -> bool:
    """Whether two whole states agree bit for bit, padding of the vocabulary that only one has left aside."""
    return not differences(before, after)


def differences(before: Logical, after: Logical) -> list[str]:
    """Which tensors are in one of two whole states only, or are not the same bit for bit in both."""
    found = [
        f"{kind} of {name} is only {'before' if (kind, name) in before else 'after'}"
        for kind, name in sorted(before.keys() ^ after.keys())
    ]
    for key in sorted(before.keys() & after.keys()):
        tensor, other = before[key], after[key]
        if key[1] in (EMBEDDING, OUTPUT):
            rows = min(tensor.shape[0], other.shape[0])
            tensor, other = tensor[:rows], other[:rows]
        if not same_bits(tensor, other):
            found.append(f"{key[0]} of {key[1]} differs")
    return found


def holds(job: Job, logical: Logical) -> bool:
    """Whether every parameter of this rank is its slice of the whole state, bit for bit."""
    return all(
        same_bits(one.parameter.detach(), slice_of(logical["param", one.name], one.cut, one.parameter.shape))
        for one in named(job.model)
    )


def load_rank(job: Job, records: Sequence[Mapping[str, Any]], logical: Logical, *, change: int = 1) -> None:
    """Set a fresh job's state to the saved one: its slice of every tensor, and all that goes along.

    The optimizer may cut its state otherwise than the saved job's did.

    Args:
        job: the fresh job, in any layout.
        records: what ``read_ranks`` gives.
        logical: what ``assemble`` makes of it.
        change: number of the change that this stands for; random streams that begin with it are derived from it, by
            the documented rule (``adapters/megatron/rng.py``), the one thing that is taken from there.
    """
    steps = {name: step for record in records for name, _, _, step, _ in record["tensors"] if step is not None}
    settings = {name: values for record in records for name, values in record["settings"].items()}
    kept = owned(job.optimizer)
    kinds = {kind for kind, _ in logical} - {"param", MASTER, BUFFER}
    for one in named(job.model):
        shape = one.parameter.shape
        one.parameter.data.copy_(slice_of(logical["param", one.name], one.cut, shape))
        own = kept.get(one.parameter)
        if own is None:
            continue
        if own.main.dtype != one.parameter.dtype:
            master = slice_of(logical[MASTER, one.name], one.cut, shape)
            own.main.data.copy_(spanned(master, own.span))
        state: dict[str, Any] = {
            kind: spanned(slice_of(logical[kind, one.name], one.cut, shape), own.span)
            for kind in kinds
            if (kind, one.name) in logical
        }
        if state and one.name in steps:
            state["step"] = torch.tensor(steps[one.name])
        _set_state(job.optimizer, own.main, state)
    for name, module, key in named_buffers(job.model):
        module._buffers[key] = logical[BUFFER, name].clone()
    _load_scalers(job.optimizer, records[0]["scalers"])
    job.scheduler.load_state_dict(records[0]["scheduler"])
    for parameter, name in ((one.parameter, one.name) for one in named(job.model)):
        if parameter in kept and name in settings:
            kept[parameter].group.update(settings[name])
    job.iteration = records[0]["iteration"]
    streams = rng.Origins.read(ParallelConfig.parse(records[0]["config"]), {r["rank"]: r["streams"] for r in records})
    rng.install(streams.at(job.config, job.layout.rank, change))


def _join(held: Mapping[int, torch.Tensor], kind: str, name: str, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return held[0]
    dim, segments, ways, _ = cut
    if sorted(held) != list(range(ways)):
        raise ValueError(f"{kind} of {name}: slices {sorted(held)} of {ways} are there")
    parts = [held[index].chunk(segments, dim) for index in range(ways)]
    return torch.cat([torch.cat([part[segment] for part in parts], dim) for segment in range(segments)], dim)


def _gathers_later(chunk: Any) -> bool:
    config: Any = getattr(chunk, "ddp_config", None)
    return config is not None and config.use_distributed_optimizer and config.overlap_param_gather


def _set_state(optimizer: Any, main: torch.Tensor, state: dict[str, Any]) -> None:
    for part in parts(optimizer):
        for group in () if part.optimizer is None else part.optimizer.param_groups:
            if any(main is other for other in group["params"]):
                part.optimizer.state[main] = state


def _scaler(part: Any) -> dict[str, Any] | None:
    scaler = getattr(part, "grad_scaler", None)
    return None if scaler is None else {k: getattr(v, "item", lambda v=v: v)() for k, v in scaler.state_dict().items()}


def _load_scalers(optimizer: Any, saved: Sequence[dict[str, Any] | None]) -> None:
    for index, part in enumerate(parts(optimizer)):
        state = saved[min(index, len(saved) - 1)]
        if state is not None and getattr(part, "grad_scaler", None) is not None:
            part.grad_scaler.load_state_dict({k: torch.tensor([v]) if k == "scale" else v for k, v in state.items()})


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's settings, but for whether it is of experts' buffers, which is so where EP is above 1 alone."""
    return {key: value for key, value in group.items() if key not in ("params", "is_expert_parallel")}


def _groups(job: Job) -> list[dict[str, Any]]:
    return [
        group for part in parts(job.optimizer) if part.optimizer is not None for group in part.optimizer.param_groups
    ]
