from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardshift.elastic import Script
from shardshift.elastic.resize import Resize
from shardshift.values import Infeasible, ParallelConfig


def test_a_script_announces_the_next_change_until_it_is_past() -> None:
    script = Script({20: ParallelConfig(tp=4), 10: "pp4"})
    assert [script.upcoming(iteration) for iteration in (0, 10, 11, 20, 21)] == [
        Resize(10, ParallelConfig(pp=4)),
        Resize(10, ParallelConfig(pp=4)),
        Resize(20, ParallelConfig(tp=4)),
        Resize(20, ParallelConfig(tp=4)),
        None,
    ]


def test_a_script_that_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(Infeasible, match="not a parallel configuration"):
        Script({1: "four"})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({-1: "pp2"}, "-1: 'pp2' has no iteration"),
        ({2.5: "pp2"}, "2.5: 'pp2' has no iteration"),
        ({"2": "pp2"}, "'2': 'pp2' has no iteration"),
        ({True: "pp2"}, "True: 'pp2' has no iteration"),
        ({2: "pp2", "4": "pp1"}, "'4': 'pp1' has no iteration"),
        ({2: 2}, "2: 2 has no configuration"),
        ({2: None}, "2: None has no configuration"),
        (["pp2"], r"a script is a mapping, not \['pp2'\]"),
    ],
)
def test_what_is_no_script_is_refused_where_it_is_written(changes: Any, text: str) -> None:
    with pytest.raises(Infeasible, match=f"^{text}.*what to do: write it like"):
        Script(changes)


def test_whole_numbers_of_any_kind_are_iterations() -> None:
    changes: Any = {np.int64(2): "pp2"}
    assert Script(changes).upcoming(0) == Resize(2, ParallelConfig(pp=2))


def test_a_script_is_read_from_a_line() -> None:
    script = Script.parse("4:pp2tp2dp1, 8:pp1tp1dp1")
    assert script.upcoming(0) == Resize(4, ParallelConfig.parse("pp2tp2"))
    assert script.upcoming(5) == Resize(8, ParallelConfig())
    assert Script.parse("").upcoming(0) is None


@pytest.mark.parametrize("text", ["pp2", "4:", "-1:pp2", "4:pp2,4:pp1", "x:pp2"])
def test_a_line_that_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(Infeasible, match="what to do"):
        Script.parse(text)
