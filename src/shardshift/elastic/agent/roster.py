"""Roster: which nodes a job has, as their agents say in the job's store.

Each node has a *slot*, a number that is never used again, and a record under ``node/<slot>`` that its agent writes:

    {"slot": 1, "host": "worker-7", "devices": [4, 5], "pids": {"4": 4711, "5": 4712}, "state": "here"}

``devices`` are those whose workers run; the k-th device of slot s is s * devices_per_node + k. With every change the
number ``roster/version`` grows, so who wants to know whether anything is new reads one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import torch.distributed as dist

from ...coordination import AnsweringStore, current_era, era_store
from ...coordination.answering import close_store, part_of
from ...values import Mismatch

State = Literal["here", "leaving", "left"]

_TERMS: Final = "terms"
_COUNT: Final = "node/count"
_VERSION: Final = "roster/version"
_OFFERED: Final = "growth/offered"


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all nodes of a job; the first agent lays it down.

    Attributes:
        name: of the job.
        devices_per_node: workers on each node.
        min_nodes: the job starts with so many; ``min_nodes * devices_per_node`` is WORLD_SIZE.
        max_nodes: the most that may be there at a time.
    """

    name: str
    devices_per_node: int
    min_nodes: int
    max_nodes: int

    @property
    def world_size(self) -> int:
        """Devices of the first nodes."""
        return self.min_nodes * self.devices_per_node

    def devices_of(self, slot: int) -> tuple[int, ...]:
        """The devices of a node."""
        first = slot * self.devices_per_node
        return tuple(range(first, first + self.devices_per_node))


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What an agent says of its node.

    Attributes:
        slot: the node's number.
        host: name of the machine.
        devices: those whose workers run, in rising order.
        pids: process id of each of them.
        state: "here", "leaving" (its devices are to be freed) or "left" (so is a node whose agent is lost).
    """

    slot: int
    host: str
    devices: tuple[int, ...]
    pids: Mapping[int, int] = field(hash=False)
    state: State

    def to_json(self) -> str:
        """The record as it lies in the store."""
        pids = {str(device): pid for device, pid in self.pids.items()}
        return json.dumps(
            {"slot": self.slot, "host": self.host, "devices": self.devices, "pids": pids, "state": self.state}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> NodeRecord:
        """Read what ``to_json`` has written."""
        record = json.loads(text)
        pids = {int(device): pid for device, pid in record["pids"].items()}
        return cls(record["slot"], record["host"], tuple(record["devices"]), pids, record["state"])


class Roster:
    """The nodes of a job.

    Args:
        store: of the job (``Member.store``).
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def agree(self, terms: Terms) -> Terms:
        """Lay down the terms of the job, or learn those that the first agent has laid down.

        Raises:
            Mismatch: if this is another job's store, or its nodes have another number of devices.
        """
        held = Terms(**json.loads(self._store.compare_set(_TERMS, "", _terms_json(terms))))
        if held.name != terms.name:
            raise Mismatch(
                f"the store at this endpoint is that of job '{held.name}', not of '{terms.name}'; what to do: give "
                "each job an --rdzv-endpoint of its own, and all nodes of a job one --rdzv-id"
            )
        if held.devices_per_node != terms.devices_per_node:
            raise Mismatch(
                f"nodes of job '{held.name}' have {held.devices_per_node} devices, this one has "
                f"{terms.devices_per_node}; what to do: start it with --nproc-per-node {held.devices_per_node}"
            )
        return held

    def terms(self) -> Terms | None:
        """The terms of the job; None before an agent has laid them down, or under another launcher."""
        return Terms(**json.loads(self._store.get(_TERMS))) if self._store.check([_TERMS]) else None

    def begin(self, founders: int) -> None:
        """The first slots are given out; called by every agent that takes one, in whatever order."""
        self._store.compare_set(_COUNT, "", str(founders))

    def next_slot(self) -> int:
        """A slot for one node more."""
        return self._store.add(_COUNT, 1) - 1

    def count(self) -> int:
        """How many slots have been given out."""
        return self._store.add(_COUNT, 0) if self._store.check([_COUNT]) else 0

    def write(self, node: NodeRecord) -> None:
        """Say what is now true of a node."""
        self._store.set(_key(node.slot), node.to_json())
        self.touch()

    def node(self, slot: int) -> NodeRecord | None:
        """The record of a node, if it has written one."""
        return NodeRecord.from_json(self._store.get(_key(slot))) if self._store.check([_key(slot)]) else None

    def nodes(self) -> tuple[NodeRecord, ...]:
        """The records that there are, in order of slots."""
        return tuple(node for slot in range(self.count()) if (node := self.node(slot)) is not None)

    def records(self) -> dict[str, str]:
        """All that a store which takes the place of this one has to hold of the nodes, by key."""
        keys = [_TERMS, _COUNT, _VERSION, _OFFERED, *(_key(slot) for slot in range(self.count()))]
        there = [key for key in keys if self._store.check([key])]
        return dict(zip(there, (content.decode() for content in self._store.multi_get(there)), strict=True))

    def touch(self) -> None:
        """Something has changed that a lead may want to look at, such as a device that stands by now."""
        self._store.add(_VERSION, 1)

    def version(self) -> int:
        """A number that grows whenever a record changes."""
        return self._store.add(_VERSION, 0)

    def offer(self, devices: Iterable[int]) -> None:
        """Note that the job has been offered these devices."""
        self._store.set(_OFFERED, json.dumps(sorted(self.offered().union(devices))))

    def offered(self) -> set[int]:
        """The devices that the job has been offered since they came."""
        return set(json.loads(self._store.get(_OFFERED))) if self._store.check([_OFFERED]) else set()

    def devices_here(self) -> tuple[int, ...]:
        """The devices whose workers run on nodes that stay, in rising order."""
        return self._devices("here")

    def leaving(self) -> tuple[int, ...]:
        """The devices whose workers still run on nodes that are about to leave, in rising order."""
        return self._devices("leaving")

    def _devices(self, state: State) -> tuple[int, ...]:
        return tuple(device for node in self.nodes() if node.state == state for device in node.devices)


class Stores:
    """The parts of the job's store that an agent asks; each answers within a limit, or raises ``dist.DistError``.

    Args:
        store: of the job.
        limit_s: how long its host may be silent.

    Attributes:
        job: all of it.
        waiting: where nodes that wait for the first ones show their beats, by ticket.
        nodes: where agents show theirs, by slot.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._limit_s = limit_s
        self._take(store)

    def _take(self, store: dist.Store) -> None:
        self.job = AnsweringStore.over(store, self._limit_s)
        self.waiting = part_of(self.job, "waiting")
        self.nodes = part_of(self.job, "agents")

    def move(self, store: dist.Store) -> None:
        """From now on these are parts of another store, which has taken the place of the one before."""
        self.close()
        self._take(store)

    def current(self) -> int:
        """The number of the present era."""
        return current_era(self.job)

    def era(self, number: int) -> dist.Store:
        """What an era has to itself."""
        return era_store(self.job, number)

    def close(self) -> None:
        """Nothing is asked any more."""
        close_store(self.job)


def _terms_json(terms: Terms) -> str:
    names = ("name", "devices_per_node", "min_nodes", "max_nodes")
    return json.dumps({name: getattr(terms, name) for name in names})


def _key(slot: int) -> str:
    return f"node/{slot}"
