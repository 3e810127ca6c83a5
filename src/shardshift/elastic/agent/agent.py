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
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...values import Infeasible, ShardshiftError
from ..member import job_store
from .joining import Place, join
from .node import Asked, EndAtOnce, NodeLife, Say, store_lost
from .roster import Stores, Terms
from .workers import Workers, worker_environment

Control = Callable[[dist.Store], contextlib.AbstractContextManager[object]]

_PROBE_S: Final = 1.0


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
        try:
            store, hosts = open_store(self._launch, self._asked.pause)
            where = f"{store.host}:{store.port}"
            try:
                with contextlib.ExitStack() as ends:
                    stores = ends.enter_context(contextlib.closing(Stores(job_store(store), self._launch.silence_s)))
                    if hosts and self._control is not None:
                        ends.enter_context(self._control(stores.job))
                    return self._run(store, stores, hosts)
            except dist.DistError as error:
                raise store_lost(where, error) from error
        except EndAtOnce as end:
            return end.status

    def _run(self, store: dist.TCPStore, stores: Stores, hosts: bool) -> int:
        launch = self._launch
        place = join(stores, launch.terms, timeout_s=launch.timeout_s, pause=self._asked.pause)
        life = NodeLife(
            place,
            stores,
            self._asked,
            hosts=hosts,
            grace_s=launch.grace_s,
            silence_s=launch.silence_s,
            say=self._say,
        )
        life.begin()
        try:
            workers = self._start(place, store)
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

    def _start(self, place: Place, store: dist.TCPStore) -> Workers:
        launch, locals_ = self._launch, range(place.terms.devices_per_node)
        environments = {
            local: worker_environment(place, local, store.host, store.port, role=launch.role, more=launch.environment)
            for local in locals_
        }
        workers = Workers(place.devices, launch.command, environments, logs=self._logs, role=launch.role)
        if place.terms != launch.terms:
            self._say(f"the first node's --nnodes holds: {place.terms.min_nodes}:{place.terms.max_nodes}")
        if not place.founds:
            self._say(f"node {place.slot} joins job '{place.terms.name}' with devices {_span(place.devices)}")
        return workers


def open_store(launch: Launch, pause: Callable[[], None]) -> tuple[dist.TCPStore, bool]:
    """Host the job's store, or connect to it, whichever can be.

    Args:
        launch: what the agent is to do.
        pause: called between two attempts; may raise.

    Returns:
        The store, and whether this process hosts it.

    Raises:
        Infeasible: if the endpoint is none.
        ShardshiftError: if there is no store in time.
    """
    try:
        host, port = parse_rendezvous_endpoint(launch.endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise Infeasible(f"{error} What to do: give --rdzv-endpoint HOST:PORT") from None
    until_s = time.monotonic() + launch.timeout_s
    reason = "nothing listens there"
    # In attempts, each in a thread of its own: in C++, where a connection may hang for ever, no signal is heard.
    while True:
        hosts = _can_bind(host, port) if launch.hosts is None else launch.hosts
        if hosts or _answers(host, port):
            attempts: queue.SimpleQueue[dist.TCPStore | None] = queue.SimpleQueue()
            threading.Thread(target=_attempt, args=(launch, hosts, attempts), daemon=True).start()
            while attempts.empty() and time.monotonic() <= until_s:
                pause()
            if not attempts.empty() and (store := attempts.get()) is not None:
                return store, hosts
            reason = "it cannot be bound" if hosts else "what listens there is no store"
        if time.monotonic() > until_s:
            raise ShardshiftError(
                f"no store at {launch.endpoint} within {launch.timeout_s:.0f} s: {reason}; what to do: give all nodes "
                "the address and a free port of one of them as --rdzv-endpoint, and start that one"
            )
        pause()


def _attempt(launch: Launch, hosts: bool, attempts: queue.SimpleQueue[dist.TCPStore | None]) -> None:
    """Put the store of torch's rendezvous backend; None if another process was faster, or is none."""
    terms = launch.terms
    parameters = RendezvousParameters(
        "c10d",
        launch.endpoint,
        terms.name,
        terms.min_nodes,
        terms.max_nodes,
        is_host=str(hosts),
        read_timeout=max(1, round(launch.silence_s)),
    )
    store: dist.Store | None = None
    with contextlib.suppress(RendezvousConnectionError):
        _, store = create_backend(parameters)
    attempts.put(store if isinstance(store, dist.TCPStore) else None)


def _can_bind(host: str, port: int) -> bool:
    """Whether an address is this machine's, and free: for all protocols, since the store listens on all."""
    can = False
    for family, kind, protocol, _, address in _addresses(host, port):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
                probe.bind(address)
                probe.listen()
                can = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return can


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _PROBE_S):
        return True
    return False


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:  # a name that is not known yet
        return []


def _span(devices: Sequence[int]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
