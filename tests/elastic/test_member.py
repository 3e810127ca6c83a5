from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from shardshift.elastic import Member, job_store
from shardshift.values import Infeasible, ShardshiftError, Topology


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The variables that torchrun sets, for rank 3 of 4, and the store that its agent hosts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 3, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    return store


def test_a_member_is_who_the_launcher_says(launched: dist.Store) -> None:
    member = Member.from_launcher(devices_per_node=2, timeout_s=10.0)
    assert (member.device, member.topology) == (3, Topology(2, 2))
    member.store.set("key", "value")
    assert job_store(launched).get("key") == b"value"


def test_without_a_number_all_devices_are_on_one_node(launched: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Member.from_launcher(timeout_s=10.0).topology == Topology(1, 4)


@pytest.mark.parametrize(("local", "topology"), [(2, Topology(2, 2)), (4, Topology(1, 4)), (3, Topology(1, 4))])
def test_the_launcher_says_how_many_are_on_a_node(
    launched: dist.Store, monkeypatch: pytest.MonkeyPatch, local: int, topology: Topology
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert Member.from_launcher(timeout_s=10.0).topology == topology


def test_nodes_that_are_not_full_are_refused(launched: dist.Store) -> None:
    with pytest.raises(Infeasible, match="do not fill nodes of 3"):
        Member.from_launcher(devices_per_node=3, timeout_s=10.0)


def test_without_a_launcher_the_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Infeasible, match=r"^RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set.*what to do: start"):
        Member.from_launcher()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(Infeasible, match=r"^MASTER_PORT is not set"):
        Member.from_launcher()


def test_a_port_that_is_taken_and_a_store_that_is_not_there_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        told = f"^rank 0 cannot host the job's store at 127.0.0.1:{port} .*the port is taken; what to do: .*$"
        with pytest.raises(ShardshiftError, match=told) as raised:
            Member.from_launcher(timeout_s=1.0)
        assert isinstance(raised.value.__cause__, dist.DistError)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    told = f"^rank 1 cannot reach the job's store at nowhere.invalid:{port} .*within 1 s; what to do: .*$"
    with pytest.raises(ShardshiftError, match=told) as raised:
        Member.from_launcher(timeout_s=1.0)
    assert isinstance(raised.value.__cause__, dist.DistError)
