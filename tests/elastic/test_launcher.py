from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.elastic.toy import Recipe, ToyAdapter, Unpicklable, open_session

from shardshift.elastic import LocalJob, Member, job_store
from shardshift.values import Infeasible, PeerLost, ShardshiftError, Topology

GRACE_S = 5.0
PRELOAD = ["shardshift.elastic.opening"]


def echo(send: Any, word: str) -> None:
    send((word, os.environ["RANK"], os.environ["WORLD_SIZE"]))


def fail(send: Any, how: str, timeout_s: float) -> None:
    """Rank 1 fails; the others wait for it in a collective."""
    member = Member.from_launcher(timeout_s=timeout_s)
    if member.device == 1:
        match how:
            case "raise":
                raise ValueError("ordered by the test")
            case "refuse":
                raise Infeasible("ordered by the test")
            case "unpicklable":
                raise Unpicklable("ordered by the test")
            case "unpicklable message":
                send(lambda: None)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    store = dist.PrefixStore("world", member.store)
    dist.init_process_group("gloo", store=store, rank=member.device, world_size=3, timeout=timedelta(seconds=timeout_s))
    send("entered")
    if member.device == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def test_workers_find_what_torchrun_would_set() -> None:
    with LocalJob(2, echo, ("hello",), timeout_s=20.0, preload=PRELOAD) as job:
        assert set(job.pids) == {0, 1}
        assert sorted(job.messages()) == [(0, ("hello", "0", "2")), (1, ("hello", "1", "2"))]


def tell_tensors(send: Any) -> None:
    for number in range(3):
        send((number, torch.full((1000,), float(number))))


def test_what_a_worker_has_sent_is_there_after_its_end() -> None:
    """Tensors, too, which torch would leave in the memory of the process that sends them."""
    with LocalJob(1, tell_tensors, (), timeout_s=20.0, preload=PRELOAD) as job:
        psutil.wait_procs([psutil.Process(pid) for pid in job.pids.values()], timeout=GRACE_S * 4)
        found = {number: tensor for _, (number, tensor) in job.messages()}
    assert {number: tensor.unique().tolist() for number, tensor in found.items()} == {0: [0.0], 1: [1.0], 2: [2.0]}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", ShardshiftError, "worker 1 failed: ValueError: ordered by the test"),
        ("refuse", Infeasible, "ordered by the test"),
        ("unpicklable", ShardshiftError, "worker 1 failed: Unpicklable: ordered by the test"),
        ("unpicklable message", ShardshiftError, "worker 1 failed: "),
    ],
)
def test_what_a_worker_raises_is_raised_by_the_launcher(how: str, kind: type[ShardshiftError], text: str) -> None:
    with (
        LocalJob(3, fail, (how, 2.0), timeout_s=2.0, preload=PRELOAD) as job,
        pytest.raises(ShardshiftError) as caught,
    ):
        list(job.messages())
    own = [error for error in (caught.value,) if type(error) is kind and text in str(error)]
    assert own, caught.value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["exit", "kill", "stop"])
def test_a_worker_that_ends_without_a_word_or_hangs_ends_the_job_in_bounded_time(how: str) -> None:
    timeout_s = 2.0
    started_s = time.monotonic()
    with (
        LocalJob(3, fail, (how, timeout_s), timeout_s=timeout_s, preload=PRELOAD) as job,
        pytest.raises(ShardshiftError),
    ):
        list(job.messages())
    # The survivors notice within their timeout, then those that hang have timeout + 5 s; the rest is for starting.
    assert time.monotonic() - started_s < 2 * timeout_s + GRACE_S + 20


def meet(send: Any) -> None:
    """The one that the job begins with waits for the others, which tell what they are."""
    member = Member.from_launcher(timeout_s=60.0)
    send((os.environ["RANK"], os.environ["WORLD_SIZE"], os.getppid()))
    if member.device == 0:
        member.store.get("came")
    elif member.store.add("count", 1) == 2:
        member.store.set("came", "")


@pytest.mark.timeout(90)
def test_workers_are_added_while_others_run_as_processes_of_their_own_and_are_heard_as_well() -> None:
    told: dict[int, Any] = {}
    with LocalJob(1, meet, (), timeout_s=60.0, preload=PRELOAD) as job:
        for device, message in job.messages():
            told[device] = message
            if device == 0:
                assert job.add(2) == range(1, 3)
        assert {device: message[:2] for device, message in told.items()} == {n: (str(n), "1") for n in range(3)}
        assert [message[2] == os.getpid() for _, message in sorted(told.items())] == [False, True, True]
        assert all(not psutil.pid_exists(pid) for pid in job.pids.values())


@pytest.mark.timeout(60)
def test_one_that_was_added_is_missed_when_it_dies() -> None:
    with LocalJob(1, wait_or_die, (), timeout_s=5.0, preload=PRELOAD) as job:
        messages = job.messages()
        assert next(messages) == (0, "here")
        job.add(1)
        with pytest.raises(PeerLost, match="its process ended with exit code 3") as caught:
            next(messages)
    assert caught.value.ranks == (1,)


def wait_or_die(send: Any) -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    send("here")
    time.sleep(20)  # as long as it takes: the launcher ends it


def test_the_way_a_silent_worker_ended_is_told() -> None:
    with (
        LocalJob(2, end, (), timeout_s=5.0, preload=PRELOAD) as job,
        pytest.raises(PeerLost, match="its process ended with exit code 3") as caught,
    ):
        list(job.messages())
    assert caught.value.ranks == (1,)


def end(send: Any) -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def leave_a_child(send: Any) -> None:
    """A child keeps this worker's end of the pipe open."""
    child = os.fork()
    if child == 0:
        signal.pause()
    send(child)


@pytest.mark.timeout(60)
def test_a_process_that_a_worker_leaves_behind_does_not_keep_the_launcher() -> None:
    with LocalJob(1, leave_a_child, (), timeout_s=5.0, preload=PRELOAD) as job:
        ((_, child),) = job.messages()
    os.kill(child, signal.SIGKILL)


def wait_for_ever(send: Any) -> None:
    send(os.getpid())
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)  # a process that stands still ends, too
    signal.pause()


def launch_and_report(pipe: Connection) -> None:
    with LocalJob(2, wait_for_ever, (), timeout_s=5.0, preload=PRELOAD) as job:
        for _, pid in job.messages():
            pipe.send(pid)


@pytest.mark.timeout(60)
def test_a_launcher_that_is_killed_leaves_no_process_behind() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    launcher = context.Process(target=launch_and_report, args=(theirs,))
    launcher.start()
    theirs.close()
    workers = [psutil.Process(ours.recv()) for _ in range(2)]
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.join()
    _, left = psutil.wait_procs([*workers, *children], timeout=GRACE_S)
    for process in left:
        process.kill()
    assert left == []


def host_a_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def train_with_a_store_elsewhere(send: Any, port: int) -> None:
    device = int(os.environ["RANK"])
    member = Member(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port)), device, Topology(1, 3))
    adapter = ToyAdapter(device, send)
    try:
        with open_session(adapter, member, Recipe("pp2", {3: "tp3"}, timeout_s=3.0)) as elastic:
            send("entered")
            job = elastic.start()
            while job and job.iteration < 3:
                job.step()
                job.iteration += 1
            assert job
            Member.from_launcher().store.wait(["go"])
            elastic.resize(job)
    except PeerLost as lost:
        send(str(lost))


@pytest.mark.timeout(60)
def test_when_the_store_dies_every_process_ends_with_an_error_that_says_so() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    server = context.Process(target=host_a_store, args=(theirs,))
    server.start()
    told: dict[int, str] = {}
    entered = 0
    try:
        with LocalJob(3, train_with_a_store_elsewhere, (ours.recv(),), timeout_s=10.0, preload=PRELOAD) as job:
            for device, message in job.messages():
                if message != "entered":
                    told[device] = message
                    continue
                entered += 1
                if entered == 3:
                    server.kill()
                    server.join()
                    job_store(job._store).set("go", "")
    finally:
        server.kill()
        server.join()
    assert told.keys() == {0, 1, 2}
    assert all("the job's store does not answer" in text for text in told.values()), told
