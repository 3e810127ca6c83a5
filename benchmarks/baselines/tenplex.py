"""Tenplex's way: the whole state goes into a memory store on each node, and the new ranks read what they need.

Tenplex (SOSP 2024) keeps a job's state in a store process per node, in host memory; after a change each rank reads its
new tensors out of the stores, only the ranges that it needs, its own node's first. *Central*: one node's store has all
of it, and all go through that.

1. A store is a process of its own beside the ranks (``serve``). Its memory is shared with the ranks of its node, which
   copy into and out of it at the speed of memory (Tenplex goes through a file system in user space there). Other nodes'
   ranks reach it over TCP on loopback.
2. *save*: of equal shards on a node the lowest device's goes into the node's store.
3. *load*: a rank copies what its node's store has, and asks the others for the rest, one request a store. Both ends
   know beforehand what will be asked, so a request is one byte: looking up and deciding is not timed.
"""

from __future__ import annotations

import mmap
import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
from _processes import Rank, Side
from _state import dtype_of

from shardshift.plan import Plan
from shardshift.transport.views import byte_view
from shardshift.values import PlacedLayout, Region, Shard, Tensor
from shardshift.values.region import subtract_all

from .common import Place, part

B = TypeVar("B", bytearray, memoryview)

_ALIGN_BYTES: Final = 64
_PUT: Final = b"P"
_GET: Final = b"G"
_DONE: Final = b"."
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """One node's store: what lies where in its memory. Made before the ranks are forked, so all share the memory.

    Attributes:
        name: of the key under which its port is published.
        node: where it is.
        offsets: by shard where it begins, in bytes.
        savers: by shard the device that puts it there.
        memory: its memory.
    """

    name: str
    node: int
    offsets: dict[Shard, int]
    savers: dict[Shard, int]
    memory: mmap.mmap

    @classmethod
    def of(cls, name: str, node: int, layout: PlacedLayout, devices: Sequence[int]) -> Store:
        """A store with room for all that some devices hold, each shard once."""
        offsets: dict[Shard, int] = {}
        savers: dict[Shard, int] = {}
        end_bytes = 0
        for device in devices:
            for shard in layout.shards_on(device):
                if shard not in offsets:
                    offsets[shard], savers[shard] = end_bytes, device
                    end_bytes += -(-shard.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(name, node, offsets, savers, mmap.mmap(-1, max(end_bytes, 1)))

    def view(self, shard: Shard) -> torch.Tensor:
        """A shard's place in the memory, as a tensor."""
        count = shard.region.numel
        if not count:  # of a rank that has padding of the vocabulary alone
            return torch.empty(shard.region.shape, dtype=dtype_of(shard))
        flat = torch.frombuffer(self.memory, dtype=dtype_of(shard), count=count, offset=self.offsets[shard])
        return flat.view(shard.region.shape)


def stores_of(plan: Plan, devices_per_node: int, *, central: bool = False) -> list[Store]:
    """The stores for a change: one a node, or one on node 0."""
    old = sorted(plan.prev.devices)
    if central:
        return [Store.of("central", 0, plan.prev, old)]
    nodes: dict[int, list[int]] = {}
    for device in old:
        nodes.setdefault(device // devices_per_node, []).append(device)
    return [Store.of(f"node/{node}", node, plan.prev, held) for node, held in nodes.items()]


def serve(rank: Rank, store: Store, clients: int) -> None:
    """Be a store's process, until all clients have hung up.

    Args:
        rank: this process.
        store: what it keeps.
        clients: how many connect.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=clients) as server:
        rank.store("tenplex").set(store.name, str(server.getsockname()[1]))
        threads = []
        for _ in range(clients):
            connection, _ = server.accept()
            threads.append(threading.Thread(target=_serve_one, args=(connection, store), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _serve_one(connection: socket.socket, store: Store) -> None:
    with connection, suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        length = _LENGTH.unpack(bytes(_receive(connection, bytearray(_LENGTH.size))))[0]
        puts, gets = pickle.loads(_receive(connection, bytearray(length)))
        into = [byte_view(store.view(shard)) for shard in puts]
        out = [part(store.view(shard), region, shard.region) for shard, region in gets]
        connection.sendall(_DONE)
        while order := connection.recv(1):
            if order == _PUT:
                for view in into:
                    _receive(connection, view.numpy().data)
                connection.sendall(_DONE)
            else:
                for view in out:
                    _send(connection, view)


@dataclass(slots=True, eq=False)
class _Peer:
    """What a rank has to do with a store: what it puts there, and what it takes from it into its targets."""

    store: Store
    puts: list[Shard] = field(default_factory=list)
    gets: list[tuple[Shard, Region, torch.Tensor]] = field(default_factory=list)
    connection: socket.socket | None = None


class Tenplex:
    """A rank's side; see the head of this module.

    Args:
        place: this rank's part.
        stores: all stores.
        central: whether it is the central form, for the name.
    """

    def __init__(self, place: Place, stores: Sequence[Store], *, central: bool = False) -> None:
        self.name, self.moved_bytes = "Tenplex, central" if central else "Tenplex", dict[str, int]()
        self._place = place
        node = place.device // place.devices_per_node
        nearest = sorted(stores, key=lambda store: (store.node != node, (store.node - node) % len(stores)))
        self._peers = [_Peer(store) for store in nearest]
        for peer in self._peers:
            peer.puts = [shard for shard, device in peer.store.savers.items() if device == place.device]
        self._find()
        for peer in self._peers:
            if peer.store.node != node:
                self._connect(peer)

    def phases(self) -> Mapping[str, Side]:
        """Save and load."""
        return {"save": lambda: self._save, "load": lambda: self._load}

    def clean(self) -> None:
        """Nothing: a store keeps its memory."""

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers:
            if peer.connection is not None:
                peer.connection.close()

    def _find(self) -> None:
        """Decide from which store each element of the new shards comes: the nearest that has it."""
        holders: dict[Tensor, list[tuple[_Peer, Shard]]] = {}
        for peer in self._peers:
            for shard in peer.store.offsets:
                holders.setdefault(shard.tensor, []).append((peer, shard))
        for shard, target in self._place.targets.items():
            left: tuple[Region, ...] = (shard.region,) if shard.nbytes else ()
            for peer, held in holders[shard.tensor]:
                common = [both for region in left if (both := region.intersect(held.region)) is not None]
                peer.gets += [(held, region, part(target, region, shard.region)) for region in common]
                left = tuple(rest for region in left for rest in subtract_all(region, common))
            assert not left, f"no store has {left} of {shard}"

    def _connect(self, peer: _Peer) -> None:
        port = int(self._place.rank.store("tenplex").get(peer.store.name))
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        told = pickle.dumps((peer.puts, [(held, region) for held, region, _ in peer.gets]))
        connection.sendall(_LENGTH.pack(len(told)) + told)
        _receive(connection, bytearray(len(_DONE)))
        peer.connection = connection

    def _save(self) -> None:
        place, total_bytes = self._place, 0
        for peer in self._peers:
            if not peer.puts:
                continue
            if peer.connection is None:
                for shard in peer.puts:
                    peer.store.view(shard).copy_(place.sources[shard])
            else:
                peer.connection.sendall(_PUT)
                for shard in peer.puts:
                    _send(peer.connection, place.sources[shard])
                _receive(peer.connection, bytearray(len(_DONE)))
            total_bytes += sum(shard.nbytes for shard in peer.puts)
        self.moved_bytes["save"] = total_bytes

    def _load(self) -> None:
        total_bytes = 0
        far = [peer for peer in self._peers if peer.gets and peer.connection is not None]
        for peer in far:
            assert peer.connection is not None
            peer.connection.sendall(_GET)
        for peer in self._peers:
            if peer.connection is None:
                for held, region, target in peer.gets:
                    target.copy_(part(peer.store.view(held), region, held.region))
        for peer in far:
            assert peer.connection is not None
            for _, _, target in peer.gets:
                if target.is_contiguous():
                    _receive(peer.connection, _bytes(target))
                else:
                    landing = torch.empty(target.shape, dtype=target.dtype)
                    _receive(peer.connection, _bytes(landing))
                    target.copy_(landing)
        for peer in self._peers:
            total_bytes += sum(target.nbytes for _, _, target in peer.gets)
        self.moved_bytes["load"] = total_bytes


def _bytes(tensor: torch.Tensor) -> memoryview:
    return byte_view(tensor).numpy().data


def _send(connection: socket.socket, tensor: torch.Tensor) -> None:
    connection.sendall(_bytes(tensor.contiguous()))


def _receive(connection: socket.socket, into: B) -> B:
    """Fill a buffer.

    Raises:
        ConnectionError: if the other side hangs up before.
    """
    view = memoryview(into).cast("B")
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other side has hung up")
        view = view[got:]
    return into
