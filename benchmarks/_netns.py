"""Ranks on hosts of their own: network namespaces with shaped links to one bridge, or to one of a node's, as a cluster.

A namespace is a network stack of its own, so what ranks in two of them send one another crosses two virtual cables,
and each end of a cable is held to a rate by a token bucket (``tc``'s tbf). So the network, not this machine's memory,
is what is slow, in both directions of each host at its own. Names carry the process id; what a killed process has left
is taken away by the next one that comes. Addresses are of 198.18.0.0/15, which is set apart for benchmarks (RFC 2544).

A *cluster* has a bridge for each node, which devices hang on, each a namespace with a shaped cable of its own, and a
bridge between the nodes, to which each node's bridge has one shaped cable. So all that a device sends or receives goes
through its lane, and what leaves its node through the node's link besides: the lanes of ``shardshift.values.Topology``.

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

    @property
    def interface(self) -> str:
        """The name that each host has for its end of its cable."""
        return _INTERFACE

    def address(self, index: int) -> str:
        """Of host ``index``, as the others reach it."""
        return f"{self.gateway.rpartition('.')[0]}.{index + 1}"

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
    names = _names(pid, count)
    try:
        bridge, gateway = _core(pid)
        for index in range(count):
            _add_host(pid, index, bridge, rate_mbit)
        yield Hosts(names, gateway)
    finally:
        _remove(pid)


@contextmanager
def shaped_cluster(nodes: int, devices_per_node: int, device_mbit: int, link_mbit: int) -> Iterator[Hosts]:
    """Hosts, one a device, node by node, of a cluster.

    Args:
        nodes: how many.
        devices_per_node: of each.
        device_mbit: what a device's lane carries each way.
        link_mbit: what a node's link carries each way.

    Raises:
        OSError: if a command fails; nothing is left behind.
    """
    _remove_leftovers()
    pid = os.getpid()
    names = _names(pid, nodes * devices_per_node)
    try:
        core, gateway = _core(pid)
        for node in range(nodes):
            bridge, up, down = (f"ss{pid}{kind}{node}" for kind in "nuc")
            _call(f"ip link add {bridge} type bridge")
            _call(f"ip link set dev {bridge} up")
            _call(f"ip link add {up} type veth peer name {down}")
            _call(f"ip link set dev {up} master {bridge} up")
            _call(f"ip link set dev {down} master {core} up")
            for end in (up, down):
                _call(f"tc qdisc add dev {end} {_shape(link_mbit)}")
            for index in range(node * devices_per_node, (node + 1) * devices_per_node):
                _add_host(pid, index, bridge, device_mbit)
        yield Hosts(names, gateway)
    finally:
        _remove(pid)


def cable_of(hosts: Hosts, index: int) -> str:
    """The end of a host's cable that is outside of it; taken down, the host is cut off."""
    return f"ss{hosts.names[index].split('-')[1]}h{index}"


def _names(pid: int, count: int) -> tuple[str, ...]:
    return tuple(f"{_PREFIX}-{pid}-{index}" for index in range(count))


def _network(pid: int) -> str:
    return f"198.18.{pid % 256}"


def _core(pid: int) -> tuple[str, str]:
    """The bridge that this process is on, and this process's address there."""
    bridge, gateway = f"ss{pid}b", f"{_network(pid)}.254"
    _call(f"ip link add {bridge} type bridge")
    _call(f"ip addr add {gateway}/24 dev {bridge}")
    _call(f"ip link set dev {bridge} up")
    return bridge, gateway


def _add_host(pid: int, index: int, bridge: str, rate_mbit: int) -> None:
    name, outside = f"{_PREFIX}-{pid}-{index}", f"ss{pid}h{index}"
    _call(f"ip netns add {name}")
    _call(f"ip link add {outside} type veth peer name {_INTERFACE} netns {name}")
    _call(f"ip link set dev {outside} master {bridge} up")
    _call(f"ip -n {name} addr add {_network(pid)}.{index + 1}/24 dev {_INTERFACE}")
    _call(f"ip -n {name} link set dev {_INTERFACE} up")
    _call(f"ip -n {name} link set dev lo up")
    _call(f"tc qdisc add dev {outside} {_shape(rate_mbit)}")
    _call(f"tc -n {name} qdisc add dev {_INTERFACE} {_shape(rate_mbit)}")


def _shape(rate_mbit: int) -> str:
    return f"root tbf rate {rate_mbit}mbit burst 256kb latency 100ms"


def _remove_leftovers() -> None:
    for path in _RUN.glob(f"{_PREFIX}-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(int(pid))


def _remove(pid: int) -> None:
    """Take away what a process made: cables first, as the kernel takes its time with those of a namespace."""
    for path in sorted(_DEVICES.glob(f"ss{pid}[bhnuc]*")):
        subprocess.run(["ip", "link", "del", path.name], capture_output=True, check=False)
    for path in _RUN.glob(f"{_PREFIX}-{pid}-*"):
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"'{command}' failed: {done.stderr.strip()}")
