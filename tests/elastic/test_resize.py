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
