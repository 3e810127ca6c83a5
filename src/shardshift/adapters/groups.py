"""Steps and param groups of an optimizer, by the parameters that they belong to.

1. A parameter is known by its logical name, a group by the parameters that it holds. The order of groups counts for
   nothing: it differs between stages and layouts.
2. A group of the new layout takes the settings of the old groups that held its parameters; they must agree. A group
   that holds none (its parameters are on other ranks) takes those of the groups that Megatron made alike: by the keys
   that a new group starts with, and if that finds none by Megatron's own four (``optimizer/optimizer.py``,
   ``param_group_identifier_keys``), which decoupled learning rates leave ambiguous in 0.16.1. Groups that hold
   parameters speak before groups that hold none.
3. Steps keep the convention that they came in: a 0-dim tensor or a number per parameter (torch), or ``step`` in the
   group (Apex's and Transformer Engine's FusedAdam). A step that is missing or None on some ranks comes from those that
   have it; two that differ are refused.

Rejected: the index of a group as its identity; Megatron's ``_synchronize_steps``, which looks at one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..values import Mismatch, Unaccounted
from .plain import digest_of_packed, pack, unpack

STEP: Final = "step"
_MEGATRONS: Final = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_OF_THE_LAYOUT: Final = "is_expert_parallel"
"""Whether the expert optimizer has the group: decided by the new layout. Without expert parallelism Megatron puts
experts among the dense parameters."""
_ORIGIN: Final = (*_MEGATRONS, "max_lr", "min_lr", "start_wd", "end_wd")
"""What ``_get_param_groups`` (``optimizer/__init__.py``) makes a group from, and no schedule changes."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One param group of one rank; values are packed.

    Attributes:
        settings: lr, weight decay, ..., without parameters and step.
        step: the group's own step, if that is where the optimizer counts; else None.
        steps: (step, logical names) of the parameters that have one, each step once.
        names: logical names of the parameters.
    """

    settings: dict[str, Any]
    step: Any
    steps: list[tuple[Any, list[str]]]
    names: list[str]

    def plain(self) -> dict[str, Any]:
        """For a record."""
        return {"settings": self.settings, "step": self.step, "steps": self.steps, "names": self.names}


def describe(
    names: Mapping[torch.Tensor, str],
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    where: str,
    own: Iterable[str] | None = None,
) -> list[GroupRecord]:
    """The groups of one rank.

    Args:
        names: the logical name of each parameter that the optimizer steps: the parameter, its fp32 master, or with
            the distributed optimizer this rank's shard of that.
        groups: live param groups of the optimizers inside.
        states: live state by parameter; empty before the first step.
        where: this rank, for errors.
        own: the logical names that this rank speaks for; None for all. A replica leaves out what the first tells.

    Raises:
        Unaccounted: if a group holds a parameter without a name, or a value that no record can carry.
    """
    wanted = None if own is None else set(own)
    found: list[GroupRecord] = []
    for index, group in enumerate(groups):
        strangers = [str(tuple(parameter.shape)) for parameter in group["params"] if parameter not in names]
        if strangers:
            raise Unaccounted(
                f"{where}: param group {index} holds parameters of shapes {', '.join(strangers)} that are not in the "
                "model; nothing was moved. What to do: make them part of the model that the job is given",
                strangers,
            )
        told = [parameter for parameter in group["params"] if wanted is None or names[parameter] in wanted]
        steps: dict[bytes, tuple[Any, list[str]]] = {}
        for parameter in told:
            step = states.get(parameter, {}).get(STEP)
            if step is not None:
                packed = pack(step, f"{where}: step of {names[parameter]}")
                steps.setdefault(digest_of_packed(packed), (packed, []))[1].append(names[parameter])
        what = f"{where}: param group {index}"
        settings = {key: pack(value, f"{what}: {key}") for key, value in group.items() if key not in ("params", STEP)}
        step = pack(group.get(STEP), f"{what}: step")
        found.append(GroupRecord(settings, step, list(steps.values()), [names[parameter] for parameter in told]))
    return found


def replicated(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all data parallel ranks must hold alike of their groups, by name: for ``alike.differing``.

    Megatron makes the same groups on all ranks, empty where need be; which parameters and step they hold may differ.
    """
    found: dict[str, Any] = {}
    for index, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in ("params", STEP)}
        found |= {f"{key} of param group {index}": value for key, value in settings.items()}
    return found


class Groups:
    """The groups of all ranks of the layout before.

    Args:
        records: per virtual rank its groups.

    Raises:
        Mismatch: if two ranks give one parameter different steps.
    """

    def __init__(self, records: Mapping[int, Sequence[GroupRecord]]) -> None:
        self._groups = [group for _, of_rank in sorted(records.items()) for group in of_rank]
        self._rank = {id(group): rank for rank, of_rank in records.items() for group in of_rank}
        self._of: dict[str, list[GroupRecord]] = {}
        self._steps: dict[str, Any] = {}
        for group in self._groups:
            for name in group.names:
                self._of.setdefault(name, []).append(group)
            for step, names in group.steps:
                for name in names:
                    self._steps[name] = _one_step(self._steps.get(name, step), step, name)

    @property
    def all(self) -> list[GroupRecord]:
        """The groups of every rank, by rank."""
        return list(self._groups)

    def tells(self, name: str) -> bool:
        """Whether any rank had a logical parameter in a group."""
        return name in self._of

    def step(self, name: str) -> Any:
        """The step of a logical parameter where the optimizer counts by parameter; None if it has none."""
        return unpack(self._steps.get(name))

    def settings(self, names: Iterable[str], made: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The settings of a group of the new layout, with its step if groups have one.

        Args:
            names: the logical parameters that it holds.
            made: the group as the new optimizer has made it, to find its like if it holds no parameter.

        Returns:
            Values that are the caller's own; None if no group before was like it.

        Raises:
            Mismatch: if the parameters come from groups of different settings or steps.
        """
        found: GroupRecord | None = None
        first, step = "", None
        compared: set[int] = set()  # a group holds many of the names, and costs a digest per setting
        for name in names:
            for group in self._of.get(name, ()):
                if id(group) in compared:
                    continue
                compared.add(id(group))
                if found is None:
                    found, first = group, name
                elif _differing(found.settings, group.settings):
                    raise self._differ(found, first, group, name)
                step = _one_step(step, group.step, f"the param group of {first} and {name}")
        if found is None:
            return None if made is None else self._like(made)
        if step is None:
            step = self._step_like(found.settings)
        return _live(found.settings, step)

    def _differ(self, found: GroupRecord, first: str, group: GroupRecord, name: str) -> Mismatch:
        """The error for two groups that are to be one and differ in their settings: two ranks, or two parameters."""
        told = self._of[name][0]
        if drifted := _differing(told.settings, group.settings):
            one, other = self._rank[id(told)], self._rank[id(group)]
            who = (
                f"ranks {one} and {other} have {name} in param groups that" if one != other else f"two groups of {name}"
            )
            shown = ", ".join(
                f"{key} ({unpack(told.settings.get(key))!s:.40} and {unpack(group.settings.get(key))!s:.40})"
                for key in drifted
            )
            return Mismatch(
                f"{who} differ in {shown}; nothing was moved. What to do: find out what has set them apart (a "
                "scheduler that some ranks have stepped more often), and set them alike"
            )
        return Mismatch(
            f"the new optimizer puts {first} and {name} into one param group, but their settings differ in "
            f"{_differing(found.settings, group.settings)}; what to do: let wrap, or build, make the same groups "
            "whatever the layout"
        )

    def _like(self, made: Mapping[str, Any]) -> dict[str, Any] | None:
        packed = {key: pack(made[key], key) for key in _keys(made, _ORIGIN).values()}
        by_layout = (_ORIGIN, _MEGATRONS)
        for keys in (*by_layout, *(tuple(key for key in keys if key != _OF_THE_LAYOUT) for keys in by_layout)):
            alike = [group for group in self._groups if _identity(group.settings, keys) == _identity(packed, keys)]
            alike = [group for group in alike if group.names] or alike
            if alike and not any(_differing(alike[0].settings, group.settings) for group in alike):
                return _live(alike[0].settings, self._step_like(alike[0].settings))
        return None

    def _step_like(self, settings: Mapping[str, Any]) -> Any:
        """The step of groups that are alike, or else the one step that all groups have: for a group without its own."""
        wanted = _identity(settings, _ORIGIN)
        alike = [group for group in self._groups if _identity(group.settings, _ORIGIN) == wanted]
        for candidates in (alike, self._groups):
            steps = [group.step for group in candidates if group.step is not None]
            if steps and len({_number(step) for step in steps}) == 1:
                return steps[0]
        return None


def restore(carried: Groups, names: Mapping[torch.Tensor, str], groups: Iterable[dict[str, Any]]) -> None:
    """Set the live groups of a new optimizer. After the scheduler's state, which sets lr and weight decay.

    Args:
        carried: the groups before.
        names: the logical name of each parameter that the new optimizer steps.
        groups: live param groups; each gets values of its own, also tensors (lr).

    Raises:
        Mismatch: if a group joins parameters of different settings or steps.
    """
    for group in groups:
        found = carried.settings([names[parameter] for parameter in group["params"]], group)
        if found is not None:
            group.pop(STEP, None)
            group.update(found)


def _one_step(one: Any, other: Any, what: str) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if _number(one) != _number(other):
        raise Mismatch(
            f"{what}: one copy is at optimizer step {_number(one)}, another at {_number(other)}; what to do: find out "
            "which ranks skipped or repeated a step, and start from a checkpoint that is whole"
        )
    return one


def _number(packed: Any) -> float:
    return float(unpack(packed))


def _live(settings: Mapping[str, Any], step: Any) -> dict[str, Any]:
    live: dict[str, Any] = {key: unpack(value) for key, value in settings.items() if key != _OF_THE_LAYOUT}
    return live if step is None else live | {STEP: unpack(step)}


def _keys(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Per key the one that the settings have it under: NeMo writes ``pre_wd_mult`` for ``wd_mult``."""
    return {key: there for key in keys for there in (key, f"pre_{key}") if there in settings}


def _identity(settings: Mapping[str, Any], keys: Sequence[str]) -> tuple[tuple[str, bytes], ...]:
    return tuple((key, digest_of_packed(settings[there])) for key, there in _keys(settings, keys).items())


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    keys = (one.keys() | other.keys()) - {_OF_THE_LAYOUT}
    return sorted(key for key in keys if digest_of_packed(one.get(key)) != digest_of_packed(other.get(key)))
