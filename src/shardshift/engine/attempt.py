"""One attempt to move state, from one device's side: plan, agree, move, commit. ``mover`` says what for.

Its records lie in the store under a name of its own, so what an earlier attempt has left behind is never read. Until
``carry_out`` begins nothing is touched, only read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..coordination import opened, refusal, settle, to_record
from ..plan import Plan, make_plan
from ..schedule import Epoch, Program, Schedule, peak_of
from ..values import Layout, PlacedLayout, Shard, ShardshiftError, Topology
from .aliases import storages
from .events import phase
from .journal import Journal, check_held
from .line import Line
from .memory import available_bytes
from .named import by_shard, names_of
from .pages import Pages
from .readiness import Policy, check_alike, choose_policy, shared_storages
from .replicas import Copies, differing, refuse_differing
from .run import Move
from .ties import Ties, agreed_ties, check_ties, tied_here


@dataclass(frozen=True, slots=True)
class Terms:
    """How state is to be moved; the same on all devices.

    Attributes:
        policy: ``auto``, ``keep`` or ``release``.
        may_release: whether ``auto`` may choose ``release``.
        verify: whether each piece is held to a digest of what was sent.
        compare_copies: whether replicas are compared before.
        staging_bytes: the most that a device stages.
    """

    policy: Policy
    may_release: bool
    verify: bool
    compare_copies: bool
    staging_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """What all devices have agreed on.

    Attributes:
        schedule: of the plan, under the policy that was chosen.
        program: this device's.
        move: what it does about it; prepared already under ``keep``.
        ties: tensors that stand for one, by groups.
    """

    schedule: Schedule
    program: Program
    move: Move
    ties: Ties


@dataclass(frozen=True, slots=True, eq=False)
class Interrupted:
    """What an interrupted move under ``release`` left on this device; see ``Mover.resume``.

    Attributes:
        schedule: the schedule of the move.
        journal: the fences that were passed, and this device's tensors.
    """

    schedule: Schedule
    journal: Journal


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    schedule: Schedule
    program: Program
    move: Move
    copies: Copies
    answer: bytes


class Attempt:
    """One attempt.

    Args:
        line: to the other devices.
        name: of its records; the same on all devices, used once.
        generation: of the state as it is.
        terms: how to move.
        memory: where new tensors are made.
    """

    def __init__(self, line: Line, name: str, generation: int, terms: Terms, memory: torch.device) -> None:
        self._line, self._name, self._generation, self._terms = line, name, generation, terms
        self._device, self._memory = line.device, memory

    def place(self, decide: Callable[[], PlacedLayout], curr: Layout) -> PlacedLayout:
        """A layout where the lowest device says that it should be."""
        key, lead, control = f"{self._name}/placement", self._line.devices[0], self._line.control
        with self._phase("plan"):
            if self._device == lead:
                try:
                    answer = to_record(devices=decide().devices)
                except Exception as error:  # the others wait for this record
                    answer = refusal(error)
                control.publish(key, answer)
            return PlacedLayout(curr, tuple(opened(control.fetch(key, lead, "plan"))["devices"]))

    def plan(
        self,
        prev: PlacedLayout,
        curr: PlacedLayout,
        lost: Collection[int],
        topology: Topology | None,
        among: Collection[int] | None = None,
    ) -> Plan:
        """The plan between two placed layouts; ``among``: devices that could have run the new one, None for all."""
        with self._phase("plan"):
            return make_plan(
                prev,
                curr.layout,
                devices=self._line.devices if among is None else sorted(among),
                topology=topology,
                lost=tuple(sorted(lost)),
                placement=curr.devices,
            )

    def agree(self, plan: Plan | Exception, sources: MutableMapping[Shard, torch.Tensor]) -> Agreed:
        """Say whether this device is ready, hear whether all are, and conclude how to move.

        Args:
            plan: this device's, or what is wrong.
            sources: its tensors as the plan's old layout has them.

        Raises:
            ShardshiftError: the same on all devices. Nothing has moved.
            PeerLost: if a device did not answer.
        """
        with self._phase("agree"):
            ready = None
            try:
                ready = self._ready(plan, sources)
                answer = ready.answer
            except Exception as error:  # goes to every device as text
                answer = refusal(error)
            records = self._settle("ready", answer, "agree")
            assert ready is not None  # a refusal of one's own has been raised
            check_alike(records)
            self._refuse_differing(records, ready.copies, sources)
            plan = ready.schedule.plan
            tied = agreed_ties(plan, records)
            if choose_policy(records) == "keep":
                return Agreed(ready.schedule, ready.program, ready.move, tied)
            shared = shared_storages(plan, records)
            release = Schedule.of(plan, self._terms.staging_bytes, policy="release", storages=shared)
            program = _program(release, self._device)
            return Agreed(release, program, self._move(program, sources), tied)

    def ask(self, topic: str, answer: bytes) -> dict[int, dict[str, Any]]:
        """Give an answer before anything is planned, and hear those of all; see ``settle``."""
        with self._line.watch.during("agree"):
            return self._settle(topic, answer, "agree")

    def stay(self, layout: PlacedLayout, state: Mapping[str, torch.Tensor]) -> None:
        """Agree that nothing has to move: the state is in the layout that was asked for, on every device.

        Raises:
            ShardshiftError: the same on all devices, if a state is not what the layout says, or copies differ.
            PeerLost: if a device did not answer.
        """
        with self._phase("agree"):
            copies, live = Copies(layout, self._device), dict[Shard, torch.Tensor]()
            try:
                live = by_shard(state, names_of(layout.shards_on(self._device)))
                check_held(live)
                answer = to_record(
                    **asdict(self._terms),
                    digest=f"{layout.layout.digest} on {layout.devices}",
                    generation=self._generation,
                    copies=copies.digests(live) if self._terms.compare_copies else {},
                )
            except Exception as error:  # goes to every device as text
                answer = refusal(error)
            records = self._settle("ready", answer, "agree")
            check_alike(records)
            self._refuse_differing(records, copies, live)

    def _refuse_differing(
        self, records: Mapping[int, Mapping[str, Any]], copies: Copies, live: Mapping[Shard, torch.Tensor]
    ) -> None:
        if suspects := differing({device: record["copies"] for device, record in records.items()}):
            refuse_differing(self._settle("copies", to_record(**copies.details(live, suspects)), "agree"))

    def carry_out(self, agreed: Agreed, held: Sequence[MutableMapping[str, torch.Tensor]]) -> dict[Shard, torch.Tensor]:
        """Move and commit.

        Args:
            agreed: what to do. Under ``release`` nobody else may hold the tensors that ``agree`` was given, and the
                mapping is emptied on the way.
            held: mappings in which they are, too; emptied at once under ``release``.

        Raises:
            PeerLost: if a device is gone.
            Mismatch: if a piece did not arrive as it was sent, or tied tensors turned out to differ.
            ShardshiftError: if another device cannot go on.

        After an error under ``release`` its ``journal`` is an ``Interrupted``.
        """
        schedule, journal = agreed.schedule, agreed.move.journal
        try:
            if schedule.policy == "release":
                for state in held:
                    state.clear()
            return self._run(agreed)
        except BaseException as error:  # an interrupt from the keyboard, too, leaves what to resume from
            if schedule.policy == "release":
                with suppress(AttributeError):  # an exception that takes no attributes
                    error.journal = Interrupted(schedule, journal)  # type: ignore[attr-defined]
            raise

    def _run(self, agreed: Agreed) -> dict[Shard, torch.Tensor]:
        last, journal = agreed.schedule.epochs - 1, agreed.move.journal
        asked = False  # whether the others have heard, or said, what is raised

        def fence(epoch: int) -> None:
            nonlocal asked
            if epoch == last:
                check_ties(agreed.ties, journal.targets)
            asked = True
            with self._phase("commit" if epoch == last else "fence"):
                self._settle(f"fence/{epoch}", to_record(), "commit" if epoch == last else "move")
            asked = False

        with self._phase("move", agreed.program.work_bytes):
            try:
                return agreed.move.run(fence)
            except ShardshiftError as error:
                if not asked:  # the others are on their way to the fence, and hear of it there
                    self._settle(f"fence/{journal.fences}", refusal(error), "move")
                raise
            except Exception as error:
                self._line.watch.fail(error)  # the others wait for this device's bytes, or this one for theirs
                raise

    def _move(self, program: Program, sources: MutableMapping[Shard, torch.Tensor]) -> Move:
        line, pages = self._line, Pages()
        assert line.transport is not None
        return Move(
            Journal(program, sources),
            line.transport,
            staging_bytes=self._terms.staging_bytes,
            allocate=lambda shard: pages.of_shard(shard, self._memory),
            pages=pages,
            timeout_s=line.timeout_s,
            verify=self._terms.verify,
            sink=line.sink,
        )

    def _ready(self, plan: Plan | Exception, sources: MutableMapping[Shard, torch.Tensor]) -> _Ready:
        """What this device says of itself; raises what is wrong."""
        if isinstance(plan, Exception):
            raise plan
        terms, device = self._terms, self._device
        schedule, copies = Schedule.of(plan, terms.staging_bytes), Copies(plan.prev, device, plan.lost)
        program = _program(schedule, device)
        names_of(plan.curr.shards_on(device))  # no two of them may have one name
        check_held(sources)
        move = self._move(program, sources)
        peak_bytes = peak_of(program, plan.prev.shards_on(device)).beside_prev_bytes
        free_bytes = available_bytes(len(self._line.devices))
        if terms.policy == "keep" or (terms.policy == "auto" and peak_bytes <= free_bytes):
            move.prepare()  # with small pieces that takes as long as the wire, and here all do it at once
        answer = to_record(
            **asdict(terms),
            **self._sharing(plan, sources),
            digest=plan.digest,
            generation=self._generation,
            peak_bytes=peak_bytes,
            free_bytes=free_bytes,
            copies=copies.digests(sources) if terms.compare_copies else {},
        )
        return _Ready(schedule, program, move, copies, answer)

    def _sharing(self, plan: Plan, sources: MutableMapping[Shard, torch.Tensor]) -> dict[str, list[list[int]]]:
        """Which tensors share memory here, and which are one, by their numbers in the layout."""
        number = {tensor: index for index, tensor in enumerate(plan.prev.layout.tensors)}
        live = {shard: sources[shard] for shard in plan.prev.shards_on(self._device)}
        shared = {tuple(sorted({number[shard.tensor] for shard in group})) for group in storages(live)}
        return {
            "ties": [[number[tensor] for tensor in group] for group in tied_here(live)],
            "storages": [list(group) for group in sorted(shared) if len(group) > 1],
        }

    def _settle(self, topic: str, answer: bytes, phase: str) -> dict[int, dict[str, Any]]:
        return settle(self._line.control, f"{self._name}/{topic}", self._line.devices, phase, answer)

    @contextmanager
    def _phase(self, name: str, total_bytes: int = 0) -> Iterator[None]:
        with self._line.watch.during(name), phase(self._line.sink, self._device, name, total_bytes):
            yield


def _program(schedule: Schedule, device: int) -> Program:
    """A device's program; one that does nothing for a device without a part, which only comes to the fences."""
    if device in schedule.plan.devices:
        return schedule.program(device)
    return Program(device, (), (Epoch(),) * schedule.epochs, schedule.plan.digest)
