from __future__ import annotations

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


def test_a_script_is_read_from_a_line() -> None:
    script = Script.parse("4:pp2tp2dp1, 8:pp1tp1dp1")
    assert script.upcoming(0) == Resize(4, ParallelConfig.parse("pp2tp2"))
    assert script.upcoming(5) == Resize(8, ParallelConfig())
    assert Script.parse("").upcoming(0) is None


@pytest.mark.parametrize("text", ["pp2", "4:", "-1:pp2", "4:pp2,4:pp1", "x:pp2"])
def test_a_line_that_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(Infeasible, match="what to do"):
        Script.parse(text)
