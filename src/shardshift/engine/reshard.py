"""``reshard``: one move of state over a process group, with nothing left behind."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from ..plan.summary import STAGING_BYTES
from ..values import Infeasible, Layout, PlacedLayout, Topology
from .events import Sink, nowhere
from .line import Kind
from .mover import Mover
from .readiness import Policy, Verify
from .reconcile import Differing


def reshard(
    prev: PlacedLayout | Layout,
    curr: PlacedLayout | Layout,
    state: MutableMapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    policy: Policy = "auto",
    may_release: bool = False,
    verify: Verify = False,
    compare_copies: bool = True,
    differing: Differing = "error",
    topology: Topology | None = None,
    transport: Kind = "auto",
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 30.0,
    memory: torch.device | str = "cpu",
    sink: Sink = nowhere,
) -> dict[str, torch.Tensor]:
    """Move state from one layout to another over a process group. Called by all of its ranks.

    The group's ranks are the devices. Its store is used to meet; the bytes take connections of their own, which
    are closed before this returns. Whoever moves often, or wants to go on after a loss, keeps a ``Mover``.

    Args:
        prev: who holds what now. Rank r of a layout that is not placed is rank r of the group. See ``Mover.move``, also
            for ``state`` and the policies.
        curr: who shall hold what; likewise.
        state: this rank's tensors by name.
        group: the process group; None for the default one.
        policy: see ``Mover.move``.
        may_release: see ``Mover.move``.
        verify: see ``Mover.move``.
        compare_copies: see ``Mover.move``.
        differing: see ``Mover.move``.
        topology: see ``Mover``.
        transport: see ``Mover``.
        staging_bytes: see ``Mover``.
        timeout_s: see ``Mover``.
        memory: see ``Mover``.
        sink: see ``Mover``.

    Returns:
        This rank's tensors in the new layout, by name.

    Raises:
        Infeasible, Mismatch, Unaccounted, StateLost, PeerLost: see ``Mover.move``.
    """
    with mover_of(
        group,
        topology=topology,
        transport=transport,
        staging_bytes=staging_bytes,
        timeout_s=timeout_s,
        memory=memory,
        sink=sink,
    ) as mover:
        return mover.move(
            prev,
            curr,
            state,
            policy=policy,
            may_release=may_release,
            verify=verify,
            compare_copies=compare_copies,
            differing=differing,
        )


def mover_of(
    group: dist.ProcessGroup | None = None,
    *,
    topology: Topology | None = None,
    transport: Kind = "auto",
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 30.0,
    memory: torch.device | str = "cpu",
    sink: Sink = nowhere,
) -> Mover:
    """A mover whose devices are the ranks of a process group. Called by all of them; arguments as for ``Mover``."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group, or give a group")
    if not isinstance(group, dist.ProcessGroup):
        raise Infeasible(
            "this rank is not in the group; what to do: call this on the ranks of the group only, as any collective"
        )
    store, device = group.get_group_store(), group.rank()
    # Each rank counts its own calls, so that no two share records; ranks call alike, so they count alike.
    call = store.add(f"shardshift/calls/{device}", 1)
    return Mover(
        dist.PrefixStore(f"shardshift/{call}", store),
        device,
        range(group.size()),
        topology=topology,
        transport=transport,
        staging_bytes=staging_bytes,
        timeout_s=timeout_s,
        memory=memory,
        sink=sink,
    )
