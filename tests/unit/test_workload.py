"""Workloads: what each rank holds, and how the paper prints it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardshift.plan.workload import Workload, require_paper_axes, stages, workload
from shardshift.values import Infeasible, Mismatch, ParallelConfig

parse = ParallelConfig.parse


@pytest.mark.parametrize(
    ("config", "layers", "rank", "slices", "text"),
    [
        ("pp4", 16, 1, 1, "4, 5, 6, 7"),  # Fig. 4
        ("pp8", 24, 7, 1, "21, 22, 23"),  # Fig. 7(a)
        ("pp4tp2", 12, 0, 4, "0.ab, 1.ab, 2.ab"),  # Fig. 7(b), prev
        ("pp4tp2", 12, 3, 4, "3.cd, 4.cd, 5.cd"),
        ("pp6tp4", 12, 0, 4, "0.a, 1.a"),  # Fig. 7(b), curr
        ("pp6tp4", 12, 10, 4, "4.c, 5.c"),
        ("pp6tp4", 12, 23, 4, "10.d, 11.d"),
    ],
)
def test_labels_are_those_of_the_papers_figures(config: str, layers: int, rank: int, slices: int, text: str) -> None:
    assert str(workload(parse(config), layers, rank, slices=slices)) == text


def test_beyond_26_slices_labels_are_runs_of_numbers_because_letters_would_be_ambiguous() -> None:
    assert workload(parse("tp2"), 1, 0, slices=26).labels == ("0.abcdefghijklm",)
    assert workload(parse("tp2"), 2, 1, slices=32).labels == ("0.16-31", "1.16-31")
    assert Workload(frozenset({(3, 0), (3, 1), (3, 30)}), 32).labels == ("3.0-1+30",)


def test_workloads_have_the_operations_of_sets() -> None:
    prev, curr = workload(parse("pp2tp2"), 4, 0, slices=4), workload(parse("pp1tp4"), 4, 1, slices=4)
    assert (len(prev), len(curr)) == (4, 4)
    assert str(prev & curr) == "0.b, 1.b"
    assert str(curr - prev) == "2.b, 3.b"
    assert str(prev | curr) == "0.ab, 1.ab, 2.b, 3.b"
    assert (0, 1) in curr
    assert (0, 0) not in curr


def test_workloads_of_unlike_slices_do_not_mix() -> None:
    with pytest.raises(Mismatch, match="2 slices a layer meets one of 4"):
        workload(parse("tp2"), 1, 0) & workload(parse("tp4"), 1, 0)


def test_slices_must_be_a_multiple_of_tp() -> None:
    with pytest.raises(Mismatch, match="4 slices a layer for tp 3"):
        workload(parse("tp3"), 1, 0, slices=4)


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    assert [len(stage) for stage in stages(4, 10)] == [3, 3, 2, 2]
    assert stages(3, [1, 0, 2]) == (range(0, 1), range(1, 1), range(1, 3))


@pytest.mark.parametrize(
    ("pp", "layers", "error"), [(4, 3, Infeasible), (2, [1, 1, 1], Mismatch), (2, [3, -1], Infeasible)]
)
def test_a_split_that_cannot_be_is_refused(pp: int, layers: int | list[int], error: type[Exception]) -> None:
    with pytest.raises(error, match="what to do"):
        stages(pp, layers)


@pytest.mark.parametrize("text", ["pp2cp2", "pp2vpp2", "dp2ep2", "tp2etp1"])
def test_axes_that_the_paper_does_not_know_are_refused(text: str) -> None:
    with pytest.raises(Infeasible, match="knows only pp, tp, dp"):
        require_paper_axes(parse(text))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_each_replica_holds_every_slice_of_every_layer_once(
    pp: int, tp: int, dp: int, more: int, data: st.DataObject
) -> None:
    config, layers = ParallelConfig(pp, tp, dp), data.draw(st.integers(pp, 12))
    held: dict[int, list[tuple[int, int]]] = {}
    for rank in range(config.world_size):
        held.setdefault(config.coordinate(rank).dp, []).extend(workload(config, layers, rank, slices=tp * more))
    assert all(sorted(items) == list(product(range(layers), range(tp * more))) for items in held.values())
