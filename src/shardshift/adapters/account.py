"""The account of a job: every tensor that it reaches, what becomes of it, and the bytes of each fate.

1. An adapter claims stretches of storages (``claims``), each with a fate, and walks what the job reaches (``reach``).
2. A tensor has the first fate up to which claims cover it whole; one that they do not cover is *unknown*.
3. Bytes are counted by storage, each byte once however many tensors view it: to the first fate that claims it, to
   unknown if an unknown tensor views it, else to *slack* (no tensor reaches it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..values import Unaccounted
from .claims import CLAIMED, Address, Claims, Fate, Places, joined, nbytes
from .reach import Found


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that was found.

    Attributes:
        path: how it is reached.
        fate: what becomes of it.
        by: by which rule, or as what it is carried.
        nbytes: of the tensor itself; views of one storage overlap.
    """

    path: str
    fate: Fate
    by: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What a job reaches, tensor by tensor.

    Attributes:
        entries: every tensor, array and generator, in order of the walk.
        bytes_by_fate: bytes of storages, each counted once.
        storages: how many there are.
        unreached: labels of carried tensors that the job does not reach: it would go on without them.
        advice: what else to do about what is unknown; as it is added to the error.
    """

    entries: tuple[Entry, ...]
    bytes_by_fate: Mapping[Fate, int]
    storages: int
    unreached: tuple[str, ...] = ()
    advice: str = ""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths of what no rule covers."""
        return tuple(entry.path for entry in self.entries if entry.fate is Fate.UNKNOWN)

    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """Per fate that occurs: its name, tensors, bytes."""
        tensors = Counter(entry.fate for entry in self.entries)
        return tuple(
            (str(fate), tensors[fate], size)
            for fate in Fate
            if (size := self.bytes_by_fate.get(fate, 0)) or tensors[fate]
        )

    def check(self) -> None:
        """Raise if there is anything unknown.

        Raises:
            Unaccounted: naming it.
        """
        if self.unreached:
            raise Unaccounted(
                f"the adapter would move {', '.join(self.unreached[:8])}, which the job does not hold any more; "
                "nothing was moved. What to do: report this, it is a fault of shardshift's",
                self.unreached,
            )
        if not self.unknown:
            return
        shown = ", ".join(self.unknown[:8]) + (f" and {len(self.unknown) - 8} more" if len(self.unknown) > 8 else "")
        raise Unaccounted(
            f"the job holds {self.bytes_by_fate[Fate.UNKNOWN]} bytes that no rule covers: {shown}; nothing was moved. "
            "What to do: make such tensors parameters or registered buffers if they are state, build them on an "
            "explicit device if they follow from the configuration, or drop them before the change" + self.advice,
            self.unknown,
        )

    def __str__(self) -> str:
        lines = [f"{name:<10}{tensors:>8} tensors{size:>16,} bytes" for name, tensors, size in self.rows()]
        return "\n".join([*lines, *(f"unknown: {path}" for path in self.unknown)])


def judged(
    state: Sequence[Found],
    claims: Claims,
    places: Places,
    other: Callable[[Found], tuple[Fate, str]],
    carried: Mapping[str, torch.Tensor],
) -> Audit:
    """The account of what a walk found.

    Args:
        state: what was found.
        claims: of the adapter.
        places: where the tensors lie, as the claims have them.
        other: the fate, and the rule, of what is no tensor: arrays, storages, generators.
        carried: by label what the adapter moves: the job must reach it.
    """
    whole, entries = Claims(places), []
    for each in state:
        fate, by = claims.judge(each.value) if isinstance(each.value, torch.Tensor) else other(each)
        entries.append(Entry(each.path, fate, by, nbytes(each.value)))
        if isinstance(each.value, torch.Tensor):
            whole.add(each.value, fate, by)
    unreached = tuple(
        label for label, tensor in carried.items() if (at := places.of(tensor)) and at[0] not in whole.sizes
    )
    strange = {
        at[0]
        for entry, each in zip(entries, state, strict=True)
        if entry.fate is Fate.UNKNOWN and isinstance(each.value, torch.Tensor) and (at := places.of(each.value))
    }
    return Audit(tuple(entries), *_count(claims, whole, entries, state, strange), unreached)


def _count(
    claims: Claims, whole: Claims, entries: Sequence[Entry], state: Sequence[Found], strange: Collection[Address]
) -> tuple[dict[Fate, int], int]:
    """Bytes of every storage that is reached, by fate, each byte once; ``strange`` are those with unknown tensors."""
    total: Counter[Fate] = Counter()
    for storage, size in whole.sizes.items():
        reached = 0
        if (alone := claims.alone(storage)) is not None:
            total[alone[0]] += alone[1]
            reached = alone[1]
        else:
            for fate in CLAIMED:
                upto = sum(stop - start for start, stop in claims.covered(storage, fate))
                total[fate] += upto - reached
                reached = upto
        if storage in strange:
            every = joined([*claims.covered(storage, Fate.DERIVED), *whole.covered(storage, Fate.UNKNOWN)])
            before, reached = reached, sum(stop - start for start, stop in every)
            total[Fate.UNKNOWN] += reached - before
        total[Fate.SLACK] += size - reached
    others = 0
    for entry, each in zip(entries, state, strict=True):
        if not isinstance(each.value, torch.Tensor):
            total[entry.fate] += entry.nbytes
            others += 1
    return {fate: total[fate] for fate in Fate}, len(whole.sizes) + others
