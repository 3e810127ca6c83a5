"""Extra state of modules (``get_extra_state``), carried by the module's logical name.

What it holds is the module's own affair (Transformer Engine keeps FP8 scales there): it is moved as it is, with its own
length and type, and never cut or joined.

1. A module has extra state if its class overrides ``get_extra_state`` and that gives anything but None.
2. As with random streams, the rank with dp 0 and cp 0 publishes all it has; another rank only what that one lacks
   (experts) or has otherwise, by digests.
3. Copies that agree serve every rank that holds the module. Copies that differ are kept apart by the fewest axes that
   explain the difference: tp, or (ep, etp), or (tp, dp, cp); the new layout must have the same sizes there. Otherwise
   nobody knows what the module would want: refused, with advice; or the lowest rank's copy is taken, if the caller
   says so. (A mean, as for numbers, has no sense for a value that cannot be looked into.)
4. A name that only one of the two layouts has is refused by name before anything moves. None is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ...values import Mismatch, ParallelConfig, Unaccounted
from ..plain import digest_of_packed, pack, unpack

Modules = Iterable[tuple[str, torch.nn.Module]]
"""Modules of a rank by logical name: layers and experts by their number in the whole model."""

Differing = Literal["error", "first"]
"""What is done with copies that differ and cannot be kept apart."""

_Axes = tuple[str, ...]
_EXPLANATIONS: Final[tuple[_Axes, ...]] = ((), ("tp",), ("ep", "etp"), ("tp", "dp", "cp"))


def declaring(modules: Modules) -> frozenset[str]:
    """Names of the modules that may have extra state, live or on the meta device."""
    return frozenset(name for name, _ in _declaring(modules))


def keeps(module: torch.nn.Module) -> bool:
    """Whether a module may have extra state."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def capture(modules: Modules) -> dict[str, Any]:
    """The extra state of a rank's modules, packed, by logical name; those that give None are left out.

    Raises:
        Unaccounted: naming the module whose state no record can carry, or that cannot be told what it gave.
        Mismatch: if two modules of one logical name (copies of a tied one) give different states.
    """
    found: dict[str, Any] = {}
    for name, module in _declaring(modules):
        state = module.get_extra_state()
        if state is None:
            continue
        if type(module).set_extra_state is torch.nn.Module.set_extra_state:
            raise Unaccounted(
                f"{name} gives extra state and {type(module).__name__} has no set_extra_state to take it; nothing was "
                "moved. What to do: define it, or let get_extra_state give None",
                [name],
            )
        packed = pack(state, f"extra state of {name}")
        if digest_of_packed(found.setdefault(name, packed)) != digest_of_packed(packed):
            raise Mismatch(f"two modules of this rank are both {name}, and their extra states differ")
    return found


def refuse_one_sided(captured: Iterable[str], before: Iterable[str], after: Iterable[str]) -> None:
    """Refuse extra state that would not arrive, and modules that would wait for one. Before anything moves.

    Args:
        captured: modules of this rank that have extra state now.
        before: ``declaring`` of all ranks of the layout before, from the meta models.
        after: the same of the layout after.

    Raises:
        Unaccounted: naming the modules.
    """
    before, after = set(before), set(after)
    for names, what in (
        (set(captured) - after, "have extra state and are not in the model that build_model gives for the new layout"),
        (after - before, "of the new layout may have extra state and are not in the model of the old one"),
    ):
        if names:
            listed = sorted(names)
            raise Unaccounted(
                f"modules {', '.join(listed)} {what}; nothing was moved. What to do: let build_model make the same "
                "modules, of the same names, whatever the layout",
                listed,
            )


def published(captured: Mapping[str, Any], differing: Iterable[str] | None) -> dict[str, Any]:
    """What a rank publishes.

    Args:
        captured: its own.
        differing: None for the rank with dp 0 and cp 0; for another one, the names in which it differs from that.

    Returns:
        State by name; None where the first has one and this rank has not.
    """
    return dict(captured) if differing is None else {name: captured.get(name) for name in differing}


@dataclass(frozen=True, slots=True)
class ExtraState:
    """The extra states of all ranks of the layout before.

    Attributes:
        config: that layout.
        copies: per logical name, per virtual rank that has one, the packed state.
        differing: what is done with copies that cannot be kept apart.
    """

    config: ParallelConfig
    copies: Mapping[str, Mapping[int, Any]]
    differing: Differing = "error"

    @classmethod
    def read(
        cls,
        config: ParallelConfig,
        published: Mapping[int, Mapping[str, Any]],
        differing: Differing = "error",
        *,
        survivors: bool = False,
    ) -> ExtraState:
        """From what each virtual rank published; one that differs in nothing may be left out.

        With ``survivors`` each has published all that it has, and who is left out is lost.
        """
        copies: dict[str, dict[int, Any]] = {}
        for rank in range(config.world_size):
            at = config.coordinate(rank)
            first = {} if survivors else published.get(config.rank(at.pp, at.tp), {})
            for name, state in (dict(first) | dict(published.get(rank, {}))).items():
                if state is not None:
                    copies.setdefault(name, {})[rank] = state
        return cls(config, copies, differing)

    def check(self, config: ParallelConfig) -> None:
        """Refuse copies that differ in a way that a new layout cannot keep.

        Raises:
            Mismatch: naming the module and the axes.
        """
        for name in self.copies:
            self._axes(name, config)

    def at(self, name: str, config: ParallelConfig, rank: int) -> Any:
        """The state of a module for a virtual rank of the new layout; None if it has none.

        Raises:
            Mismatch: as ``check``.
        """
        copies = self.copies.get(name)
        if not copies:
            return None
        axes = self._axes(name, config)
        wanted = _index(config, rank, axes)
        for before in sorted(copies):
            if _index(self.config, before, axes) == wanted:
                return unpack(copies[before])
        return unpack(copies[min(copies)])

    def restore(self, modules: Modules, config: ParallelConfig, rank: int) -> None:
        """Give each module of a new rank its extra state; those without keep what they were built with."""
        for name, module in _declaring(modules):
            state = self.at(name, config, rank)
            if state is not None:
                module.set_extra_state(state)

    def _axes(self, name: str, config: ParallelConfig) -> _Axes:
        """The fewest axes that tell the copies of a module apart, and that a new layout has in the same sizes."""
        marks = {rank: digest_of_packed(state) for rank, state in self.copies[name].items()}
        explaining: list[_Axes] = []
        for axes in _EXPLANATIONS:
            seen: dict[tuple[int, ...], bytes] = {}
            if all(seen.setdefault(_index(self.config, rank, axes), mark) == mark for rank, mark in marks.items()):
                explaining.append(axes)
        for axes in explaining:
            if _sizes(self.config, axes) == _sizes(config, axes):
                return axes
        if self.differing == "first":
            return ()
        by = " x ".join(explaining[0]) if explaining else "pipeline stages"
        raise Mismatch(
            f"extra state of {name} differs over {by} ({len(set(marks.values()))} values on ranks "
            f"{_few(sorted(marks))} of {self.config}), and {config} does not keep these axes; nothing was "
            "moved. What to do: keep their sizes, make the module agree with itself over its ranks, or choose "
            "extra_state='first'"
        )


def _declaring(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, module) for name, module in modules if keeps(module))


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _index(config: ParallelConfig, rank: int, axes: _Axes) -> tuple[int, ...]:
    at, among = config.coordinate(rank), config.expert_coordinate(rank)
    return tuple(getattr(among if axis in ("ep", "etp") else at, axis) for axis in axes)


def _sizes(config: ParallelConfig, axes: _Axes) -> tuple[int, ...]:
    return tuple(config.expert_tp if axis == "etp" else getattr(config, axis) for axis in axes)
