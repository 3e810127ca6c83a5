"""The agent of a node: what ``shardshift run`` is. It has one node's workers, and a part in the job's store.

1. The store: whoever can bind the endpoint's address hosts it, the others connect to it.
2. A place in the job (``joining``): the first nodes wait for one another, later ones join while the others train.
3. Workers (``workers``), which find what torchrun would set.
4. The node's life (``node``): until its workers have ended, or it was told to leave.

Built on torch.distributed.elastic's rendezvous backend and process contexts. Its agents were rejected: any change of
membership makes them start all workers again, and what decides that is private to them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from ...values import Infeasible
from ..member import job_store
from ..reign import STORE_FILE, Whereabouts
from .joining import Place, join
from .leaving import Say
from .node import Asked, EndAtOnce, NodeLife, store_lost
from .roster import Stores, Terms
from .store import open_store
from .succession import MinorityStops, Reign, Succession, minority_stops
from .workers import Workers, worker_environment

Control = Callable[[dist.Store], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Launch:
    """What an agent is to do.

    Attributes:
        terms: of the job, as this node has them.
        endpoint: ``HOST:PORT`` of the store, alike on all nodes; port 0 for any free one, on a single node.
        command: what each worker runs.
        role: torchrun's --role.
        environment: variables for the workers beside torchrun's.
        hosts: whether this node hosts the store; None: if it can bind the endpoint's address.
        grace_s: how long a leave may take.
        timeout_s: how long to wait for the store, and for the first nodes.
        silence_s: an agent or a store that shows no life for so long is lost.
    """

    terms: Terms
    endpoint: str
    command: Sequence[str]
    role: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    hosts: bool | None = None
    grace_s: float = 30.0
    timeout_s: float = 600.0
    silence_s: float = 30.0


class Agent:
    """One node's agent.

    Args:
        launch: what it is to do.
        logs: where the workers' streams go.
        say: takes lines for whoever has started it.
        control: opened around the job's life, with its store, by the agent that hosts that: a control endpoint.
    """

    def __init__(self, launch: Launch, *, logs: LogsSpecs, say: Say, control: Control | None = None) -> None:
        self._launch, self._logs, self._say, self._control = launch, logs, say, control
        self._asked = Asked()

    def leave(self) -> None:
        """Let the node leave within its grace; the second time: at once. May be called by a signal handler."""
        self._asked.leave()

    def end(self, number: int) -> None:
        """End at once, because of a signal. May be called by a signal handler."""
        self._asked.end(number)

    def run(self) -> int:
        """Be the agent of a node for as long as it is part of the job.

        Returns:
            The exit status: 0, or 128 + a signal that it was told to end by.

        Raises:
            Infeasible: if the job has all the nodes that it may have, or the endpoint cannot be.
            Mismatch: if the node does not fit into the job.
            ShardshiftError: if workers failed, or the store is gone, or too few nodes came.
        """
        launch = self._launch
        try:
            store, hosts = open_store(
                launch.terms,
                launch.endpoint,
                hosts=launch.hosts,
                timeout_s=launch.timeout_s,
                silence_s=launch.silence_s,
                say=self._say,
                pause=self._asked.pause,
            )
            where = f"{store.host}:{store.port}"
            try:
                with contextlib.ExitStack() as ends:
                    stores = ends.enter_context(contextlib.closing(Stores(job_store(store), launch.silence_s)))
                    return self._run(store, stores, hosts, ends)
            except dist.DistError as error:
                raise store_lost(where, error) from error
            except MinorityStops as error:
                raise minority_stops(error) from None
        except EndAtOnce as end:
            return end.status

    def _run(self, store: dist.TCPStore, stores: Stores, hosts: bool, ends: contextlib.ExitStack) -> int:
        launch, say = self._launch, self._say
        if hosts and self._control is not None:
            ends.enter_context(self._control(stores.job))
        place = join(stores, launch.terms, timeout_s=launch.timeout_s, pause=self._asked.pause)
        succession: Succession | None = None
        more = dict(launch.environment)
        file = Path()
        if place.terms.max_nodes > 1:
            succession = Succession(place.slot, place.terms, store, stores, silence_s=launch.silence_s, say=say)
            ends.callback(succession.close)
            file = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="shardshift-"))) / "store"
            Whereabouts(succession.reign, store.host, store.port, succession.patience_s).write(file)
            more[STORE_FILE] = str(file)

        def moved(reign: Reign) -> None:
            assert succession is not None
            Whereabouts(reign.number, *reign.address, succession.patience_s).write(file)
            if reign.host == place.slot and self._control is not None:
                try:
                    ends.enter_context(self._control(stores.job))
                except (Infeasible, OSError) as error:  # the job goes on all the same
                    say(f"the control endpoint cannot be served here: {error}")

        life = NodeLife(
            place,
            stores,
            self._asked,
            hosts=hosts,
            grace_s=launch.grace_s,
            silence_s=launch.silence_s,
            say=say,
            succession=succession,
            moved=moved,
        )
        life.begin()
        try:
            workers = self._start(place, store, more)
        except SignalException as received:  # torch's handler, while it starts processes
            life.never_began("its node was told to end before it began")
            raise EndAtOnce(128 + received.sigval) from None
        except OSError as error:
            life.never_began(f"its process could not be started: {error}")
            raise
        try:
            return life.live(workers)
        finally:
            workers.close()

    def _start(self, place: Place, store: dist.TCPStore, more: Mapping[str, str]) -> Workers:
        launch, locals_ = self._launch, range(place.terms.devices_per_node)
        environments = {
            local: worker_environment(place, local, store.host, store.port, role=launch.role, more=more)
            for local in locals_
        }
        workers = Workers(place.devices, launch.command, environments, logs=self._logs, role=launch.role)
        if place.terms != launch.terms:
            self._say(f"the first node's --nnodes holds: {place.terms.min_nodes}:{place.terms.max_nodes}")
        if not place.founds:
            self._say(f"node {place.slot} joins job '{place.terms.name}' with devices {_span(place.devices)}")
        return workers


def _span(devices: Sequence[int]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
