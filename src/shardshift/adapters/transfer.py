"""``transfer``: the state of one job becomes that of another, whatever frameworks they are of.

Both speak of logical tensors, so all that is asked of them is which shard each of their live tensors is: a Megatron
job (``megatron.Adapter.shards``), a job of torch's own parallelism (``fsdp.shards``), or anything that lists them.
Where names or shapes differ, one of the two says so (``fsdp.Job(names=)``).

1. Each rank tells its shards of both sides; lists that ranks have in common travel once.
2. The two layouts, a plan, agreement and move are those of ``engine.Mover``: the fewest bytes, all or none.
3. What has arrived is copied into the targets. Until all have committed these are untouched; sources are only read.

Rejected: receiving into the targets themselves, which saves a copy and leaves them half written after a failure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..engine import mover_of, names_of
from ..engine.aliases import exact_aliases
from ..engine.events import Sink, nowhere
from ..engine.line import Kind as Transport
from ..engine.readiness import Verify
from ..engine.ties import same
from ..plan.summary import STAGING_BYTES
from ..values import Kind, Layout, Mismatch, Region, Shard, Tensor, Topology, Unaccounted
from .once import Records, digest_of, speaks, spoken


def transfer(
    sources: Mapping[Shard, torch.Tensor],
    targets: Mapping[Shard, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    drop: Collection[str] = (),
    verify: Verify = False,
    compare_copies: bool = True,
    topology: Topology | None = None,
    transport: Transport = "auto",
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 60.0,
    memory: torch.device | str = "cpu",
    sink: Sink = nowhere,
) -> int:
    """Fill the tensors of one job from those of another. Called by all ranks of the group, alike.

    What is no tensor (steps, schedules, positions) stays with the jobs.

    Args:
        sources: this rank's tensors of the job that has the state, by shard; none where it has no part.
        targets: this rank's tensors of the other job, by shard, each of the region's shape; written in place.
        group: all ranks of either job; None for the default one.
        drop: kinds, or names as ``kind:name``, that the targets shall go without. Others that they lack are refused.
        verify: see ``Mover.move``.
        compare_copies: see ``Mover.move``.
        topology: see ``Mover``.
        transport: see ``Mover``.
        staging_bytes: see ``Mover``.
        timeout_s: see ``Mover``.
        memory: see ``Mover``.
        sink: see ``Mover``.

    Returns:
        Bytes that were sent between ranks, over all of them.

    Raises:
        Mismatch: if the two describe a tensor differently, or a tensor has not its shard's shape or dtype.
        Unaccounted: naming what only the sources have.
        StateLost: naming what no source holds.
        PeerLost: if a rank is gone. In all these cases the targets are as they were.
    """
    with mover_of(
        group,
        topology=topology,
        transport=transport,
        staging_bytes=staging_bytes,
        timeout_s=timeout_s,
        memory=memory,
        sink=sink,
    ) as mover:
        kept: dict[Shard, torch.Tensor] = {}
        listed: dict[str, str] = {}

        def first() -> dict[str, Any]:
            kept.update({shard: tensor for shard, tensor in sources.items() if not _dropped(shard.tensor, drop)})
            for side in (kept, targets):
                for shard, tensor in side.items():
                    _check(shard, tensor)
            _check_targets(targets, kept)
            listed.update(sources=_body(kept), targets=_body(targets))
            return {name: digest_of(body.encode()) for name, body in listed.items()}

        told = mover.exchange(first)
        own = {f"{name}_body": body for name, body in listed.items() if speaks(mover.device, told, name)}
        bodies = mover.exchange(lambda: own)
        prev, curr = (_layout(told, bodies, name) for name in listed)
        if missing := sorted({*map(str, prev.tensors)} - {*map(str, curr.tensors)}):
            raise Unaccounted(
                f"only the sources have {', '.join(missing[:8])}; nothing was moved. What to do: give targets for "
                "them, or name them, or their kinds, in drop=",
                missing,
            )
        state = {name: kept[shard] for name, shard in names_of(prev.shards(mover.device)).items()}
        arrived = mover.move(prev, curr, state, policy="keep", verify=verify, compare_copies=compare_copies)
        names = names_of(curr.shards(mover.device))
        found = {shard: arrived[name] for name, shard in names.items()}
        mover.exchange(lambda: _check_tied(targets, found))
        with torch.no_grad():
            for shard, tensor in found.items():
                targets[shard].copy_(tensor)
        return mover.plan.moved_bytes if mover.plan else 0


def _dropped(tensor: Tensor, drop: Collection[str]) -> bool:
    return str(tensor.kind) in drop or str(tensor) in drop


def _check(shard: Shard, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (tuple(tensor.shape), dtype) != (shard.region.shape, shard.tensor.dtype):
        raise Mismatch(
            f"{shard}: the tensor has shape {tuple(tensor.shape)} and dtype {dtype}, the shard {shard.region.shape} "
            f"and {shard.tensor.dtype}; nothing was moved. What to do: give each shard the tensor of its region"
        )


def _check_targets(targets: Mapping[Shard, torch.Tensor], sources: Mapping[Shard, torch.Tensor]) -> None:
    """Hold it that what is written to each target is there afterwards, and that no source is written to on the way."""
    for shard, target in targets.items():
        if target.is_meta or torch._debug_has_internal_overlap(target) == 1:
            raise Mismatch(
                f"{shard}: the target is "
                f"{'on the meta device' if target.is_meta else 'one element seen several times'}, so nothing can be "
                "written to it; nothing was moved. What to do: give it memory (to_empty)"
            )
    exact_aliases(targets)  # refuses those that share memory in part
    homes = {tensor.untyped_storage().data_ptr(): shard for shard, tensor in sources.items() if tensor.numel()}
    for shard, target in targets.items():
        source = homes.get(target.untyped_storage().data_ptr()) if target.numel() else None
        if source is not None and sources.get(shard) is not target:
            raise Mismatch(
                f"{shard}: the target lies in memory of the source {source}; nothing was moved. What to do: give the "
                "two jobs tensors of their own"
            )


def _check_tied(targets: Mapping[Shard, torch.Tensor], found: Mapping[Shard, torch.Tensor]) -> dict[str, Any]:
    """Hold it that targets that are one tensor are given one content."""
    for group in exact_aliases(targets):
        for one, other in itertools.pairwise(group):
            if not same(found[one], found[other]):
                raise Mismatch(
                    f"{one} and {other} are one tensor in the targets and two in the sources; nothing was written. "
                    "What to do: tie them in both jobs, or in neither"
                )
    return {}


def _body(tensors: Mapping[Shard, torch.Tensor]) -> str:
    return json.dumps([[*_words(shard.tensor), shard.region.offsets, shard.region.shape] for shard in tensors])


def _words(tensor: Tensor) -> Sequence[Any]:
    return tensor.kind, tensor.name, tensor.shape, tensor.dtype, tensor.itemsize


def _layout(told: Records, bodies: Records, name: str) -> Layout:
    """The layout that all ranks' lists come to; rank r of it is rank r of the group."""
    texts = spoken(told, bodies, name, _shards)
    return Layout(list(texts.values()), [[*texts].index(told[rank][name]) for rank in sorted(told)])


def _shards(body: str) -> tuple[Shard, ...]:
    return tuple(
        Shard(Tensor(Kind(kind), name, tuple(shape), dtype, itemsize), Region(tuple(offsets), tuple(extent)))
        for kind, name, shape, dtype, itemsize, offsets, extent in json.loads(body)
    )
