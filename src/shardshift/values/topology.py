"""Topology: which device sits on which node, and how fast bytes move between them.

Two kinds of lanes, each with a rate per direction, carry all that moves:

1. *Device*: all bytes that a device sends or receives, inside its node or not (PCIe or NVLink).
2. *Link*: all bytes that leave or enter a node (its network cards together). Traffic inside a node is not on it.

Every device and every link has the cluster's rate unless an exception names it, so a cluster of 131,072 devices
costs as much to keep, compare and hash as one of two. Arrays of one rate per device are made when asked for.

Left out: switches, oversubscription between nodes, and which network card a device is nearest to: any one device
may use the whole link of its node (NCCL does so, PXN). A matrix of rates per pair of devices was rejected: nobody
can fill one in, and 131,072 squared entries fit nowhere.

A topology file is TOML. Singular tables state the rule, plural ones the exceptions; all but the size is optional::

    preset = "cluster-a"          # or: nodes = 32, devices_per_node = 4; with a preset, `nodes` may change its size
    latency_s = 20e-6
    [device]                      # every device; rates for both directions, or each by itself
    in_bytes_per_s = 25e9
    out_gbit_per_s = 200
    memory_bytes = 42949672960
    [link]                        # the network link of every node
    gbit_per_s = 400
    [[devices]]                   # what is not named here stays as above
    ids = [3, 4]
    out_bytes_per_s = 6e9
    [[links]]
    nodes = [1]
    gbit_per_s = 100
"""

from __future__ import annotations

import math
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import Infeasible

GBIT_BYTES = 125_000_000
"""Bytes in a gigabit, as networks count: 10**9 bits."""

MOST_DEVICES: Final = 2**21
"""Devices of a topology at most, 16 times the largest job that is planned for: more are a slip of the keyboard, and
arrays of one entry a device would be made of it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a lane carries, per direction, in bytes per second.

    Raises:
        Infeasible: if a rate is not a finite number above 0.
    """

    in_bytes_per_s: float
    out_bytes_per_s: float

    def __post_init__(self) -> None:
        for name, rate in (("in", self.in_bytes_per_s), ("out", self.out_bytes_per_s)):
            if not (0 < rate < math.inf):
                raise Infeasible(
                    f"{name}_bytes_per_s is {rate}, expected a finite number above 0; what to do: leave out "
                    "devices that cannot be reached"
                )

    @classmethod
    def both(cls, bytes_per_s: float) -> Rates:
        """The same rate in and out."""
        return cls(bytes_per_s, bytes_per_s)


Exceptions = tuple[tuple[int, Rates], ...]
"""(id, rates), ascending: the devices or nodes whose rates differ from the cluster's."""


def _sorted_exceptions(what: str, exceptions: Exceptions, count: int) -> Exceptions:
    ordered = tuple(sorted(exceptions, key=lambda one: one[0]))
    before = -1
    for index, _ in ordered:
        if not 0 <= index < count:
            raise Infeasible(f"an exception names {what} {index}, expected 0 to {count - 1}")
        if index == before:
            raise Infeasible(f"{what} {index} has two exceptions; what to do: state its rates once")
        before = index
    return ordered


def _too_many(nodes: int, devices_per_node: int) -> str:
    size = f"{reprlib.repr(nodes)} nodes x {reprlib.repr(devices_per_node)} devices"
    return f"{size} are more than a topology may have, {MOST_DEVICES}; what to do: give the size of a real cluster"


def _spread(rate: float, count: int, exceptions: Exceptions, attribute: str) -> NDArray[np.float64]:
    rates = np.full(count, rate)
    if exceptions:
        rates[[index for index, _ in exceptions]] = [getattr(own, attribute) for _, own in exceptions]
    return rates


@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` machines with ``devices_per_node`` devices each; device ids count node by node.

    Attributes:
        nodes: machines.
        devices_per_node: devices of each.
        device_rates: rates of every device; by default PCIe 4 x16, 25e9 bytes/s each way.
        link_rates: rates of every node's network link; None becomes 100 Gb/s each way per device of the node.
        latency_s: seconds before the first byte of a message arrives; one hop of a chain costs one.
        device_exceptions: devices with rates of their own. Any order is taken, and kept sorted.
        link_exceptions: nodes whose link has rates of its own.
        device_memory_bytes: memory of each device; None means unknown.

    Raises:
        Infeasible: if a size is less than 1 or there are more than ``MOST_DEVICES``, the latency is negative, or an
            exception names a device or node that is not there, or one twice.
    """

    nodes: int
    devices_per_node: int
    device_rates: Rates = Rates(25e9, 25e9)
    link_rates: Rates | None = None
    latency_s: float = 20e-6
    device_exceptions: Exceptions = ()
    link_exceptions: Exceptions = ()
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise Infeasible(
                f"a topology needs at least one node and one device a node, not {self.nodes} x {self.devices_per_node}"
            )
        if self.nodes * self.devices_per_node > MOST_DEVICES:
            raise Infeasible(_too_many(self.nodes, self.devices_per_node))
        if not 0 <= self.latency_s < math.inf:
            raise Infeasible(f"latency_s is {self.latency_s}, expected a finite number of at least 0")
        if self.device_memory_bytes is not None and self.device_memory_bytes < 1:
            raise Infeasible(f"device_memory_bytes is {self.device_memory_bytes}, expected at least 1, or None")
        # Equal topologies compare and hash equal, however they were written down.
        if self.link_rates is None:
            object.__setattr__(self, "link_rates", Rates.both(100 * GBIT_BYTES * self.devices_per_node))
        device_exceptions = _sorted_exceptions("device", self.device_exceptions, self.devices)
        object.__setattr__(self, "device_exceptions", device_exceptions)
        object.__setattr__(self, "link_exceptions", _sorted_exceptions("node", self.link_exceptions, self.nodes))

    @classmethod
    def of(cls, devices: int, devices_per_node: int) -> Topology:
        """The topology of so many devices, at the default rates.

        Raises:
            Infeasible: if they do not fill whole nodes.
        """
        if devices_per_node < 1 or devices % devices_per_node:
            raise Infeasible(
                f"{devices} devices do not fill nodes of {devices_per_node}; what to do: start as many processes "
                "on every node"
            )
        return cls(devices // devices_per_node, devices_per_node)

    @classmethod
    def preset(cls, name: str) -> Topology:
        """A cluster of the paper (arXiv 2607.04749, Table II and Fig. 8), by name; see ``PRESETS``.

        Raises:
            Infeasible: if there is no such preset.
        """
        if name not in PRESETS:
            raise Infeasible(f"no topology preset {name!r}; what to do: give one of {', '.join(PRESETS)}, or a file")
        return PRESETS[name]

    @classmethod
    def from_toml(cls, path: str | Path) -> Topology:
        """Read a topology file; the module's docstring shows the form.

        Raises:
            Infeasible: naming the file and the key, if the file cannot be read or any key or value is wrong.
        """
        try:
            return _read(_Table(str(path), "", tomllib.loads(Path(path).read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError) as error:  # ValueError: TOML, UTF-8, a number of many digits
            raise Infeasible(f"{path}: not a readable topology file: {error}; what to do: give a TOML file") from error

    def with_nodes(self, nodes: int) -> Topology:
        """The same kind of cluster with more or fewer nodes.

        Exceptions stay with their nodes and devices; those that are gone take theirs along.
        """
        return replace(
            self,
            nodes=nodes,
            device_exceptions=tuple(e for e in self.device_exceptions if e[0] < nodes * self.devices_per_node),
            link_exceptions=tuple(e for e in self.link_exceptions if e[0] < nodes),
        )

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that a device sits on.

        Raises:
            ValueError: if there is no such device.
        """
        if not 0 <= device < self.devices:
            raise ValueError(f"device {device} is not in a topology of {self.devices} devices")
        return device // self.devices_per_node

    def nodes_of(self, devices: ArrayLike) -> NDArray[np.int64]:
        """The nodes of many devices, in the shape of ``devices``.

        Raises:
            ValueError: naming one that does not exist.
        """
        ids = np.asarray(devices, dtype=np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.devices):
            outside = ids[(ids < 0) | (ids >= self.devices)][0]
            raise ValueError(f"device {outside} is not in a topology of {self.devices} devices")
        return ids // self.devices_per_node

    def device_in_bytes_per_s(self) -> NDArray[np.float64]:
        """Inbound rate by device, shape (devices,)."""
        return _spread(self.device_rates.in_bytes_per_s, self.devices, self.device_exceptions, "in_bytes_per_s")

    def device_out_bytes_per_s(self) -> NDArray[np.float64]:
        """Outbound rate by device, shape (devices,)."""
        return _spread(self.device_rates.out_bytes_per_s, self.devices, self.device_exceptions, "out_bytes_per_s")

    def node_in_bytes_per_s(self) -> NDArray[np.float64]:
        """Inbound rate of the network link by node, shape (nodes,)."""
        return _spread(self._link.in_bytes_per_s, self.nodes, self.link_exceptions, "in_bytes_per_s")

    def node_out_bytes_per_s(self) -> NDArray[np.float64]:
        """Outbound rate of the network link by node, shape (nodes,)."""
        return _spread(self._link.out_bytes_per_s, self.nodes, self.link_exceptions, "out_bytes_per_s")

    @property
    def _link(self) -> Rates:
        assert self.link_rates is not None, "__post_init__ sets it"
        return self.link_rates


PRESETS: Mapping[str, Topology] = MappingProxyType(
    {
        # Table II: 32 nodes x 4 GPUs of 40 GB, no NVLink (so PCIe 4 x16), 4 x 100 Gb/s a node.
        "cluster-a": Topology(
            32, 4, Rates.both(25e9), Rates.both(4 * 100 * GBIT_BYTES), device_memory_bytes=40 * 2**30
        ),
        # Fig. 8: 4 nodes x 8 GPUs of 80 GB, NVLink, 4 x 200 Gb/s a node. The paper does not name the NVLink; GPUs of
        # 80 GB beside 40 GB ones are A100, whose NVLink 3 has 300 GB/s each way.
        "cluster-b": Topology(
            4, 8, Rates.both(300e9), Rates.both(4 * 200 * GBIT_BYTES), device_memory_bytes=80 * 2**30
        ),
    }
)
"""The paper's clusters by name."""


class _Table:
    """A TOML table whose keys are taken one by one; errors name the file and the full key."""

    def __init__(self, file: str, path: str, values: Mapping[str, Any]) -> None:
        self.file, self.path, self.left = file, path, dict(values)
        self.known: list[str] = []

    def refuse(self, key: str, expected: str, actual: object) -> Infeasible:
        return Infeasible(f"{self.file}: {self.path}{key}: expected {expected}, got {actual}; what to do: correct it")

    def take(self, key: str) -> Any:
        self.known.append(key)
        return self.left.pop(key, None)

    def number(self, key: str, least: float = 0.0) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e30:
            raise self.refuse(key, f"a finite number of at least {least:g}", reprlib.repr(value))
        return float(value)

    def whole(self, key: str) -> int | None:
        value = self.take(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self.refuse(key, "a whole number of at least 1", reprlib.repr(value))
        return value

    def ids(self, key: str, count: int) -> list[int]:
        value = self.take(key)
        fine = isinstance(value, list) and value and all(type(i) is int and 0 <= i < count for i in value)
        if not fine:
            raise self.refuse(key, f"a list of numbers from 0 to {count - 1}", reprlib.repr(value))
        return list(value)

    def tables(self, key: str) -> Sequence[_Table]:
        value = self.take(key) or []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.refuse(key, f"tables, written [[{key}]]", reprlib.repr(value))
        return [_Table(self.file, f"{self.path}{key}[{index}].", one) for index, one in enumerate(value)]

    def table(self, key: str) -> _Table:
        value = self.take(key)
        if not isinstance(value, dict | None):
            raise self.refuse(key, f"a table, written [{key}]", reprlib.repr(value))
        return _Table(self.file, f"{self.path}{key}.", value or {})

    def rates(self, base: Rates) -> Rates:
        """The rates that this table states, each direction at most once; the others as in ``base``."""
        given: dict[str, tuple[str, float]] = {}
        for unit, scale in (("bytes_per_s", 1), ("gbit_per_s", GBIT_BYTES)):
            for key, directions in ((unit, ("in", "out")), (f"in_{unit}", ("in",)), (f"out_{unit}", ("out",))):
                rate = self.number(key)
                for direction in directions if rate is not None else ():
                    if direction in given:
                        raise self.refuse(key, f"the {direction} rate stated once", f"also {given[direction][0]}")
                    if not rate:
                        raise self.refuse(key, "a rate above 0", rate)
                    given[direction] = (key, rate * scale)
        return Rates(
            given["in"][1] if "in" in given else base.in_bytes_per_s,
            given["out"][1] if "out" in given else base.out_bytes_per_s,
        )

    def require_size(self, nodes: int, devices_per_node: int) -> None:
        if nodes * devices_per_node > MOST_DEVICES:
            raise Infeasible(f"{self.file}: {_too_many(nodes, devices_per_node)}")

    def done(self) -> None:
        for key, value in self.left.items():
            raise self.refuse(key, f"no such key; known: {', '.join(self.known)}", reprlib.repr(value))


def _read(root: _Table) -> Topology:
    preset, nodes, devices_per_node = root.take("preset"), root.whole("nodes"), root.whole("devices_per_node")
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise root.refuse("preset", f"one of {', '.join(PRESETS)}", reprlib.repr(preset))
        if devices_per_node is not None:
            raise root.refuse("devices_per_node", f"nothing beside preset {preset!r}", devices_per_node)
        base = PRESETS[preset]
        root.require_size(nodes or base.nodes, base.devices_per_node)
        base = base.with_nodes(nodes or base.nodes)
    else:
        if nodes is None or devices_per_node is None:
            missing = "nodes" if nodes is None else "devices_per_node"
            raise root.refuse(missing, "a whole number, or a preset", "nothing")
        root.require_size(nodes, devices_per_node)
        base = Topology(nodes, devices_per_node)

    latency_s = root.number("latency_s")
    device, link = root.table("device"), root.table("link")
    memory_bytes = device.whole("memory_bytes")
    base = replace(
        base,
        latency_s=base.latency_s if latency_s is None else latency_s,
        device_rates=device.rates(base.device_rates),
        link_rates=link.rates(base._link),
        device_memory_bytes=memory_bytes or base.device_memory_bytes,
    )
    device_exceptions = _read_exceptions(root.tables("devices"), "ids", base.devices, base.device_rates)
    link_exceptions = _read_exceptions(root.tables("links"), "nodes", base.nodes, base._link)
    for table in (device, link, root):
        table.done()
    return replace(base, device_exceptions=device_exceptions, link_exceptions=link_exceptions)


def _read_exceptions(tables: Sequence[_Table], key: str, count: int, base: Rates) -> Exceptions:
    found: dict[int, Rates] = {}
    for table in tables:
        ids, rates = table.ids(key, count), table.rates(base)
        table.done()
        for index in ids:
            if index in found:
                raise table.refuse(key, "each number once over all exceptions", f"{index} again")
            found[index] = rates
    return tuple(found.items())
