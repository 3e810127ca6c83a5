"""The job's store, as agents open it: one of them hosts it, the others connect.

In attempts, each in a thread of its own: in C++, where a connection may hang for ever, no signal is heard.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...values import Infeasible, ShardshiftError
from .roster import Terms

_PROBE_S: Final = 1.0
_CONNECT_S: Final = 5.0


def open_store(
    terms: Terms,
    endpoint: str,
    *,
    hosts: bool | None,
    timeout_s: float,
    silence_s: float,
    say: Callable[[str], None],
    pause: Callable[[], None],
) -> tuple[dist.TCPStore, bool]:
    """Host the job's store, or connect to it, whichever can be.

    Args:
        terms: of the job.
        endpoint: ``HOST:PORT``.
        hosts: whether this process is to host it; None: if it can bind the endpoint's address.
        timeout_s: how long to try.
        silence_s: how long a request may take.
        say: takes a line for whoever has started this process, where it has to wait and for what.
        pause: called between two attempts; may raise.

    Returns:
        The store, and whether this process hosts it.

    Raises:
        Infeasible: if the endpoint is none.
        ShardshiftError: if there is no store in time.
    """
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise Infeasible(f"{error} What to do: give --rdzv-endpoint HOST:PORT") from None
    until_s = time.monotonic() + timeout_s
    told = ""
    while True:
        reason = "nothing listens there" if _addresses(host, port) else f"no host is known by the name '{host}'"
        hosts_it = _can_bind(host, port) if hosts is None else hosts
        if hosts_it or _answers(host, port):
            parameters = RendezvousParameters(
                "c10d",
                endpoint,
                terms.name,
                terms.min_nodes,
                terms.max_nodes,
                is_host=str(hosts_it),
                read_timeout=max(1, round(silence_s)),
            )
            store = _attempt(lambda made=parameters: _of_torch(made), until_s, pause)  # type: ignore[misc]
            if store is not None:
                return store, hosts_it
            reason = "it cannot be bound" if hosts_it else "what listens there is no store"
        if reason != told:
            say(f"waits up to {timeout_s:.0f} s for the job's store at {endpoint}: {reason}")
            told = reason
        if time.monotonic() > until_s:
            raise ShardshiftError(
                f"no store at {endpoint} within {timeout_s:.0f} s: {reason}; what to do: give all nodes the address "
                "and a free port of one of them as --rdzv-endpoint, and start that one"
            )
        pause()


def succeeding_store(address: str, port: int, silence_s: float) -> dist.TCPStore:
    """Host a store that takes the place of one that is lost, at its port if that is free here.

    Args:
        address: of this process's host, as the others reach it.
        port: of the store that is lost.
        silence_s: how long a request may take.
    """
    timeout = timedelta(seconds=silence_s)
    for tried in (port, 0) if _can_bind(address, port) else (0,):
        with contextlib.suppress(dist.DistError):
            return dist.TCPStore(address, tried, is_master=True, wait_for_workers=False, timeout=timeout)
    raise ShardshiftError(f"no store can be hosted on {address}; what to do: free a port")


def connected_store(
    address: str, port: int, silence_s: float, timeout_s: float, pause: Callable[[], None] = lambda: None
) -> dist.TCPStore | None:
    """Connect to a store that another process hosts; None if there is none in time.

    Args:
        address: of its host.
        port: of the store.
        silence_s: how long a request may take.
        timeout_s: how long to try.
        pause: called between two looks; may raise.
    """
    timeout = timedelta(seconds=silence_s)
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if _answers(address, port):
            store = _attempt(
                lambda: dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout),
                until_s,
                pause,
            )
            if store is not None:
                return store
        pause()
    return None


def own_address(store: dist.TCPStore) -> str:
    """This host's address, as seen from the store's."""
    with socket.create_connection((store.host, store.port), _CONNECT_S) as probe:
        address: str = probe.getsockname()[0]
        return address


def _of_torch(parameters: RendezvousParameters) -> dist.TCPStore | None:
    """The store of torch's rendezvous backend; None if another process was faster, or what listens is none."""
    with contextlib.suppress(RendezvousConnectionError):
        _, store = create_backend(parameters)
        return store if isinstance(store, dist.TCPStore) else None
    return None


def _attempt(
    make: Callable[[], dist.TCPStore | None], until_s: float, pause: Callable[[], None]
) -> dist.TCPStore | None:
    """Make a store in a thread; None if that failed, or takes too long."""
    made: queue.SimpleQueue[dist.TCPStore | None] = queue.SimpleQueue()

    def run() -> None:
        store = None
        with contextlib.suppress(dist.DistError):
            store = make()
        made.put(store)

    threading.Thread(target=run, daemon=True).start()
    while made.empty() and time.monotonic() <= until_s:
        pause()
    return None if made.empty() else made.get()


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
