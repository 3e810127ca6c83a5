"""Readiness: what each device says before anything moves, and what all conclude from it alike.

Conclusions are functions of the records of all devices and of nothing else, so every device comes to the same one, or
raises the same error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from ..plan import Plan
from ..values import Infeasible, Mismatch, Tensor

Policy: TypeAlias = Literal["auto", "keep", "release"]
POLICIES: Final = ("auto", "keep", "release")
Verify: TypeAlias = bool | Literal["digest"]
"""``True`` is ``"digest"``: so far there is no other way."""

_ALIKE: Final = {
    "digest": "plan",
    "generation": "generation of the state",
    "policy": "policy",
    "may_release": "may_release",
    "verify": "verify",
    "compare_copies": "compare_copies",
    "staging_bytes": "staging_bytes",
}
"""What must be the same on all devices, and what it is called."""

Records = Mapping[int, Mapping[str, Any]]
"""Per device what it says of itself."""


def verifies(verify: Verify) -> bool:
    """Whether pieces are to be held to digests.

    Raises:
        Infeasible: if it is another word.
    """
    if verify not in (False, True, "digest"):
        raise Infeasible(f"unknown verify {verify!r}; what to do: use 'digest', True or False")
    return bool(verify)


def check_alike(records: Records) -> None:
    """Hold it that all devices are about to do the same.

    Raises:
        Mismatch: naming two devices and what they differ in.
    """
    (first, expected), *others = sorted(records.items())
    for key, what in _ALIKE.items():
        for device, record in others:
            if record[key] != expected[key]:
                raise Mismatch(
                    f"{what}: device {device} has {record[key]}, device {first} has {expected[key]}; nothing was "
                    "moved. What to do: call move with the same layouts and options on every device, as often"
                )


def choose_policy(records: Records) -> Literal["keep", "release"]:
    """``keep`` or ``release``, by what was asked for and by what fits.

    Raises:
        Infeasible: under ``auto``, if old and new state do not fit together, and giving back was not allowed.
    """
    first = next(iter(records.values()))
    policy: Policy = first["policy"]
    if policy != "auto":
        return policy
    short = {
        device: record for device, record in sorted(records.items()) if record["peak_bytes"] > record["free_bytes"]
    }
    if not short:
        return "keep"
    if first["may_release"]:
        return "release"
    device, record = max(short.items(), key=lambda one: one[1]["peak_bytes"] - one[1]["free_bytes"])
    raise Infeasible(
        f"device {device} needs {record['peak_bytes']:,} bytes beside its old state, {record['free_bytes']:,} are free "
        f"({len(short)} devices lack memory); nothing was moved. What to do: allow release (may_release=True), which "
        "gives old memory back as it goes, free memory, or go in two steps (more devices first)"
    )


def shared_storages(plan: Plan, records: Records) -> tuple[tuple[Tensor, ...], ...]:
    """Groups of tensors that share memory on some device, as the schedule wants them."""
    tensors = plan.prev.layout.tensors
    groups = {tuple(group) for record in records.values() for group in record["storages"]}
    return tuple(tuple(tensors[index] for index in group) for group in sorted(groups))
