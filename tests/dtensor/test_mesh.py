"""A mesh as a value: row-major order of its axes, whatever the ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardshift as ss
from shardshift.values import Mesh

axes = st.dictionaries(st.sampled_from(["pp", "dp", "tp", "cp", "ep"]), st.integers(1, 4), max_size=5)


@given(axes, st.randoms(use_true_random=False))
def test_coordinates_are_those_of_a_table_of_ranks(axes: Mapping[str, int], random: Any) -> None:
    ranks = random.sample(range(2000), math.prod(axes.values()))
    mesh = Mesh(axes, ranks)
    table = torch.tensor(ranks).reshape(tuple(axes.values()))
    for index in itertools.product(*map(range, axes.values())):
        rank = int(table[index])
        assert tuple(mesh.coordinate(rank).values()) == index
        assert list(mesh.coordinate(rank)) == list(axes) == list(mesh.names)
        assert mesh.ranks[mesh.position(rank) or 0] == rank
    assert mesh.shape == tuple(table.shape)


def test_ranks_are_counted_from_0_where_none_are_given() -> None:
    mesh = ss.Mesh({"dp": 2, "tp": 3})
    assert mesh.ranks == (0, 1, 2, 3, 4, 5)
    assert mesh.coordinate(5) == {"dp": 1, "tp": 2}
    assert (mesh.size("dp"), mesh.size("pp"), mesh.position(6)) == (2, 1, None)


def test_a_mesh_without_axes_is_one_rank() -> None:
    assert Mesh({}).ranks == (0,)
    assert Mesh({}, [7]).coordinate(7) == {}
    assert str(Mesh({}, [7])) == "one rank on rank 7"


def test_a_mesh_says_what_it_is() -> None:
    assert str(Mesh({"dp": 2, "tp": 2})) == "dp 2 x tp 2 on ranks 0-3"
    assert str(Mesh({"dp": 2}, [3, 1])) == "dp 2 on ranks 3,1"
    assert str(Mesh({"dp": 1}, [3])) == "dp 1 on rank 3"


def test_equal_meshes_are_equal_and_hash_alike() -> None:
    one, other = Mesh({"dp": 2, "tp": 1}), Mesh({"dp": 2, "tp": 1}, iter([0, 1]))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Mesh({"tp": 1, "dp": 2})
    assert one != Mesh({"dp": 2, "tp": 1}, [1, 0])


@pytest.mark.parametrize(
    ("axes", "ranks", "says"),
    [
        ({"dp": 0}, None, "axis dp of a mesh has size 0"),
        ({"dp": -1}, None, "axis dp of a mesh has size -1"),
        ({"dp": 2.0}, None, r"axis dp of a mesh has size 2\.0"),
        ({"dp": True}, None, "axis dp of a mesh has size True"),
        ({"": 2}, None, "an axis named ''"),
        ({3: 2}, None, "an axis named 3"),
        ({"dp": 2, "tp": 2}, [0, 1, 2], "dp 2 x tp 2 has 4 ranks, but 3 are given"),
        ({}, [], "no axes has 1 ranks, but 0 are given"),
        ({"dp": 2}, [0, 0], "names rank 0 twice"),
        ({"dp": 2}, [0, -1], "names rank -1"),
        ({"dp": 2}, [0, "1"], "names rank '1'"),
        ({"dp": 2}, [0, True], "names rank True"),
    ],
)
def test_what_is_no_mesh_is_refused(axes: Any, ranks: Any, says: str) -> None:
    with pytest.raises(ss.Infeasible, match=says):
        Mesh(axes, ranks)


def test_a_rank_outside_has_no_coordinate() -> None:
    with pytest.raises(ss.Infeasible, match="rank 9 is not in the mesh dp 2 on ranks 0,1"):
        Mesh({"dp": 2}).coordinate(9)


def test_a_mesh_of_a_hundred_thousand_ranks_is_looked_up_at_once() -> None:
    mesh = Mesh({"pp": 16, "dp": 1024, "tp": 8})
    assert mesh.coordinate(131_071) == {"pp": 15, "dp": 1023, "tp": 7}
    assert [mesh.position(rank) for rank in (0, 8, 131_071)] == [0, 8, 131_071]


@pytest.mark.parametrize(("to", "kind"), [((2, 2), "tuple"), ({"dp": 2}, "dict"), (None, "NoneType")])
def test_what_is_no_mesh_is_no_place_to_go_to(to: Any, kind: str) -> None:
    with pytest.raises(ss.Infeasible, match=rf"is a {kind}, expected an ss\.Mesh; what to do: .*ss\.Mesh\(\{{'dp': 2"):
        ss.migrate(None, lambda mesh: (torch.nn.Linear(1, 1), None), to)
