"""Ranks on hosts of their own: network namespaces, each with a shaped link to one bridge.

A namespace is a network stack of its own, so what ranks in two of them send one another crosses two virtual cables,
and each end of a cable is held to a rate by a token bucket (``tc``'s tbf). So the network, not this machine's memory,
is what is slow, in both directions of each host at its own. Names carry the process id; what a killed process has left
is taken away by the next one that comes. Addresses are of 198.18.0.0/15, which is set apart for benchmarks (RFC 2544).

Shaping loopback was rejected: all ranks would share one link.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_PREFIX: Final = "shardshift"
_RUN: Final = Path("/run/netns")
_DEVICES: Final = Path("/sys/class/net")
_INTERFACE: Final = "wire0"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Namespaces that reach one another and this process.

    Attributes:
        names: of the namespaces.
        gateway: this process's address.
    """

    names: tuple[str, ...]
    gateway: str

    def enter(self, index: int) -> None:
        """Move this process, which must have one thread, to host ``index``; gloo groups made later run there."""
        with (_RUN / self.names[index]).open() as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"setns to {self.names[index]}: {os.strerror(code)}")
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what libraries write to stderr from the console."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def obstacle() -> str:
    """Why there can be no hosts on this machine; empty if there can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not found"
    try:
        with shaped_hosts(1, 100):
            return ""
    except OSError as error:
        return str(error)


@contextmanager
def shaped_hosts(count: int, rate_mbit: int) -> Iterator[Hosts]:
    """Hosts whose links carry ``rate_mbit`` each way.

    Raises:
        OSError: if a command fails; nothing is left behind.
    """
    _remove_leftovers()
    pid = os.getpid()
    bridge, network = f"ss{pid}b", f"198.18.{pid % 256}"
    names = tuple(f"{_PREFIX}-{pid}-{index}" for index in range(count))
    try:
        _call(f"ip link add {bridge} type bridge")
        _call(f"ip addr add {network}.254/24 dev {bridge}")
        _call(f"ip link set dev {bridge} up")
        for index, name in enumerate(names):
            outside = f"ss{pid}h{index}"
            _call(f"ip netns add {name}")
            _call(f"ip link add {outside} type veth peer name {_INTERFACE} netns {name}")
            _call(f"ip link set dev {outside} master {bridge} up")
            _call(f"ip -n {name} addr add {network}.{index + 1}/24 dev {_INTERFACE}")
            _call(f"ip -n {name} link set dev {_INTERFACE} up")
            _call(f"ip -n {name} link set dev lo up")
            shape = f"root tbf rate {rate_mbit}mbit burst 256kb latency 100ms"
            _call(f"tc qdisc add dev {outside} {shape}")
            _call(f"tc -n {name} qdisc add dev {_INTERFACE} {shape}")
        yield Hosts(names, f"{network}.254")
    finally:
        _remove(pid)


def _remove_leftovers() -> None:
    for path in _RUN.glob(f"{_PREFIX}-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(int(pid))


def _remove(pid: int) -> None:
    """Take away what a process made: cables first, as the kernel takes its time with those of a namespace."""
    for path in sorted(_DEVICES.glob(f"ss{pid}[bh]*")):
        subprocess.run(["ip", "link", "del", path.name], capture_output=True, check=False)
    for path in _RUN.glob(f"{_PREFIX}-{pid}-*"):
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"'{command}' failed: {done.stderr.strip()}")
