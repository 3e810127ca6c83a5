"""The mover: state from one layout to another, all or nothing, between processes that meet over a store.

It is the framework-free primitive (``reshard`` is one call of it), and it assumes nothing of the job: not torch's
default process group, not that the world stands still. A move (``attempt``) goes

1. **plan**: every device derives the plan from the two layouts and proves it (where the ranks of the new one should run
   is a question of its own: ``place``);
2. **agree**: each says what it has planned, whether its tensors are what the layout says, which of them share memory,
   digests of the copies that others hold too, and what memory it would need. One error is raised on all, as text;
   nothing has moved. From all answers everyone concludes alike which policy it is, and compiles its program;
3. **move**: the engine runs the program. Under ``keep`` old tensors are only read; under ``release`` their memory is
   given back epoch by epoch, each after a fence that all have passed or none;
4. **commit**: the last fence. From here on the new state is the state, and the generation counts up.

Whatever breaks ends as one error on every survivor. Before the commit ``keep`` has changed nothing. ``release`` leaves
a *journal* at the error: the fences that were passed, and the tensors that this device holds. ``exclude`` goes on
without the lost devices, ``resume`` brings the state into a layout again, forward or back, whichever needs less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist

from ..coordination import Control, refusal, to_record
from ..plan import Plan, make_plan
from ..plan.summary import STAGING_BYTES
from ..schedule import Direction
from ..values import (
    Infeasible,
    Layout,
    Mismatch,
    PlacedLayout,
    Shard,
    ShardshiftError,
    Topology,
)
from .attempt import Agreed, Attempt, Interrupted, Terms
from .events import Sink, nowhere
from .left import Left
from .line import Kind, Line
from .named import by_shard, names_of
from .readiness import POLICIES, Policy, Verify, verifies
from .reconcile import Differing, check_way, reconciled
from .ties import Ties, tie

_MEETING_S: Final = 60.0
_LATE_S: Final = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """Where the state is after an interrupted move was resumed.

    Attributes:
        direction: ``forward`` to the new layout, ``back`` to the old one (both without the lost devices), or ``to`` for
            a layout that was given.
        layout: the layout that the state is in.
        state: this device's tensors by name.
    """

    direction: str
    layout: PlacedLayout
    state: dict[str, torch.Tensor]


class Mover:
    """One process's part in moves of a job's state; use it as a context manager.

    Every device of the job makes one, and all call ``move`` together, those without a part in it too.

    Args:
        store: where the devices meet; a prefix that nothing else uses, on a host that outlives them.
        device: this process's id.
        devices: all ids of the job.
        topology: which devices share a node, and rates; None for one node.
        transport: ``auto``, ``gloo``, ``same-host`` or ``nccl``; see ``shardshift.transport.connect``. Or a function of
            (store, device, devices) that gives a transport.
        staging_bytes: the most that a device stages at any time, for sending and receiving together.
        timeout_s: the longest that a round or an agreement may take. For all to be there at first, a minute if that is
            longer.
        memory: where new tensors are made; tensors of one job are all there.
        sink: takes the events of all moves.

    Raises:
        Infeasible: if the device is not among the devices.
        PeerLost: if not all devices come in time.

    Attributes:
        device: this process's id.
        generation: moves that were committed.
        plan: of the last one; None if nothing had to move.
    """

    def __init__(
        self,
        store: dist.Store,
        device: int,
        devices: Sequence[int],
        *,
        topology: Topology | None = None,
        transport: Kind = "auto",
        staging_bytes: int = STAGING_BYTES,
        timeout_s: float = 30.0,
        memory: torch.device | str = "cpu",
        sink: Sink = nowhere,
    ) -> None:
        if timeout_s <= 0:
            raise Infeasible(f"a timeout of {timeout_s} s gives nobody time; what to do: give some seconds")
        if device not in devices:
            raise Infeasible(f"device {device} is not among the devices {tuple(devices)}; what to do: name all of them")
        self.device, self.generation = device, 0
        self.plan: Plan | None = None
        self._store, self._topology, self._kind = store, topology, transport
        self._staging_bytes, self._timeout_s, self._sink = staging_bytes, timeout_s, sink
        self._memory = torch.device(memory)
        self._era = self._attempts = 0
        self._line = self._open(devices, max(timeout_s, _MEETING_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids that take part, ascending."""
        return self._line.devices

    def close(self) -> None:
        """Give back threads and sockets; a second call does nothing."""
        self._line.close()

    def exclude(self, lost: Collection[int]) -> None:
        """Go on without some devices. Every survivor calls it with the same ones, as ``PeerLost.ranks`` names them.

        Raises:
            Infeasible: if this device is among them, or none is.
            PeerLost: if not all survivors come within ``timeout_s`` + 10 s.
        """
        survivors = [device for device in self.devices if device not in lost]
        if self.device not in survivors or len(survivors) == len(self.devices):
            raise Infeasible(
                f"device {self.device} cannot go on without {sorted(lost)} of the devices {self.devices}; what to do: "
                "name devices of the job, and not this one"
            )
        self._line.close()
        self._era += 1
        # The last survivor hears of the loss when the move times out on it; the first may have come here at once.
        self._line = self._open(survivors, self._timeout_s + _LATE_S)

    def exchange(self, say: Callable[[], Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Give a record and hear those of all devices, who call this as often as each other, between moves.

        Args:
            say: gives this device's record, of plain JSON values; what it raises all devices hear.

        Returns:
            Per device its record.

        Raises:
            ShardshiftError: on every device alike, if ``say`` raised on one: that of the lowest where it did.
            PeerLost: if a device is gone.
        """
        attempt = self._attempt("auto", may_release=False, verify=False, compare_copies=False)
        try:
            answer = to_record(**say())
        except Exception as error:  # the others wait for this record
            answer = refusal(error)
        with self._line.watch.peers():
            return attempt.ask("record", answer)

    def move(
        self,
        prev: PlacedLayout | Layout,
        curr: PlacedLayout | Layout,
        state: MutableMapping[str, torch.Tensor],
        *,
        policy: Policy = "auto",
        may_release: bool = False,
        verify: Verify = False,
        compare_copies: bool = True,
        differing: Differing = "error",
        lost: Collection[int] = (),
        among: Collection[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Move the state of the job from ``prev`` to ``curr``. Every device calls it, alike but for ``state``.

        Args:
            prev: who holds what now. A layout that is not placed has rank r on the r-th device, ascending.
            curr: who shall hold what; likewise. ``place`` says where its ranks should run for the fewest bytes.
            state: this device's tensors, by the names of ``shardshift.names_of``. Only read under ``keep``. Under
                ``release`` it is emptied when the move begins, and nobody else should hold its tensors: their memory is
                what is given back.
            policy: ``keep``: old tensors stay whole until the commit; ``release``: memory is bounded by the larger of
                old and new state, plus staging, plus the largest storage; ``auto``: ``keep`` if it fits everywhere.
            may_release: whether ``auto`` may choose ``release`` where ``keep`` does not fit.
            verify: ``"digest"`` (or True): hold each piece to a digest of what was sent.
            compare_copies: refuse replicas that differ, which reads every byte that several devices hold, also where
                their shards overlap without being equal (a whole tensor beside slices of it).
            differing: what becomes of replicas that differ instead: ``first``: as the lowest device has them; ``mean``.
                By the element: where shards overlap in part, each part is settled among the devices that hold it.
            lost: devices of ``prev`` that are gone.
            among: devices that could have run the new ranks, for ``Plan.least_moved_bytes``; None for all.

        Returns:
            This device's tensors in the new layout, by name; none if it has no rank there. A shard that has not changed
            is the very tensor of ``state``; names that were one tensor still are.

        Raises:
            Infeasible, Mismatch, Unaccounted, StateLost: on every device alike; nothing has moved. Except a Mismatch of
                ``verify``: then nothing was committed.
            PeerLost: on every survivor within ``timeout_s`` + 5 s. The state is as it was under ``keep``; under
                ``release`` it is in the error's ``journal``, for ``resume``.
        """
        check_way(differing)
        given = state
        if differing != "error":
            state = reconciled(self, lambda: self._placed(prev, lost), state, differing, lost)
        attempt = self._attempt(policy, may_release=may_release, verify=verify, compare_copies=compare_copies)
        with self._line.watch.peers():
            sources: dict[Shard, torch.Tensor] = {}
            plan: Plan | PlacedLayout | Exception
            try:
                if policy not in POLICIES:
                    raise Infeasible(f"unknown policy {policy!r}; what to do: use one of {', '.join(POLICIES)}")
                verifies(verify)
                before, after = self._placed(prev, lost), self._placed(curr, ())
                if before == after and not lost:
                    plan = after
                else:
                    plan = attempt.plan(before, after, lost, self._topology, among)
                    sources = by_shard(state, names_of(before.shards_on(self.device)))
            except Exception as error:  # goes to every device as text
                plan = error
            if isinstance(plan, PlacedLayout):
                attempt.stay(plan, state)
                self.generation, self.plan = self.generation + 1, None
                found = dict(state)
                if policy == "release":
                    given.clear()  # as where something moves
                return found
            return self._finish(attempt, attempt.agree(plan, sources), (given, state))

    def place(
        self,
        prev: PlacedLayout | Layout,
        curr: Layout,
        *,
        lost: Collection[int] = (),
        among: Collection[int] | None = None,
        group_size: int = 1,
        node_worth_bytes: int | None = 0,
    ) -> PlacedLayout:
        """Where the ranks of a new layout should run so that the fewest bytes move. Called by every device, alike.

        The lowest device decides for all: two versions of a solver may break ties differently.

        Args:
            prev: who holds what now; see ``move``.
            curr: the layout to place on the devices of the mover.
            lost: devices of ``prev`` that are gone.
            among: devices that may run a rank; None for all.
            group_size: consecutive ranks of ``curr`` that belong on as few nodes as can be: its TP.
            node_worth_bytes: how many more bytes may move for one more free node; None for any number.

        Raises:
            ShardshiftError: what the lowest device met, on all.
            PeerLost: if it is gone.
        """
        attempt = self._attempt("auto", may_release=False, verify=False, compare_copies=False)
        with self._line.watch.peers():
            return attempt.place(
                lambda: (
                    make_plan(
                        self._placed(prev, lost),
                        curr,
                        devices=self.devices if among is None else sorted(among),
                        topology=self._topology,
                        lost=tuple(lost),
                        group_size=group_size,
                        node_worth_bytes=node_worth_bytes,
                    ).curr
                ),
                curr,
            )

    def resume(self, interrupted: object, *, to: PlacedLayout | None = None, verify: Verify = False) -> Resumed:
        """Bring the state of an interrupted move under ``release`` into a layout again.

        Called by all devices of the mover: all of the move, or, after ``exclude``, the survivors.

        Args:
            interrupted: the ``journal`` of the error that interrupted the move. It is used up when the state begins to
                move.
            to: a layout on the devices of the mover; None for the new one or the old one without the lost devices,
                whichever moves less.
            verify: as in ``move``.

        Raises:
            StateLost: naming exactly the tensors of which no survivor holds all.
            Infeasible: if nothing is lost, but neither layout is whole without the lost devices: give one.
            Mismatch: if a device gives no journal, a used one, or that of another move; or as in ``move``.
            PeerLost: as in ``move``.

        All survivors raise alike, and the error's ``journal`` is what to resume from: the same, or that of the way that
        was begun.
        """
        attempt = self._attempt("release", may_release=True, verify=verify, compare_copies=False)
        left = interrupted if isinstance(interrupted, Left) else None
        try:
            with self._line.watch.peers():
                records = attempt.ask("journal", self._told(left, type(interrupted).__name__))
                assert left is not None  # a refusal of one's own has been raised
                direction: Direction = "to"
                sources: dict[Shard, torch.Tensor] = {}
                planned: Plan | Exception
                try:
                    direction, planned, sources = left.planned(records, to)
                except Exception as error:  # goes to every device as text
                    planned = error
                agreed = attempt.agree(planned, sources)
        except ShardshiftError as error:
            error.journal = left
            raise
        left.journal.hand_over()
        with self._line.watch.peers():
            state = self._finish(attempt, agreed, (), left.tied)
        left.tie(names_of(agreed.schedule.plan.curr.shards_on(self.device)), state)
        return Resumed(direction, agreed.schedule.plan.curr, state)

    def _told(self, left: Left | None, given: str) -> bytes:
        """What this device says of what an interrupted move has left here."""
        if left is not None:
            return to_record(**left.record)
        return refusal(
            Mismatch(
                f"device {self.device} gives a {given}, which is no journal of an interrupted move; nothing was "
                "moved. What to do: give the attribute 'journal' of the error; where it is None the old state is "
                "whole, and there is nothing to resume"
            )
        )

    def _finish(
        self,
        attempt: Attempt,
        agreed: Agreed,
        held: Sequence[MutableMapping[str, torch.Tensor]],
        tied: Ties = (),
    ) -> dict[str, torch.Tensor]:
        try:
            targets = attempt.carry_out(agreed, held)
        except BaseException as error:
            interrupted = getattr(error, "journal", None)
            if isinstance(interrupted, Interrupted):
                error.journal = Left.by(interrupted, agreed, tied)  # type: ignore[attr-defined]
            raise
        self.generation, self.plan = self.generation + 1, agreed.schedule.plan
        tie(agreed.ties, targets, {refer.shard for refer in agreed.program.refers})
        names = names_of(agreed.schedule.plan.curr.shards_on(self.device))
        return {name: targets[shard] for name, shard in names.items()}

    def _attempt(self, policy: Policy, *, may_release: bool, verify: Verify, compare_copies: bool) -> Attempt:
        if self._line.transport is None:
            raise Mismatch("this mover is closed; nothing was moved. What to do: make a new one, on every device")
        self._attempts += 1
        terms = Terms(policy, may_release, bool(verify), compare_copies, self._staging_bytes)
        return Attempt(self._line, f"move/{self._attempts}", self.generation, terms, self._memory)

    def _placed(self, layout: PlacedLayout | Layout, lost: Collection[int]) -> PlacedLayout:
        if isinstance(layout, PlacedLayout):
            return layout
        devices = sorted({*self.devices, *lost})
        if layout.world_size > len(devices):
            raise Infeasible(
                f"the layout has {layout.world_size} ranks, there are {len(devices)} devices; what to do: start more "
                "processes, or choose a smaller layout"
            )
        return PlacedLayout(layout, tuple(devices[: layout.world_size]))

    def _open(self, devices: Sequence[int], meeting_s: float) -> Line:
        members = ",".join(map(str, sorted(devices)))
        store = dist.PrefixStore(f"era/{self._era}/{members}", self._store)
        # Who is late is not lost, so this has a limit of its own; of whom that concerns, all are there afterwards.
        Control(dist.PrefixStore("meeting", store), self.device, meeting_s).gather("here", devices, b"", "start")
        return Line(store, self.device, devices, self._kind, self._timeout_s, self._sink)
