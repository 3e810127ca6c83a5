"""Epochs: which tensors move together under the policy ``release``, so that memory stays within its bound.

At every moment, on every device: live bytes <= max(old state, new state) + staging bound + its largest storage.
Live are the old storages whose epoch has not passed its fence, the new ones whose epoch has begun, and what the epoch
stages, which is at most the staging bound and at most what the device sends and receives in it.

1. Units (``ledger``) are vectors over devices: what they allocate less what they give back.
2. A sequence of units can be run if each of them, alone in an epoch, is within the bound: the state after the units
   before it, what it allocates, what it stages. So the partial sums of the vectors must stay near the straight line
   from the old state to the new one. That vectors have an order of small partial sums, whatever they are, is the
   Steinitz lemma (I. Barany, "On the power of linear dependencies", 2008, section 3).
3. Sequences are tried in turn, and the first that can be run is taken:
   a. the order of need;
   b. kind by kind as they are needed, and within a kind always the unit that leaves the sum nearest to the line;
   c. the same over all kinds at once;
   d. the same backwards in time, from the new state to the old one.
4. The sequence is cut into epochs, each as long as the bound allows. That gives the fewest for a sequence, since any
   run of units within what may be an epoch may be one too.

Everything that decides is whole numbers, or products and sums of such that a double holds exactly: all devices, which
each do this by themselves, come to the same.

Rejected: to release shard by shard as receivers acknowledge (after a failure, survivors would be in one of very many
states; a fence leaves one that all know), an exact order by search (the greedy one is within the bound on every grid
that was tried, both ways), and cutting one tensor into several epochs (its bytes would then be in neither layout).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..values import Infeasible, Tensor
from ..values.boxes import Ints
from .ledger import Ledger, Unit
from .need import NeedOrder

_Sequence: TypeAlias = list[tuple[int, Unit]]
"""Units in some order, each with its class."""
_FINE: Final = 1 << 12
"""The longest entry of a scaled vector: products of two, summed over 2**17 classes of devices, fit a double."""


def assign_epochs(
    plan: Plan, need: NeedOrder, staging_bytes: int, storages: Collection[Collection[Tensor]] = ()
) -> Ints:
    """Per tensor of ``plan.curr.layout`` the epoch in which it moves, -1 for one that every device keeps as it is.

    Args:
        plan: a proved plan.
        need: the order of need of its new layout.
        staging_bytes: the staging bound.
        storages: groups of tensors that share one storage on some device, before or after; groups that have a tensor
            in common are one. Where a device keeps a shard of a group as it is, the rest of its old storage is taken
            to stay with it, in the new state too.

    Raises:
        Infeasible: if no order was found that is within the bound, naming a device and both figures.
    """
    orders = _Orders(Ledger.of(plan, need, storages), staging_bytes)
    failures: list[_Stuck] = []
    for sequence in orders.sequences():
        found = sequence if isinstance(sequence, _Stuck) else orders.cut(sequence)
        if not isinstance(found, _Stuck):
            return found
        failures.append(found)
    stuck = min(failures, key=lambda one: one.needed_bytes - one.allowed_bytes)
    raise Infeasible(
        f"device {stuck.device} would hold {stuck.needed_bytes} bytes while the state moves, {stuck.allowed_bytes} are "
        f"allowed: the larger of its old and new state, {staging_bytes} of staging, and its largest storage; no order "
        "of the tensors was found that needs less. Nothing was moved. What to do: allow at least "
        f"{stuck.needed_bytes - stuck.allowed_bytes} bytes more of staging, or use the policy 'keep', which needs the "
        "memory of both states"
    )


@dataclass(frozen=True, slots=True)
class _Stuck:
    """Where an order ends: no unit that is left fits."""

    device: int
    needed_bytes: int
    allowed_bytes: int


class _Orders:
    """Orders of the units of a ledger, and how they are cut."""

    def __init__(self, ledger: Ledger, staging_bytes: int) -> None:
        self._ledger, self._staging_bytes = ledger, staging_bytes
        self._slack = ledger.largest + staging_bytes
        self._allowed = ledger.steady + self._slack

    def sequences(self) -> Iterator[_Sequence | _Stuck]:
        """Orders of all units to try."""
        units, rank, kind = self._ledger.units, self._ledger.rank, self._ledger.kind
        every = [(k, unit) for k, of_class in enumerate(units) for unit in of_class]
        yield sorted(every, key=lambda entry: rank[entry[1][0]])
        kinds = sorted({int(kind[unit[0]]) for _, unit in every})
        yield self._balanced([[[u for u in of_class if kind[u[0]] == one] for of_class in units] for one in kinds])
        yield self._balanced([units])
        backwards = self._balanced([[of_class[::-1] for of_class in units]], forwards=False)
        yield backwards if isinstance(backwards, _Stuck) else backwards[::-1]

    def cut(self, sequence: _Sequence) -> Ints | _Stuck:
        """Per tensor its epoch; or where a unit does not fit an epoch of its own."""
        ledger = self._ledger
        epoch_of = np.full(len(ledger.rank), -1, np.int64)
        live, epoch = ledger.before.copy(), 0
        carried, given = np.zeros_like(live), np.zeros_like(live)
        for k, unit in sequence:
            live += ledger.new[k]
            carried += ledger.carried[k]
            if not self._fits(live, carried):
                live -= given  # the fence: what the epoch has given back is free
                carried, given, epoch = ledger.carried[k].copy(), np.zeros_like(given), epoch + 1
                if not self._fits(live, carried):
                    return self._stuck(live + np.minimum(carried, self._staging_bytes))
            given += ledger.old[k]
            epoch_of[list(unit)] = epoch
        return epoch_of

    def _fits(self, live: Ints, carried: Ints) -> bool:
        return bool((live + np.minimum(carried, self._staging_bytes) <= self._allowed).all())

    def _stuck(self, needed: Ints) -> _Stuck:
        worst = int((needed - self._allowed).argmax())
        return _Stuck(int(self._ledger.devices[worst]), int(needed[worst]), int(self._allowed[worst]))

    def _balanced(self, phases: Sequence[Sequence[Sequence[Unit]]], *, forwards: bool = True) -> _Sequence | _Stuck:
        """Units in an order of small partial sums.

        Args:
            phases: one after the other; per unit class the units of the phase, in their order.
            forwards: False to go from the new state to the old one.
        """
        ledger = self._ledger
        new, old = (ledger.new, ledger.old) if forwards else (ledger.old, ledger.new)
        live = ledger.before.copy()
        if not forwards:
            live += np.array([len(units) for units in ledger.units], np.int64) @ (old - new)
        room = self._allowed - new - np.minimum(ledger.carried, self._staging_bytes)
        found: _Sequence = []
        for phase in phases:
            left = [deque(units) for units in phase]
            classes = np.array([k for k, units in enumerate(left) if units], np.int64)
            count = np.array([len(left[k]) for k in classes.tolist()], np.int64)
            step, rooms = (new - old)[classes], room[classes]
            vectors = self._off_the_line(step, (new + old)[classes].sum(axis=1), count)
            gram = (vectors @ vectors.T).astype(np.int64)
            # Twice the product of the sum so far with each vector, and its own square: how far off it would lead.
            off = np.diag(gram).copy()
            for _ in range(int(count.sum())):
                open_ = np.flatnonzero(count)
                at = open_[off[open_].argmin()]
                if not (live <= rooms[at]).all():
                    over = (live - rooms[open_]).max(axis=1)
                    fitting = open_[over <= 0]
                    if not len(fitting):
                        k = classes[open_[over.argmin()]]
                        return self._stuck(live + self._allowed - room[k])
                    at = fitting[off[fitting].argmin()]
                k = int(classes[at])
                found.append((k, left[k].popleft()))
                count[at] -= 1
                live += step[at]
                off += 2 * gram[at]
        return found

    def _off_the_line(self, step: Ints, size: Ints, count: Ints) -> NDArray[np.float64]:
        """Per unit class how far one unit leads off the straight way of all, in parts of the slack; whole numbers."""
        share = size / max(int(count @ size), 1)
        off = (step - share[:, None] * (count @ step)) / self._slack
        longest = float(np.abs(off).max(initial=0.0))
        whole: NDArray[np.float64] = np.rint(off * (_FINE / longest)) if longest else off
        return whole
