"""Topology: devices count node by node; rates per device and link; topology files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from shardshift.values import Infeasible, Topology
from shardshift.values.topology import PRESETS, Rates


def test_devices_count_node_by_node() -> None:
    topology = Topology(nodes=3, devices_per_node=4)
    assert topology.devices == 12
    assert [topology.node_of(device) for device in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert topology.nodes_of(np.arange(12)).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert topology.nodes_of([[11], [0]]).tolist() == [[2], [0]]


@pytest.mark.parametrize("device", [-1, 12])
def test_a_device_outside_is_refused(device: int) -> None:
    with pytest.raises(ValueError, match="12 devices"):
        Topology(nodes=3, devices_per_node=4).node_of(device)
    with pytest.raises(ValueError, match=f"device {device} is not in"):
        Topology(nodes=3, devices_per_node=4).nodes_of([0, device, 1])


@pytest.mark.parametrize(("nodes", "devices"), [(0, 1), (1, 0)])
def test_an_empty_cluster_is_refused(nodes: int, devices: int) -> None:
    with pytest.raises(Infeasible, match="at least one"):
        Topology(nodes, devices)


@pytest.mark.parametrize("size", [(10**9, 10**9), (1, 10**20), (2**21 + 1, 1), (10**8, 8)])
def test_a_cluster_of_more_devices_than_there_are_is_refused_before_anything_is_made(size: tuple[int, int]) -> None:
    with pytest.raises(Infeasible, match="more than a topology may have, 2097152; what to do"):
        Topology(*size)
    with pytest.raises(Infeasible, match="more than a topology may have"):
        Topology(1, size[1]).with_nodes(size[0])


def test_the_default_is_pcie_and_100_gigabits_a_device() -> None:
    topology = Topology(2, 4)
    assert topology.device_in_bytes_per_s().tolist() == topology.device_out_bytes_per_s().tolist() == [25e9] * 8
    assert topology.node_in_bytes_per_s().tolist() == topology.node_out_bytes_per_s().tolist() == [50e9] * 2
    assert topology == Topology(2, 4, link_rates=Rates.both(50e9))
    assert topology == Topology.of(8, 4)


def test_exceptions_change_their_own_rates_only() -> None:
    topology = Topology(
        2, 2, Rates(8.0, 9.0), Rates.both(5.0), device_exceptions=((3, Rates(1.0, 2.0)), (0, Rates(8.0, 4.0)))
    )
    assert topology.device_in_bytes_per_s().tolist() == [8, 8, 8, 1]
    assert topology.device_out_bytes_per_s().tolist() == [4, 9, 9, 2]
    assert topology.node_in_bytes_per_s().tolist() == [5, 5]


def test_the_order_of_exceptions_does_not_matter() -> None:
    slow, slower = (1, Rates.both(2.0)), (0, Rates.both(1.0))
    one, other = Topology(2, 1, link_exceptions=(slow, slower)), Topology(2, 1, link_exceptions=(slower, slow))
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("exceptions", [((2, Rates.both(1.0)),), ((0, Rates.both(1.0)), (0, Rates.both(2.0)))])
def test_an_exception_that_cannot_be_is_refused(exceptions: tuple[tuple[int, Rates], ...]) -> None:
    with pytest.raises(Infeasible, match="exception"):
        Topology(1, 2, device_exceptions=exceptions)
    with pytest.raises(Infeasible, match="exception"):
        Topology(2, 1, link_exceptions=exceptions)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(Infeasible, match="out_bytes_per_s"):
        Rates(1.0, rate)


def test_nodes_can_be_added_and_taken() -> None:
    topology = Topology(
        3, 2, device_exceptions=((1, Rates.both(7.0)), (5, Rates.both(1.0))), link_exceptions=((2, Rates.both(1.0)),)
    )
    smaller = topology.with_nodes(2)
    assert smaller == Topology(2, 2, device_exceptions=((1, Rates.both(7.0)),))
    assert smaller.with_nodes(4).device_in_bytes_per_s().tolist() == [25e9, 7, *[25e9] * 6]


def test_presets_are_the_clusters_of_the_paper() -> None:
    a, b = Topology.preset("cluster-a"), Topology.preset("cluster-b")
    assert (a.nodes, a.devices_per_node, a.node_in_bytes_per_s()[0]) == (32, 4, 400e9 / 8)
    assert (b.nodes, b.devices_per_node, b.node_in_bytes_per_s()[0]) == (4, 8, 800e9 / 8)
    assert (a.device_memory_bytes, b.device_memory_bytes) == (40 * 2**30, 80 * 2**30)
    assert a.with_nodes(4).devices == 16
    with pytest.raises(Infeasible, match=r"cluster-c.*cluster-a, cluster-b"):
        Topology.preset("cluster-c")


def test_a_file_states_rules_and_exceptions(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(
        """
        nodes = 2
        devices_per_node = 3
        latency_s = 1e-3
        [device]
        gbit_per_s = 8
        memory_bytes = 1000
        [link]
        in_gbit_per_s = 16
        [[devices]]
        ids = [4, 3]
        out_bytes_per_s = 5
        [[devices]]
        ids = [0]
        bytes_per_s = 7
        [[links]]
        nodes = [1]
        gbit_per_s = 1
        """
    )
    topology = Topology.from_toml(file)
    assert topology.device_in_bytes_per_s().tolist() == [7, 1e9, 1e9, 1e9, 1e9, 1e9]
    assert topology.device_out_bytes_per_s().tolist() == [7, 1e9, 1e9, 5, 5, 1e9]
    assert topology.node_in_bytes_per_s().tolist() == [2e9, 125e6]
    assert topology.node_out_bytes_per_s().tolist() == [37.5e9, 125e6]
    assert (topology.latency_s, topology.device_memory_bytes) == (1e-3, 1000)


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text('preset = "cluster-b"\nnodes = 6\n[[links]]\nnodes = [5]\ngbit_per_s = 8\n')
    assert Topology.from_toml(file) == Topology(
        6,
        8,
        PRESETS["cluster-b"].device_rates,
        PRESETS["cluster-b"].link_rates,
        link_exceptions=((5, Rates.both(1e9)),),
        device_memory_bytes=80 * 2**30,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "nodes: expected a whole number, or a preset, got nothing"),
        ("nodes = 2", "devices_per_node: expected a whole number, or a preset, got nothing"),
        ('preset = "cluster-z"', "preset: expected one of cluster-a, cluster-b, got 'cluster-z'"),
        ("preset = []", "preset: expected one of"),
        ('preset = "cluster-a"\ndevices_per_node = 2', "devices_per_node: expected nothing beside preset"),
        ("nodes = true\ndevices_per_node = 1", "nodes: expected a whole number of at least 1, got True"),
        ("nodes = 0\ndevices_per_node = 1", "nodes: expected a whole number of at least 1, got 0"),
        ("nodes = 1\ndevices_per_node = 1.5", "devices_per_node: expected a whole number of at least 1, got 1.5"),
        ('preset = "cluster-a"\nlatency_s = -1', "latency_s: expected a finite number of at least 0, got -1"),
        ('preset = "cluster-a"\nlatency_s = nan', "latency_s: expected a finite number"),
        ('preset = "cluster-a"\nspeed = 3', "speed: expected no such key; known: preset, nodes,"),
        ('preset = "cluster-a"\ndevice = 3', r"device: expected a table, written \[device\], got 3"),
        ('preset = "cluster-a"\n[devices]\nids = [1]', r"devices: expected tables, written \[\[devices\]\]"),
        ('preset = "cluster-a"\n[device]\nin_gbit_per_s = 0', "device.in_gbit_per_s: expected a rate above 0"),
        (
            'preset = "cluster-a"\n[device]\nrate = 1',
            "device.rate: expected no such key; known: memory_bytes, bytes_per_s",
        ),
        (
            'preset = "cluster-a"\n[link]\ngbit_per_s = 1\nout_bytes_per_s = 5',
            "link.gbit_per_s: expected the out rate stated once, got also out_bytes_per_s",
        ),
        ('preset = "cluster-a"\n[[devices]]\nbytes_per_s = 1', r"devices\[0\].ids: expected a list .* got None"),
        (
            'preset = "cluster-a"\n[[devices]]\nids = [128]',
            r"devices\[0\].ids: expected a list of numbers from 0 to 127",
        ),
        (
            'preset = "cluster-a"\n[[links]]\nnodes = [1]\nids = [1]',
            r"links\[0\].ids: expected no such key; known: nodes",
        ),
        (
            'preset = "cluster-a"\n[[links]]\nnodes = [1]\n[[links]]\nnodes = [2, 1]',
            r"links\[1\].nodes: expected each number once over all exceptions, got 1 again",
        ),
        ("nodes = ", "not a readable topology file"),
        ("nodes = 100000000\ndevices_per_node = 8", "100000000 nodes x 8 devices are more than a topology may have"),
        ('preset = "cluster-a"\nnodes = 1000000000', "1000000000 nodes x 4 devices are more than"),
        ("nodes = " + "9" * 5000, "not a readable topology file"),
        ("nodes = " + "[" * 5000, "not a readable topology file"),
        ("nodes = " + "9" * 400 + "\ndevices_per_node = 1", r"9{5,30}\.\.\.9{5,30} nodes x 1 devices are more than"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(Infeasible, match=rf"wrong\.toml: {says}"):
        Topology.from_toml(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match=r"none\.toml: not a readable"):
        Topology.from_toml(tmp_path / "none.toml")
