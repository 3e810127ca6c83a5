"""Topology: which device sits on which node."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Infeasible


@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` machines with ``devices_per_node`` devices each; device ids count node by node.

    Raises:
        Infeasible: if either number is less than 1.
    """

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise Infeasible(
                f"a topology needs at least one node and one device a node, not {self.nodes} x {self.devices_per_node}"
            )

    @classmethod
    def of(cls, devices: int, devices_per_node: int) -> Topology:
        """The topology of so many devices.

        Raises:
            Infeasible: if they do not fill whole nodes.
        """
        if devices_per_node < 1 or devices % devices_per_node:
            raise Infeasible(
                f"{devices} devices do not fill nodes of {devices_per_node}; what to do: start as many processes "
                "on every node"
            )
        return cls(devices // devices_per_node, devices_per_node)

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
