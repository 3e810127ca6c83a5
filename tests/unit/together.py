"""Several devices of a job as threads of one process, each with a mover."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from tests.unit.strategies import inside

from shardshift.engine import Mover, names_of
from shardshift.transport import MemoryHub, Transport
from shardshift.values import PlacedLayout, Tensor

TIMEOUT_S = 20.0

Values = Mapping[Tensor, torch.Tensor]


def together(devices: Sequence[int], work: Callable[[Mover], Any], **options: Any) -> dict[int, Any]:
    """What ``work`` gives on each device, or the exception that it raises; over an in-memory transport."""
    store = dist.HashStore()
    hubs: dict[tuple[int, ...], MemoryHub] = {}

    def transport(wires: dist.Store, device: int, members: Sequence[int]) -> Transport:
        # A hub for each set of members: what a lost device left on a wire is gone with the wire.
        hub = hubs.setdefault(tuple(members), MemoryHub(1 + max(devices)))
        return hub.transport(device)

    defaults: dict[str, Any] = {"transport": transport, "timeout_s": TIMEOUT_S}

    def one(device: int) -> Any:
        try:
            with Mover(store, device, devices, **defaults | options) as mover:
                return work(mover)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(devices)) as pool:
        return dict(zip(devices, pool.map(one, devices), strict=True))


def coded(layout: PlacedLayout) -> dict[Tensor, torch.Tensor]:
    """Whole tensors in which every element has a number of its own, as far as the dtype has room."""
    values: dict[Tensor, torch.Tensor] = {}
    first = 1
    for tensor in layout.layout.tensors:
        numel = int(torch.Size(tensor.shape).numel())
        ids = torch.arange(first, first + numel) * 2654435761
        bits = torch.stack([ids >> shift & 255 for shift in (0, 8, 16, 24, 3, 11, 19, 27)], dim=1).to(torch.uint8)
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        values[tensor] = bits[:, : tensor.itemsize].contiguous().view(dtype).reshape(tensor.shape)
        first += numel
    return values


def state_on(device: int, layout: PlacedLayout, values: Values) -> dict[str, torch.Tensor]:
    """What a device holds, by name."""
    return {
        name: values[shard.tensor][inside(shard.region)].clone()
        for name, shard in names_of(layout.shards_on(device)).items()
    }


def holds(device: int, layout: PlacedLayout, values: Values, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether a device holds exactly what the layout says, bit for bit."""
    wanted = state_on(device, layout, values)
    return wanted.keys() == state.keys() and all(_bytes(state[name]) == _bytes(wanted[name]) for name in wanted)


def _bytes(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
