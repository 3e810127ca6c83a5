"""Real processes that move state with a ``Mover``, each over the transport that a case asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tests.cases.moves import Values
from tests.unit.strategies import inside

from shardshift.coordination import Control
from shardshift.elastic import LocalJob, Member
from shardshift.engine import Mover, names_of
from shardshift.transport import byte_view
from shardshift.values import PlacedLayout, Shard, ShardshiftError

TIMEOUT_S = 30.0
DIRECTLY = ("gloo", "same-host")
"""The transports between processes on CPU."""

Send = Callable[[Any], None]


@contextmanager
def process() -> Iterator[tuple[Member, Control]]:
    """This process of a ``LocalJob``, and where it meets the others; it leaves when all do."""
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    yield member, Control(dist.PrefixStore("test", member.store), member.device, TIMEOUT_S)


def mover_in(member: Member, devices: int, kind: Any, **options: Any) -> Mover:
    """A mover of the process."""
    store = dist.PrefixStore("mover", member.store)
    return Mover(store, member.device, range(devices), transport=kind, **{"timeout_s": TIMEOUT_S} | options)


def told(devices: int, worker: Callable[..., None], *args: Any, gone: Sequence[int] = ()) -> dict[int, list[Any]]:
    """What each process sends. Those that are ``gone`` in the end may be lost, and nobody else may fail."""
    found: dict[int, list[Any]] = {device: [] for device in range(devices)}
    with LocalJob(devices, worker, args, timeout_s=TIMEOUT_S) as job:
        try:
            for device, message in job.messages():
                found[device].append(message)
                if gone and all(found[other] for other in found if other not in gone):
                    break
        except ShardshiftError:
            if not gone:
                raise
    return found


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """What two tensors have alike if no bit differs."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tensor.shape, bytes(byte_view(plain).numpy().data)


def wanted(shard: Shard, values: Values) -> torch.Tensor:
    """The shard's part of the whole state."""
    return values[shard.tensor][inside(shard.region)]


def is_right(device: int, layout: PlacedLayout, values: Values, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether a device holds exactly what the layout says, bit for bit."""
    names = names_of(layout.shards_on(device))
    return names.keys() == state.keys() and all(
        bits(state[name]) == bits(wanted(shard, values)) for name, shard in names.items()
    )
