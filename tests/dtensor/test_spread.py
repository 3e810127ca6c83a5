"""What belongs to a place of the mesh: streams go on where they were, begin where there were none; extras never do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shardshift.adapters.dtensor.spread import Spread
from shardshift.adapters.generators import begun
from shardshift.adapters.plain import digest, pack
from shardshift.values import Infeasible, Mesh


def spread(mesh: Mesh, value: Any, name: str = "torch") -> Spread:
    """From a function of a rank's coordinate."""
    return Spread.of(name, mesh, {rank: pack(value(**mesh.coordinate(rank)), name) for rank in mesh.ranks})


def stream(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def streams(spread: Spread, mesh: Mesh, generation: int = 0) -> list[bytes]:
    return [digest(spread.stream(mesh, rank, generation)) for rank in mesh.ranks]


def test_values_that_are_all_alike_go_to_everybody() -> None:
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: {"step": 3})
    assert told.axes == ()
    for to in (Mesh({"dp": 8}, range(8, 16)), Mesh({}), Mesh({"tp": 3, "pp": 2})):
        assert [told.state(to, rank, None) for rank in to.ranks] == [{"step": 3}] * len(to.ranks)


@pytest.mark.parametrize("by", [("dp",), ("tp",), ("pp", "tp"), ("dp", "tp", "pp"), ()])
def test_the_axes_that_matter_are_those_along_which_values_differ(by: tuple[str, ...]) -> None:
    told = spread(Mesh({"pp": 2, "dp": 3, "tp": 2}), lambda **at: [at[axis] for axis in by])
    assert set(told.axes) == set(by)


def test_each_stream_goes_on_at_its_place_and_copies_go_on_alike() -> None:
    """Streams differ along tp only; every new data parallel replica has that of its tensor parallel place."""
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: stream(tp))
    to = Mesh({"dp": 3, "tp": 2}, [7, 6, 5, 4, 3, 2])
    assert streams(told, to) == [digest(stream(tp)) for dp in range(3) for tp in range(2)]


def test_four_streams_permuted_stay_with_their_logical_places() -> None:
    told = spread(Mesh({"ep": 4}), lambda ep: stream(10 + ep))
    assert streams(told, Mesh({"ep": 4}, [3, 1, 0, 2])) == [digest(stream(10 + ep)) for ep in range(4)]


def test_a_place_that_is_new_begins_a_stream_that_nobody_had_and_all_who_share_the_place_begin_alike() -> None:
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: stream(tp))
    to = Mesh({"dp": 2, "tp": 4})
    found = streams(told, to)
    first, second = found[:4], found[4:]
    assert first == second
    assert first[:2] == [digest(stream(0)), digest(stream(1))]
    assert len({*first, digest(torch.Generator().get_state())}) == 5
    assert found == streams(told, to)
    assert streams(told, to, generation=1)[2:4] != first[2:]
    assert first[2] == digest(begun("torch", stream(0), "tp2", 0))


def test_one_place_grows_to_two_which_draw_different_numbers() -> None:
    told = spread(Mesh({"tp": 1}), lambda tp: stream(5))
    # One value alone matters along no axis: all go on alike, as they would under DDP.
    assert set(streams(told, Mesh({"tp": 2}))) == {digest(stream(5))}
    again = spread(Mesh({"tp": 2}), lambda tp: stream(5 + tp))
    assert len(set(streams(again, Mesh({"tp": 3})))) == 3
    assert streams(again, Mesh({"tp": 1})) == [digest(stream(5))]


def test_where_an_axis_is_gone_places_are_counted_through() -> None:
    told = spread(Mesh({"pp": 2, "dp": 2}), lambda pp, dp: stream(2 * pp + dp))
    assert streams(told, Mesh({"fsdp": 3})) == [digest(stream(number)) for number in range(3)]
    grown = streams(told, Mesh({"fsdp": 6}))
    assert grown[:4] == [digest(stream(number)) for number in range(4)]
    assert len(set(grown)) == 6


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_each_kind_of_stream_can_begin(name: str) -> None:
    from shardshift.adapters import generators

    told = spread(Mesh({"dp": 2}), lambda dp: {**generators.captured(), "torch": stream(dp)}[name], name)
    told = Spread(name, told.mesh, told.values, ("dp",), {(0,): 0, (1,): 1})
    before = generators.captured()
    try:
        generators.install({name: told.stream(Mesh({"dp": 3}), 2, 0)})
        assert digest(generators.captured()[name]) != digest(before[name])
    finally:
        generators.install(before)


def test_a_state_that_differs_goes_on_where_its_axis_stays_whatever_the_ranks() -> None:
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: {"position": dp})
    to = Mesh({"tp": 4, "dp": 2}, range(8, 16))
    assert [told.state(to, rank, None)["position"] for rank in to.ranks] == [0, 1] * 4


@pytest.mark.parametrize("to", [Mesh({"dp": 1, "tp": 4}), Mesh({"dp": 4}), Mesh({"fsdp": 2}), Mesh({})])
def test_a_state_that_differs_along_an_axis_that_changes_is_refused_by_name(to: Mesh) -> None:
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: {"position": dp}, "loader")
    with pytest.raises(Infeasible, match=r"extra 'loader' differs along dp \(dp 2 before, .*PerRank"):
        told.state(to, to.ranks[0], None)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_states_that_the_user_merges_come_in_order_of_their_places(count: int) -> None:
    """The samples of a global batch of 24 that each of some ranks has still to see."""
    old = Mesh({"tp": 2, "dp": 4})
    told = spread(old, lambda tp, dp: {"left": list(range(6 * dp, 6 * dp + 6))}, "data")

    def merge(states: list[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
        left = [sample for state in states for sample in state["left"]]
        return {"left": left[len(left) * index // count : len(left) * (index + 1) // count]}

    to = Mesh({"dp": count, "tp": 2}) if count != 4 else old
    found = [told.state(to, rank, merge)["left"] for rank in to.ranks]
    assert [sample for left in found[::2] for sample in left] == list(range(24))
    assert found[::2] == found[1::2]


def test_states_that_differ_along_two_axes_are_merged_in_row_major_order() -> None:
    told = spread(Mesh({"a": 2, "b": 2}), lambda a, b: 2 * a + b)
    to = Mesh({"a": 1, "c": 2, "b": 3})
    found = [told.state(to, rank, lambda states, index, count: (states, index, count)) for rank in to.ranks]
    assert found == [([0, 1, 2, 3], index, 3) for _, index in itertools.product(range(2), range(3))]


def test_where_the_axis_is_gone_the_user_says_which_one_takes_its_place() -> None:
    """Unasked, every rank would be given the whole, and each sample be seen by all."""
    told = spread(Mesh({"dp_shard": 4}), lambda dp_shard: dp_shard)
    to = Mesh({"dp_replicate": 2, "tp": 2})

    def merge(states: list[int], index: int, count: int) -> tuple[list[int], int, int]:
        return states, index, count

    with pytest.raises(Infeasible, match="dp_shard, which the new mesh"):
        told.state(to, 0, merge)
    found = [told.state(to, rank, merge, ("dp_replicate",)) for rank in to.ranks]
    assert found == [([0, 1, 2, 3], index, 2) for index in (0, 0, 1, 1)]
    assert told.state(to, 3, merge, ()) == ([0, 1, 2, 3], 0, 1)


def test_what_only_some_ranks_have_is_theirs_to_tell() -> None:
    mesh = Mesh({"dp": 3})
    told = Spread.of("log", mesh, {1: pack({"lines": 4}, "log")})
    assert told.state(Mesh({"dp": 5}), 4, None) == {"lines": 4}
    told = Spread.of("log", mesh, {rank: pack({"lines": rank}, "log") for rank in (0, 2)})
    assert told.state(mesh, 2, None) == {"lines": 2}
    with pytest.raises(Infeasible, match=r"dp 3 before, dp 3 after\), and 2 places have told theirs"):
        told.state(mesh, 1, None)
    assert told.state(mesh, 1, lambda states, index, count: {"lines": len(states)}) == {"lines": 2}


def test_two_ranks_that_alone_have_told_and_differ_in_two_axes_are_not_taken_to_be_alike() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    told = Spread.of("log", mesh, {rank: pack({"lines": rank}, "log") for rank in (0, 3)})
    assert [told.state(mesh, rank, None)["lines"] for rank in (0, 3)] == [0, 3]
    with pytest.raises(Infeasible, match="differs along dp, tp"):
        told.state(mesh, 1, None)


def test_a_value_is_a_copy_for_each_who_gets_it() -> None:
    told = spread(Mesh({"dp": 2}), lambda dp: {"seen": torch.zeros(2)})
    one, other = (told.state(Mesh({"dp": 2}), rank, None) for rank in (0, 1))
    one["seen"] += 1
    assert other["seen"].tolist() == [0, 0]


@pytest.mark.parametrize("key", ["_snapshot", "_num_yielded", "_sampler_iter_yielded"])
def test_a_position_in_the_data_of_one_rank_is_no_place_in_the_whole_though_all_ranks_say_the_same(key: str) -> None:
    """torchdata's StatefulDataLoader counts what its rank has seen: half as many ranks have not seen half of it."""
    told = spread(Mesh({"dp": 2, "tp": 2}), lambda dp, tp: {key: 8, "_steps": 1}, "data")
    for to in (Mesh({"dp": 4}), Mesh({"tp": 2}), Mesh({"dp": 2, "rep": 2})):
        with pytest.raises(Infeasible, match=r"'data' is a StatefulDataLoader.*(dp|rep) changes from"):
            told.state(to, 0, None)

    def spent(states: list[dict[str, int]], index: int, count: int) -> int:
        return sum(state[key] for state in states) // count

    # Alike or not, each data parallel rank has one: 8 samples of 2 ranks are 4 of 4, and 8 of 2.
    assert [told.state(Mesh({"dp": 4}), rank, spent) for rank in range(4)] == [4] * 4
    assert told.state(Mesh({"dp": 1, "tp": 4}), 3, spent) == 16
    assert told.state(Mesh({"rep": 4}), 0, spent, ("rep",)) == 4
    for to in (Mesh({"dp": 2}), Mesh({"tp": 4, "dp": 2}), Mesh({"pp": 2, "dp": 2, "cp": 2})):
        assert [told.state(to, rank, None)[key] for rank in to.ranks] == [8] * len(to.ranks)
    spread(Mesh({"dp": 2}), lambda dp: {"seen": 8}).state(Mesh({"dp": 4}), 0, None)
