"""Staging: how much memory beside its tensors a device needs for what it sends and receives in its rounds.

1. A piece of ``DIRECT_BYTES`` or more is a message of its own. Where it is contiguous in its shard (which is taken to
   be contiguous itself, row-major), it travels out of and into that memory: it is *direct*.
2. All else is *staged*: packed on the sender, landed in a buffer and copied from there on the receiver. Contiguity is
   each end's own affair: a piece may be direct on one end and staged on the other.
3. Two rounds are in flight at most, so a device stages at most what two consecutive rounds stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from ..values import Region
from .program import Forward, Recv, Round, Send

DIRECT_BYTES: Final = 1 << 20
"""Pieces of this size and more are messages of their own: packing them would cost more than one call."""


def is_contiguous(region: Region, within: Region) -> bool:
    """Whether a region is one run of a row-major array that holds ``within``, which contains it."""
    first = next((dim for dim, size in enumerate(region.shape) if size != 1), len(region.shape))
    return region.numel == 0 or region.shape[first + 1 :] == within.shape[first + 1 :]


def is_direct(instruction: Send | Forward | Recv) -> bool:
    """Whether this end of a piece needs no staging."""
    shard = instruction.target if isinstance(instruction, Recv) else instruction.source
    piece = instruction.piece
    return piece.nbytes >= DIRECT_BYTES and is_contiguous(piece.region, shard.region)


def staged_bytes(step: Round) -> int:
    """Bytes that a device stages for one round, sends and receives together."""
    return sum(one.piece.nbytes for one in (*step.sends, *step.recvs) if not is_direct(one))


def staging_in_use_bytes(rounds: Sequence[Round]) -> int:
    """The most that a device stages at any time in these rounds, of which two may be in flight."""
    staged = [staged_bytes(step) for step in rounds]
    return max(staged if len(staged) < 2 else [one + other for one, other in pairwise(staged)], default=0)
