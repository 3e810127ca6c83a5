"""Explanations: the paper's figures, the exact costs element by element, and who sits where."""

from __future__ import annotations

import io
import json
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardshift.models import Catalogue, Experts, Model
from shardshift.plan.methods import Change, solve
from shardshift.plan.plan import Plan
from shardshift.plan.workload import workload
from shardshift.report.explain import Explanation, exact_matrix, explain, short, span
from shardshift.report.explain_tables import explanation_tables
from shardshift.values import ParallelConfig, Shard, Topology

parse = ParallelConfig.parse


def explained(
    prev: str, curr: str, *, layers: int = 24, per_node: int = 4, experts: Experts | None = None, zero1: bool = False
) -> tuple[Explanation, Plan]:
    model = Model(
        layers=layers, hidden=16, heads=8, kv_heads=8, head_dim=2, ffn=32, vocab=64, vocab_divisor=8, experts=experts
    )
    before, after = parse(prev), parse(curr)
    nodes = -(-max(before.world_size, after.world_size) // per_node)
    devices = tuple(range(nodes * per_node))
    change = Change(before, after, layers, devices[: before.world_size], devices, Topology(nodes, per_node))
    catalogue = Catalogue.of(model)
    plans = solve(change, catalogue.layout(before, zero1=zero1), catalogue.layout(after, zero1=zero1))
    return explain(change, plans), plans[0]


def text(explanation: Explanation, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        for title, table in explanation_tables(explanation):
            console.print(title)
            if table:
                console.print(table)
    return captured.get()


def test_the_matrices_are_those_of_fig_5() -> None:
    found, _ = explained("pp4tp2", "pp6tp4")
    paper = found.paper
    assert paper is not None
    assert paper.pp.entries[:3] == ((0, 4, 4, 4), (2, 2, 4, 4), (4, 0, 4, 4))
    assert paper.tp.entries == ((0, 1), (0, 1), (1, 0), (1, 0))
    assert paper.merged.entries[:4] == ((0, *(4,) * 7), (0, *(4,) * 7), (4, 0, *(4,) * 6), (4, 0, *(4,) * 6))
    assert paper.prev[:2] == ("0-5.ab", "0-5.cd")
    assert paper.curr[-1] == "20-23.d"


def test_what_the_paper_does_not_know_is_said_and_the_rest_is_there() -> None:
    found, _ = explained("pp2tp2", "pp2tp2cp2", layers=4)
    assert found.paper is None
    assert "cp" in found.no_paper
    assert "what to do" not in found.no_paper  # nothing is wrong
    assert found.to_json()["paper"] is None
    assert "No matrices of the paper" in text(found)


CONFIGS = st.sampled_from(["pp2tp2", "pp4tp1", "pp1tp4dp2", "pp3tp2", "pp1tp2dp2ep2", "pp2tp1dp4ep4"])


@settings(max_examples=25)
@given(prev=CONFIGS, curr=CONFIGS, experts=st.sampled_from([None, Experts(4, 8)]), zero1=st.booleans())
def test_exact_costs_are_the_elements_that_a_rank_lacks(
    prev: str, curr: str, experts: Experts | None, zero1: bool
) -> None:
    found, plan = explained(prev, curr, layers=4, experts=experts, zero1=zero1)
    matrix = exact_matrix(plan, found.change)

    def lacking(rank: int, held: int | None) -> int:
        wanted = plan.curr.layout.shards(rank)
        has = () if held is None else plan.prev.layout.shards(held)
        return sum(shard.nbytes for shard in wanted) - sum(common(one, other) for one in wanted for other in has)

    rows = {label: first for first, label in reversed(list(labels(parse(curr), matrix.rows)))}
    columns = {label: first for first, label in reversed(list(labels(parse(prev), matrix.columns[:-1])))}
    for row, entries in zip(matrix.rows, matrix.entries, strict=True):
        for column, entry in zip(matrix.columns, entries, strict=True):
            assert entry == lacking(rows[row], None if column == "fresh" else columns[column])


def labels(config: ParallelConfig, wanted: tuple[str, ...]) -> list[tuple[int, str]]:
    """Ranks by each of the names that they may have."""
    names = [
        (rank, short(config, rank, replica=replica)) for rank in range(config.world_size) for replica in (False, True)
    ]
    return [(rank, name) for rank, name in names if name in wanted]


def common(one: Shard, other: Shard) -> int:
    if one.tensor != other.tensor:
        return 0
    region = one.region.intersect(other.region)
    return 0 if region is None else region.numel * one.tensor.itemsize


def test_devices_are_shown_by_node_before_and_after() -> None:
    found, plan = explained("pp4", "pp2", layers=4, per_node=2)
    assert found.before == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [found.after[device] for device in plan.curr.devices] == [0, 1]
    shown = text(found)
    assert "before  p2t0d0 p3t0d0" in shown
    assert "after   - -" in shown  # the other node is free, whichever it is
    record = found.to_json()["nodes"][1]
    after = found.after
    assert record == {
        "node": 1,
        "devices": [2, 3],
        "ranks": [
            {"device": 2, "before": 2, "after": after.get(2)},
            {"device": 3, "before": 3, "after": after.get(3)},
        ],
    }


def test_devices_without_a_rank_are_counted_and_cost_nothing() -> None:
    topology = Topology(200_000, 8)
    change = Change(parse("pp2"), parse("pp3"), 6, (9, 30), (9, 30, 31), topology)
    catalogue = Catalogue.of(Model.from_dimensions(layers=6, hidden=8, heads=2, vocab=10))
    found = explain(change, solve(change, catalogue.layout("pp2"), catalogue.layout("pp3")))
    record = found.to_json()
    assert [(node["node"], [one["device"] for one in node["ranks"]]) for node in record["nodes"]] == [
        (1, [9]),
        (3, [30, 31]),
    ]
    assert record["unused_nodes"] == 199_998
    assert len(json.dumps(record)) < 4000
    shown = " ".join(text(found).split())
    assert "199,998 more nodes, all free" in shown
    assert "1 before - p0t0d0 - - - - - -" in shown


def test_a_wide_node_shows_its_many_free_devices_as_a_number() -> None:
    change = Change(parse("pp1"), parse("pp1"), 6, (90_000,), (90_000, 99_998), Topology(1, 100_000))
    catalogue = Catalogue.of(Model.from_dimensions(layers=6, hidden=8, heads=2, vocab=10))
    shown = text(explain(change, solve(change, catalogue.layout("pp1"), catalogue.layout("pp1"))))
    assert "before  90,000 x - p0t0d0     9,999 x -" in shown


def test_a_narrow_console_gets_fewer_columns_of_a_matrix_and_is_told_so() -> None:
    found, _ = explained("pp4tp2", "pp6tp4")
    titles = [title for title, _ in explanation_tables(found, 40)]
    assert any("the first 24 x 6 of 24 x 8" in title for title in titles)


def test_large_matrices_are_cut_to_80_columns_and_say_so() -> None:
    found, _ = explained("pp12tp8", "pp24tp8", per_node=8)
    shown = text(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert "of 192 x 96" in shown
    record = found.to_json()["paper"]["merged"]
    assert (len(record["rows"]), record["all_rows"], record["all_columns"]) == (128, 192, 96)


def test_a_workload_of_many_layers_is_named_by_its_ends() -> None:
    assert span(workload(parse("pp2tp2"), 8, 1, slices=4)) == "0-3.cd"
    assert span(workload(parse("pp2"), 8, 1)) == "4-7"
    assert span(workload(parse("pp2tp2"), 2, 0)) == "0.a"
    assert span(workload(parse("pp2"), ([1, 0]), 1)) == "nothing"


def test_matrices_in_json_are_numbers() -> None:
    found, _ = explained("pp4tp2", "pp6tp4")
    cost = found.to_json()["paper"]["merged"]["cost"]
    assert cost[0][:2] == [0.0, 4.0]
    assert not any(isinstance(entry, Fraction) for row in cost for entry in row)
