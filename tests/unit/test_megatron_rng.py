"""Random streams by logical coordinate: what each rank publishes, what each new rank gets. Ranks are imagined."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from shardshift import ParallelConfig
from shardshift.adapters.generators import Streams
from shardshift.adapters.megatron import rng
from shardshift.adapters.megatron.alike import differing_from, digests
from shardshift.adapters.megatron.records import JobRecord, RankRecord
from shardshift.values import Mismatch

TRACKED = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
Generators = dict[str, torch.Generator]


def of(text: str) -> ParallelConfig:
    return ParallelConfig.parse(text)


def megatron_seeds(config: ParallelConfig, rank: int, *, by_replica: bool = False) -> Generators:
    """The streams that Megatron's ``initialize.py`` seeds on a rank, each a generator to draw from."""
    at, among = config.coordinate(rank), config.expert_coordinate(rank)
    seed = 1234 + 100 * at.pp + (10 * at.dp if by_replica else 0)
    seeds = (seed, seed, seed + 2718 + at.tp, seed + 1024 + 100 * among.ep + among.etp)
    names = ("torch", *(f"tracker:{stream}" for stream in TRACKED))
    return {name: torch.Generator().manual_seed(seed) for name, seed in zip(names, seeds, strict=True)}


def seeds_of_its_own(config: ParallelConfig, rank: int) -> Generators:
    names = ("torch", *(f"tracker:{stream}" for stream in TRACKED))
    return {name: torch.Generator().manual_seed(10 + rank) for name in names}


def draw(generators: Generators) -> dict[str, float]:
    return {name: float(torch.rand((), generator=generator)) for name, generator in generators.items()}


def carry(
    before: ParallelConfig, live: Mapping[int, Streams], after: ParallelConfig, generation: int = 1, seen: Any = ()
) -> tuple[dict[int, Streams], rng.Origins, dict[int, bytes]]:
    """Each new rank's streams, through real records; what was read; the records' bytes by rank."""
    contents: dict[int, bytes] = {}
    for rank, streams in live.items():
        at = before.coordinate(rank)
        first = before.rank(at.pp, at.tp)
        names = None if rank == first else differing_from(digests(live[first]), digests(streams))
        record = RankRecord(rank, [], rng.published(streams, names), {}, {})
        for content in record.to_bytes(first=rank == first).values():
            contents[rank] = content
    published = {rank: RankRecord.from_bytes(content).streams for rank, content in contents.items()}
    origins = rng.Origins.read(before, published, seen)
    return {rank: origins.at(after, rank, generation) for rank in range(after.world_size)}, origins, contents


def go_on(streams: Mapping[str, torch.Tensor]) -> Generators:
    generators = {name: torch.Generator() for name in streams}
    for name, state in streams.items():
        generators[name].set_state(state)
    return generators


def states(generators: Generators) -> Streams:
    return {name: generator.get_state() for name, generator in generators.items()}


@pytest.mark.parametrize("seeds", [megatron_seeds, seeds_of_its_own], ids=["of Megatron", "of each rank's own"])
@pytest.mark.parametrize(
    "text", ["dp4ep4", "tp2dp2", "pp2tp2dp2ep4etp1", "pp2tp1cp2dp2", "tp2cp2dp2ep2etp2", "pp1tp4dp2ep8etp1"]
)
def test_the_fourth_draw_of_every_coordinate_is_that_of_a_job_that_never_moved(
    text: str, seeds: Callable[[ParallelConfig, int], Generators]
) -> None:
    config = of(text)
    moving = {rank: seeds(config, rank) for rank in range(config.world_size)}
    staying = {rank: seeds(config, rank) for rank in range(config.world_size)}
    for _ in range(3):
        for generators in (*moving.values(), *staying.values()):
            draw(generators)
    carried, _, _ = carry(config, {rank: states(own) for rank, own in moving.items()}, config)
    assert {rank: draw(go_on(own)) for rank, own in carried.items()} == {
        rank: draw(own) for rank, own in staying.items()
    }


def test_a_rank_publishes_only_what_the_first_of_its_replicas_has_not() -> None:
    config = of("tp2dp4ep2")
    _, _, contents = carry(config, {r: states(megatron_seeds(config, r)) for r in range(8)}, config)
    told = {rank: set(RankRecord.from_bytes(content).streams) for rank, content in contents.items()}
    ep = [config.expert_coordinate(rank).ep for rank in range(8)]
    assert told[0] == told[1] == {"torch", *(f"tracker:{stream}" for stream in TRACKED)}
    other_expert = {rank for rank in range(2, 8) if ep[rank] != ep[config.coordinate(rank).tp]}
    assert told.keys() == {0, 1} | other_expert
    assert all(told[rank] == {"tracker:expert-parallel-rng"} for rank in other_expert)


def test_streams_seeded_by_replica_belong_to_the_whole_coordinate() -> None:
    before, after = of("tp2dp2"), of("tp2dp4")
    live = {rank: states(megatron_seeds(before, rank, by_replica=True)) for rank in range(4)}
    carried, origins, _ = carry(before, live, after)
    assert origins.individual == {"torch", *(f"tracker:{stream}" for stream in TRACKED)}
    for rank, streams in carried.items():
        at = after.coordinate(rank)
        if at.dp < 2:
            kept = live[before.rank(0, at.tp, at.dp)]
            assert all(torch.equal(state, kept[name]) for name, state in streams.items())
    for name in origins.individual:
        assert len({carried[rank][name].numpy().tobytes() for rank in (4, 5, 6, 7)}) == 4, "each new one has its own"


def test_streams_that_were_individual_stay_so_when_one_replica_is_left_between() -> None:
    wide, narrow = of("dp2"), of("dp1")
    carried, origins, _ = carry(wide, {r: states(megatron_seeds(wide, r, by_replica=True)) for r in range(2)}, narrow)
    again, still, _ = carry(narrow, carried, wide, 2, seen=origins.individual)
    assert still.individual == origins.individual
    assert torch.equal(again[0]["torch"], carried[0]["torch"])
    assert not torch.equal(again[1]["torch"], again[0]["torch"])


def test_a_new_tensor_rank_has_the_documented_derived_stream_alike_on_all_replicas() -> None:
    before, after = of("tp1dp2"), of("tp2dp2")
    live = {rank: states(megatron_seeds(before, rank)) for rank in range(2)}
    carried, _, _ = carry(before, live, after, generation=7)
    name = "tracker:model-parallel-rng"
    text = b"shardshift rng\0" + live[0][name].numpy().tobytes() + f"\0{name}\0change 7\0pp0 tp1".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    derived = torch.Generator().manual_seed(seed).get_state()
    for dp in range(2):
        assert torch.equal(carried[after.rank(0, 0, dp)][name], live[0][name])
        assert torch.equal(carried[after.rank(0, 1, dp)][name], derived)
        for shared in ("torch", "tracker:data-parallel-rng"):
            assert torch.equal(carried[after.rank(0, 1, dp)][shared], live[0][shared])
    from_the_seed = states(megatron_seeds(after, after.rank(0, 1)))
    assert not torch.equal(derived, from_the_seed[name])


def test_derived_streams_differ_between_changes_even_if_nothing_was_drawn_between() -> None:
    one, two = of("tp1"), of("tp2")
    live = {0: states(megatron_seeds(one, 0))}
    first, second = (carry(one, live, two, generation)[0][1] for generation in (1, 2))
    assert not torch.equal(first["tracker:model-parallel-rng"], second["tracker:model-parallel-rng"])


CONFIGS = st.sampled_from(
    [of(t) for t in ("dp1", "dp4ep4", "tp2dp2ep2", "pp2tp2", "pp2tp1dp2ep2", "tp2dp2ep4etp1", "cp2dp2", "tp4", "dp3")]
)


@given(CONFIGS, CONFIGS)
def test_homes_that_existed_go_on_and_new_ones_are_shared_by_the_ranks_of_that_home_alone(
    before: ParallelConfig, after: ParallelConfig
) -> None:
    live = {rank: states(megatron_seeds(before, rank)) for rank in range(before.world_size)}
    carried, origins, _ = carry(before, live, after)
    assert not origins.individual
    groups: dict[str, Callable[[ParallelConfig, int], tuple[int, ...]]] = {
        "torch": lambda c, r: (c.coordinate(r).pp,),
        "tracker:data-parallel-rng": lambda c, r: (c.coordinate(r).pp,),
        "tracker:model-parallel-rng": lambda c, r: (c.coordinate(r).pp, c.coordinate(r).tp),
        "tracker:expert-parallel-rng": lambda c, r: (
            c.expert_coordinate(r).pp,
            c.expert_coordinate(r).ep,
            c.expert_coordinate(r).etp,
        ),
    }
    for name, key in groups.items():
        old = {key(before, rank): own[name].numpy().tobytes() for rank, own in live.items()}
        new: dict[Any, set[bytes]] = {}
        for rank, own in carried.items():
            new.setdefault(key(after, rank), set()).add(own[name].numpy().tobytes())
        assert all(len(found) == 1 for found in new.values())
        assert all(new[at] == {old[at]} for at in new.keys() & old.keys())
        begun = [found for at, found in new.items() if at not in old]  # Megatron's own seeds collide: pp1 ep0, pp0 ep1
        assert len(set(old.values()).union(*begun)) == len(set(old.values())) + len(begun), "no new one is another's"


def test_python_and_numpy_and_the_tracker_are_set_as_they_were_captured() -> None:
    tracker = get_cuda_rng_tracker()
    kept = rng.capture()
    try:
        tracker.set_states({stream: torch.Generator().manual_seed(5).get_state() for stream in TRACKED})
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)
        record = RankRecord.from_bytes(RankRecord(0, [], rng.capture(), {}, {}).to_bytes(first=True)["rank0"])
        expected = random.random(), float(np.random.standard_normal()), float(torch.rand(()))
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        tracker.set_states({"of another layout": torch.get_rng_state()})
        rng.install(record.streams)
        assert (random.random(), float(np.random.standard_normal()), float(torch.rand(()))) == expected
        assert set(tracker.get_states()) == set(TRACKED)
    finally:
        rng.install(kept)


@pytest.mark.parametrize("stream", ["python", "numpy"])
def test_new_stages_begin_python_and_numpy_streams_that_can_be_drawn_from(stream: str) -> None:
    kept = rng.capture()
    try:
        carried, _, _ = carry(of("pp1"), {0: {stream: kept[stream]}}, of("pp2"))
        assert carried[0].keys() == carried[1].keys() == {stream}
        drawn = []
        for own in (carried[0], carried[1], carried[1]):
            rng.install(own)
            drawn.append(random.random() if stream == "python" else float(np.random.rand()))
        assert drawn[0] != drawn[1] == drawn[2]
    finally:
        rng.install(kept)


def test_a_stream_that_a_replica_lacks_is_not_taken_for_that_of_the_first() -> None:
    config = of("dp2")
    live = {rank: states(megatron_seeds(config, rank)) for rank in range(2)}
    del live[1]["tracker:model-parallel-rng"]
    carried, origins, _ = carry(config, live, config)
    assert "tracker:model-parallel-rng" in origins.individual
    assert not torch.equal(carried[0]["tracker:model-parallel-rng"], carried[1]["tracker:model-parallel-rng"])


def test_the_missing_record_of_a_first_rank_is_an_error_that_names_it() -> None:
    with pytest.raises(Mismatch, match=r"rank 1 \(pp0 tp1 dp0\)"):
        rng.Origins.read(of("tp2"), {0: {"torch": torch.get_rng_state()}})


def test_what_was_found_individual_travels_in_the_record_of_the_job() -> None:
    record = JobRecord(3, 24, 1, None, {}, individual=("torch",))
    assert JobRecord.from_bytes(record.to_bytes()["job"]) == record
