"""What keeps workers from outliving their agent. A script of its own, without an import beyond the standard library.

    guard.py watch            read "+PID" and "-PID" on stdin; at its end, end the sessions of all PIDs that are left
    guard.py run PARENT COMMAND ...    become COMMAND, which the kernel ends when PARENT does

A worker leads a session of its own, which its children are in. Where an agent is killed, nobody but a third process
can end the children (they die with nobody), and only the kernel ends a worker for sure (the guard may be killed, too).
So both are there. It starts in 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127


def end_sessions(leaders: Collection[int]) -> None:
    """Kill every process of some sessions. A process that is left behind when its leader ends is still in it."""
    killed: set[int] = set()
    while found := _members(leaders) - killed:  # again, for what they have started meanwhile
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _members(leaders: Collection[int]) -> set[int]:
    members = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                if os.getsid(int(name)) in leaders:
                    members.add(int(name))
    return members


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:
        sign, pid = line[0], int(line[1:])
        (leaders.add if sign == "+" else leaders.discard)(pid)
    if leaders:
        end_sessions(leaders)


def _run(parent: int, command: list[str]) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(_NOT_FOUND)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        _watch()
    else:
        _run(int(sys.argv[2]), sys.argv[3:])
