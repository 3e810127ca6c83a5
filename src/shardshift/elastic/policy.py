"""The policy: which configuration a job should have on the devices that there are.

``best`` looks at every (pp, tp, dp) that the devices can run, so its choice hangs on no search order:

1. *List.* pp * tp * dp * cp is at most the number of devices; fewer are allowed, for none may divide. What else the
   present configuration says (cp, vpp, ep, etp) stays where it can: vpp needs stages, ep and etp have to divide the
   ranks of a stage, else the largest part of ep that does.
2. *Time.* ``Adapter.load`` in its cheap form refuses what does not divide and gives operations and traffic, from which
   ``models.step_time`` predicts the step. No model is built for that.
3. From the fastest on, ``Adapter.check`` and the exact load, for which the adapter may build the model without
   memory: parameters, gradients, optimizer and activations of the fullest rank must fit into a device. So must the
   move, at which old state and gradients, the new state but for what stays in place, and staging are there at once.
4. The first that fits is the fastest. Others within ``tolerance`` of it are as good, since the model is no clock: of
   these the one that moves the fewest bytes (``make_plan``), then the faster, then the one with fewer devices.

Where nothing fits, the error says why by family: so many for memory, so many for the batch. Rejected: integer
programming, as there are some hundred candidates; and measuring candidates, which is a change of layout each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from ..models.load import Load, StageLoad
from ..models.step_time import FLOPS_PER_S, StepTime, step_time
from ..plan import Plan, make_plan
from ..values import Infeasible, Mismatch, ParallelConfig, PlacedLayout, ShardshiftError
from .candidates import Refused, candidates, family_of, nothing_fits, sizes
from .nearest import nearest
from .present import Policy, Present

TOLERANCE: Final = 0.03
"""Predicted steps that differ by less than this are as good as one another."""


class Plannable(Protocol):
    """What a policy asks of an adapter."""

    def check(self, config: ParallelConfig) -> None:
        """Refuse a configuration; see ``Adapter``."""

    def load(self, config: ParallelConfig, *, exact: bool = True) -> Load:
        """What a configuration costs.

        Args:
            config: the configuration.
            exact: whether state is counted; otherwise it may be worked out, and nothing be built for it.

        Raises:
            Infeasible: if the configuration cannot be.
        """

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, kinds: Sequence[str]) -> Any:
        """Both layouts of a change; see ``Adapter``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``best`` goes by.

    Attributes:
        memory_bytes: memory of a device that the job may use; None: as the topology says, and no limit if it says none.
        flops_per_s: operations that a device does in a second of its work (``models.step_time``).
        activation_factor: what activations really take over what is predicted (``models.load``), as measured.
        overlap: the part of data parallel communication that hides behind the backward.
        tolerance: predicted steps that are longer by no more than this part are as good.
        staging_bytes: the most that a device stages in a move.
        prefer: ``"nodes"`` or ``"bytes"``, as the session has it.
    """

    memory_bytes: int | None = None
    flops_per_s: float = FLOPS_PER_S
    activation_factor: float = 1.0
    overlap: float = 0.0
    tolerance: float = TOLERANCE
    staging_bytes: int = 64 << 20
    prefer: Literal["nodes", "bytes"] = "nodes"


@dataclass(frozen=True, slots=True)
class Choice:
    """The best configuration.

    Attributes:
        config: it.
        load: what it costs.
        time: its predicted step.
        plan: of the move to it.
        as_good: all that were within the tolerance of the fastest and fit, it included; the faster first.
        refused: those that were looked at and refused. Ones that are slower were not all looked at.
    """

    config: ParallelConfig
    load: Load
    time: StepTime
    plan: Plan
    as_good: tuple[ParallelConfig, ...]
    refused: tuple[Refused, ...]


def best(devices: Sequence[int], present: Present, adapter: Plannable, settings: Settings | None = None) -> Choice:
    """The best configuration on some of the devices.

    Args:
        devices: those that may run ranks of it.
        present: how the job runs now. Devices of it that are not in ``devices`` hold nothing that counts as kept.
        adapter: knows the job.
        settings: limits and rates.

    Raises:
        Infeasible: if no configuration can be, naming the reasons by family.
    """
    return _Search(tuple(sorted(set(devices))), present, adapter, settings or Settings()).best()


class _Search:
    def __init__(self, devices: tuple[int, ...], present: Present, adapter: Plannable, settings: Settings) -> None:
        self._devices, self._present, self._adapter, self._settings = devices, present, adapter, settings
        limit_bytes = settings.memory_bytes
        self._limit_bytes = present.topology.device_memory_bytes if limit_bytes is None else limit_bytes
        self._refused: list[Refused] = []

    def best(self) -> Choice:
        queue = [
            found for group in candidates(len(self._devices), self._present.config) if (found := self._timed(group))
        ]
        heapq.heapify(queue)
        fits: list[tuple[_Timed, Load, Plan]] = []
        as_good_s = math.inf
        while queue and queue[0].seconds <= as_good_s:
            one = heapq.heappop(queue)
            try:
                fits.append((one, *self._look(one.config)))
            except (Infeasible, Mismatch) as error:  # the job's own functions may fail for one layout, and not others
                self._refuse(one.config, error)
                if other := self._timed(one.others):
                    heapq.heappush(queue, other)  # it may be faster than some that fit
                continue
            as_good_s = min(as_good_s, one.seconds * (1 + self._settings.tolerance))
        if not fits:
            raise nothing_fits(self._refused, len(self._devices))
        fits = sorted((fit for fit in fits if fit[0].seconds <= as_good_s), key=lambda fit: fit[0])
        chosen, load, plan = min(fits, key=lambda fit: (fit[2].moved_bytes, fit[0]))
        as_good = tuple(one.config for one, _, _ in fits)
        return Choice(chosen.config, load, chosen.time, plan, as_good, tuple(self._refused))

    def _timed(self, group: Sequence[ParallelConfig]) -> _Timed | None:
        """The first of alternatives that divides, and its predicted step."""
        for index, config in enumerate(group):
            try:
                load = self._adapter.load(config, exact=False)
            except Infeasible as error:
                self._refuse(config, error)
                continue
            settings = self._settings
            time = step_time(load, self._present.topology, flops_per_s=settings.flops_per_s, overlap=settings.overlap)
            return _Timed(time.seconds, config.world_size, sizes(config), config, time, tuple(group[index + 1 :]))
        return None

    def _look(self, config: ParallelConfig) -> tuple[Load, Plan]:
        self._adapter.check(config)
        load = self._adapter.load(config)
        limit_bytes = self._limit_bytes
        if limit_bytes is not None:
            needed = [(self._needed_bytes(each), stage) for stage, each in enumerate(load.stages)]
            needed_bytes, stage = max(needed, key=lambda one: one[0])
            if needed_bytes > limit_bytes:
                state = load.stages[stage].state
                raise Infeasible(
                    f"{config}: stage {stage} needs {needed_bytes:,} bytes of memory, a device has {limit_bytes:,} "
                    f"(parameters {state.param_bytes:,}, gradients {state.gradient_bytes:,}, optimizer "
                    f"{state.optimizer_bytes:,}, activations {needed_bytes - state.total_bytes:,})"
                )
        plan = self._plan(config)
        if limit_bytes is not None:
            device, peak_bytes = self._peak(plan)
            if peak_bytes > limit_bytes:
                raise Infeasible(
                    f"{config}: during the move device {device} needs {peak_bytes:,} bytes of memory (old and new "
                    f"state), it has {limit_bytes:,}"
                )
        return load, plan

    def _needed_bytes(self, stage: StageLoad) -> int:
        return stage.state.total_bytes + math.ceil(self._settings.activation_factor * stage.activation_bytes)

    def _plan(self, config: ParallelConfig) -> Plan:
        present, by_nodes = self._present, self._settings.prefer == "nodes"
        change = self._adapter.change(present.config, config, kinds=present.kinds)
        return make_plan(
            PlacedLayout(change.prev, present.devices),
            change.curr,
            devices=self._devices,
            topology=present.topology,
            group_size=config.tp if by_nodes else 1,
            node_worth_bytes=None if by_nodes else 0,
        )

    def _peak(self, plan: Plan) -> tuple[int, int]:
        """The device that needs the most while the state moves, sources whole until the commit; and how much."""
        present = self._present
        old = self._adapter.load(present.config).stages
        before = dict(zip(present.devices, plan.prev.layout.rank_bytes.tolist(), strict=True))
        needed = dict.fromkeys(plan.curr.devices, 0)
        for rank, device in enumerate(present.devices):
            if device in needed:
                stage = old[rank // present.config.stage_size]
                needed[device] = before[device] + stage.state.gradient_bytes
        new_bytes = (plan.curr.layout.rank_bytes - plan.referred_by_rank_bytes).tolist()
        for device, extra_bytes in zip(plan.curr.devices, new_bytes, strict=True):
            needed[device] += extra_bytes + (self._settings.staging_bytes if extra_bytes else 0)
        device = max(needed, key=lambda each: (needed[each], -each))
        return device, needed[device]

    def _refuse(self, config: ParallelConfig, error: ShardshiftError) -> None:
        self._refused.append(Refused(config, family_of(str(error)), str(error)))


@dataclass(frozen=True, slots=True, order=True)
class _Timed:
    """A candidate by its predicted step; compares by time, then devices, then sizes."""

    seconds: float
    devices: int
    sizes: tuple[int, ...]
    config: ParallelConfig
    time: StepTime
    others: tuple[ParallelConfig, ...]


Given: TypeAlias = (
    Literal["auto", "nearest"] | Mapping[int, ParallelConfig | str] | Callable[[Sequence[int]], ParallelConfig | str]
)


def policy_of(given: Given, adapter: Plannable, settings: Settings | None = None) -> Policy:
    """The policy that a user asked for.

    Args:
        given: ``"auto"`` for ``best``; ``"nearest"`` for as near to the present one as can be (``nearest``); a table,
            e.g. ``{8: "pp2tp2dp2", 4: "pp2tp2dp1"}``, of which the entry with the most devices that are there counts;
            or a function of the devices.
        adapter: knows the job. What a table or a function says is held to its ``check``.
        settings: of ``best``.

    Raises:
        Infeasible: if a table has an entry that needs more devices than its key, or is no configuration. The policy
            raises it where it finds nothing, or a configuration that the job cannot have.
    """
    if given == "auto":
        return lambda devices, present: best(devices, present, adapter, settings).config
    if given == "nearest":
        return nearest(adapter)
    if isinstance(given, Mapping):
        choose: Callable[[Sequence[int]], ParallelConfig | str] = _Table(given)
    elif callable(given):
        choose = given
    else:
        raise Infeasible(
            f"policy is {given!r}; what to do: give 'auto', 'nearest', a table of configurations, or a function"
        )

    def policy(devices: Sequence[int], present: Present) -> ParallelConfig:
        config = ParallelConfig.of(choose(tuple(devices)))
        if config.world_size > len(devices):
            raise Infeasible(
                f"the policy chose {config}, which needs {config.world_size} devices, of {len(devices)}; what to do: "
                "let it choose a smaller one"
            )
        adapter.check(config)
        return config

    return policy


class _Table:
    def __init__(self, table: Mapping[int, ParallelConfig | str]) -> None:
        self._table = {count: ParallelConfig.of(config) for count, config in sorted(table.items(), reverse=True)}
        for count, config in self._table.items():
            if config.world_size > count:
                raise Infeasible(
                    f"the policy's table gives {config} for {count} devices, which needs {config.world_size}; what to "
                    "do: give a smaller one, or correct the number of devices"
                )

    def __call__(self, devices: Sequence[int]) -> ParallelConfig:
        for count, config in self._table.items():
            if count <= len(devices):
                return config
        raise Infeasible(
            f"the policy's table has no entry for {len(devices)} devices or fewer, only for "
            f"{', '.join(map(str, sorted(self._table)))}; what to do: add one"
        )
