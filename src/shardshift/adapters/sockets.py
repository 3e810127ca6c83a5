"""The sockets of a world's process groups, so that a world can be cut off at once.

A gloo collective that waits for a process that has stopped can be ended by nothing that torch offers: it has no abort,
a group's destructor waits for its works, and a neighbour's death wakes only those that wait for that neighbour at the
moment. What ends it is the kernel: ``shutdown(2)`` of the sockets, from any thread. gloo's loop then sees its peers
close their ends, every work of the group fails within a millisecond, and the group can be dropped.

1. Before a world is entered, note every socket of the process; when its job is built, note them again. What came in
   between and is connected is the world's, unless it leads to a server that the process was connected to before, or
   came to one that it had itself: other threads open more connections to the job's store meanwhile, or get them if the
   store is here. gloo connects all pairs as a group is made, and listens at a port of its own.
2. ``cut`` shuts those down that are still open. They are known by their inode, which the kernel does not use again
   soon, and looked at through a duplicate: so a number that another thread has closed and opened meanwhile is safe.

NCCL has an abort of its own (``world.cut``). Rejected: dropping the groups alone, in a thread of their own (they hang
there until the timeout, and neighbours with them), and a proxy in front of each pair (every byte twice).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_DESCRIPTORS: Final = Path("/proc/self/fd")
_TCP: Final = (socket.AF_INET, socket.AF_INET6)


class Sockets:
    """Those of one world. Made before the world is entered; on systems without /proc it knows of none."""

    def __init__(self) -> None:
        self._own: frozenset[int] = frozenset()
        before = {inode: (_peer(one), _served(one)) for inode, one in _sockets()}
        self._known = frozenset(before)
        self._servers = {peer for peer, _ in before.values() if peer is not None}
        self._served = {port for _, port in before.values() if port is not None}

    def note(self) -> None:
        """The world is there: what has come since belongs to it."""
        self._own = frozenset(
            inode
            for inode, one in _sockets()
            if inode not in self._known
            and (peer := _peer(one)) is not None
            and peer not in self._servers
            and one.getsockname()[1] not in self._served
        )

    def cut(self) -> int:
        """Shut down what is still open, from any thread; how many these were."""
        count = 0
        for inode, one in _sockets():
            if inode in self._own:
                with contextlib.suppress(OSError):  # the other end was faster
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every socket of this process by inode, as a duplicate that is closed when the next one is asked for."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else []:
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as one:
            yield status.st_ino, one


def _served(one: socket.socket) -> int | None:
    """The port that a TCP socket listens at; None if it does not."""
    listens = one.family in _TCP and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return one.getsockname()[1] if listens else None


def _peer(one: socket.socket) -> Any:
    """Whom a TCP socket is connected to; None if to nobody."""
    if one.family not in _TCP:
        return None
    try:
        return one.getpeername()
    except OSError:
        return None
