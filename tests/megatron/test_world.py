"""The virtual world leaves no trace; the real one is given back whole, change after change."""

import contextlib
import functools
import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tests.megatron.harness import (
    TIMEOUT_S,
    Scenario,
    Send,
    initialise,
    open_session,
    run_processes,
    small,
    start_alone,
)
from tests.megatron.training import advance, leave_plain, start_plain, training
from tests.megatron.training import optimizer_step as train_plain_optimizer
from tests.megatron.training import train_step as train_training_step
from torch.distributed import distributed_c10d as c10d

from shardshift import Member, Mismatch, ParallelConfig
from shardshift.adapters import Place
from shardshift.adapters.megatron import Job, RankLayout, world
from shardshift.adapters.megatron.sharing import shared_groups
from shardshift.demo.model import build_model, optimizer_step, set_initial_weights, train_step

SCENARIO = Scenario(small(12), "pp2tp1dp1", {})
REGISTRIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


def everything() -> dict[str, Any]:
    """Whatever an imagined world could leave behind."""
    numpy_state: Any = np.random.get_state()
    found: dict[str, Any] = {name: dict(getattr(c10d._world, name)) for name in REGISTRIES}
    found["tags_to_pg"] = {tag: list(groups) for tag, groups in c10d._world.tags_to_pg.items() if groups}
    found |= {
        f"mpu {name}": value for name, value in vars(parallel_state).items() if name[:1] == "_" and name[1:2].isupper()
    }
    tracker = get_cuda_rng_tracker()
    return found | {
        "world": c10d.GroupMember.WORLD,
        "group_count": c10d._world.group_count,
        "init_method": c10d._default_pg_init_method,
        "excepthook": sys.excepthook,
        "all_reduce": dist.all_reduce,
        "python": random.getstate(),
        "numpy": [str(part) if isinstance(part, str) else np.asarray(part).tolist() for part in numpy_state],
        "torch": torch.get_rng_state().tolist(),
        "tracker": {name: state.tolist() for name, state in tracker.states_.items()},
        "seeds": set(tracker.seeds_),
        "initialized": tracker.is_initialized(),
    }


class BrokenBuilder(Exception):
    pass


def build_and_break(config: ParallelConfig) -> None:
    with world.virtual_rank(config, 5), world.on_meta():
        build_model(SCENARIO.recipe.shape, RankLayout(config, 5))
        raise BrokenBuilder


def imagine(send: Send, real: bool) -> None:
    """Imagine every rank of a world, and one that breaks while it builds."""
    job = start_alone(SCENARIO.make(), SCENARIO.start, "real") if real else None
    config = ParallelConfig.parse("pp4tp2dp3")
    with world.virtual_rank(config, 0):
        pass  # registers torch's fake backend, once and for all
    before = everything()
    for rank in (0, 7, 23):
        with world.virtual_rank(config, rank), world.on_meta():
            send((dist.get_rank(), dist.get_world_size(), parallel_state.get_pipeline_model_parallel_rank()))
            build_model(SCENARIO.recipe.shape, RankLayout(config, rank))
            torch.rand(3), random.random(), np.random.rand()
    send(everything() == before)
    with pytest.raises(BrokenBuilder):
        build_and_break(config)
    send(everything() == before)
    if job is not None:
        set_initial_weights(job, 1)
        train_step(job)  # the real groups still work
        dist.barrier()
        world.leave().wait()
        send(
            not c10d._world.pg_map and not any(isinstance(v, dist.ProcessGroup) for v in vars(parallel_state).values())
        )


@pytest.mark.parametrize("real", [True, False], ids=["beside a real world", "without one"])
def test_an_imagined_world_leaves_no_trace(real: bool) -> None:
    sent = [message for device, message in run_processes(2, imagine, real) if device == 0]
    assert sent == [(0, 24, 0), (7, 24, 1), (23, 24, 3), True, True] + [True] * real


MOST_SHARED: dict[str, Any] = {
    "pp2tp2dp1": training(3, dropout=0.1),
    "pp2tp1dp1vpp2": training(3, layers=4, tied=False),
    "pp2tp1dp2": training(3, precision="bf16", distributed=True, overlap=True, bucket_size=500),
    "pp1tp2dp2ep2etp1": training(  # tensor and expert ranks are alike, and those of both kinds of gradients
        3, experts=4, biases=False, ffn=8, sequence_parallel=True, distributed=True, overlap=True, bucket_size=500
    ),
}


def train_with_and_without_sharing(send: Send) -> None:
    torch.set_num_threads(1)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    for name, recipe in MOST_SHARED.items():
        config = ParallelConfig.parse(name)
        for sharing in (False, True) if member.device < config.world_size else ():
            store = dist.PrefixStore(f"{name}/{sharing}", member.store)
            with shared_groups(expert_gradients=config.ep > 1) if sharing else contextlib.nullcontext():
                job: Any = start_plain(recipe, store, config, member.device)
            set_initial_weights(job, 1)
            losses = []
            for _ in range(recipe.steps):
                losses.append(train_training_step(job))
                train_plain_optimizer(job)
                advance(job)
            weights = [parameter.detach().float().numpy().tobytes() for parameter in job.model[-1].parameters()]
            send((name, sharing, member.device, losses, weights, len(c10d._world.pg_map)))
            leave_plain()


def test_training_in_shared_groups_is_that_in_megatrons_own_bit_for_bit() -> None:
    found: dict[Any, Any] = {}
    for _, (name, sharing, device, *rest) in run_processes(4, train_with_and_without_sharing):
        found[name, device, sharing] = rest
    assert {name for name, _, _ in found} == {*MOST_SHARED}
    for name, device in {key[:2] for key in found}:
        (losses, weights, groups), (losses_shared, weights_shared, groups_shared) = (
            found[name, device, sharing] for sharing in (False, True)
        )
        assert losses_shared == losses
        assert weights_shared == weights
        assert groups_shared < groups


class Fills(torch.nn.Module):
    """Weights by each way that fills at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)  # uniform_
        self.weight = torch.nn.Parameter(torch.empty(4, 4))
        init = functools.partial(torch.nn.init.normal_, std=0.02)  # as megatron-core's init_method_normal
        self.same = init(self.weight) is self.weight and self.weight.data.uniform_(-1, 1).is_meta


def test_building_on_meta_leaves_random_values_out_and_real_tensors_are_filled() -> None:
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = torch.empty(8, device="cpu").normal_(generator=theirs)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with world.on_meta():
        built = Fills()
        assert built.same
        assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
        assert torch.equal(torch.get_rng_state(), before)
        built.weight.data.normal_(generator=ours)
        filled = torch.zeros(8, device="cpu").normal_(generator=ours)
    assert torch.equal(filled, expected)
    assert torch.empty(2, device="meta").normal_().is_meta
    assert torch.Tensor.normal_ is torch._C.TensorBase.normal_, "as it was"


CYCLE = ("pp1tp2dp1", "pp1tp1dp2ep2", "pp2tp1dp1")
EXPERTS = training(
    22, experts=2, ffn=8, rms_norm=True, biases=False, sequence_parallel=True, distributed=("pp1tp1dp2ep2", "pp2tp1dp1")
)


def train_through_changes(send: Send) -> None:
    torch.set_num_threads(1)
    changes = {step: CYCLE[step % 3] for step in range(1, 22)}
    with open_session(Scenario(EXPERTS, CYCLE[0], changes)) as elastic:
        job = elastic.start(lambda job: set_initial_weights(job, 1))
        while job and job.iteration < EXPERTS.steps:
            train_training_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            if elastic.resize_due(job):
                job = elastic.resize(job)
                left: Any = elastic._party.adapter
                left._leaving.wait()  # groups go in threads of their own while the next world trains
                counts = {  # before the collector runs: nothing may depend on it
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "registered groups": len(c10d._world.pg_map),
                    "excepthooks": hook_depth(),
                }
                gc.collect()
                send(counts | held())


def held() -> dict[str, int]:
    """What Python holds; in a function of its own, so that nothing of it is held on."""
    things = gc.get_objects()
    tensors = [thing for thing in things if isinstance(thing, torch.Tensor) and not thing.is_meta]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    return {
        "modules": sum(isinstance(thing, torch.nn.Module) for thing in things),
        "groups": sum(isinstance(thing, dist.ProcessGroup) for thing in things),
        "bytes of tensors": sum(storages.values()),
        "KiB resident": resident_kib(),
    }


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


GRADIENTS, EXPERT_GRADIENTS = "_DATA_PARALLEL_GROUP_WITH_CP", "_EXPERT_DATA_PARALLEL_GROUP"
LAYOUTS = ("pp2tp1dp1", "pp1tp1dp2", "pp1tp1dp2ep2", "pp1tp2dp1ep2etp1", "pp2tp2dp2", "pp1tp2dp2ep2etp1")


def groups_here() -> dict[str, Any]:
    return {name: group for name, group in vars(parallel_state).items() if isinstance(group, dist.ProcessGroup)}


def look_at_groups(send: Send) -> None:
    """Megatron's groups as it makes them itself, and in our world: do they have the same ranks, and work?"""
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    for name in LAYOUTS:
        config = ParallelConfig.parse(name)
        if member.device >= config.world_size:
            continue
        start_plain_world(config, member.device, dist.PrefixStore(f"{name}/plain", member.store))
        plain = {name: dist.get_process_group_ranks(group) for name, group in groups_here().items()}
        world.leave().wait()

        world.enter(Place(dist.PrefixStore(f"{name}/ours", member.store), config, member.device, TIMEOUT_S))
        ours = groups_here()
        assert {name: dist.get_process_group_ranks(group) for name, group in ours.items()} == plain
        made = {id(group): group for group in ours.values()}
        for group in made.values():
            ones = torch.ones(1)
            dist.all_reduce(ones, group=group)
            assert ones.item() == group.size()
        assert len(c10d._world.pg_map) == len(made) + 1, (
            "each is registered, and so closed, once; and the default group"
        )
        send((name, {one: {other for other in ours if ours[other] is ours[one]} for one in ours}, plain))
        del made, group, ours
        world.leave().wait()
        assert not c10d._world.pg_map


def start_plain_world(config: ParallelConfig, rank: int, store: Any) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.world_size)
    parallel_state.initialize_model_parallel(
        config.tp,
        config.pp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.expert_tp,
        create_gloo_process_groups=False,
    )


def test_groups_of_the_same_ranks_are_one_except_those_that_gradients_are_reduced_in() -> None:
    sent = [message for _, message in run_processes(8, look_at_groups)]
    assert {name for name, _, _ in sent} == {*LAYOUTS}
    for name, shared_with, ranks in sent:
        config = ParallelConfig.parse(name)
        apart = {GRADIENTS} | ({EXPERT_GRADIENTS} if config.ep > 1 else set())
        apart = {one for one in apart if len(ranks[one]) > 1}
        apart |= {alias for one in apart for alias in shared_with[one] if "INTRA_PARTIAL" in alias}  # Megatron's own
        for one, others in shared_with.items():
            alike = {other for other in ranks if ranks[other] == ranks[one]}
            if one in apart:
                assert {other.replace("_INTRA_PARTIAL", "") for other in others} == {one.replace("_INTRA_PARTIAL", "")}
            else:
                assert others == alike - apart


def hook_depth() -> int:
    depth, hook = 0, sys.excepthook
    while getattr(hook, "__closure__", None):
        depth += 1
        inner = [cell.cell_contents for cell in hook.__closure__ or () if callable(cell.cell_contents)]
        if not inner:
            break
        hook = inner[0]
    return depth


def test_twenty_changes_leave_no_file_thread_group_model_or_memory_behind() -> None:
    sent = run_processes(2, train_through_changes)
    for device in range(2):
        counts = [message for sender, message in sent if sender == device]
        assert len(counts) == 21
        for what in counts[0]:
            series = [count[what] for count in counts]
            # Layouts take turns, and whether a peer, or a thread of this process, has ended by then is chance: so the
            # least of each layout's visits counts, which grows with every leak.
            grown = max(min(series[15 + k :: 3]) - min(series[6 + k : 12 : 3]) for k in range(3))
            assert grown <= (2048 if what == "KiB resident" else 0), f"{what}: {series}"


def uses_of(job: Job) -> list[Callable[[], Any]]:
    chunk: Any = job.model[0]
    optimizer, scheduler = job.optimizer, job.scheduler
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return [
        lambda: job.model,
        lambda: job.optimizer,
        lambda: job.data,
        lambda: chunk(tokens, tokens, None, labels=tokens),
        lambda: chunk.module(tokens, tokens, None, labels=tokens),
        lambda: chunk.zero_grad_buffer(),
        lambda: chunk.state_dict(),
        lambda: optimizer.step(),
        lambda: optimizer.state_dict(),
        lambda: optimizer.chained_optimizers[0].step(),
        lambda: optimizer.chained_optimizers[0].optimizer.step(),
        lambda: scheduler.step(8),
    ]


def use_what_is_gone(send: Send) -> None:
    torch.set_num_threads(1)
    scenario = Scenario(small(3, layers=2), "pp1tp1dp1", {1: "pp1tp2dp1"})
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < scenario.recipe.steps:
            if elastic.resize_due(job):
                uses = uses_of(job)
                job = elastic.resize(job)
                for use in uses:
                    with pytest.raises(Mismatch, match="change of layout"):
                        use()
                send(len(uses))
                continue
            train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)


def test_objects_of_a_consumed_job_raise_on_use() -> None:
    assert [message for _, message in run_processes(2, use_what_is_gone)] == [12]
