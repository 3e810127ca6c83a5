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
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Generic, Self

import torch.distributed as dist

from ..adapters import Adapter, Place
from ..adapters.protocol import J
from ..coordination import AnsweringStore, Control, Watch
from ..engine import Verify, verifies
from ..engine.events import Notice, Sink, guarded, nowhere, phase
from ..transport import Transport, connect
from ..values import Infeasible, Mismatch, ParallelConfig, PeerLost, ShardshiftError
from .member import Member
from .proposal import Proposal
from .report import Phases, ResizeReport
from .resize import Resize, ResizeSource, Script
from .transition import Derived, Prepared, Settings, Transition, too_few_devices

_FINISHED = "finished"


class Session(Generic[J]):
    """One process's part in an elastic job; use it as a context manager. Made by ``shardshift.session``.

    Attributes:
        reports: one report for each change of layout that this process took part in.
    """

    def __init__(
        self, adapter: Adapter[J], member: Member, config: ParallelConfig, resizes: ResizeSource, settings: Settings
    ) -> None:
        if settings.policy not in ("auto", "keep"):
            raise Infeasible(f"unknown policy {settings.policy!r}; what to do: use 'auto' or 'keep'")
        if settings.prefer not in ("nodes", "bytes"):
            raise Infeasible(f"unknown preference {settings.prefer!r}; what to do: use 'nodes' or 'bytes'")
        if config.world_size > member.topology.devices:
            raise too_few_devices(config, member.topology.devices)
        self.reports: list[ResizeReport] = []
        self._adapter, self._member, self._resizes, self._settings = adapter, member, resizes, settings
        self._config = config
        self._devices: tuple[int, ...] = tuple(range(config.world_size))
        self._generation = 0
        self._attempt = 0
        self._refused_at: int | None = None
        self._started = False
        self._job: J | None = None
        self._prepared: Prepared[J] | None = None
        self._control = Control(
            AnsweringStore.over(member.store, settings.timeout_s), member.device, settings.timeout_s
        )
        self._watch = Watch(self._control, range(member.topology.devices))
        self._transport: Transport | None = None

    def __enter__(self) -> Self:
        store = dist.PrefixStore("move", self._member.store)
        try:
            with self._watch.peers():
                self._watch.start()
                self._transport = connect(
                    store,
                    self._member.device,
                    self._member.topology.devices,
                    self._settings.timeout_s,
                    kind=self._settings.transport,
                    say=self._say,
                )
        except BaseException:
            self._close(graceful=False)  # Python calls __exit__ only after a successful __enter__
            raise
        self._watch.concern(self._devices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        graceful = False
        try:
            if error is not None:
                self._watch.fail(error)
            elif self._job is not None:
                with self._watch.peers(), self._watch.during("finish"):
                    self._control.gather(_FINISHED, self._devices, b"", "finish")
                    self._control.publish(_FINISHED, b"")
            graceful = error is None
        finally:
            self._close(graceful=graceful)
        if graceful:
            self._control.leave(self._member.topology.devices)
        self._control.close()

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
        if self._job is not None:
            raise Mismatch(
                "start was called while this process trains; what to do: call it once, and when resize gave None"
            )
        first, self._started = not self._started, True
        if not first or self._member.device not in self._devices:
            return self._stand_by()
        with self._watch.peers(), self._watch.during("start"):
            self._adapter.check(self._config)
            self._job = self._adapter.start(self._place(self._devices.index(self._member.device)))
            if initial is not None:
                initial(self._job)
        self._watch.phase = "train"
        return self._job

    def resize_due(self, job: J) -> bool:
        """Whether a change of layout is announced for the iteration that the job has reached; asks nobody.

        A change that was refused is not due again at the same iteration: the job trains on.
        """
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
        resize = self._upcoming(job)
        if resize is None or resize.iteration != job.iteration:
            return job
        phases = Phases()
        try:
            with self._watch.peers():
                with self._timed(phases, "plan"):
                    prepared = self._plan(job, resize)
                return self._take_part(job, prepared, phases)
        except PeerLost:
            raise
        except ShardshiftError:
            self._refused_at = job.iteration
            self._settle("train")
            raise

    @contextmanager
    def commit_step(self, job: J) -> Iterator[None]:
        """Around the optimizer step: the step counts once it is left without an exception.

        A change of layout that is announced for later is prepared here, once: so the pause need not wait for plans.
        """
        with self._watch.during("step"):
            yield
        self._adapter.advance(job)
        resize = self._upcoming(job)
        if self._prepared is None and resize is not None and resize.iteration > job.iteration:
            started_s = time.perf_counter()
            with self._watch.peers(), self._watch.during("prepare"):
                prepared = self._prepare(job, resize)
            self._prepared = replace(prepared, ahead_s=time.perf_counter() - started_s)

    def _upcoming(self, job: J) -> Resize | None:
        """The next change that is announced, unless it changes nothing or was refused."""
        resize = self._resizes.upcoming(job.iteration)
        if resize is None or resize.config == job.config or resize.iteration == self._refused_at:
            return None
        return resize

    def _prepare(self, job: J, resize: Resize) -> Prepared[J]:
        """Propose (the lead) and derive a change; a refusal is kept for when the change is due."""
        transition = self._next_transition()
        derived: Derived[J] | None = None
        if self._member.device == self._lead:
            derived = transition.propose(job, self._devices, resize)
        try:
            proposal = transition.proposal(self._lead)
        except PeerLost:
            raise
        except ShardshiftError as refused:
            return Prepared(resize, transition, None, refused)
        return Prepared(resize, transition, proposal, derived or transition.derive(proposal))

    def _plan(self, job: J, resize: Resize) -> Prepared[J]:
        """What was prepared for the change that is due, if it still holds; else a new plan."""
        leads = self._member.device == self._lead
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            if leads:
                proposal = prepared.proposal
                stale = proposal is not None and (
                    proposal.kinds != tuple(map(str, self._adapter.state_kinds(job)))
                    or not self._control.gone().isdisjoint(proposal.participants)
                )
                prepared.transition.decide(holds=prepared.resize == resize and not stale)
            if prepared.transition.holds(self._lead):
                return prepared
        prepared = self._prepare(job, resize)
        if leads:
            prepared.transition.decide(holds=True)
        return prepared

    def _stand_by(self) -> J | None:
        """Follow the job's changes until one gives this process a role, or training ends."""
        while True:
            self._settle("standby")
            try:
                with self._watch.peers():
                    self._control.stand_by(True)
                    transition = self._next_transition()
                    if not self._comes(transition.key("proposal")):
                        return None
                    proposal = transition.proposal(self._lead)
                    concerned = self._member.device in proposal.participants
                    derived = transition.derive(proposal) if concerned else None
                    if isinstance(derived, Derived):
                        transition.make_room(derived)
                    if not self._comes(transition.key("due")):
                        return None
                    if not transition.holds(self._lead):
                        continue
                    if derived is not None:
                        self._control.stand_by(False)
                        resize = Resize(proposal.iteration, proposal.curr)
                        return self._take_part(None, Prepared(resize, transition, proposal, derived), Phases())
                    if transition.outcome():
                        self._follow(proposal)
            except PeerLost:
                raise
            except ShardshiftError:
                continue  # refused: those who train have raised it, nothing has changed for this process

    def _comes(self, key: str) -> bool:
        """Wait for a record; False if training ends before it comes, which ends standing by."""
        if self._control.await_any([key, _FINISHED]) == key:
            return True
        self._control.stand_by(False)
        return False

    def _take_part(self, job: J | None, prepared: Prepared[J], phases: Phases) -> J | None:
        """Agree, then do it."""
        transition, proposal, derived = prepared.transition, prepared.proposal, prepared.derived
        if proposal is None:
            assert isinstance(derived, Exception)
            raise derived  # the lead's refusal
        self._watch.concern(proposal.participants)
        with self._timed(phases, "quiesce"):
            derived = transition.quiesce(job, derived)
        with self._timed(phases, "agree"):
            accepted = transition.agree(job, proposal, derived)
        assert not isinstance(derived, Exception)  # agree has raised it
        assert self._transport is not None
        with self._timed(phases, "move", derived.program.work_bytes), self._alone():
            tensors = transition.move(derived, self._transport)
        with self._timed(phases, "commit"), self._alone():
            transition.commit(proposal)
        with self._timed(phases, "rebuild"), self._alone():
            self._follow(proposal)
            self._job = None  # whatever happens from here on, the old job is retired once
            if job is not None:
                self._adapter.retire(job)
            rank = derived.plan.curr.rank_of(self._member.device)
            if rank is not None:
                self._job = derived.change.rebuild(self._place(rank), tensors, accepted)
        self.reports.append(
            ResizeReport.of(derived.plan, proposal.prev, proposal.curr, proposal.iteration, phases, prepared.ahead_s)
        )
        self._watch.phase = "standby" if self._job is None else "train"
        return self._job

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Where only this rank knows of its error: the others must hear of it, whatever the caller makes of it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerLost):
                self._watch.fail(error)
            raise

    @property
    def _lead(self) -> int:
        return min(self._devices)

    def _follow(self, proposal: Proposal) -> None:
        """Take note of a committed change."""
        self._config, self._devices = proposal.curr, proposal.curr_devices
        self._generation += 1
        self._watch.concern(self._devices)

    def _settle(self, phase: str) -> None:
        """Between two changes only the devices that train matter."""
        self._watch.phase = phase
        self._watch.concern(self._devices)

    def _next_transition(self) -> Transition[J]:
        self._attempt += 1
        return Transition(self._attempt, self._adapter, self._control, self._member.topology, self._settings)

    def _place(self, rank: int) -> Place:
        store = dist.PrefixStore(f"world/{self._generation}", self._member.store)
        return Place(store, self._config, rank, self._settings.timeout_s)

    @contextmanager
    def _timed(self, phases: Phases, name: str, total_bytes: int = 0) -> Iterator[None]:
        seen = phase(self._settings.sink, self._member.device, name, total_bytes)
        with self._watch.during(name), phases.phase(name), seen:
            yield

    def _say(self, text: str) -> None:
        self._settings.sink(Notice(self._member.device, text, time.perf_counter()))

    def _close(self, *, graceful: bool) -> None:
        """Give back threads and groups, in whatever state they are."""
        job, self._job = self._job, None
        self._watch.stop()
        if self._transport is not None:
            self._transport.close()
        if job is None:
            return
        try:
            self._adapter.retire(job)
        except Exception:
            if graceful:
                raise  # after a failure the first error matters; groups whose peers are gone may not close cleanly


def session(
    adapter: Adapter[J],
    layout: ParallelConfig | str,
    *,
    resizes: ResizeSource | None = None,
    member: Member | None = None,
    policy: str = "auto",
    prefer: str = "nodes",
    timeout_s: float = 30.0,
    staging_bytes: int = 64 << 20,
    transport: str = "auto",
    verify: Verify = False,
    sink: Sink = nowhere,
) -> Session[J]:
    """Open this process's part in an elastic training job.

    Args:
        adapter: for the framework that the job is written in, e.g. ``shardshift.megatron.Adapter``.
        layout: configuration to begin with, e.g. ``"pp2tp2dp1"``; devices 0, 1, ... take its ranks, others stand by.
        resizes: where changes of layout come from; None for none.
        member: this process's membership; None to take it from the launcher's environment variables.
        policy: ``"auto"`` (keep sources whole until the commit if they and the targets fit memory together, else
            refuse) or ``"keep"`` (the same without asking for memory to spare).
        prefer: where new ranks run on several nodes. ``"nodes"``: tensor parallel groups on as few nodes as can be,
            then as many whole nodes free as can be, then as few moved bytes; ``"bytes"``: as few moved bytes as can be.
        timeout_s: the longest that a collective, an agreement or a round may take.
        staging_bytes: the most that one device stages at any time, for sending and receiving together.
        transport: ``"auto"``: directly within a host where that works, else over gloo; ``"gloo"``: over gloo alone.
        verify: ``"digest"`` (or True): hold each piece that is moved to a digest of what was sent.
        sink: takes the events of all changes of layout (``shardshift.engine.events``).

    Raises:
        Infeasible: if the layout, the policy, the preference or the verification cannot be.
    """
    return Session(
        adapter,
        member or Member.from_launcher(timeout_s=timeout_s),
        ParallelConfig.parse(layout) if isinstance(layout, str) else layout,
        resizes or Script({}),
        Settings(policy, prefer, timeout_s, staging_bytes, transport, verifies(verify), guarded(sink)),
    )
