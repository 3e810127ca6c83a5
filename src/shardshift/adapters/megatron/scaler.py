"""Loss scales of an fp16 job: the state of the grad scalers of a Megatron optimizer.

A chained optimizer has one part for dense parameters and one for experts, perhaps several of each, and each part has a
scaler of its own (``optimizer/__init__.py``, ``_get_megatron_optimizer_based_on_param_groups``). A part counts
overflows over its own ranks, so dense and expert scalers may rightly differ; within one kind all parts of all ranks
saw the same overflows and must agree. So a state is carried per kind of part. A constant scale has no state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...values import Mismatch
from ..plain import digest_of_packed, pack, unpack


def capture(optimizer: Any, where: str) -> dict[str, Any]:
    """Per kind of part ("dense", "expert") the state of its scaler, packed; a part without a scaler tells nothing.

    Raises:
        Mismatch: if parts of one kind disagree.
    """
    found: dict[str, Any] = {}
    for kind, scaler in _scalers(optimizer):
        state = pack(scaler.state_dict(), f"{where}: grad scaler of the {kind} part")
        found[kind] = _agreed(found.get(kind, state), state, kind, where)
    return found


def merge(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The states that all ranks agree on.

    Raises:
        Mismatch: if two ranks disagree.
    """
    merged: dict[str, Any] = {}
    for states in of_ranks:
        for kind, state in states.items():
            merged[kind] = _agreed(merged.get(kind, state), state, kind, "two ranks")
    return merged


def kinds(optimizer: Any) -> frozenset[str]:
    """The kinds of part that have a scaler."""
    return frozenset(kind for kind, _ in _scalers(optimizer))


def check(carried: Mapping[str, Any], made: Collection[str]) -> None:
    """Refuse optimizers of the new layout that have scalers where the job has none, or no scaler.

    Args:
        carried: what ``merge`` gave.
        made: the kinds of part that have a scaler in the new layout; a meta job tells them before anything moves.

    Raises:
        Mismatch: if only one side has any.
    """
    if bool(made) != bool(carried):
        raise Mismatch(
            f"the job has {_list(carried)}, the optimizer that wrap makes for the new layout {_list(made)}; what to "
            "do: let wrap make the same optimizer whatever the layout (fp16, loss_scale)"
        )


def restore(carried: Mapping[str, Any], optimizer: Any) -> None:
    """Set the scalers of a new optimizer; an expert part that is new goes on with the dense one's state.

    Raises:
        Mismatch: if the job had scalers and the new optimizer has none, or the other way round.
    """
    check(carried, kinds(optimizer))
    for kind, scaler in _scalers(optimizer, stubs=True):
        state = carried[kind] if kind in carried else next(iter(carried.values()))
        scaler.load_state_dict(unpack(state))  # of its own: load_state_dict keeps the tensor that it is given


def _scalers(optimizer: Any, *, stubs: bool = False) -> Iterator[tuple[str, Any]]:
    """Kind and scaler of each part; a part without parameters does not say its kind, but has a scaler."""
    for part in getattr(optimizer, "chained_optimizers", (optimizer,)):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and (stubs or part.optimizer is not None):
            groups = [] if part.optimizer is None else part.optimizer.param_groups
            experts = any(group.get("is_expert_parallel", False) for group in groups)
            yield ("expert" if experts else "dense"), scaler


def _agreed(one: Any, other: Any, kind: str, where: str) -> Any:
    if digest_of_packed(one) != digest_of_packed(other):
        raise Mismatch(
            f"{where}: two grad scalers of {kind} parameters are at {unpack(one)} and {unpack(other)}; nothing was "
            "moved. What to do: find out which ranks saw an overflow that others did not"
        )
    return one


def _list(kinds: Iterable[str]) -> str:
    return " and ".join(f"a grad scaler of {kind} parameters" for kind in sorted(kinds)) or "no grad scaler"
