"""The cost matrix: the bytes that a device lacks for each role it might take next.

The paper counts whole layers and TP slices and merges the two by a rule (section III-B); that is exact only
for equal layers. Here bytes are counted, over all kinds, so uneven stages, embeddings, replicated norms and
ranges of the distributed optimizer are all right by themselves:

1. Group the shards of both layouts by logical tensor: only shards of one tensor can overlap.
2. Per tensor, intersect every curr region with every prev region at once, and add the volumes to their roles.
   The regions of one tensor that a role holds never overlap, so the volumes simply add.
3. A role lacks what it holds in all less the overlap; a fresh device lacks all.

Rows and columns are roles, not ranks: a job of a hundred thousand ranks has some hundred roles. Looping over
pairs of roles was rejected: most pairs share no tensor, and tensors know which do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..values import Infeasible, Layout, Region, Tensor

Held: TypeAlias = dict[Tensor, list[tuple[int, Region]]]
"""Per tensor: (role, region) of every shard of it."""


def lacking_bytes(prev: Layout, curr: Layout) -> NDArray[np.int64]:
    """Bytes that a device of prev role j lacks if it becomes curr role i.

    Returns:
        An int64 array of shape (curr roles, prev roles + 1); the last column is a fresh device.

    Raises:
        Infeasible: if one role holds 2**63 bytes or more.
    """
    whole = [sum(shard.nbytes for shard in role) for role in curr.roles]
    if max(whole, default=0) >= 2**63:
        raise Infeasible(f"curr role {whole.index(max(whole))} holds {max(whole)} bytes; the most is 2**63 - 1")
    lacking = np.repeat(np.array(whole, dtype=np.int64)[:, None], len(prev.roles) + 1, axis=1)
    held = _by_tensor(prev)
    for tensor, wanted in _by_tensor(curr).items():
        if tensor in held:
            wanted_roles, low, high = _arrays(wanted)
            held_roles, held_low, held_high = _arrays(held[tensor])
            size = np.minimum(high[:, None], held_high) - np.maximum(low[:, None], held_low)
            overlap_bytes = size.clip(min=0).prod(axis=2) * tensor.itemsize
            # Not `lacking[...] -= ...`, which would count a role with several regions of a tensor only once.
            np.subtract.at(lacking, (wanted_roles[:, None], held_roles), overlap_bytes)
    return lacking


def _by_tensor(layout: Layout) -> Held:
    held: Held = {}
    for index, role in enumerate(layout.roles):
        for shard in role:
            held.setdefault(shard.tensor, []).append((index, shard.region))
    return held


def _arrays(held: Sequence[tuple[int, Region]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Roles, first and one-past-last indices; shapes (n,), (n, dims) and (n, dims)."""
    roles = np.array([role for role, _ in held], dtype=np.int64)
    low = np.array([region.offsets for _, region in held], dtype=np.int64)
    return roles, low, low + np.array([region.shape for _, region in held], dtype=np.int64)
