"""One change of layout from one process's side: propose, derive, agree, move. ``session`` says in which order.

Nothing here touches the running job except to read it: whatever fails, the job is as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch

from ..adapters import Adapter, Change, Place
from ..adapters.protocol import J
from ..coordination import Control, refusal, settle, to_record
from ..engine import Copies, Journal, available_bytes, differing, prefault, refuse_differing, run_program
from ..plan import Plan, make_plan
from ..schedule import Program, compile_program, peak_extra_bytes
from ..transport import Transport
from ..values import Infeasible, Mismatch, ParallelConfig, PeerLost, PlacedLayout, Shard, ShardshiftError, Topology
from .proposal import Proposal
from .resize import Resize
from .settings import Settings
from .state import State
from .survivors import fitted, with_copies


@dataclass(frozen=True, slots=True)
class Derived(Generic[J]):
    """What a rank has derived from a proposal, and proved.

    Attributes:
        plan: the plan.
        change: the adapter's view of it.
        program: this device's.
        room: memory for new shards that was made beforehand.
    """

    plan: Plan
    change: Change[J]
    program: Program
    room: dict[Shard, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[J]):
    """A change of layout that is planned but not carried out.

    Attributes:
        resize: what was announced; None for what nobody asked for, after a loss.
        transition: the attempt.
        proposal: the lead's; None if it refused.
        derived: what this rank derived from it, or what is wrong; None if it is not concerned.
        ahead_s: seconds that preparing took while training could have gone on; 0 if it was done in the pause.
    """

    resize: Resize | None
    transition: Transition[J]
    proposal: Proposal | None
    derived: Derived[J] | Exception | None
    ahead_s: float = 0.0


class Transition(Generic[J]):
    """One attempt to change the layout; its records lie under keys of their own."""

    def __init__(
        self, attempt: int, adapter: Adapter[J], control: Control, topology: Topology, settings: Settings
    ) -> None:
        self._attempt = attempt
        self._adapter = adapter
        self._control = control
        self._topology = topology
        self._settings = settings
        self._held: dict[Shard, torch.Tensor] = {}
        self._change: Change[J] | None = None

    def key(self, topic: str) -> str:
        """The store's key of one of this attempt's records."""
        return f"change/{self._attempt}/{topic}"

    def propose(
        self,
        state: State[J],
        target: ParallelConfig,
        devices: Sequence[int],
        *,
        iteration: int,
        usable: Sequence[int],
        lost: Sequence[int] = (),
        copies: tuple[tuple[int, int], ...] = (),
        wires: Callable[[Sequence[int]], int],
        refuse: Callable[[Exception], bytes] = refusal,
    ) -> Derived[J] | None:
        """The lead's part: decide on the pairing and publish it, or the reason why it cannot be.

        Args:
            state: the lead's, as it is now; a job may train on until the change is due.
            target: the configuration to change to.
            devices: per virtual rank of the state's configuration its device.
            iteration: optimizer steps that will be finished when the change is due.
            usable: the devices that may run a rank of ``target``.
            lost: devices that are gone.
            copies: (lost device, device that gives the buddy copies of it).
            wires: gives the number of the wires among some devices.
            refuse: makes the record of a reason why it cannot be.

        Returns:
            What the lead has derived on the way; None if it had to refuse.
        """
        try:
            if target.world_size > len(usable):
                raise too_few_devices(target, len(usable))
            self._adapter.check(target)
            change = self._adapter.change(state.config, target, kinds=state.kinds)
            plan = self._plan(change, devices, usable, target, None, lost, copies)
            ends = tuple(sorted({*usable, *devices}.difference(lost)))
            proposal = Proposal(
                state.config,
                target,
                tuple(devices),
                plan.curr.devices,
                tuple(usable),
                tuple(lost),
                wires(ends),
                ends,
                iteration,
                state.kinds,
                plan.digest,
                copies,
            )
            derived, wire = self._derived(plan, change), proposal.to_wire()
        except Exception as error:  # every rank waits for this record: whatever happened must reach them
            self._control.publish(self.key("proposal"), refuse(error))
            return None
        self._control.publish(self.key("proposal"), wire)
        return derived

    def proposal(self, lead: int, timeout_s: float | None = None) -> Proposal:
        """The proposal of the device ``lead``, within the job's limit or another one.

        Raises:
            ShardshiftError: what the lead refused with.
            PeerLost: if none came.
        """
        return Proposal.from_wire(self._control.fetch(self.key("proposal"), lead, "plan", timeout_s))

    def derive(self, proposal: Proposal) -> Derived[J] | Exception:
        """This rank's own plan; or what is wrong, for ``agree`` to tell."""
        try:
            change = self._adapter.change(proposal.prev, proposal.curr, kinds=proposal.kinds)
            plan = self._plan(
                change,
                proposal.prev_devices,
                proposal.usable,
                proposal.curr,
                proposal.curr_devices,
                proposal.lost,
                proposal.copies,
            )
            if plan.digest != proposal.digest:
                raise Mismatch(
                    f"device {self._control.device} derives plan {plan.digest}, the lead {proposal.digest}; nothing "
                    "was moved. What to do: run the same code and the same model description on every rank"
                )
            return self._derived(plan, change)
        except Exception as error:  # goes to every rank as text
            return error

    def enter_ahead(
        self, proposal: Proposal, derived: Derived[J] | Exception, place: Callable[[int], Place]
    ) -> Derived[J] | Exception:
        """Make ahead what the new layout needs beside the state, if all participants have derived their plans.

        Nothing of it is made if one has not: it tells why when the change is due.

        Args:
            proposal: the change.
            derived: this rank's plan, or what is wrong; returned as it is.
            place: where a rank of the new layout will stand.

        Raises:
            PeerLost: if a rank did not come.
        """
        answer = refusal(derived) if isinstance(derived, Exception) else to_record()
        try:
            settle(self._control, self.key("ahead"), proposal.participants, "plan", answer)
        except PeerLost:
            raise
        except ShardshiftError:
            return derived
        assert not isinstance(derived, Exception)  # it was told as a refusal
        self._change = derived.change
        rank = derived.plan.curr.rank_of(self._control.device)
        if rank is not None:
            derived.change.enter_ahead(place(rank))
        return derived

    def _leave_ahead(self) -> None:
        if self._change is not None:
            self._change.leave_ahead()

    def make_room(self, derived: Derived[J]) -> None:
        """A joiner's part, while others train on: make the memory for its state, pages and all.

        A fresh page costs more than the wire, and a joiner has nothing else to do. If the change is refused, the memory
        goes with what was derived.
        """
        rank = derived.plan.curr.rank_of(self._control.device)
        if rank is not None and self._control.device not in derived.plan.prev.devices:
            derived.room.update({shard: derived.change.allocate(rank, shard) for shard in derived.program.allocate})
            prefault(derived.room.values())

    def decide(self, *, holds: bool) -> None:
        """The lead's part, when the change is due: say whether what was prepared still holds."""
        self._control.publish(self.key("due"), to_record(holds=holds))

    def holds(self, lead: int) -> bool:
        """The lead's decision on what was prepared.

        Raises:
            PeerLost: if none came.
        """
        holds = bool(json.loads(self._control.fetch(self.key("due"), lead, "plan"))["holds"])
        if not holds:
            self._leave_ahead()
        return holds

    def quiesce(self, job: J | None, derived: Derived[J] | Exception) -> Derived[J] | Exception:
        """Let the job come to rest; or what is wrong, for ``agree`` to tell."""
        try:
            if job is not None:
                self._adapter.quiesce(job)
            return derived
        except PeerLost:
            raise
        except Exception as error:  # goes to every rank as text
            return error

    def agree(self, state: State[J] | None, proposal: Proposal, derived: Derived[J] | Exception) -> Any:
        """Say whether this rank is ready, hear whether all are; then the same of what goes along with the tensors.

        Returns:
            What the adapter made of the job's companions; None for a device that leaves.

        Raises:
            ShardshiftError: the same on every rank, if one was not ready. Nothing has moved.
            PeerLost: if a rank did not come.
        """
        records = self._gather("agree", proposal, self._ready(state, proposal, derived))
        assert not isinstance(derived, Exception)  # it was told as a refusal
        if suspects := differing({device: record["copies"] for device, record in records.items()}):
            copies = Copies(derived.plan.prev, self._control.device, derived.plan.lost)
            mine = copies.details(self._held, suspects)
            details = self._gather("copies", proposal, to_record(**mine))
            self._control.publish(self.key("refused"), b"")
            self._leave_ahead()
            refuse_differing(details)
        names = [name for record in records.values() for name in record["companions"]]
        rank, accepted = derived.plan.curr.rank_of(self._control.device), None
        answer = to_record()
        if rank is not None:
            # All are there: each rank published its own before it said yes.
            keys = [self._companion(name) for name in names]
            companions = dict(zip(names, self._control.store.multi_get(keys) if keys else [], strict=True))
            try:
                accepted = derived.change.accept(rank, companions)
            except Exception as error:  # goes to every rank as text
                answer = refusal(error)
        self._gather("accept", proposal, answer)
        return accepted

    def move(self, derived: Derived[J], transport: Transport) -> dict[Shard, torch.Tensor]:
        """Run this device's program; its tensors in the new layout."""
        change, rank = derived.change, derived.plan.curr.rank_of(self._control.device)
        held, self._held = self._held, {}  # nothing here may keep old tensors while the new job is put together

        def allocate(shard: Shard) -> torch.Tensor:
            assert rank is not None  # a device that leaves has nothing to allocate
            made = derived.room.pop(shard, None)
            return change.allocate(rank, shard) if made is None else made

        return run_program(
            Journal(derived.program, held),
            transport,
            staging_bytes=self._settings.staging_bytes,
            allocate=allocate,
            timeout_s=self._settings.timeout_s,
            verify=self._settings.verify,
            sink=self._settings.sink,
        )

    def commit(self, proposal: Proposal) -> None:
        """All have everything: from here on the new state is the state.

        Raises:
            PeerLost: if a rank did not come.
        """
        self._gather("commit", proposal, to_record())
        self._control.publish(self.key("committed"), b"")

    def _gather(self, phase: str, proposal: Proposal, answer: bytes) -> dict[int, dict[str, Any]]:
        """Every participant's answer; if one refused, its error is raised on all."""
        try:
            return settle(self._control, self.key(phase), proposal.participants, phase, answer)
        except PeerLost:
            raise
        except ShardshiftError:
            self._control.publish(self.key("refused"), b"")
            self._leave_ahead()
            raise

    def outcome(self) -> bool:
        """For a process that takes no part: wait for the end of it, and say whether it was committed."""
        committed = self.key("committed")
        return self._control.await_any([committed, self.key("refused")]) == committed

    def _ready(self, state: State[J] | None, proposal: Proposal, derived: Derived[J] | Exception) -> bytes:
        """This rank's answer; its companions are published before it says yes."""
        if isinstance(derived, Exception):
            return refusal(derived)
        try:
            if self._settings.policy == "auto":
                self._check_memory(derived.program, len(proposal.participants))
            records: dict[str, bytes] = {}
            copies: dict[str, int] = {}
            if state is not None:
                self._check_position(state, proposal)
                self._held = dict(state.held(derived.change))
                if any(giver == self._control.device for _, giver in proposal.copies):
                    self._held = fitted(derived.plan.prev.shards_on(self._control.device), self._held)
                of_copies = Copies(derived.plan.prev, self._control.device, derived.plan.lost)
                copies = of_copies.digests(self._held)
                records = state.companions()
            for name, content in records.items():
                self._control.publish(self._companion(name), content)
            return to_record(companions=list(records), copies=copies)
        except Exception as error:  # goes to every rank as text
            return refusal(error)

    def _check_position(self, state: State[J], proposal: Proposal) -> None:
        if (state.config, state.iteration) != (proposal.prev, proposal.iteration):
            raise Mismatch(
                f"device {self._control.device} is at iteration {state.iteration} of {state.config}, the proposal at "
                f"iteration {proposal.iteration} of {proposal.prev}; what to do: ask resize_due at the same iterations "
                "on every rank"
            )

    def _companion(self, name: str) -> str:
        return self.key(f"companion/{name}")

    def _derived(self, plan: Plan, change: Change[J]) -> Derived[J]:
        rank = plan.curr.rank_of(self._control.device)
        if rank is not None:
            change.check(rank)
        return Derived(plan, change, compile_program(plan, self._control.device, self._settings.staging_bytes))

    def _plan(
        self,
        change: Change[J],
        prev_devices: Sequence[int],
        usable: Sequence[int],
        target: ParallelConfig,
        placement: Sequence[int] | None,
        lost: Sequence[int],
        copies: Sequence[tuple[int, int]],
    ) -> Plan:
        by_nodes = self._settings.prefer == "nodes"
        per_node = self._topology.devices_per_node
        nodes = max(max(*usable, *prev_devices) // per_node + 1, self._topology.nodes)
        return make_plan(
            PlacedLayout(with_copies(change.prev, prev_devices, copies), tuple(prev_devices)),
            change.curr,
            devices=usable,
            topology=self._topology.with_nodes(nodes),
            lost=lost,
            placement=placement,
            group_size=target.tp if by_nodes else 1,
            node_worth_bytes=None if by_nodes else 0,
        )

    def _check_memory(self, program: Program, sharers: int) -> None:
        """Refuse a move that would not fit beside the state that is kept until the commit."""
        peak_bytes = peak_extra_bytes(program)
        share_bytes = available_bytes(sharers)
        if peak_bytes > share_bytes:
            raise Infeasible(
                f"device {self._control.device} needs {peak_bytes:,} bytes beside its present state, {share_bytes:,} "
                "are free; nothing was moved. What to do: free memory, or go in two steps (more devices first)"
            )


def too_few_devices(config: ParallelConfig, devices: int) -> Infeasible:
    """The error for a configuration that is larger than the job."""
    return Infeasible(
        f"{config} needs {config.world_size} devices, there are {devices}; what to do: choose a smaller configuration "
        "or start more processes"
    )
