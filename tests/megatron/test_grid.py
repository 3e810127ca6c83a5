"""What a grid says of every rank is what Megatron makes there: built rank by rank, nothing in common but the recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.megatron.harness import Scenario
from tests.megatron.training import Training, build_model, training, wrap

from shardshift import Kind, ParallelConfig
from shardshift.adapters.megatron import RankLayout, world
from shardshift.adapters.megatron import optimizer as optim
from shardshift.adapters.megatron.grid import Grid
from shardshift.adapters.megatron.job import unwrapped
from shardshift.adapters.megatron.meta import MetaJobs
from shardshift.adapters.megatron.names import named_tensors
from shardshift.adapters.megatron.slots import Slot

MOE: dict[str, Any] = {"experts": 4, "ffn": 8, "rms_norm": True, "sequence_parallel": True, "expert_bias": True}
JOBS = {
    "dense": (training(1, layers=4, distributed=True), "pp2tp2dp3"),
    "several buckets": (training(1, layers=4, distributed=True, overlap=True, bucket_size=900), "pp2tp1dp4"),
    "bf16": (training(1, layers=4, distributed=True, precision="bf16"), "pp1tp2dp4"),
    "masters without ranges": (training(1, layers=4, precision="bf16"), "pp2tp2dp2"),
    "experts": (training(1, biases=False, distributed=True, **MOE), "pp1tp2dp4ep2"),
    "experts cut otherwise": (training(1, biases=False, distributed=True, **MOE), "pp2tp2dp2ep4etp1"),
    "virtual stages": (training(1, layers=4, distributed=True), "pp2tp1dp2vpp2"),
}


@pytest.mark.parametrize(("recipe", "config"), JOBS.values(), ids=JOBS.keys())
def test_slots_of_every_rank_are_what_megatron_makes_there(recipe: Training, config: str) -> None:
    parsed = ParallelConfig.parse(config)
    meta = MetaJobs(
        lambda layout: build_model(recipe, layout),
        lambda chunks, layout: wrap(recipe, list(chunks), layout),
    )
    grid = Grid(parsed, meta.stages(parsed), meta.wholes(), (Kind.EXP_AVG,), None)
    for rank in range(parsed.world_size):
        layout = RankLayout(parsed, rank)
        with world.virtual_rank(parsed, rank):
            with world.on_meta():
                chunks = build_model(recipe, layout)
            with world.on_meta(wrapping=True):
                wrapped, optimizer, _ = wrap(recipe, chunks, layout)
            named = list(named_tensors(unwrapped(wrapped), layout.expert_coordinate.ep))
            held = optim.holdings(optimizer)
            slots: dict[tuple[Kind, str], Slot] = {(slot.kind, slot.name): slot for slot in grid.of_rank(rank)}
            for one in named:
                if not one.is_parameter:
                    continue
                slot = slots.pop((Kind.PARAM, one.name))
                assert (slot.shape, slot.dtype, slot.where) == (tuple(one.tensor.shape), one.tensor.dtype, one.where)
                kept = held.get(one.tensor)
                moment = slots.pop((Kind.EXP_AVG, one.name), None)
                master = slots.pop((Kind.MASTER, one.name), None)
                assert (kept is None) == (moment is None)
                if kept is not None and moment is not None:
                    assert (moment.flat, moment.shape) == (kept.flat, tuple(kept.key.shape))
                    assert (master is None) == (kept.master is None)
                    assert moment.dtype == torch.float32
        assert {kind for kind, _ in slots} <= {Kind.BUFFER}
    assert grid.layout.world_size == parsed.world_size


def test_a_job_is_imagined_once_for_each_configuration() -> None:
    built: list[ParallelConfig] = []
    recipe = training(1)

    def build(layout: RankLayout) -> Any:
        built.append(layout.config)
        return build_model(recipe, layout)

    meta = MetaJobs(build, lambda chunks, layout: wrap(recipe, list(chunks), layout))
    two = ParallelConfig.parse("pp2tp1dp2")
    assert meta.stages(two) is meta.stages(two)
    assert built == [two, two]


def test_changes_of_one_adapter_share_nothing_that_a_rank_writes() -> None:
    adapter = Scenario(training(1), "pp1tp1dp1", {}).make()
    one, two = (ParallelConfig.parse(config) for config in ("pp1tp1dp1", "pp1tp2dp1"))
    changes = [adapter.change(one, two, kinds=["exp_avg"]) for _ in range(2)]
    shard = changes[0].curr.shards(0)[0]
    made = [change.allocate(0, shard) for change in changes for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in made}) == 4
