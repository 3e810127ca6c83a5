"""Topology: devices count node by node."""

from __future__ import annotations

import pytest

from shardshift.values import Infeasible, Topology


def test_devices_count_node_by_node() -> None:
    topology = Topology(nodes=3, devices_per_node=4)
    assert topology.devices == 12
    assert [topology.node_of(device) for device in range(12)] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("device", [-1, 12])
def test_a_device_outside_is_refused(device: int) -> None:
    with pytest.raises(ValueError, match="12 devices"):
        Topology(nodes=3, devices_per_node=4).node_of(device)


@pytest.mark.parametrize(("nodes", "devices"), [(0, 1), (1, 0)])
def test_an_empty_cluster_is_refused(nodes: int, devices: int) -> None:
    with pytest.raises(Infeasible, match="at least one"):
        Topology(nodes, devices)
