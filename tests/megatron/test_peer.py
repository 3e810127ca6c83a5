"""megatron-core's own ``resharding`` and our engine give the same weights, bit for bit, wherever it can do the change.

Both start from one live model. What the new model must hold is cut from whole tensors by Megatron's attributes, so
neither side is the other's only witness. What the peer cannot do, ours does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.megatron.training import build_model, training

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

EXACT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor ranks become stages": ("pp2tp2", "pp4", {"layers": 4}),
    "stages become tensor ranks": ("pp2tp2", "tp4", {"layers": 4, "tied": False, "swiglu": True}),
    "tensor ranks become replicas, tied": ("pp2tp2", "pp2dp2", {}),
    "stages become tensor ranks of replicas": ("pp2dp2", "tp2dp2", {"rms_norm": True, "qk_norm": True}),
    "more tensor ranks than query groups": ("tp2dp2", "tp4", {"query_groups": 2, "swiglu": True}),
    "fewer tensor ranks, as many as query groups": ("tp4", "tp2dp2", {"query_groups": 2}),
    "latent attention, learned positions": ("pp2dp2", "tp2dp2", {"latent": True, "learned_positions": True}),
}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "one stage becomes two, tied": ("tp2", "pp2", {}, "'output_layer.weight' on rank 1 not found in source model"),
    "the vocabulary's padding changes": ("dp2", "tp2", {"vocab_size": 50}, "1*52 != 2*28"),
    "expert ranks become replicas": ("dp2ep2", "dp2", {"experts": 4}, "local_experts.2.linear_fc1.weight' on rank 0"),
    "replicas become expert ranks": ("dp2", "dp2ep2", {"experts": 4}, "parameters wrong, no error"),
    "from virtual stages": ("pp2vpp2", "pp2", {"layers": 4}, "not found in source model"),
    "to virtual stages": ("pp2", "pp2vpp2", {"layers": 4}, "parameters wrong, no error"),
}


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("peer")
    sys.path.remove(BENCHMARKS)


def change(peer: Any, prev: str, curr: str, settings: dict[str, Any]) -> Any:
    recipe = training(1, **settings)
    return peer.Change(prev, curr, recipe.shape, lambda layout: build_model(recipe, layout))


@pytest.fixture(scope="module")
def moved(peer: Any) -> list[dict[str, tuple[list[str], list[str], int, int]]]:
    """Per rank and case: what the peer got wrong, in what ours differs from it, bytes moved by the peer and by ours."""

    def body(rank: Any) -> dict[str, Any]:
        peer.enter(rank)
        transport = peer.connected(rank, "gloo")
        found = {}
        for case, (prev, curr, settings) in EXACT.items():
            models = peer.Models.of(change(peer, prev, curr, settings), rank.index)
            plan = models.peer_plan()
            models.peer_move(plan, peer.peer_service())
            own = models.plan(same_ranks=True)
            engine = models.engine(own)
            result = engine.prepared(transport, engine.targets.__getitem__).run()
            found[case] = (models.wrong(), models.differing(result), models.peer_bytes(plan), own.moved_bytes)
        return found

    ranks: list[dict[str, Any]] = peer.run_ranks(4, body)
    return ranks


@pytest.mark.parametrize("case", EXACT)
def test_both_give_the_bits_that_the_new_model_must_hold(moved: list[dict[str, Any]], case: str) -> None:
    for wrong, differing, *_ in (rank[case] for rank in moved):
        assert wrong == []
        assert differing == []


@pytest.mark.parametrize("case", EXACT)
def test_ours_moves_no_more_than_the_peer_on_the_same_devices(moved: list[dict[str, Any]], case: str) -> None:
    theirs = sum(rank[case][2] for rank in moved)
    assert {rank[case][3] for rank in moved} == {moved[0][case][3]}
    assert 0 < moved[0][case][3] <= theirs


@pytest.mark.parametrize("case", REFUSED)
def test_ours_does_what_the_peer_cannot(peer: Any, case: str) -> None:
    prev, curr, settings, words = REFUSED[case]
    assert words in (peer.refusal(change(peer, prev, curr, settings)) or "")


def test_the_benchmark_shows_both_times_and_bytes_in_one_run(peer: Any) -> None:
    shape = training(1, tied=False).shape
    said: list[str] = []
    scale, rows = peer.run(said.append, peer.Scale(shape, (("TP", "dp2", "tp2"),), (), runs=1))
    assert "MiB of fp32 weights" in scale
    by_case = {row.case: row for row in rows}
    assert by_case["TP dp2 → tp2, gloo"].baseline == "megatron-core"
    assert by_case["TP dp2 → tp2, planning"].ratio is not None
    assert by_case["TP dp2 → tp2, between processes"].ours == 0
