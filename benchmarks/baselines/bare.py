"""The floor: the bytes that a plan moves between each two devices, as one flat buffer a pair, and nothing else.

*gloo*: all receives and sends are posted at once, then waited for. *same host*: each receiver reads each of its buffers
out of the sender's memory with one ``process_vm_readv``. Nothing is packed, agreed on or acknowledged, and everything
has been written before. *and copies*: each device also copies as many bytes as the plan copies inside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from _processes import Action, Side, post
from _state import memcpy, pair_bytes, warm_bytes

from shardshift.plan import Plan
from shardshift.transport.probe import MemoryReader

from .common import Place

_MOST_BYTES: Final = 1 << 30
"""Of one call, which takes a little less than 2 GiB."""


def bare_sides(place: Place, plan: Plan, *, near: bool) -> dict[str, Side]:
    """The sides ``bare gloo`` and, with ``near``, ``bare same host``, and both with copies; over the default group.

    Args:
        place: this rank's part.
        plan: whose bytes are moved.
        near: whether processes can read one another's memory.
    """
    device, store = place.device, place.rank.store("bare")
    pairs = pair_bytes(plan)
    sends = {to: warm_bytes(nbytes) for (source, to), nbytes in pairs.items() if source == device}
    receives = {source: warm_bytes(nbytes) for (source, to), nbytes in pairs.items() if to == device}
    rank = plan.curr.rank_of(device)
    copied_bytes = 0 if rank is None else int(plan.kept_by_rank_bytes[rank] - plan.referred_by_rank_bytes[rank])
    local = warm_bytes(copied_bytes), warm_bytes(copied_bytes)
    group = dist.group.WORLD
    assert group is not None

    def copying(act: Action) -> Action:
        def both() -> None:
            memcpy(*local)
            act()

        return both

    def gloo(*, copy: bool = False) -> None:
        works = post(group, sends, receives)
        if copy:
            memcpy(*local)  # while the bytes are on their way
        for work in works:
            work.wait()

    sides: dict[str, Side] = {"bare gloo": lambda: gloo, "bare gloo and copies": lambda: lambda: gloo(copy=True)}
    if near:
        read = _reading(store, device, sends, receives)
        sides |= {"bare same host": lambda: read, "bare same host and copies": lambda: copying(read)}
    return sides


def _reading(
    store: dist.Store, device: int, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
) -> Action:
    addresses = {to: buffer.data_ptr() for to, buffer in sends.items()}
    store.set(f"read/{device}", json.dumps([os.getpid(), addresses]))
    reader = MemoryReader()
    calls: list[tuple[int, int, int, int]] = []
    for source, into in receives.items():
        pid, of = json.loads(store.get(f"read/{source}"))
        for low in range(0, into.numel(), _MOST_BYTES):
            nbytes = min(_MOST_BYTES, into.numel() - low)
            calls.append((pid, into.data_ptr() + low, of[str(device)] + low, nbytes))

    def read() -> None:
        for pid, into_address, of_address, nbytes in calls:
            done = 0
            while done < nbytes:
                left = nbytes - done
                done += reader.read(pid, np.array([[into_address + done, left]]), np.array([[of_address + done, left]]))

    return read
