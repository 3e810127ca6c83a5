"""Agents in processes of their own, whose workers do what the test tells them over a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from tests.elastic.deciding import until_all_decide

from shardshift.coordination import present_store
from shardshift.coordination.failure import recorded_failure
from shardshift.elastic import job_store, start_fork_server
from shardshift.elastic.agent.agent import Agent, Launch
from shardshift.elastic.agent.node import Asked
from shardshift.elastic.agent.roster import NodeRecord, Roster, Terms
from shardshift.elastic.agent.witness import bear_witness
from shardshift.elastic.operating.answer import Answer
from shardshift.elastic.operating.board import Board
from shardshift.values import ShardshiftError

pytestmark = pytest.mark.timeout(60)

WORKER = Path(__file__).parent / "scripts" / "obedient.py"
END_S = 30.0


def be_agent(launch: Launch, pipe: Connection, folder: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    agent = Agent(launch, logs=DefaultLogsSpecs(folder), say=lambda line: pipe.send(("says", line)))
    signal.signal(signal.SIGTERM, lambda number, frame: agent.leave())
    signal.signal(signal.SIGINT, lambda number, frame: agent.end(number))
    pipe.send(("pid", os.getpid()))
    try:
        pipe.send(("status", agent.run()))
    except ShardshiftError as error:
        pipe.send((type(error).__name__, str(error)))


def be_witness(name: str, port: int, silence_s: float, pipe: Connection) -> None:
    asked = Asked()
    pipe.send(("pid", os.getpid()))
    try:
        bear_witness(
            name,
            f"127.0.0.1:{port}",
            timeout_s=30.0,
            silence_s=silence_s,
            say=lambda line: pipe.send(("says", line)),
            pause=asked.pause,
        )
        pipe.send(("status", 0))
    except ShardshiftError as error:
        pipe.send((type(error).__name__, str(error)))


class Worker:
    """A worker's end of the line to the test."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self.rank, pid, self.environment = line.recv()
        self.process = psutil.Process(pid)

    def does(self, *order: Any) -> Any:
        self._line.send(order)
        return self._line.recv() if order[0] != "exit" else None


class RunningAgent:
    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe
        assert self._next()[0] == "pid"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def says(self, text: str) -> None:
        """Wait until the agent has said so."""
        while True:
            kind, content = self._next()
            assert kind == "says", content
            if text in content:
                return

    def end(self) -> tuple[str, Any]:
        """How it ended."""
        while True:
            kind, content = self._next()
            if kind != "says":
                self.process.join()
                return kind, content

    def _next(self) -> tuple[str, Any]:
        message: tuple[str, Any] = self._pipe.recv()
        return message


class Cluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = Listener(str(folder / "line"), backlog=16)
        self._agents: list[RunningAgent] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def agent(self, nodes: str = "1:2", per_node: int = 1, *, name: str = "job", **more: Any) -> RunningAgent:
        low, _, high = nodes.partition(":")
        command = (sys.executable, "-S", str(WORKER), str(self._listener.address))
        launch = Launch(
            Terms(name, per_node, int(low), int(high or low)),
            f"127.0.0.1:{self.port}",
            **{"command": command, "timeout_s": 30.0, "silence_s": 10.0, **more},
        )
        return self._started(lambda pipe: (be_agent, (launch, pipe, str(self._folder / "logs"))))

    def witness(self, silence_s: float = 10.0) -> RunningAgent:
        return self._started(lambda pipe: (be_witness, ("job", self.port, silence_s, pipe)))

    def _started(self, target: Callable[[Connection], tuple[Any, tuple[Any, ...]]]) -> RunningAgent:
        context = start_fork_server(["shardshift.elastic.agent.agent"])
        ours, theirs = context.Pipe(duplex=False)
        function, arguments = target(theirs)
        process = context.Process(target=function, args=arguments)
        process.start()
        theirs.close()
        agent = RunningAgent(process, ours)
        self._agents.append(agent)
        return agent

    def workers(self, count: int) -> list[Worker]:
        return sorted((Worker(self._listener.accept()) for _ in range(count)), key=lambda worker: worker.rank)

    @property
    def store(self) -> dist.Store:
        return job_store(dist.TCPStore("127.0.0.1", self.port, timeout=timedelta(seconds=END_S)))

    def until(self, state: Callable[[Roster], bool]) -> None:
        """Wait for a change of the roster that brings a state."""
        roster = Roster(self.store)
        while not state(roster):
            pass

    def close(self) -> None:
        for agent in self._agents:
            agent.process.kill()
            agent.process.join()
        self._listener.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def ended(*processes: psutil.Process) -> bool:
    """Whether processes end; zombies have ended, whoever is to reap them."""
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
                process.kill()
    return not left


def node(cluster: Cluster, slot: int) -> NodeRecord:
    record = Roster(cluster.store).node(slot)
    assert record is not None
    return record


def test_a_node_starts_its_workers_and_ends_when_all_have_ended_well(cluster: Cluster) -> None:
    agent = cluster.agent(per_node=2)
    first, second = cluster.workers(2)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    assert node(cluster, 0).pids == {0: first.process.pid, 1: second.process.pid}
    first.does("exit", 0)
    cluster.until(lambda roster: roster.devices_here() == (1,))
    second.does("exit", 0)
    assert agent.end() == ("status", 0)


def test_the_first_nodes_wait_for_one_another(cluster: Cluster) -> None:
    agents = [cluster.agent("2", per_node=2)]
    cluster.until(lambda roster: roster.terms() is not None)
    agents.append(cluster.agent("2", per_node=2))
    workers = cluster.workers(4)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "SHARDSHIFT_JOB")
    assert [[worker.environment[name] for name in names] for worker in workers] == [
        [str(rank), str(rank % 2), "4", "2", str(rank // 2), str(cluster.port), "job"] for rank in range(4)
    ]
    for worker in workers:
        worker.does("exit", 0)
    assert [agent.end() for agent in agents] == [("status", 0), ("status", 0)]


def test_a_node_joins_a_job_that_runs(cluster: Cluster) -> None:
    host = cluster.agent("1:2", per_node=2)
    founders = cluster.workers(2)
    joiner = cluster.agent("1:2", per_node=2)
    joiners = cluster.workers(2)
    joiner.says("node 1 joins job 'job' with devices 2-3")
    assert [(worker.rank, worker.environment["WORLD_SIZE"]) for worker in joiners] == [(2, "2"), (3, "2")]
    cluster.until(lambda roster: roster.devices_here() == (0, 1, 2, 3))
    assert all(worker.process.is_running() for worker in founders)
    for worker in (*founders, *joiners):
        worker.does("exit", 0)
    assert (host.end(), joiner.end()) == (("status", 0), ("status", 0))


def test_who_does_not_fit_is_refused_and_the_job_goes_on(cluster: Cluster) -> None:
    host = cluster.agent("1:1")
    (worker,) = cluster.workers(1)
    assert cluster.agent("1:1", per_node=2).end()[0] == "Mismatch"
    assert cluster.agent("1:1", name="other").end()[0] == "Mismatch"
    kind, text = cluster.agent("1:1").end()
    assert (kind, text.partition(",")[0]) == ("Infeasible", "job 'job' may have 1 nodes at a time")
    worker.does("exit", 0)
    assert host.end() == ("status", 0)


def test_where_a_worker_dies_the_others_live_on_and_its_loss_is_recorded(cluster: Cluster) -> None:
    agent = cluster.agent(per_node=2)
    first, second = cluster.workers(2)
    first.process.kill()
    cluster.until(lambda roster: roster.devices_here() == (1,))
    lost = recorded_failure(present_store(cluster.store))
    assert lost is not None
    assert lost.ranks == (0,)
    assert "SIGKILL" in lost.reason
    assert second.does("still there?") == "yes"
    second.does("exit", 0)
    kind, text = agent.end()
    assert kind == "ShardshiftError"
    assert f"device 0 (process {first.process.pid}) was ended by SIGKILL" in text


def test_a_joiner_that_fails_before_it_takes_part_is_no_loss_of_the_job(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    cluster.workers(1)[0].does("exit", 3)
    _, text = joiner.end()
    assert "ended with exit code 3" in text
    assert recorded_failure(present_store(cluster.store)) is None
    founder.does("exit", 0)
    assert host.end() == ("status", 0)


def test_what_a_worker_has_started_ends_with_it(cluster: Cluster) -> None:
    agent = cluster.agent(per_node=2)
    first, second = cluster.workers(2)
    children = [psutil.Process(first.does(how)) for how in ("child", "child in a group of its own")]
    first.process.kill()
    assert ended(*children)
    child = psutil.Process(second.does("child"))
    second.does("exit", 0)
    assert ended(child)
    agent.end()


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_that_is_killed_leaves_no_process_behind(cluster: Cluster, stopped: bool) -> None:
    agent = cluster.agent(per_node=2)
    workers = cluster.workers(2)
    children = [psutil.Process(worker.does("child")) for worker in workers]
    of_agent = psutil.Process(agent.process.pid).children(recursive=True)
    assert {*children, *(worker.process for worker in workers)} < {*of_agent}  # there is a guard, too
    if stopped:
        workers[0].process.suspend()
    agent.process.kill()
    assert ended(*of_agent)


def test_workers_end_with_their_agent_though_its_guard_was_killed_before(cluster: Cluster) -> None:
    agent = cluster.agent(per_node=2)
    workers = [worker.process for worker in cluster.workers(2)]
    (guard,) = {*psutil.Process(agent.process.pid).children()} - {*workers}
    guard.kill()
    agent.process.kill()
    assert ended(*workers)


def test_a_node_that_is_told_to_leave_asks_the_job_to_do_without_it(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent(grace_s=50.0)
    (worker,) = cluster.workers(1)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    joiner.signal(signal.SIGTERM)
    cluster.until(lambda roster: roster.leaving() == (1,))
    board = Board(cluster.store)
    assert board.count() == 1
    assert board.request(1).to_json() == {"leave": [1], "within_s": 50.0}
    assert worker.does("still there?") == "yes"
    worker.does("exit", 0)
    assert joiner.end() == ("status", 0)
    assert node(cluster, 1).state == "left"
    founder.does("exit", 0)
    assert host.end() == ("status", 0)


def test_where_the_job_cannot_do_without_it_the_workers_are_told_to_end(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    Board(cluster.store).write(1, Answer("refused", "ordered by the test"))
    joiner.signal(signal.SIGTERM)
    joiner.says("cannot do without node 1: ordered by the test")
    assert ended(worker.process)
    assert joiner.end() == ("status", 128 + signal.SIGTERM)
    founder.does("exit", 0)
    host.end()


def test_alone_a_node_hands_sigterm_on_as_torchrun_does(cluster: Cluster) -> None:
    agent = cluster.agent(per_node=2)
    first, _ = cluster.workers(2)
    first.does("on SIGTERM exit", 0)
    agent.signal(signal.SIGTERM)
    assert agent.end() == ("status", 128 + signal.SIGTERM)


def test_when_the_grace_is_over_what_still_runs_is_ended(cluster: Cluster) -> None:
    agent = cluster.agent(grace_s=0.5)
    (worker,) = cluster.workers(1)
    worker.does("on SIGTERM exit", None)
    agent.signal(signal.SIGTERM)
    kind, text = agent.end()
    assert kind == "ShardshiftError"
    assert "SIGKILL" in text
    assert ended(worker.process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_again_or_by_sigint_a_node_ends_at_once(cluster: Cluster, number: signal.Signals) -> None:
    agent = cluster.agent()
    (worker,) = cluster.workers(1)
    worker.does("on SIGTERM exit", None)
    if number == signal.SIGTERM:
        agent.signal(number)
        agent.says("have 30 s to end by themselves")
    agent.signal(number)
    assert agent.end() == ("status", 128 + number)
    assert ended(worker.process)


def test_a_node_that_still_waits_ends_when_it_is_told_to(cluster: Cluster) -> None:
    agent = cluster.agent("2")
    cluster.until(lambda roster: roster.terms() is not None)
    agent.signal(signal.SIGTERM)
    assert agent.end() == ("status", 128 + signal.SIGTERM)


def test_the_host_of_the_store_stays_until_the_others_have_left(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    founder.does("exit", 0)
    host.says("stays for 1 more")
    assert worker.does("still there?") == "yes"
    worker.does("exit", 0)
    assert joiner.end() == ("status", 0)
    assert host.end() == ("status", 0)


def test_of_two_nodes_the_one_that_does_not_host_the_store_ends_with_it(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    until_all_decide(cluster.port, 2)
    host.process.kill()
    kind, text = joiner.end()
    assert kind == "ShardshiftError"
    assert "of 2 that decide on another store, too many have ended: node 0" in text
    assert ended(founder.process, worker.process)


@pytest.mark.alone
def test_a_node_whose_agent_is_silent_has_left_and_is_back_when_it_goes_on(cluster: Cluster) -> None:
    host = cluster.agent(silence_s=1.0)
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    joiner.signal(signal.SIGSTOP)
    host.says("node 1 on")
    cluster.until(lambda roster: roster.devices_here() == (0,))
    joiner.signal(signal.SIGCONT)
    cluster.until(lambda roster: roster.devices_here() == (0, 1))
    worker.does("exit", 0)
    joiner.end()
    founder.does("exit", 0)
    host.end()


def test_what_record_caught_is_told(cluster: Cluster) -> None:
    agent = cluster.agent()
    (worker,) = cluster.workers(1)
    path = Path(worker.environment["TORCHELASTIC_ERROR_FILE"])
    path.write_text(json.dumps({"message": {"message": "ValueError: by the test", "extraInfo": {"timestamp": 1}}}))
    worker.does("exit", 1)
    _, text = agent.end()
    assert "exit code 1: ValueError: by the test" in text


def test_a_command_that_is_not_there_is_an_error_of_the_worker(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, text = cluster.agent(command=("./nothing",)).end()
    assert (kind, "exit code 127" in text) == ("ShardshiftError", True)


def test_a_witness_lets_the_other_of_two_nodes_go_on(cluster: Cluster) -> None:
    host = cluster.agent()
    (_,) = cluster.workers(1)
    witness = cluster.witness()
    witness.says("witness of job 'job'")
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    until_all_decide(cluster.port, 3)
    assert cluster.witness().end()[0] == "Infeasible", "one vote is one process's"
    host.process.kill()
    joiner.says("node 1 hosts the job's store from now on")
    witness.says("node 1 hosts the job's store from now on")
    assert worker.does("still there?") == "yes"
    worker.does("exit", 0)
    assert joiner.end() == ("status", 0)
    witness.says("the job has ended")
    assert witness.end() == ("status", 0)


@pytest.mark.alone
def test_a_host_that_was_stopped_finds_itself_alone_and_ends_when_it_goes_on(cluster: Cluster) -> None:
    host = cluster.agent(silence_s=1.0)
    (founder,) = cluster.workers(1)
    witness = cluster.witness(silence_s=1.0)
    joiner = cluster.agent(silence_s=1.0)
    (worker,) = cluster.workers(1)
    until_all_decide(cluster.port, 3)
    host.signal(signal.SIGSTOP)
    joiner.says("node 1 hosts the job's store from now on")
    host.signal(signal.SIGCONT)
    kind, text = host.end()
    assert kind == "ShardshiftError"
    assert "this node stops" in text
    assert ended(founder.process)
    worker.does("exit", 0)
    assert joiner.end() == ("status", 0)
    assert witness.end() == ("status", 0)


def test_a_host_that_leaves_hands_the_store_to_the_others(cluster: Cluster) -> None:
    host = cluster.agent()
    (founder,) = cluster.workers(1)
    joiner = cluster.agent()
    (worker,) = cluster.workers(1)
    until_all_decide(cluster.port, 2)
    host.signal(signal.SIGTERM)
    cluster.until(lambda roster: roster.leaving() == (0,))
    founder.does("exit", 0)
    host.says("node 0 has left: the others find another host for the store")
    assert host.end() == ("status", 0)
    joiner.says("node 1 hosts the job's store from now on")
    assert worker.does("still there?") == "yes"
    worker.does("exit", 0)
    assert joiner.end() == ("status", 0)


def test_where_something_else_listens_it_is_said(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", cluster.port)):
        kind, text = cluster.agent(timeout_s=1.0, silence_s=1.0).end()
    assert kind == "ShardshiftError"
    assert "what listens there is no store" in text
