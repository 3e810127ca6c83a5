"""The oracle: the job's logical state, gathered and sliced by other means than shardshift's.

Nothing here knows regions, layouts or plans. Each rank writes its own tensors with Megatron's attributes to a
file; one process joins them with ``torch.cat``; fresh processes take their part with ``torch.chunk``. That is
slow and plain on purpose: it decides whether a change of layout was exact.
"""

from __future__ import annotations

from ..adapters.megatron import Job, rng

# The line above puts the CPU stand-ins in place, which must be there before anything of megatron is imported.
# isort: split

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

KINDS = ("param", "exp_avg", "exp_avg_sq")
Logical = dict[tuple[str, str], torch.Tensor]
"""Whole tensors by (kind, logical name)."""


def named_logical(model: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Per parameter of wrapped model chunks: local name, parameter, logical name."""
    for chunk in model:
        module = getattr(chunk, "module", chunk)
        for name, parameter in module.named_parameters():
            logical = name
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                logical = f"decoder.layers.{module.decoder.layers[int(local)].layer_number - 1}.{rest}"
            elif name == "output_layer.weight" and module.share_embeddings_and_output_weights:
                logical = "embedding.word_embeddings.weight"
            yield name, parameter, logical


def save_rank(job: Job, folder: Path) -> None:
    """Write what this rank holds to a file of its own, as plain tensors and values."""
    states = {p: s for part in _parts(job.optimizer) for p, s in part.optimizer.state.items()}
    tensors = []
    for _, parameter, name in named_logical(job.model):
        state = states.get(parameter, {})
        cut = (
            (parameter.partition_dim, parameter.partition_stride)
            if getattr(parameter, "tensor_model_parallel", False)
            else None
        )
        found = {"param": parameter.detach()} | {kind: state[kind] for kind in KINDS[1:] if kind in state}
        step = float(state["step"]) if "step" in state else None
        tensors.append((name, cut, {kind: tensor.clone() for kind, tensor in found.items()}, step))
    at = job.layout.coordinate
    record = {
        "coordinate": (at.pp, at.tp, at.dp),
        "tensors": tensors,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in _groups(job)],
        "scheduler": job.scheduler.state_dict(),
        "iteration": job.iteration,
        "consumed_samples": job.position.consumed_samples,
        "streams": rng.capture(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(record, folder / f"rank{job.layout.rank}.pt")


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What every rank wrote, in order of ranks."""
    files = sorted(folder.glob("rank*.pt"), key=lambda file: int(file.stem[4:]))
    return [torch.load(file, weights_only=True) for file in files]


def assemble(records: Sequence[Mapping[str, Any]]) -> Logical:
    """Whole tensors from what all ranks wrote.

    Raises:
        ValueError: if two ranks hold different bits of what must be one tensor.
    """
    slices: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    cuts: dict[str, tuple[int, int] | None] = {}
    for record in records:
        _, tp, _ = record["coordinate"]
        for name, cut, tensors, _ in record["tensors"]:
            cuts[name] = cut
            for kind, tensor in tensors.items():
                held = slices.setdefault((kind, name), {})
                index = 0 if cut is None else tp
                if index in held and not same_bits(held[index], tensor):
                    raise ValueError(f"{kind} of {name}: two ranks that hold slice {index} differ")
                held[index] = tensor
    return {
        (kind, name): _join([held[index] for index in sorted(held)], cuts[name])
        for (kind, name), held in slices.items()
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (NaN and minus zero included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def same_state(before: Logical, after: Logical) -> bool:
    """Whether two whole states agree bit for bit, padding of the vocabulary that only one has left aside."""
    if before.keys() != after.keys():
        return False
    for key, tensor in before.items():
        other = after[key]
        rows = min(tensor.shape[0], other.shape[0])
        if "embedding" in key[1] or "output_layer" in key[1]:
            tensor, other = tensor[:rows], other[:rows]
        if not same_bits(tensor, other):
            return False
    return True


def holds(job: Job, logical: Logical) -> bool:
    """Whether every parameter of this rank is its slice of the whole state, bit for bit."""
    tp_rank = job.layout.coordinate.tp
    return all(
        same_bits(parameter.detach(), slice_by_attributes(logical["param", name], parameter, tp_rank))
        for _, parameter, name in named_logical(job.model)
    )


def load_rank(job: Job, records: Sequence[Mapping[str, Any]], logical: Logical) -> None:
    """Set a fresh job's state to the saved one: its slice of every tensor, and all that goes along."""
    steps = {name: step for record in records for name, _, _, step in record["tensors"]}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    owners = {
        p: part.optimizer for part in _parts(job.optimizer) for g in part.optimizer.param_groups for p in g["params"]
    }
    for _, parameter, name in named_logical(job.model):
        parameter.data.copy_(slice_by_attributes(logical["param", name], parameter, tp_rank))
        if ("exp_avg", name) not in logical:
            continue
        state = {kind: slice_by_attributes(logical[kind, name], parameter, tp_rank) for kind in KINDS[1:]}
        owners[parameter].state[parameter] = {"step": torch.tensor(steps[name]), **state}
    job.scheduler.load_state_dict(records[0]["scheduler"])
    job.iteration = records[0]["iteration"]
    streams = {(r["coordinate"][0], r["coordinate"][1]): r["streams"] for r in reversed(records)}
    rng.restore(streams, job.layout.coordinate)


def slice_by_attributes(whole: torch.Tensor, parameter: Any, tp_rank: int) -> torch.Tensor:
    """This tensor rank's slice of a whole tensor, as Megatron's attributes of the parameter say."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole.clone()
    dim, stride = parameter.partition_dim, parameter.partition_stride
    ways = parallel_state.get_tensor_model_parallel_world_size()
    rows = parameter.shape[dim] * ways
    if rows > whole.shape[dim]:  # padding of the vocabulary that this layout has in excess
        excess = list(whole.shape)
        excess[dim] = rows - whole.shape[dim]
        whole = torch.cat([whole, whole.new_zeros(excess)], dim)
    segments = whole.narrow(dim, 0, rows).chunk(stride, dim)
    return torch.cat([segment.chunk(ways, dim)[tp_rank] for segment in segments], dim)


def _join(slices: Sequence[torch.Tensor], cut: tuple[int, int] | None) -> torch.Tensor:
    if cut is None:
        return slices[0]
    dim, stride = cut
    parts = [tensor.chunk(stride, dim) for tensor in slices]
    return torch.cat([torch.cat([part[segment] for part in parts], dim) for segment in range(stride)], dim)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _groups(job: Job) -> list[dict[str, Any]]:
    return [group for part in _parts(job.optimizer) for group in part.optimizer.param_groups]
