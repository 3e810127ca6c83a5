"""What an interrupted move under ``release`` has left, and how its survivors come to one plan for it.

1. Each says which move it was in, how many fences it knows to be passed, and how many epochs it has finished itself. If
   one knows of a fence, it is passed for all: each has finished what is before it, or the fence would not have passed.
2. From all answers everyone concludes alike who holds what (``schedule.resume``), and plans from that.
3. A device finds the tensors of what it holds: old ones, new ones, and views of new ones for what the old ones lack.

Names that stood for one tensor are tied anew at the end of a move only. Those that have arrived as two before it was
interrupted are one again from here on, provided that their bits are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..plan import Plan
from ..schedule.resume import Direction, resume_plan
from ..values import Mismatch, PlacedLayout, Shard, Tensor
from .attempt import Agreed, Interrupted
from .pieces import part_of
from .ties import Ties, pairs, same


@dataclass(frozen=True, slots=True, eq=False)
class Left(Interrupted):
    """What an interrupted move has left on this device.

    Attributes:
        tied: tensors that stand for one, by groups.
    """

    tied: Ties = ()

    @classmethod
    def by(cls, interrupted: Interrupted, agreed: Agreed, before: Ties = ()) -> Left:
        """With the ties of the move.

        Args:
            interrupted: what its error has.
            agreed: what was agreed on.
            before: ties that an earlier move had left.
        """
        return cls(interrupted.schedule, interrupted.journal, (*before, *agreed.ties))

    @property
    def record(self) -> Mapping[str, Any]:
        """What this device says of it."""
        return {"move": self.schedule.plan.digest, "fences": self.journal.fences, "finished": self.journal.finished}

    def planned(
        self, records: Mapping[int, Mapping[str, Any]], to: PlacedLayout | None
    ) -> tuple[Direction, Plan, dict[Shard, torch.Tensor]]:
        """The way, the plan, and this device's tensors as its old layout has them.

        Args:
            records: of all devices that are left.
            to: see ``Mover.resume``.

        Raises:
            Mismatch: if the records are of several moves, or what is left has been used up.
            StateLost, Infeasible, Unaccounted: see ``resume_plan``.
        """
        (first, one), *others = sorted(records.items())
        fences = max(record["fences"] for record in records.values())
        for device, record in others:
            if record["move"] != one["move"]:
                raise Mismatch(
                    f"devices {first} and {device} give journals of different moves; nothing was moved. What to do: "
                    "give the journal of the last error on each"
                )
        finished = {device: max(record["finished"], fences) for device, record in records.items()}
        lost = sorted({*self.schedule.plan.devices} - {*records})
        direction, plan = resume_plan(self.schedule, fences, lost, to, finished=finished)
        sources = self._tensors(plan.prev.shards_on(self.journal.program.device))
        for group in self.tied:
            for one_of, other in pairs(group, sources):
                if not same(sources[one_of], sources[other]):
                    raise Mismatch(
                        f"{one_of} and {other} were one tensor, and have arrived with different bits; nothing was "
                        "moved. What to do: restart from a checkpoint, and untie them or make them equal there"
                    )
                sources[other] = sources[one_of]
        return direction, plan, sources

    def tie(self, names: Mapping[str, Shard], state: dict[str, torch.Tensor]) -> None:
        """Make those one again that were, by name."""
        by_shard = {shard: name for name, shard in names.items()}
        for group in self.tied:
            for one, other in pairs(group, by_shard):
                first, second = by_shard[one], by_shard[other]
                if same(state[first], state[second]):
                    state[second] = state[first]

    def _tensors(self, shards: Iterable[Shard]) -> dict[Shard, torch.Tensor]:
        journal, found = self.journal, {}
        try:
            held = journal.held()
            new: dict[Tensor, list[Shard]] = {}
            for epoch in journal.program.epochs[: journal.finished]:
                for shard in epoch.allocate:
                    new.setdefault(shard.tensor, []).append(shard)
            for shard in shards:
                tensor = held.get(shard)
                if tensor is None:
                    whole = next(one for one in new[shard.tensor] if one.region.contains(shard.region))
                    tensor = part_of(held[whole], shard.region, whole.region)
                found[shard] = tensor
        except (KeyError, StopIteration):
            raise Mismatch(
                f"device {journal.program.device} gives a journal whose tensors it has not any more; nothing was "
                "moved. What to do: give the journal of the last error; one is used up when what it is given to moves"
            ) from None
        return found
