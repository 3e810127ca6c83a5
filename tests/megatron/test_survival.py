"""After a loss: every survivor goes back to one finished step, bit for bit, leaves its dead world at once, and goes on.

The truth is the same training with the same change of layout between two steps and no loss, and what ``demo.oracle``
writes of both.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.megatron.harness import Scenario, Send, initialise, make_adapter, run_processes
from tests.megatron.training import Training, corpus_of, optimizer_step, train_step, training

from shardshift import Member, Mismatch, ParallelConfig, PeerLost
from shardshift.adapters import Place
from shardshift.adapters.megatron import Adapter, Job
from shardshift.adapters.sockets import Sockets
from shardshift.demo import oracle
from shardshift.elastic import LocalJob
from shardshift.values import Shard

WORKER = "shardshift.demo.worker"
HOUR_S = 3600.0
"""A limit that no test waits for: what is ended by it runs into pytest's."""
K, UNTIL = 2, 4
"""Finished steps when the loss comes, and where training ends."""

JOBS: dict[str, Training] = {
    "fp32": training(UNTIL, dropout=0.1),
    "bf16 with masters": training(UNTIL, precision="bf16", dropout=0.1),
    "fp16": training(UNTIL, precision="fp16", loss_scale=2.0**17),
    "ZeRO-1": training(UNTIL, distributed=True, dropout=0.1),
    "bf16, ZeRO-1, overlaps": training(UNTIL, distributed=True, precision="bf16", overlap=True, bucket_size=600),
    "experts with a bias": training(UNTIL, experts=4, biases=False, expert_bias=True),
}


def store() -> dist.Store:
    return Member.from_launcher(timeout_s=HOUR_S).store


def own_store() -> dist.Store:
    """A connection of one's own to the launcher's store, for a thread that waits in it."""
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*at, is_master=False, timeout=timedelta(seconds=HOUR_S))


def place(name: str, config: str, rank: int) -> Place:
    return Place(dist.PrefixStore(name, store()), ParallelConfig.parse(config), rank, HOUR_S)


def start(adapter: Adapter, recipe: Training, name: str, config: str) -> Job:
    """Its counts, and a step's draws of the loop's own, are part of what is compared."""
    job = adapter.start(place(name, config, int(os.environ["RANK"])))
    initialise(Scenario(recipe, config, {}), job)
    job.counters["tokens"] = 0
    adapter.mark(job)
    return job


def step(adapter: Adapter, job: Job, losses: dict[int, float]) -> None:
    loss = train_step(job)
    optimizer_step(job)
    adapter.advance(job)
    losses[job.iteration] = -1.0 if loss is None else loss
    job.counters["tokens"] += 8  # by the loop, after the step; as what it draws there
    np.random.random()
    adapter.mark(job)


def everything(job: Job, folder: Path) -> dict[str, Any]:
    oracle.save_rank(job, folder, settled=False)
    streams = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
    return {"streams": streams, "counters": job.counters, "position": job.position, "iteration": job.iteration}


def exchange(name: str, mine: dict[str, bytes], ranks: Mapping[int, int]) -> dict[str, bytes]:
    """Everybody's records; what the session does with them."""
    shared = store()
    shared.set(f"{name}/{os.environ['RANK']}", pickle.dumps(mine).hex())
    found: dict[str, bytes] = {}
    for device in ranks:
        given = pickle.loads(bytes.fromhex(shared.get(f"{name}/{device}").decode()))
        assert found.keys().isdisjoint(given)
        found |= given
    return found


Seen = tuple[dict[int, float], dict[str, Any]]
"""Losses by iteration, and what ``everything`` gives in the end."""


def calm(adapter: Adapter, recipe: Training, run: str, configs: tuple[str, str], folder: Path) -> Seen:
    """Without a loss: the change between two steps."""
    losses: dict[int, float] = {}
    rank = int(os.environ["RANK"])
    job = start(adapter, recipe, f"{run} calm", configs[0])
    for _ in range(K):
        step(adapter, job, losses)
    prev, curr = map(ParallelConfig.parse, configs)
    change = adapter.change(prev, curr, kinds=adapter.state_kinds(job))
    adapter.quiesce(job)
    tensors = change.shards(job)
    records = exchange(f"{run} calm records", adapter.companions(job), dict.fromkeys(range(prev.world_size), 0))
    adapter.retire(job)
    del job
    if rank >= curr.world_size:
        return losses, {}
    job = change.rebuild(place(f"{run} calm after", configs[1], rank), tensors, change.accept(rank, records))
    while job.iteration < UNTIL:
        step(adapter, job, losses)
    state = everything(job, folder / "calm")
    adapter.retire(job)
    return losses, state


def disturb(adapter: Adapter, job: Job, *, far: bool) -> dict[Shard, torch.Tensor]:
    """The step in flight: past its gate, and as far as ``far`` says; the copies that were taken at the gate."""
    train_step(job)
    undo = {shard: view.clone() for shard, view in adapter.shards(job).items()}
    optimizer_step(job)
    if far:
        adapter.advance(job)
        job.counters["tokens"] += 1000
        torch.rand(7)
    else:
        for view in list(adapter.shards(job).values())[::2]:
            view.mul_(2)  # as where a step is half done
    return undo


def lossy(
    adapter: Adapter, recipe: Training, run: str, configs: tuple[str, str], survivors: Mapping[int, int], folder: Path
) -> Seen:
    """With a loss in the middle of a step: device 0 has finished it, device 1 not, and one may be gone.

    Args:
        adapter: the adapter.
        recipe: the job.
        run: its name.
        configs: before and after.
        survivors: per device its rank there.
        folder: for the oracle.
    """
    losses: dict[int, float] = {}
    device = int(os.environ["RANK"])
    job = start(adapter, recipe, f"{run} lossy", configs[0])
    for _ in range(K):
        step(adapter, job, losses)
    kinds = adapter.state_kinds(job)
    undo = disturb(adapter, job, far=device == 0)
    if device not in survivors:
        os.kill(os.getpid(), signal.SIGKILL)
    adapter.sever(job)
    for shard, copy in undo.items():
        adapter.shards(job)[shard].copy_(copy)
    adapter.rewind(job, K)
    assert job.iteration == K
    kept, mine = adapter.shards(job), adapter.alone(job, K)
    prev, curr = map(ParallelConfig.parse, configs)
    adapter.abandon(job)
    with pytest.raises(Mismatch):
        _ = job.model
    del job
    change = adapter.change(prev, curr, kinds=kinds)
    records = exchange(f"{run} lossy records", mine, survivors)
    rank = survivors[device]
    job = change.rebuild(
        place(f"{run} lossy after", configs[1], rank), change.of_kept(kept), change.accept(rank, records)
    )
    while job.iteration < UNTIL:
        step(adapter, job, losses)
    state = everything(job, folder / "lossy")
    adapter.retire(job)
    return losses, state


def go_back(send: Send, names: list[str], configs: tuple[str, str], lost: int | None, folder: Path) -> None:
    torch.set_num_threads(1)
    devices = ParallelConfig.parse(configs[0]).world_size
    survivors = {device: number for number, device in enumerate(device for device in range(devices) if device != lost)}
    for name in names:
        recipe = JOBS[name]
        adapter = make_adapter(recipe, corpus_of(recipe))
        send(("calm", name, *calm(adapter, recipe, name, configs, folder / name)))
        send(("lossy", name, *lossy(adapter, recipe, name, configs, survivors, folder / name)))


def hold_together(heard: list[tuple[int, Any]], names: list[str], folder: Path, survivors: list[int]) -> None:
    for name in names:
        of = {(device, which): rest for device, (which, what, *rest) in heard if what == name}
        for rank, device in enumerate(survivors):
            losses, state = of[device, "lossy"]
            expected, expected_state = of[rank, "calm"]
            after = {iteration: loss for iteration, loss in expected.items() if iteration > K}
            assert {iteration: losses[iteration] for iteration in after} == after, name
            assert state == expected_state, name
        states = [oracle.assemble(oracle.read_ranks(folder / name / run)) for run in ("calm", "lossy")]
        assert oracle.differences(*states) == [], name


@pytest.mark.parametrize(
    ("config", "names"),
    [("dp2", [*JOBS][:3]), ("dp2", [*JOBS][3:]), ("pp2tp1dp2", ["bf16, ZeRO-1, overlaps"]), ("tp2", ["fp32"])],
    ids=lambda one: one if isinstance(one, str) else ", ".join(one),
)
def test_a_step_that_was_broken_off_is_repeated_bit_for_bit(config: str, names: list[str], tmp_path: Path) -> None:
    devices = ParallelConfig.parse(config).world_size
    heard = run_processes(devices, go_back, names, (config, config), None, tmp_path)
    hold_together(heard, names, tmp_path, [*range(devices)])


@pytest.mark.parametrize("lost", [0, 1])
def test_whoever_is_lost_the_other_replica_has_all_that_the_job_needs(lost: int, tmp_path: Path) -> None:
    heard: list[tuple[int, Any]] = []
    names, configs = ["bf16 with masters"], ("dp2", "dp1")
    run = LocalJob(2, go_back, (names, configs, lost, tmp_path), timeout_s=60.0, preload=[WORKER])
    with run as job, pytest.raises(PeerLost):
        heard.extend(job.messages())
    hold_together(heard, names, tmp_path, [1 - lost])


def leave_the_dead(send: Send, how: int) -> None:
    """Rank 2 stops or dies while all others wait for it; a thread of theirs cuts them off; then they go on by two."""
    torch.set_num_threads(1)
    recipe = training(2, distributed=True, global_batch_size=6)
    adapter = make_adapter(recipe, corpus_of(recipe))
    device = int(os.environ["RANK"])
    job = start(adapter, recipe, "before", "dp3")
    step(adapter, job, {})
    shared = store()
    if device == 2:
        for other in range(2):
            shared.get(f"waits/{other}")
        shared.set("gone", "")
        os.kill(os.getpid(), how)

    def watch() -> None:
        dist.PrefixStore("watch", own_store()).get("cut")
        adapter.sever(job)

    watching = threading.Thread(target=watch)
    watching.start()
    pending = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
    shared.set(f"waits/{device}", "")
    shared.get("gone")
    dist.PrefixStore("watch", own_store()).set("cut", "")
    with pytest.raises(RuntimeError):
        pending[0].wait()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    watching.join()
    adapter.abandon(job)
    del pending, job
    job = start(adapter, recipe, "after", "dp2")
    step(adapter, job, {})
    adapter.retire(job)
    send(("went on", job.iteration))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_dead_world_is_left_at_once(how: int) -> None:
    heard: list[tuple[int, Any]] = []
    with LocalJob(3, leave_the_dead, (int(how),), timeout_s=60.0, preload=[WORKER]) as job:
        messages = job.messages()
        while len(heard) < 2:
            heard.append(next(messages))
    assert sorted(heard) == [(0, ("went on", 1)), (1, ("went on", 1))]


def abandon_often(send: Send) -> None:
    torch.set_num_threads(1)
    recipe = training(2, distributed=True, overlap=True, bucket_size=600)
    adapter = make_adapter(recipe, corpus_of(recipe))
    counts = []
    gc.collect()
    gc.freeze()
    for number in range(20):
        job = start(adapter, recipe, f"world {number}", "dp2")
        step(adapter, job, {})
        if os.environ["RANK"] == "0":
            dist.all_reduce(torch.ones(3), async_op=True)  # which nobody answers
        adapter.abandon(job)
        assert adapter._leaving is not None
        adapter._leaving.wait()
        del job
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    send(counts)


def test_abandoning_leaks_no_threads_and_no_sockets() -> None:
    for _, counts in run_processes(2, abandon_often):
        assert min(counts[-5:]) == min(counts[4:9]), counts  # one that has just ended may still be listed


def look(send: Send) -> None:
    torch.set_num_threads(1)
    recipe = training(3, distributed=True, overlap=True, bucket_size=600, precision="bf16")
    adapter = make_adapter(recipe, corpus_of(recipe))
    job = start(adapter, recipe, "look", "dp2")
    told = [("built", adapter.whole(job))]
    for _ in range(2):
        train_step(job)
        told.append(("at the gate", adapter.whole(job)))
        optimizer_step(job)
        adapter.advance(job)
        told.append(("stepped", adapter.whole(job)))
    for chunk in job.model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    job.optimizer.zero_grad()
    told.append(("begun", adapter.whole(job)))
    adapter.quiesce(job)
    told.append(("gathered", adapter.whole(job)))

    def at(shards: Mapping[Shard, torch.Tensor]) -> dict[Shard, tuple[int, torch.Size]]:
        return {shard: (view.data_ptr(), view.shape) for shard, view in shards.items()}

    change = adapter.change(job.config, job.config, kinds=adapter.state_kinds(job))
    found = [at(adapter.shards(job)) == at(change.shards(job))]
    again = adapter.shards(job)
    found.append(all(view is again[shard] for shard, view in adapter.shards(job).items()))
    for part in job.optimizer.chained_optimizers:
        state = part.optimizer.state
        for key in list(state):
            state[key]["exp_avg"] = state[key]["exp_avg"].clone()
    found.append(at(adapter.shards(job)) == at(change.shards(job)) != at(again))
    again = adapter.shards(job)
    parameter = next(job.model[0].parameters())
    parameter.data = parameter.data.clone()
    found.append(at(adapter.shards(job)) == at(change.shards(job)) != at(again))
    send((told, found))
    adapter.retire(job)


def test_live_views_follow_the_job_and_whole_knows_of_gathers() -> None:
    for _, (told, found) in run_processes(2, look):
        assert told == [
            ("built", True),
            ("at the gate", True),
            ("stepped", False),
            ("at the gate", True),
            ("stepped", False),
            ("begun", False),
            ("gathered", True),
        ]
        assert found == [True] * 4


def two_of_a_job(send: Send) -> None:
    """One process plays both survivors."""
    torch.set_num_threads(1)
    recipe = training(3, vocab_size=51, swiglu=True, biases=False)
    adapter = make_adapter(recipe, corpus_of(recipe))
    job = start(adapter, recipe, "survivor", "dp1")
    step(adapter, job, {})
    job.individual_streams = ("python",)
    adapter.mark(job)
    one = adapter.alone(job, 1)
    with pytest.raises(Mismatch, match="cannot go back to step 7, only to"):
        adapter.alone(job, 7)
    step(adapter, job, {})
    two = {key.replace("rank0", "rank1"): content for key, content in adapter.alone(job, 2).items()}
    dp2 = ParallelConfig.parse("dp2")
    change = adapter.change(dp2, job.config, kinds=adapter.state_kinds(job))
    with pytest.raises(Mismatch, match=r"ranks 0 \(iteration 1\) and 1 \(iteration 2\)") as refused:
        change.accept(0, one | two)
    send(str(refused.value))
    send(change.accept(0, one).streams.lost)
    kept = adapter.shards(job)
    wider = adapter.change(job.config, ParallelConfig.parse("tp2"), kinds=adapter.state_kinds(job))
    found = wider.of_kept(kept)
    send({*wider.prev.shards(0)} == {*found})
    live = wider.shards(job)
    send(all(found[shard].data_ptr() == live[shard].data_ptr() for shard in live))
    kinds = adapter.state_kinds(job)
    back = adapter.change(ParallelConfig.parse("tp2"), job.config, kinds=kinds)
    adapter.quiesce(job)
    accepted = wider.accept(0, adapter.alone(job, 2))
    adapter.retire(job)
    moved = {shard: wider.allocate(1, shard) for shard in wider.curr.shards(1)}
    shards, records = wider.moved(1, moved, accepted)
    again = adapter.change(ParallelConfig.parse("tp2"), ParallelConfig.parse("tp2"), kinds=kinds)
    send({*again.prev.shards(1)} == {*shards})
    send({*back.prev.shards(1)} == {*back.of_kept(shards)})
    second = again.accept(1, records)
    first, then = (one.streams.at(ParallelConfig.parse("tp2"), 1, at) for one, at in ((accepted, 1), (second, 2)))
    send(bool(torch.equal(first["torch"], then["torch"])) and second.job.generation == 1)


def test_survivors_that_differ_are_refused_and_what_is_lost_is_named() -> None:
    refused, lost, *holds = (message for _, message in run_processes(1, two_of_a_job))
    for name in ("iteration", "consumed_samples", "scheduler", "counter tokens"):
        assert name in refused
    assert lost == ("python of pp0 tp0 dp1 cp0",)
    assert holds == [True] * 5


def test_only_what_belongs_to_the_world_is_cut() -> None:
    """Connections to servers from before are the store's, from either end."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        first = socket.create_connection(before.getsockname())
        sockets = Sockets()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ours = socket.create_connection(listening.getsockname())
            theirs, _ = listening.accept()
            others = [socket.create_connection(before.getsockname()), before.accept()[0], before.accept()[0], first]
            sockets.note()
            later = socket.create_connection(listening.getsockname())
            assert sockets.cut() == 2
            assert (ours.recv(1), theirs.recv(1)) == (b"", b"")
            for sender, receiver in ((others[0], others[2]), (others[3], others[1])):
                sender.sendall(b"1")
                assert receiver.recv(1) == b"1"
            assert later.getpeername() == listening.getsockname()
            for one in (*others, ours, theirs, later):
                one.close()
