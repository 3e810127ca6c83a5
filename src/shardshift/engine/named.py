"""State as people hold it, a dict of names, and as layouts describe it, by shard.

A parameter or buffer goes by its name, anything else by its kind and name (``exp_avg:layers.0.weight``). Where a rank
holds several shards of one tensor, the region follows (``layers.0.weight[0:4, 0:8]``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from ..values import Kind, Mismatch, Shard, Tensor, Unaccounted


def names_of(shards: Iterable[Shard]) -> dict[str, Shard]:
    """What the shards of one device are called, in their order.

    Raises:
        Mismatch: if two would be called alike.
    """
    held = tuple(shards)
    often = Counter(shard.tensor for shard in held)
    plain = Counter(tensor.name for tensor in often)
    names: dict[str, Shard] = {}
    for shard in held:
        name = _name(shard.tensor, plain) + (str(shard.region) if often[shard.tensor] > 1 else "")
        if names.setdefault(name, shard) is not shard:
            raise Mismatch(
                f"{shard.tensor} and {names[name].tensor} would both be called {name!r} on one device; nothing was "
                "moved. What to do: give tensors names that do not look like the kind or the region of another"
            )
    return names


def by_shard(state: Mapping[str, torch.Tensor], names: Mapping[str, Shard]) -> dict[Shard, torch.Tensor]:
    """The tensors of a state by shard.

    Args:
        state: by name.
        names: of the shards that this device holds, as ``names_of`` gives them.

    Raises:
        Unaccounted: naming what the state holds and the layout does not know.
        Mismatch: naming what the layout says that this device holds and the state does not, or what is no tensor.
    """
    if strange := [name for name, tensor in state.items() if not (_is(str, name) and _is(torch.Tensor, tensor))]:
        raise Mismatch(
            f"the state holds {', '.join(map(repr, strange))}, which is no name, or has no tensor; nothing was "
            "moved. What to do: give a dict of name -> tensor"
        )
    if unknown := sorted(state.keys() - names.keys()):
        raise Unaccounted(
            f"the state holds {', '.join(unknown)}, of which the old layout knows nothing on this device; nothing was "
            "moved. What to do: describe them in both layouts, or take them out of the state",
            unknown,
        )
    if missing := sorted(names.keys() - state.keys()):
        raise Mismatch(
            f"the old layout says that this device holds {', '.join(missing)}, but the state has no such name; nothing "
            "was moved. What to do: give every tensor under the name that shardshift.names_of gives its shard"
        )
    return {shard: state[name] for name, shard in names.items()}


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _name(tensor: Tensor, plain: Counter[str]) -> str:
    speaks_for_itself = tensor.kind is Kind.PARAM or (tensor.kind is Kind.BUFFER and plain[tensor.name] == 1)
    return tensor.name if speaks_for_itself else str(tensor)
