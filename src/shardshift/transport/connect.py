"""Choosing a transport, the same way on every device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch.distributed as dist

from ..values import Infeasible
from .nccl import NcclTransport
from .process_group import ProcessGroupTransport, device_ids
from .protocol import Transport
from .same_host import SameHostTransport

KINDS: Final = ("auto", "gloo", "same-host", "nccl")


def connect(
    store: dist.Store,
    device: int,
    devices: int | Sequence[int],
    timeout_s: float,
    *,
    kind: str = "auto",
    address: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    environment: Mapping[str, str] = os.environ,
) -> Transport:
    """A transport between devices; every one of them calls this alike.

    Args:
        store: where they find one another; a prefix that nothing else uses.
        device: this side's id.
        devices: the ids of all, in one order everywhere, or how many there are from 0 on.
        timeout_s: for meeting, and the longest that a message may take.
        kind: ``auto`` or ``same-host``: tensors in host memory, direct copies within a host where they work, gloo
            elsewhere. ``gloo``: gloo alone. ``nccl``: tensors on this process's current GPU.
        address: of this host, in the network that gloo is to use; None for gloo's choice. NCCL goes by its own
            settings (NCCL_SOCKET_IFNAME).
        say: is told in one line of paths that are not taken, and why.
        environment: where NCCL's settings are looked up.

    Raises:
        Infeasible: if there is no such kind, or this process cannot use it, or the address is none of this host's.
        TransportError: if the devices did not all come within ``timeout_s``.
    """
    if kind not in KINDS:
        raise Infeasible(f"there is no transport {kind!r}; what to do: use one of {', '.join(KINDS)}")
    if kind == "nccl":
        return NcclTransport.connect(store, device, devices, timeout_s, environment=environment)
    ids = device_ids(device, devices)
    gloo = ProcessGroupTransport.gloo(dist.PrefixStore("gloo", store), device, ids, timeout_s, address=address)
    if kind == "gloo" or len(ids) == 1:
        return gloo
    try:
        return SameHostTransport.over(gloo, dist.PrefixStore("same-host", store), ids, timeout_s, say)
    except BaseException:
        gloo.close()
        raise
