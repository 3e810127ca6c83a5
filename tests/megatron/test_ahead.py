"""A world made ahead leaves the present one alone, and takes its place when that is left."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tests.megatron.harness import TIMEOUT_S, Send, run_processes, start_alone
from tests.megatron.test_world import SCENARIO, everything, groups_here
from torch.distributed import distributed_c10d as c10d

from shardshift import Member, ParallelConfig
from shardshift.adapters import Place
from shardshift.adapters.megatron import RankLayout, ahead, world
from shardshift.demo.model import build_model, set_initial_weights, train_step


def stand_ahead(send: Send) -> None:
    """Make a world beside the one that a job trains in, twice; then go over to it."""
    job = start_alone(SCENARIO.make(), SCENARIO.start, "real")
    member, config = Member.from_launcher(timeout_s=TIMEOUT_S), ParallelConfig.parse("pp1tp2dp1")

    def place(name: str) -> Place:
        return Place(dist.PrefixStore(name, member.store), config, member.device, TIMEOUT_S, generation=1)

    def build() -> Any:
        with world.undisturbed_rng(), world.on_meta():
            return build_model(SCENARIO.recipe.shape, RankLayout(config, member.device))

    def broken() -> Any:
        raise RuntimeError

    before, standing = everything(), ahead.Standing()
    assert standing.make(place("dropped"), broken).chunks is None
    standing.make(place("beside"), build)
    send(everything() == before)
    assert job is not None
    set_initial_weights(job, 1)
    train_step(job)  # the present groups work
    world.leave().wait()
    stale = standing.make(place("stale"), build)
    standing.make(place("of another change"), build)
    assert standing.take(stale) is None
    taken = standing.take(standing.make(place("taken"), build))
    assert taken is not None
    assert taken.chunks is not None
    send({parameter.device.type for chunk in taken.chunks for parameter in chunk.parameters()} == {"meta"})
    taken.install()
    made = {id(group): group for group in groups_here().values()}
    for group in made.values():
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        assert ones.item() == group.size()
    send((dist.get_world_size(), parallel_state.get_tensor_model_parallel_rank() == member.device))
    send(all(c10d._resolve_process_group(name) is group for group, name in c10d._world.pg_names.items()))
    made.clear()
    del group
    world.leave().wait()
    send(not c10d._world.pg_map)


def test_a_world_made_ahead_leaves_the_present_one_as_it_is_and_takes_its_place() -> None:
    sent = run_processes(2, stand_ahead)
    for device in range(2):
        assert [message for sender, message in sent if sender == device] == [True, True, (2, True), True, True]
