"""Which devices can read one another's memory, found out by doing it.

1. Every device publishes who it is: boot id, PID namespace, process id, the address of a few random bytes, the name of
   a socket that it listens on.
2. It tries each device of the same boot and namespace: opens a handle on its process, reads the random bytes out of its
   memory with ``process_vm_readv``, connects to its socket (the lower id calls the higher). It publishes what failed.
3. Two devices have a link if nothing failed on either side. Both read the same two records, so they agree.

Trying was chosen over asking: ptrace_scope, seccomp filters, user namespaces, dumpable flags and LSMs all have a say,
and only the kernel knows what they come to. Under yama's scope 1, where only a parent may read, a process may name who
else may; that names one process tree only, so here it is everybody of the same user, for as long as the process lives.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from .protocol import TransportError
from .views import Table

IOV_MAX: Final = 1024
"""Runs that one ``process_vm_readv`` takes on either side."""

_TOKEN_BYTES: Final = 32
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = -1
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_BUFFER_BYTES: Final = 1 << 20
_ACCEPT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Link:
    """A process on this machine whose memory this one can read, and the other way round.

    Attributes:
        peer: its device id.
        pid: its process id.
        pidfd: a handle that becomes readable when the process ends; owned.
        socket: connected to it, keeps the bounds of packets; owned.
    """

    peer: int
    pid: int
    pidfd: int
    socket: socket.socket

    def close(self) -> None:
        """Give back both descriptors, and let the peer know: what a process has forked holds the socket open, too."""
        with suppress(OSError):  # the peer has gone before
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        os.close(self.pidfd)


class MemoryReader:
    """``process_vm_readv`` of the C library.

    Raises:
        OSError: if there is none.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, f"{sys.platform} is not Linux")
        try:
            self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        except AttributeError as error:
            raise OSError(errno.ENOSYS, "the C library has no process_vm_readv") from error
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]

    def read(self, pid: int, into: Table, of: Table) -> int:
        """Copy from runs of another process's memory to runs of this one's, without the interpreter lock.

        Args:
            pid: the other process, or this one.
            into: at most ``IOV_MAX`` runs of this process.
            of: at most ``IOV_MAX`` runs of the other.

        Returns:
            Bytes copied; fewer than asked for if a later run cannot be read.

        Raises:
            OSError: if nothing can be read.
        """
        got = self._call(pid, into.ctypes.data, len(into), of.ctypes.data, len(of), 0)
        if got < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_readv: {errno.errorcode.get(number, number)}")
        return int(got)


def connect_links(
    store: dist.Store, device: int, devices: Sequence[int], timeout_s: float
) -> tuple[dict[int, Link], dict[int, str]]:
    """Try every other device; all of them call this.

    Args:
        store: a prefix that nothing else uses.
        device: this side's id.
        devices: the ids of all.
        timeout_s: how long to wait for the others.

    Returns:
        The links, by peer; and for every other peer why there is none.

    Raises:
        TransportError: if the devices did not all come in time.
    """
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    listener: socket.socket | None = None
    found: dict[int, tuple[int, socket.socket | None]] = {}
    links: dict[int, Link] = {}
    try:
        try:
            reader = MemoryReader()
            _let_others_read()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind("")  # the kernel chooses a name that nobody has; no file
            listener.listen(len(devices))
            me = _identity(token, listener)
        except OSError as error:
            reader, me = None, {"unable": error.strerror or str(error)}
        peers = _exchange(store, "hello", device, me, [peer for peer in devices if peer != device], timeout_s)
        faults = {peer: _try(peer, record, me, device, reader, found) for peer, record in peers.items()}
        near = [peer for peer, record in peers.items() if _near(me, record)]
        verdicts = _exchange(store, "verdict", device, {str(p): text for p, text in faults.items()}, near, timeout_s)
        for peer in near:
            faults[peer] = faults[peer] or _theirs(verdicts[peer][str(device)])
        good = {peer for peer in near if not faults[peer]}
        arrived = _accept(listener, {peer: peers[peer]["pid"] for peer in good if peer < device})
        for peer in sorted(good):
            pidfd, out = found[peer]
            wire = out or arrived.get(peer)
            if wire is None:
                raise TransportError(f"device {device}: device {peer} said that it had called, and has not")
            _fit(wire)
            links[peer] = Link(peer, peers[peer]["pid"], pidfd, wire)
        return links, {peer: fault for peer, fault in faults.items() if fault}
    finally:
        for peer, (pidfd, out) in found.items():
            if peer not in links:
                os.close(pidfd)
                if out is not None:
                    out.close()
        if listener is not None:
            listener.close()


def why_not(faults: Mapping[int, str]) -> str:
    """One line that says with whom the direct path is not used, and why."""
    reasons: dict[str, list[int]] = {}
    for peer, fault in sorted(faults.items()):
        reasons.setdefault(fault, []).append(peer)
    each = (
        f"device{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}: {fault}"
        for fault, peers in reasons.items()
    )
    return f"the direct path between processes of one host is not used with {'; '.join(each)}"


def _identity(token: ctypes.Array[ctypes.c_char], listener: socket.socket) -> dict[str, Any]:
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "address": ctypes.addressof(token),
        "token": token.raw.hex(),
        "socket": listener.getsockname().hex(),
    }


def _near(me: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    return "boot" in me and me["boot"] == record.get("boot") and me["namespace"] == record["namespace"]


def _try(
    peer: int,
    record: Mapping[str, Any],
    me: Mapping[str, Any],
    device: int,
    reader: MemoryReader | None,
    found: dict[int, tuple[int, socket.socket | None]],
) -> str:
    """What speaks against a link; descriptors that were opened go into ``found``."""
    if reader is None:
        return str(me["unable"])
    if "unable" in record:
        return _theirs(record["unable"])
    if record["boot"] != me["boot"]:
        return "another host"
    if record["namespace"] != me["namespace"]:
        return "another PID namespace"
    try:
        pidfd = os.pidfd_open(record["pid"])
        found[peer] = (pidfd, None)
        room = np.zeros(_TOKEN_BYTES, dtype=np.uint8)
        into = np.array([[room.ctypes.data, _TOKEN_BYTES]], dtype=np.int64)
        reader.read(record["pid"], into, np.array([[record["address"], _TOKEN_BYTES]], dtype=np.int64))
        if room.tobytes().hex() != record["token"]:
            return "reading its memory gave other bytes than it wrote"
        if peer > device:
            out = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found[peer] = (pidfd, out)
            out.settimeout(_ACCEPT_S)
            try:
                out.connect(bytes.fromhex(record["socket"]))
            except ConnectionRefusedError:
                return "another network namespace"  # socket names are the namespace's
            out.send(str(device).encode())
    except OSError as error:
        scope = f" (ptrace_scope {_scope()})" if error.errno == errno.EPERM and _scope() else ""
        return f"{error.strerror or error}{scope}"
    return ""


def _theirs(fault: str) -> str:
    return f"on its side, {fault}" if fault else ""


def _accept(listener: socket.socket | None, pids: Mapping[int, int]) -> dict[int, socket.socket]:
    """The connections of these devices, which have all called by now; others are closed."""
    found: dict[int, socket.socket] = {}
    if listener is None:
        return found
    listener.settimeout(_ACCEPT_S)
    with suppress(OSError):
        while len(found) < len(pids):
            wire, _ = listener.accept()
            wire.settimeout(_ACCEPT_S)
            caller = wire.recv(16).decode()
            pid, _, _ = struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if caller.isdigit() and pids.get(int(caller)) == pid:
                found[int(caller)] = wire
            else:
                wire.close()
    return found


def _fit(wire: socket.socket) -> None:
    wire.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        wire.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)  # the kernel gives what it allows


def _exchange(
    store: dist.Store, topic: str, device: int, record: Mapping[str, Any], peers: Sequence[int], timeout_s: float
) -> dict[int, dict[str, Any]]:
    store.set(f"{topic}/{device}", json.dumps(record))
    keys = [f"{topic}/{peer}" for peer in peers]
    if not keys:
        return {}
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(f"device {device} did not meet devices {list(peers)}: {error}") from error
    return {peer: json.loads(store.get(key)) for peer, key in zip(peers, keys, strict=True)}


def _scope() -> str:
    try:
        return _YAMA.read_text().strip()
    except OSError:
        return ""


def _let_others_read() -> None:
    if _scope() == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
