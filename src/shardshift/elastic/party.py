"""One process's part in changes of layout: plan ahead, take part, stand by. ``session`` describes the phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic

import torch.distributed as dist

from ..adapters import Adapter, Place
from ..adapters.protocol import J
from ..coordination import (
    AnsweringStore,
    any_beats,
    current_era,
    dismissed,
    era_store,
    lost_before,
    record_failure,
    stands_by,
)
from ..coordination.answering import close_store
from ..engine.events import phase
from ..values import ParallelConfig, PeerLost, ShardshiftError
from .afresh import start_afresh
from .agent.roster import Roster
from .buddy import Buddies
from .course import Course
from .era import Era
from .member import Member
from .present import Present
from .proposal import Proposal
from .report import Phases, ResizeReport
from .resize import Resize
from .settings import Settings
from .state import Kept, State, kinds_of
from .transition import Derived, Prepared, Transition

FINISHED: Final = "finished"
"""Key of the record that ends standing by."""
PATIENCE: Final = 3
"""So many times the job's limit a survivor may take to come to a recovery: it may be waiting for the lost one in a
collective, and then in an agreement."""


class Party(Generic[J]):
    """What a session needs to take part in changes, and has for as long as it lives.

    Args:
        adapter: of the job's framework.
        member: this process.
        settings: how changes are carried out.
        config: the first configuration; devices 0, 1, ... take its ranks.

    Attributes:
        adapter: of the job's framework.
        member: this process.
        settings: how changes are carried out.
        course: where the job stands.
        founds: whether this process is one of those that the job begins with.
        era: of the present; another one after each loss.
        job: this process's, while it trains.
        severed: whether the job's world is gone.
        moved: this process's state in the new layout, from the commit until the job is built around it.
        buddies: this process's part in buddy copies.
        stood_by: the devices that stood by when the last era ended.
        gone: the devices that were lost so far.
        store: of the job; each request is answered in time, or raises.
        roster: of the nodes; None where the launcher keeps none.
        in_doubt: a change that this process was ready to commit when the store was lost, and what it has of the new
            state.
        reports: one for each change that this process took part in.
    """

    def __init__(self, adapter: Adapter[J], member: Member, settings: Settings, config: ParallelConfig) -> None:
        self.adapter, self.settings = adapter, settings
        self._attach(member)
        number = current_era(self.store)
        came = Course.read(era_store(self.store, number))
        self.course = came or Course(config, tuple(range(config.world_size)))
        self.founds = came is None and member.device in self.course.devices
        self.era = self._era(number, tuple(member.founders))
        self.job: J | None = None
        self.severed = False
        self.moved: Kept[J] | None = None
        self.buddies = Buddies(
            adapter,
            member.device,
            member.topology.devices_per_node,
            settings.timeout_s,
            copies=bool(settings.shard_copies),
        )
        self.stood_by: tuple[int, ...] = ()
        self.gone: set[int] = lost_before(era_store(self.store, number))
        self.in_doubt: tuple[Proposal, Kept[J] | None] | None = None
        self.reports: list[ResizeReport] = []

    def _attach(self, member: Member) -> None:
        """Use the store that this process has now."""
        self.member = member
        self.store = AnsweringStore.over(member.store, self.settings.timeout_s)
        roster = Roster(self.store)
        self.roster = None if roster.terms() is None else roster

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the job."""
        return self.member.device == self.course.lead

    def prepare(self, state: State[J], resize: Resize) -> Prepared[J]:
        """Propose (the lead) and derive a change; a refusal is kept for when the change is due.

        Args:
            state: what this process has.
            resize: the change.
        """
        transition = self.next_transition()
        derived: Derived[J] | None = None
        if self.leads:
            derived = transition.propose(
                state,
                resize.config,
                self.course.devices,
                iteration=resize.iteration,
                usable=resize.usable or self.usable(),
                wires=self.era.next_wires,
            )
        try:
            proposal = transition.proposal(self.course.lead)
        except PeerLost:
            raise
        except ShardshiftError as refused:
            return Prepared(resize, transition, None, refused)
        return self.derive(resize, transition, proposal, derived)

    def derive(
        self,
        resize: Resize | None,
        transition: Transition[J],
        proposal: Proposal,
        derived: Derived[J] | None = None,
        *,
        concerned: bool = True,
    ) -> Prepared[J]:
        """The wires for a proposal; and this process's own plan of it, if it is concerned."""
        if self.member.device in proposal.ends:
            self.era.join(proposal.wires, proposal.ends)
        found: Derived[J] | Exception | None = derived
        if derived is None and concerned and not proposal.afresh:
            found = transition.derive(proposal)
        # A device that stands by may be lost and hurt nobody: so only those who train wait for one another beforehand.
        if found is not None and not proposal.lost and {*proposal.participants} <= {*self.course.devices}:
            found = transition.enter_ahead(proposal, found, lambda rank: self._next_place(proposal, rank))
        return Prepared(resize, transition, proposal, found)

    def take_part(self, state: State[J] | None, prepared: Prepared[J], phases: Phases) -> J | None:
        """Agree, then do it. The job that this process has, if any, is consumed once all have committed.

        Returns:
            The job in the new layout; None if this process has no role in it.
        """
        transition, proposal, derived = prepared.transition, prepared.proposal, prepared.derived
        if proposal is None:
            assert isinstance(derived, Exception)
            raise derived  # the lead's refusal
        if proposal.afresh:
            return start_afresh(self, transition, proposal, phases)
        assert derived is not None
        self.era.watch.concern(proposal.participants)
        if self.job is not None and not self.severed:
            with self.timed(phases, "quiesce"):
                derived = transition.quiesce(self.job, derived)
        with self.timed(phases, "agree"):
            accepted = transition.agree(state, proposal, derived)
        assert not isinstance(derived, Exception)  # agree has raised it
        rank = derived.plan.curr.rank_of(self.member.device)
        moved: Kept[J] | None = None
        with self.timed(phases, "move", derived.program.work_bytes), self._alone():
            tensors = transition.move(derived, self.era.wires)
            if rank is not None and self.settings.survive:
                kept, records = derived.change.moved(rank, tensors, accepted)
                moved = Kept(proposal.curr, proposal.iteration, proposal.kinds, kept, records)
        if moved is not None and self.buddies.copies:
            with self.timed(phases, "copy"), self._alone():
                self.buddies.ahead(moved, proposal.curr_devices, self.course.generation + 1, self.era.wires)
        with self.timed(phases, "commit"), self._alone():
            self.in_doubt = proposal, moved
            transition.commit(proposal)
        self.in_doubt = None
        with self.timed(phases, "rebuild"), self._alone():
            self.follow(proposal)
            self.moved, moved = moved, None
            self.retire()
            if rank is not None:
                self.job = derived.change.rebuild(self.place(rank), tensors, accepted)
                self.mark(settled=False)
            self.moved = None
        self.reports.append(ResizeReport.of(derived.plan, proposal, phases, prepared.ahead_s))
        self.era.watch.phase = "standby" if self.job is None else "train"
        return self.job

    def stand_by(self) -> J | None:
        """Follow the job's changes until one gives this process a role, or training ends."""
        while True:
            self.settle("standby")
            control = self.era.control
            try:
                with self.era.watch.peers():
                    control.stand_by(True)
                    if self.roster is not None:
                        self.roster.touch()
                    transition = self.next_transition()
                    if self.course.lost:
                        self._await_recovery(transition)
                    if not self._comes(transition.key("proposal")):
                        return None
                    proposal = transition.proposal(self.course.lead)
                    concerned = self.member.device in proposal.participants
                    prepared = self.derive(None, transition, proposal, concerned=concerned)
                    if isinstance(prepared.derived, Derived):
                        transition.make_room(prepared.derived)
                    # Whoever is concerned stays: a node is dismissed only when the lead knows that it leaves.
                    if control.await_any([transition.key("due"), FINISHED]) == FINISHED:
                        control.stand_by(False)
                        return None
                    if not transition.holds(self.course.lead):
                        continue
                    if concerned:
                        control.stand_by(False)
                        return self.take_part(None, prepared, Phases())
                    if transition.outcome():
                        self.follow(proposal)
            except PeerLost:
                raise
            except ShardshiftError:
                continue  # refused: those who train have raised it, nothing has changed for this process

    def _await_recovery(self, transition: Transition[J]) -> None:
        """Wait for the first proposal of an era that began with a loss. Nobody owes it to this process but survivors.

        Raises:
            PeerLost: if none comes.
        """
        control, lead = self.era.control, self.course.lead
        limit_s = (PATIENCE + 1) * control.timeout_s
        if not control.comes(transition.key("proposal"), limit_s):
            reason = f"did not recover the job within {limit_s:.0f} s"
            silent = [device for device in self.course.living if not any_beats(control.store, [device])]
            raise record_failure(control.store, silent or [lead], "recover", reason)

    def _comes(self, key: str) -> bool:
        """Wait for a record; False if training ends before it comes, or this node leaves, which ends standing by."""
        if self.era.control.await_any([key, FINISHED, dismissed(self.member.device)]) == key:
            return True
        self.era.control.stand_by(False)
        return False

    def mark(self, *, settled: bool = True) -> None:
        """Mark the job's state between two steps, where the session is to outlive losses: nothing else needs marks."""
        if self.settings.survive and self.job is not None:
            self.adapter.mark(self.job, settled=settled)

    def copy(self, job: J) -> None:
        """Exchange buddy copies of the job as it is now, if the session keeps any; collective over the job's ranks."""
        if self.buddies.copies:
            with self.era.watch.peers(), self.era.watch.during("copy"):
                self.buddies.stepped(job, self.course, self.era.wires)

    def retire(self) -> None:
        """Leave the old job's world, if there is one: whatever happens from here on, it is retired once."""
        (job, self.job), (severed, self.severed) = (self.job, None), (self.severed, False)
        if job is None:
            return
        if severed:
            self.adapter.abandon(job)
        else:
            self.adapter.retire(job)

    def follow(self, proposal: Proposal) -> None:
        """Take note of a committed change."""
        self.course.follow(proposal)
        if self.leads:
            self.course.publish(self.era.control.store)
        self.era.watch.concern(self.course.devices)

    def devices(self) -> set[int]:
        """Every device that is known: who trains, who founded the job, who joined it."""
        return {*self.course.devices, *self.member.founders, *self.joined()} - self.gone

    def joined(self) -> set[int]:
        """Devices that came while the job ran, and have not left."""
        return set() if self.roster is None else {*self.roster.devices_here()}

    def choose(self, devices: Sequence[int]) -> ParallelConfig:
        """The configuration that the policy has for some devices."""
        topology = self.member.topology
        nodes = max(*devices, *self.course.devices) // topology.devices_per_node + 1
        topology = topology.with_nodes(max(nodes, topology.nodes))
        kinds = () if self.job is None else kinds_of(self.adapter, self.job)
        return self.settings.layouts(devices, Present(self.course.config, self.course.devices, topology, kinds))

    def usable(self) -> list[int]:
        """The devices that may run ranks: those that train or stand by.

        Where no roster tells who comes and goes, founders need not have said that they stand by.
        """
        control = self.era.control
        idle = self.devices().difference(self.course.devices)
        if self.era.number or self.roster is not None:
            idle = {device for device in idle if stands_by(control.store, device)}
        leaving = set() if self.roster is None else {*self.roster.leaving()}
        return sorted({*self.course.living, *idle} - control.gone() - leaving)

    def next_era(self, number: int) -> None:
        """Leave the present era, which has failed, for another one that was begun."""
        old = self.era
        old.end()
        self.era = self._era(number, self.course.living)
        self.era.start()
        self.era.watch.concern(self.course.living)

    def _era(self, number: int, concerned: Sequence[int]) -> Era:
        return Era(number, self.member, self.store, self.settings, concerned, self._cut_off, self._store_lost)

    def next_store(self) -> None:
        """Go to the store that has taken the place of the one that is lost.

        Raises:
            ShardshiftError: if there is none.
        """
        lost = self.store
        self._attach(self.member.moved())
        close_store(lost)

    def _cut_off(self) -> None:
        """Wake the main thread, should it wait in a collective of a world that has lost a rank. From another thread."""
        job = self.job
        if self.settings.survive and job is not None and not self.severed:
            self.adapter.sever(job)

    def _store_lost(self) -> None:
        """The same where the store is lost, and the others will go on in another one."""
        if self.member.next_store is not None:
            self._cut_off()

    def close(self) -> None:
        """Ask the store nothing any more."""
        close_store(self.store)

    def settle(self, phase: str) -> None:
        """Between two changes only the devices that train matter."""
        self.era.watch.phase = phase
        self.era.watch.concern(self.course.living)

    def next_transition(self) -> Transition[J]:
        """The next attempt to change the layout."""
        self.course.attempt += 1
        return Transition(self.course.attempt, self.adapter, self.era.control, self.member.topology, self.settings)

    def place(self, rank: int) -> Place:
        """Where this process stands in the present generation."""
        store = dist.PrefixStore(f"world/{self.era.number}/{self.course.generation}", self.member.store)
        return Place(store, self.course.config, rank, self.settings.timeout_s, self.course.generation)

    def _next_place(self, proposal: Proposal, rank: int) -> Place:
        """Where this process will stand if a change is made; under keys that no other attempt uses."""
        generation = self.course.generation + 1
        store = dist.PrefixStore(f"world/{self.era.number}/{generation}/{self.course.attempt}", self.member.store)
        return Place(store, proposal.curr, rank, self.settings.timeout_s, generation)

    @contextmanager
    def timed(self, phases: Phases, name: str, total_bytes: int = 0) -> Iterator[None]:
        """Be in a phase of a change."""
        seen = phase(self.settings.sink, self.member.device, name, total_bytes)
        with self.era.watch.during(name), phases.phase(name), seen:
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Where only this rank knows of its error: the others must hear of it, whatever the caller makes of it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerLost):
                self.era.watch.fail(error)
            raise
