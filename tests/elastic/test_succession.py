"""A real job under ``shardshift run`` outlives the host of its store; a minority stops."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.elastic.deciding import until_all_decide
from tests.elastic.test_joining import Job, Node, pids, running

pytestmark = pytest.mark.timeout(180)


SMALL = ("--nnodes", "1:4", "--nproc-per-node", "1")


def three_nodes(job: Job, *options: str) -> list[Node]:
    """Three nodes of one device each, by slot; node 0 hosts the store, and all decide on the next one."""
    first = job.node(*SMALL, *options)
    first.says("0: trains")
    others = [job.node(*SMALL, *options) for _ in range(2)]
    others.sort(key=lambda node: node.says("joins job"))
    first.says("0: trains pp1tp1dp3 exact")
    until_all_decide(job.port, 3)
    return [first, *others]


def test_three_nodes_lose_the_host_of_the_store_and_a_new_one_joins(tmp_path: Path) -> None:
    with running(tmp_path, "pp1") as job:
        first, second, third = three_nodes(job)
        first.process.kill()
        host = int(second.says("hosts the job's store from now on").split("node ")[1].split()[0])
        second.says("1: recovered exact")
        second.says("1: trains pp1tp1dp2 exact")
        third.says("2: trains pp1tp1dp2 exact")
        status = json.loads(job.ask("status", "toy", "--json").stdout)
        assert (status["config"], sorted(status["devices"]), status["losses"]) == ("pp1tp1dp2", [1, 2], 1)
        fourth = job.node(*SMALL)
        fourth.says("3: trains pp1tp1dp3 exact")
        until_all_decide(job.port, 3)
        leaving, left, device = (
            (second, third, 2) if host == 1 else (third, second, 1)
        )  # whoever was the first to stand
        leaving.process.send_signal(signal.SIGTERM)
        left.says("hosts the job's store from now on")
        assert leaving.end() == 0, "".join(leaving.lines)
        left.says(f"{device}: trains pp1tp1dp2 exact")
        fourth.says("3: trains pp1tp1dp2 exact")
        job.stop.touch()
        for node in (left, fourth):
            assert node.end() == 0, "".join(node.lines)
            assert all(len(of) == 1 for of in pids(node.lines).values())
            assert "WRONG" not in "".join(node.lines)
