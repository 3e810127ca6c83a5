"""What ranks hold alike, and what not: found by digests, in one collective on the old world.

A record of the whole job is given by its first rank, and a rank's streams or extra states by the first of its data
parallel group. Before that may stand for the others, the others must be known to hold the same. Only digests
travel: 16 bytes a value, from the first rank of the group to the others, however large the group is. Rejected: every
rank publishing all it has (each new rank would read each old rank's), and taking the first rank's word for it.

Nothing is raised inside the collective. Each rank keeps what it found and refuses later, when refusals travel as
text: a rank that raised alone here would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from ...values import Mismatch
from ..plain import digest


def differing(group: dist.ProcessGroup, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of values in which this rank differs from the first rank of a group. Collective on the group.

    Args:
        group: a group of the old world, on CPU (gloo): with DP and CP for what replicas share, the whole world for
            what all ranks share.
        values: per name what this rank has.

    Returns:
        Sorted names: of another value here, only here, or only at the first.

    A value that no record can carry counts as alike: it is refused by its name where the record is made.
    """
    if dist.get_world_size(group) == 1:
        return ()
    own = digests(values)
    first: list[Any] = [own]
    dist.broadcast_object_list(first, group=group, group_src=0)
    return differing_from(first[0], own)


def digests(values: Mapping[str, Any]) -> dict[str, bytes]:
    """The digest of each value; empty for one that no record can carry."""
    found: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            found[name] = digest(value, name)
        except Exception:  # whatever it is: a rank that raised here would leave the others in the collective
            found[name] = b""
    return found


def differing_from(first: Mapping[str, bytes], own: Mapping[str, bytes]) -> tuple[str, ...]:
    """The names under which two sets of digests are not the same."""
    return tuple(sorted(name for name in first.keys() | own.keys() if first.get(name) != own.get(name)))


def refuse_differing(names: Iterable[str], where: str) -> None:
    """Refuse values that all ranks must hold alike.

    Args:
        names: what ``differing`` on the whole world gave.
        where: this rank.

    Raises:
        Mismatch: if there are any.
    """
    if found := sorted(names):
        raise Mismatch(
            f"{where}: {', '.join(found)} differ from those of rank 0, whose values every rank of the new layout would "
            "get; nothing was moved. What to do: keep them alike on all ranks, as a schedule or count that follows the "
            "global step is"
        )
