"""Opening a session: its settings, in the words of a user."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping

from ..adapters import Adapter
from ..adapters.protocol import J
from ..engine import Verify, verifies
from ..engine.events import Sink, guarded, nowhere
from ..values import Infeasible, ParallelConfig
from .member import Member
from .policy import Given, policy_of
from .resize import ResizeSource, Script
from .session import Session
from .settings import Settings


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
    address: str | None = None,
    verify: Verify = False,
    survive: bool = False,
    shard_copies: int = 0,
    checkpoint: Callable[[J], None] | None = None,
    layouts: Given = "auto",
    grow: bool = True,
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
        address: of this host, in the network that state is to go over, e.g. that of its fast interface; None for gloo's
            choice (GLOO_SOCKET_IFNAME, or the address of the host's name).
        verify: ``"digest"`` (or True): hold each piece that is moved to a digest of what was sent.
        survive: whether the job outlives ranks that are lost: ``recover`` goes on without them. Each rank keeps a copy
            of its state in host memory for it, taken anew before each optimizer step.
        shard_copies: 1: what only one rank holds (optimizer state under ZeRO-1) is copied to another's host memory
            after each step, so that the job outlives the loss of any one rank; needs ``survive``. 0: it is not.
        checkpoint: loads the last checkpoint into a job that was started afresh, on each rank of its layout.
            Called after a loss that took state which nobody else holds; without it such a loss is ``StateLost``.
        layouts: chooses a configuration where only devices are given: after a loss, when nodes join or leave, and for
            ``shardshift resize --devices``. ``"auto"``: the fastest that fits (``docs/policy.md``); ``"nearest"``: as
            many devices as can be used, as near to the present configuration as can be; or a table or function.
        grow: under ``shardshift run``: whether nodes that join are taken in without being asked for.
        sink: takes the events of all changes of layout (``shardshift.engine.events``).

    Raises:
        Infeasible: if the layout, the resizes, the policy, the preference, the verification or the copies cannot be.
        ShardshiftError: if the job's store cannot be hosted or reached.
        Mismatch: if this process has a default process group: a session makes its own.
    """
    _refuse_no_source(resizes)
    return Session(
        adapter,
        member or Member.from_launcher(timeout_s=timeout_s),
        ParallelConfig.of(layout),
        resizes or Script({}),
        Settings(
            policy,
            prefer,
            timeout_s,
            staging_bytes,
            transport,
            verifies(verify),
            survive,
            policy_of(layouts, adapter),
            guarded(sink),
            shard_copies,
            checkpoint,
            address,
        ),
        grow=grow,
    )


def _refuse_no_source(resizes: object) -> None:
    if isinstance(resizes, Mapping):
        raise Infeasible("resizes is a mapping, expected a source; what to do: write resizes=ss.Script({10: 'pp4tp2'})")
    if resizes is not None and not all(hasattr(resizes, name) for name in ("alike", "upcoming", "settled")):
        raise Infeasible(
            f"resizes is {reprlib.repr(resizes)}, expected a source; what to do: give an ss.Script, or another "
            "ss.ResizeSource, which has alike, upcoming and settled"
        )
