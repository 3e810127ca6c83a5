"""The session: a training job that changes its layout while it runs, seen from one process.

Every process of the job opens a session. Those that the configuration needs train; the others stand by inside
``start`` until a change of layout takes them in. A change goes

1. **plan**: the lead (the lowest device that trains) checks the configuration, pairs new ranks with devices and
   publishes that as a proposal, or the reason why not; every device concerned derives the plan and proves it. This
   happens as soon as the change is announced, while training goes on, if it is announced before it is due;
2. **quiesce**: what runs beside the training loop comes to rest;
3. **agree**: each says that its live tensors and its memory are as the plan needs them, or what is wrong. One that
   is not ready, and all raise its error: nothing has moved;
4. **move**: the engine runs this device's program; sources are only read;
5. **commit**: all say that they have everything. From here on the new state is the state;
6. **rebuild**: the old job's world is left, the new one entered, the job built around the tensors in place.

Whatever breaks, in training as in a change, ends as one ``PeerLost`` on every survivor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Generic, Self

import torch.distributed as dist

from ..adapters import Adapter
from ..adapters.protocol import J
from ..coordination import Watch
from ..values import Mismatch, ParallelConfig, PeerLost, ShardshiftError
from .collector import held_off
from .desk import Desk
from .gate import Gate
from .member import Member
from .party import FINISHED, Party
from .recovery import recover
from .report import Phases, ResizeReport
from .resize import Resize, ResizeSource
from .settings import Settings
from .state import Live, kinds_of
from .transition import Prepared, too_few_devices
from .undo import Undo


class Session(Generic[J]):
    """One process's part in an elastic job; use it as a context manager. Made by ``shardshift.session``.

    Attributes:
        reports: one report for each change of layout that this process took part in.
    """

    def __init__(
        self,
        adapter: Adapter[J],
        member: Member,
        config: ParallelConfig,
        resizes: ResizeSource,
        settings: Settings,
        *,
        grow: bool = True,
    ) -> None:
        if dist.is_initialized():
            raise Mismatch(
                "this process has a default process group, and a session makes its own, a new one for each layout; "
                "what to do: leave init_process_group (and Megatron's initialize_model_parallel) to the session"
            )
        if config.world_size > len(member.founders):
            raise too_few_devices(config, len(member.founders))
        self._party: Party[J] = Party(adapter, member, settings, config)
        self._asked, self._grow = resizes, grow
        self._open_desk()
        self._settings = settings
        self._gate = Gate(self._party.era.control)
        self._undo = Undo()
        self._whole = True
        self._refused_at: int | None = None
        self._started = False
        self._prepared: Prepared[J] | None = None

    @property
    def reports(self) -> list[ResizeReport]:
        """See above."""
        return self._party.reports

    @property
    def _watch(self) -> Watch:
        return self._party.era.watch

    def __enter__(self) -> Self:
        party = self._party
        try:
            with self._watch.peers():
                party.era.start()
                if party.era.number == 0 and party.member.device in party.member.founders:
                    party.era.join(0, party.member.founders)
        except BaseException:
            self._close(graceful=False)  # Python calls __exit__ only after a successful __enter__
            raise
        self._watch.concern(party.course.devices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        graceful = False
        party = self._party
        try:
            if error is not None:
                self._watch.fail(error)
            elif party.job is not None:
                with self._watch.peers(), self._watch.during("finish"):
                    party.era.control.gather(FINISHED, party.course.devices, b"", "finish")
                    party.era.control.publish(FINISHED, b"")
            graceful = error is None
        finally:
            self._close(graceful=graceful)
        if graceful:
            party.era.control.leave(party.devices())
        party.close()

    def start(self, initial: Callable[[J], None] | None = None) -> J | None:
        """Begin to train, or stand by until a change of layout gives this process a role.

        Args:
            initial: called once with the job of the first generation, to load or set its state.

        Returns:
            The job; None if training has ended without needing this process (again).

        Raises:
            Infeasible: if the model or the batch cannot take the first layout.
            Mismatch: if this process has a job already.
            PeerLost: if the job fails meanwhile.
        """
        party = self._party
        if party.job is not None:
            raise Mismatch(
                "start was called while this process trains; what to do: call it once, and when resize gave None"
            )
        first, self._started = not self._started, True
        if not first or not party.founds:
            return self._stand_by()
        with self._watch.peers(), self._watch.during("start"):
            party.adapter.check(party.course.config)
            party.job = job = party.adapter.start(party.place(party.course.devices.index(party.member.device)))
            if initial is not None:
                initial(job)
            party.mark(settled=False)
            party.copy(job)
            if not self._resizes.alike:
                self._pass_gate(0)
        self._watch.phase = "train"
        return job

    def resize_due(self, job: J) -> bool:
        """Whether a change of layout is announced for the iteration that the job has reached; asks nobody.

        A change that was refused is not due again at the same iteration: the job trains on.
        """
        self._party.mark()  # whatever the loop has done since the step belongs to it
        resize = self._upcoming(job)
        return resize is not None and resize.iteration == job.iteration

    def resize(self, job: J) -> J | None:
        """Change to the layout that is due. Called by every rank that trains, at the same iteration.

        Returns:
            The job in its new layout; None if this process has no role in it. The old job is consumed.

        Raises:
            Infeasible, Mismatch, Unaccounted, StateLost: on every rank alike, before anything has moved; the
                job is as it was and can train on.
            PeerLost: if a rank is lost meanwhile.
        """
        resize, party = self._upcoming(job), self._party
        if resize is None or resize.iteration != job.iteration:
            return job
        phases, leads = Phases(), party.leads
        try:
            with self._watch.peers(), held_off():
                with party.timed(phases, "plan"):
                    prepared = self._plan(job, resize)
                new = party.take_part(Live(party.adapter, job), prepared, phases)
        except PeerLost:
            raise
        except ShardshiftError as refused:
            self._refused_at = job.iteration
            party.settle("train")
            if leads:
                self._settle(job, resize, None, refused)
            raise
        self._undo.forget()
        if leads:
            self._settle(new, resize, party.reports[-1], None)
        return new

    @contextmanager
    def commit_step(self, job: J) -> Iterator[None]:
        """Around the optimizer step: the step counts once it is left without an exception.

        Before it, all ranks of the job wait for one another, so that nobody steps unless all have their gradients. A
        change of layout that is announced for later is prepared here, once: so the pause need not wait for plans.

        Raises:
            Mismatch: on all ranks, if one is at another iteration, or has another script.
            PeerLost: if a rank is lost meanwhile.
        """
        party = self._party
        with self._watch.peers(), self._watch.during("gate"):
            self._pass_gate(job.iteration + 1)
            if self._settings.survive:
                self._undo.take(job.iteration, kinds_of(party.adapter, job), party.adapter.shards(job))
        self._whole = False
        with self._watch.during("step"):
            yield
        party.adapter.advance(job)
        party.mark(settled=False)
        self._whole = True
        party.copy(job)
        if self._desk is not None:
            self._desk.stepped(job)
        resize = self._upcoming(job)
        if self._prepared is None and resize is not None and resize.iteration > job.iteration:
            started_s = time.perf_counter()
            with self._watch.peers(), self._watch.during("prepare"):
                prepared = self._prepare(job, resize)
            self._prepared = replace(prepared, ahead_s=time.perf_counter() - started_s)

    def recover(self, job: J | None, error: BaseException) -> J | None:
        """Go on without the ranks that are lost, from the last whole step. Called by every survivor that trained.

        The survivors agree on the newest step that all of them hold whole, choose a layout for the devices that are
        left, and move what is needed out of what they hold: at most the step in flight is lost.

        Args:
            job: this process's; it is consumed.
            error: what the loss showed as: ``PeerLost``, or what torch raised in forward, backward or optimizer.

        Returns:
            The job in its new layout; None if this process has no role in it.

        Raises:
            BaseException: ``error`` itself, if no peer is behind it, or the session was not opened with ``survive``.
            StateLost: on all survivors, naming what no survivor holds.
            Infeasible: on all survivors, if no layout fits the devices that are left.
            PeerLost: if it is this process that the others have given up.
        """
        lost = error if isinstance(error, PeerLost) else self._watch.lost(error)
        if lost is None or not self._settings.survive:
            raise error
        if lost is not error:
            lost.__cause__ = error
        with held_off():
            return self._recover(lost)

    def _open_desk(self) -> None:
        """Look for requests and nodes in the store that there is now, which is another one once the first is lost."""
        self._desk = None if self._party.roster is None else Desk(self._party, self._asked, grow=self._grow)
        self._resizes = self._asked if self._desk is None else self._desk.source

    def _settle(
        self, job: J | None, resize: Resize, report: ResizeReport | None, refusal: ShardshiftError | None
    ) -> None:
        """The part of the rank that led a change: say how it ended."""
        if self._desk is not None:
            self._desk.changed(job, report)
        self._resizes.settled(resize, refusal)

    def _pass_gate(self, next_iteration: int) -> None:
        """Agree with all ranks to go on, and hear from the lead which change comes next."""
        party, named = self._party, "what the lead is told"
        if self._resizes.alike:
            named = str(self._resizes.upcoming(next_iteration) or "no change")
        elif party.leads:
            self._gate.announce(self._resizes.upcoming(next_iteration))
        assert party.job is not None
        self._gate.pass_through(party.job.iteration, party.course.lead, leads=party.leads, named=named)

    def _stand_by(self) -> J | None:
        """Follow the job's changes until one gives this process a role, over losses of others if need be."""
        while True:
            try:
                job = self._party.stand_by()
            except PeerLost as lost:
                if not self._settings.survive:
                    raise
                if (job := self._recover(lost)) is None:
                    continue
            self._gate = Gate(self._party.era.control)
            return job

    def _recover(self, lost: PeerLost) -> J | None:
        store = self._party.store
        new = recover(self._party, lost, self._undo, job_is_whole=self._whole)
        self._prepared, self._whole, self._refused_at = None, True, None
        self._gate = Gate(self._party.era.control)
        self._undo.forget()
        if self._party.store is not store:
            self._open_desk()
        if self._desk is not None and new is not None and self._party.leads:
            with suppress(dist.DistError):  # the next request finds the store lost, where that is handled
                self._desk.changed(new, self._party.reports[-1])
        return new

    def _upcoming(self, job: J) -> Resize | None:
        """The next change that is announced, unless it is over, changes nothing or was refused."""
        resize = self._resizes.upcoming(job.iteration) if self._resizes.alike else self._gate.announced
        if resize is None or resize.iteration < job.iteration:
            return None
        stays = resize.usable is None or {*self._party.course.devices} <= {*resize.usable}
        if resize.config == job.config and stays:
            return None
        return None if resize.iteration == self._refused_at else resize

    def _prepare(self, job: J, resize: Resize) -> Prepared[J]:
        party = self._party
        return party.prepare(Live(party.adapter, job), resize)

    def _plan(self, job: J, resize: Resize) -> Prepared[J]:
        """What was prepared for the change that is due, if it still holds; else a new plan."""
        party = self._party
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            if party.leads:
                proposal = prepared.proposal
                stale = proposal is not None and (
                    proposal.kinds != kinds_of(party.adapter, job)
                    or not party.era.control.gone().isdisjoint(proposal.participants)
                )
                prepared.transition.decide(holds=prepared.resize == resize and not stale)
            if prepared.transition.holds(party.course.lead):
                return prepared
        prepared = self._prepare(job, resize)
        if party.leads:
            prepared.transition.decide(holds=True)
        return prepared

    def _close(self, *, graceful: bool) -> None:
        """Give back threads and groups, in whatever state they are."""
        self._party.era.end()
        try:
            self._party.retire()
        except Exception:
            if graceful:
                raise  # after a failure the first error matters; groups whose peers are gone may not close cleanly
