from __future__ import annotations

import torch

from shardshift.elastic.undo import Undo
from shardshift.values import Kind, Region, Shard, Tensor


def shard(name: str, kind: Kind = Kind.PARAM) -> Shard:
    return Shard(Tensor(kind, name, (4,), "float32", 4), Region((0,), (4,)))


PARAM, MOMENT = shard("weight"), shard("weight", Kind.EXP_AVG)


def test_a_step_that_was_begun_is_undone_in_place() -> None:
    undo, live = Undo(), {PARAM: torch.arange(4.0), MOMENT: torch.ones(4)}
    undo.take(7, ("exp_avg",), live)
    addresses = [tensor.data_ptr() for tensor in live.values()]
    for tensor in live.values():
        tensor.fill_(float("nan"))
    undo.put_back(live)
    assert live[PARAM].tolist() == [0, 1, 2, 3]
    assert live[MOMENT].tolist() == [1, 1, 1, 1]
    assert [tensor.data_ptr() for tensor in live.values()] == addresses
    assert (undo.iteration, undo.kinds, undo.nbytes) == (7, ("exp_avg",), 32)


def test_state_that_the_first_step_makes_is_none_of_the_copy() -> None:
    undo, live = Undo(), {PARAM: torch.arange(4.0)}
    undo.take(0, (), live)
    live[PARAM].zero_()
    live[MOMENT] = torch.ones(4)
    undo.put_back(live)
    assert live[PARAM].tolist() == [0, 1, 2, 3]
    assert undo.shards == {PARAM}


def test_memory_is_used_again_at_each_step() -> None:
    undo, live = Undo(), {PARAM: torch.arange(4.0)}
    undo.take(0, (), live)
    copies = [copy.data_ptr() for copy in undo._copies.values()]
    live[PARAM].add_(1)
    undo.take(1, (), live)
    assert [copy.data_ptr() for copy in undo._copies.values()] == copies
    undo.forget()
    assert (undo.iteration, undo.nbytes) == (None, 0)
