"""A small model with whatever makes sharding hard, and the ways to wrap it. The axes of a mesh say which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardshift as ss

VOCABULARY, HIDDEN = 13, 6


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return grown


class Net(nn.Module):
    """Uneven and empty shards (13 rows and 6 over 4, one element), a 0-dim and a frozen parameter, buffers, a tie."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.mean = nn.Buffer(torch.zeros(HIDDEN))
        if tied:
            self.out.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.seen.add_(1)
            self.mean.add_(self.seen)
        scores: torch.Tensor = self.out(x + (self.mean * 1e-3).to(x.dtype)) * self.scale + self.bias + self.frozen.sum()
        return scores


def wrapped(model: Any, mesh: DeviceMesh, *, reshard: bool = True, policy: MixedPrecisionPolicy | None = None) -> Any:
    """Wrap a model: axis tp: TP; dp: FSDP2; rep and dp: HSDP; ddp: DistributedDataParallel."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if over := tuple(name for name in ("rep", "dp") if name in names):
        given: dict[str, Any] = {
            "mesh": mesh[over],
            "reshard_after_forward": reshard,
            "mp_policy": policy or MixedPrecisionPolicy(),
        }
        for layer in model.layers:
            fully_shard(layer, **given)
        fully_shard(model, **given, ignored_params={model.scale})  # FSDP2 shards no 0-dim parameter
    if "ddp" in names:
        return DistributedDataParallel(model, process_group=mesh.get_group("ddp"))
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(parameters, lr=0.05)


def builder(
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    extras: Callable[[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
    **ways: Any,
) -> Callable[..., Any]:
    """A ``build`` for ``migrate``: on the meta device, but for DDP, which looks at data when it wraps."""

    def build(mesh: DeviceMesh, device: str = "meta") -> Any:
        with torch.device("cpu" if mesh.mesh_dim_names == ("ddp",) else device):
            model = wrapped(Net(tied=tied).to(dtype), mesh, **ways)
        made = optimizer(model.parameters())
        return (model, made) if extras is None else (model, made, dict(extras(made)))

    return build


def first(build: Callable[..., Any], mesh: DeviceMesh | None, **options: Any) -> ss.fsdp.Job | None:
    """The first job on a mesh, each parameter with values of its own; None outside of the mesh."""
    if mesh is None:
        return None
    model, optimizer, *extras = build(mesh, "cpu")
    begin(model)
    return ss.fsdp.Job(model, optimizer, *extras, mesh=mesh, **options)


@torch.no_grad()
def begin(model: nn.Module) -> None:
    """Give parameters values that differ between elements, alike whatever the wrapping; buffers zero."""
    for number, (name, parameter) in enumerate(plain_names(model).items()):
        whole = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) - 0.5
        whole = whole + 1 if name == "scale" or "norm.weight" in name else whole
        if isinstance(parameter, DTensor):
            local = torch.distributed.tensor.distribute_tensor(
                whole.to(parameter.dtype), parameter.device_mesh, parameter.placements
            ).to_local()
            parameter.to_local().copy_(local)
        else:
            parameter.copy_(whole)
    for buffer in model.buffers():
        buffer.zero_()


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without DDP's prefix."""
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Torch's own way from a DTensor to the whole."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(job: ss.fsdp.Job) -> dict[str, Any]:
    """Every parameter, state, gradient and buffer as a whole tensor."""
    model: Any = job.model
    found: dict[str, Any] = {}
    for name, parameter in plain_names(model).items():
        found[name] = whole(parameter)
        for optimizer in job.optimizer if isinstance(job.optimizer, list) else [job.optimizer]:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = whole(value) if isinstance(value, torch.Tensor) else value
        if parameter.grad is not None:
            found[f"{name}/grad"] = whole(parameter.grad)
    return found | {f"buffer {name.removeprefix('module.')}": whole(value) for name, value in model.named_buffers()}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not alike, bit for bit."""
    return sorted({*one} ^ {*other}) + [
        name
        for name in one.keys() & other.keys()
        if not (
            torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype
            if isinstance(one[name], torch.Tensor)
            else one[name] == other[name]
        )
    ]


def _average_what_fsdp_ignores(job: ss.fsdp.Job) -> None:
    mesh, scale = job.device_mesh, plain_names(job.models[0])["scale"]
    for axis in {"rep", "dp"} & {*job.mesh.names}:
        assert mesh is not None
        assert scale.grad is not None
        dist.all_reduce(scale.grad, group=mesh.get_group(axis))
        scale.grad /= job.mesh.size(axis)


def losses(job: ss.fsdp.Job, steps: int, *, zero: bool = True) -> list[float]:
    """Train: each data parallel rank on tokens of its own, that follow from how many forwards there were."""
    model: Any = job.model
    at = job.mesh.coordinate(job.rank)
    place = at.get("rep", 0) * job.mesh.size("dp") + at.get("dp", 0) + at.get("ddp", 0)
    found = []
    for _ in range(steps):
        seed = int(dict(model.named_buffers())["module.seen" if hasattr(model, "module") else "seen"])
        tokens = torch.randint(0, VOCABULARY, (4, 3), generator=torch.Generator().manual_seed(97 * seed + place))
        job.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        _average_what_fsdp_ignores(job)
        job.optimizer.step()
        if "scheduler" in job.extras:
            job.extras["scheduler"].step()
        found.append(loss.item())
    if zero:
        job.optimizer.zero_grad()
    return found
