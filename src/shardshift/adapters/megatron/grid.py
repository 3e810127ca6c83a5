"""A configuration of a Megatron job: which slots each virtual rank has, and the layout that they make.

A rank plays three roles: that of its (pp, tp) coordinate, which its data and context parallel replicas share; that of
its (pp, ep, etp) coordinate among the experts; and, with the distributed optimizer, one of its own, the ranges of
masters and moments that it alone has. The roles of replicas are one, so planning costs no more than roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...values import Kind, Layout, ParallelConfig, Shard
from .meta import Stage
from .names import named_tensors
from .slots import Cut, Local, Slot, Whole, state_of, weight


@dataclass(frozen=True)
class Grid:
    """The slots of every rank of a configuration.

    Attributes:
        config: the configuration.
        stages: per pipeline stage what of it is state.
        wholes: every logical tensor by name.
        kinds: of the optimizer state that exists.
        vocab_rows: rows of the vocabulary that both layouts of a change have; None if it is not padded.
    """

    config: ParallelConfig
    stages: Sequence[Stage]
    wholes: Mapping[str, Whole]
    kinds: tuple[Kind, ...]
    vocab_rows: int | None
    _made: dict[tuple[int, ...], tuple[Slot, ...]] = field(default_factory=dict, compare=False, repr=False)

    def of_rank(self, rank: int) -> tuple[Slot, ...]:
        """The slots of a virtual rank: weights and buffers in order of the forward, then optimizer state.

        Raises:
            Mismatch: if a parameter does not fit its logical shape.
        """
        return tuple(slot for key in self._roles(rank) for slot in self._role(key))

    def groups_of(self, rank: int) -> list[list[str]]:
        """The logical names of each param group of a rank's stage, with the experts of that rank."""
        at = self.config.expert_coordinate(rank)
        here = {(name, at.ep): there for (name, ep), there in self._expert_names.items() if ep == at.ep}
        return [[here.get((name, at.ep), name) for name in group] for group in self.stages[at.pp].groups]

    @cached_property
    def layout(self) -> Layout:
        """The layout of all ranks."""
        keys = [self._roles(rank) for rank in range(self.config.world_size)]
        index = {
            key: number
            for number, key in enumerate(dict.fromkeys(key for own in zip(*keys, strict=True) for key in own))
        }
        roles = [tuple(_shards(self._role(key))) for key in index]
        return Layout(roles, [tuple(index[key] for key in own) for own in keys])

    def _roles(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The keys of a rank's roles: dense, expert, own."""
        at, expert = self.config.coordinate(rank), self.config.expert_coordinate(rank)
        roles: list[tuple[int, ...]] = [(0, at.pp, at.tp), (1, expert.pp, expert.ep, expert.etp)]
        if self._is_distributed:
            roles.append((2, rank))
        return tuple(roles)

    @cached_property
    def _is_distributed(self) -> bool:
        return any(local.owned is not None for stage in self.stages for local in stage.locals)

    def _role(self, key: tuple[int, ...]) -> tuple[Slot, ...]:
        if key not in self._made:
            which, *at = key
            if which == 2:
                self._made[key] = tuple(self._owned(at[0]))
            else:
                tp, expert = (at[1], None) if which == 0 else (0, (at[1], at[2]))
                self._made[key] = tuple(self._shared(at[0], tp, expert))
        return self._made[key]

    def _shared(self, pp: int, tp: int, expert: tuple[int, int] | None) -> Iterator[Slot]:
        """What replicas share: weights, buffers, and state of parameters that no distributed optimizer cut."""
        state: list[Slot] = []
        for local in self.stages[pp].locals:
            if local.named.is_expert != (expert is not None):
                continue
            slot = self._weight(local, tp, expert)
            yield slot
            if local.owned is None:
                state += self._state(local, slot, None)
        yield from state

    def _owned(self, rank: int) -> Iterator[Slot]:
        """What the distributed optimizer of one rank has for itself."""
        at, expert = self.config.coordinate(rank), self.config.expert_coordinate(rank)
        dense_owner = at.dp * self.config.cp + at.cp
        for local in self.stages[at.pp].locals:
            owned = (local.owned or {}).get(expert.edp if local.by_experts else dense_owner)
            if owned is not None:
                among = (expert.ep, expert.etp) if local.named.is_expert else None
                yield from self._state(local, self._weight(local, at.tp, among), owned)

    def _weight(self, local: Local, tp: int, expert: tuple[int, int] | None) -> Slot:
        if expert is None:
            return weight(local, local.named.name, self.wholes, Cut(self.config.tp, tp), self.vocab_rows)
        ep, etp = expert
        name = self._expert_names[local.named.name, ep]
        return weight(local, name, self.wholes, Cut(self.config.expert_tp, etp), self.vocab_rows)

    def _state(self, local: Local, slot: Slot, flat: tuple[int, int] | None) -> Iterator[Slot]:
        if local.master:
            yield state_of(slot, Kind.MASTER, torch.float32, flat)
        if local.trainable:
            dtype = torch.float32 if local.master else slot.dtype
            for kind in self.kinds:
                yield state_of(slot, kind, dtype, flat)

    @cached_property
    def _expert_names(self) -> dict[tuple[str, int], str]:
        """Per expert tensor of the first expert rank, and expert rank, its name there."""
        found: dict[tuple[str, int], str] = {}
        for stage in self.stages:
            first = {local.named.where: local.named.name for local in stage.locals if local.named.is_expert}
            for ep in range(self.config.ep if first else 0):
                for named in named_tensors(stage.chunks, ep):
                    if named.where in first:
                        found[first[named.where], ep] = named.name
        return found


def _shards(slots: Sequence[Slot]) -> Iterator[Shard]:
    for slot in slots:
        for piece in slot.pieces:
            yield piece.shard
