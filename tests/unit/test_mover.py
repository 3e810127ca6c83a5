from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from tests.unit.strategies import Move, even_grid, moves
from tests.unit.strategies import equal_layers as layers
from tests.unit.together import coded, holds, state_on, together

from shardshift.engine import Mover, attempt, names_of
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    PlacedLayout,
    Region,
    Shard,
    ShardshiftError,
    StateLost,
    Tensor,
    Unaccounted,
)

MODEL = layers(4, width=24, numel=3)
PP4, TP4, DP2 = (even_grid(MODEL, text) for text in ("pp4", "tp4", "pp2dp2"))


def placed(layout: Layout) -> PlacedLayout:
    return PlacedLayout(layout, tuple(range(layout.world_size)))


def errors(found: dict[int, Any], kind: type[ShardshiftError]) -> str:
    """The one text that all devices have raised."""
    assert {type(error) for error in found.values()} == {kind}, found
    (text,) = {str(error) for error in found.values()}
    return text


@given(moves(most_ranks=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_state_arrives_whole_and_exact_under_either_policy(move: Move) -> None:
    values, devices = coded(move.prev), sorted({*move.prev.devices, *move.devices})
    # Devices that must not run a rank have none in a layout that is placed.
    target = PlacedLayout(move.curr, move.devices[: move.curr.world_size])

    def work(mover: Mover) -> Any:
        for policy in ("keep", "release"):
            state = state_on(mover.device, move.prev, values)
            found = mover.move(move.prev, target, state, policy=policy, verify=True)
            assert holds(mover.device, target, values, found)
            if policy == "keep":
                assert holds(mover.device, move.prev, values, state)
            else:
                assert not state
        return mover.generation

    assert set(together(devices, work).values()) == {2}


def test_where_ranks_run_is_the_decision_of_one_and_unchanged_shards_keep_their_tensor() -> None:
    values = coded(placed(PP4))

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), values)
        found = mover.move(PP4, PP4, state)
        assert all(found[name] is state[name] for name in state)
        backwards = PlacedLayout(PP4, (3, 2, 1, 0))
        where = mover.place(backwards, TP4)
        assert mover.place(backwards, PP4) == backwards
        return sorted(mover.move(PP4, where, found))

    found = together(range(4), work)
    assert sorted(name for names in found.values() for name in names) == sorted([f"layers.{i}" for i in range(4)] * 4)


def test_a_device_without_a_rank_takes_part_and_holds_nothing() -> None:
    found = together(
        range(5), lambda mover: mover.move(PP4, TP4, state_on(mover.device, placed(PP4), coded(placed(PP4))))
    )
    assert [len(state) for state in found.values()] == [4, 4, 4, 4, 0]


def test_what_the_state_lacks_or_has_in_excess_is_named_on_every_device() -> None:
    values = coded(placed(PP4))

    def lacking(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), values)
        if mover.device == 2:
            del state["layers.2"]
        return mover.move(PP4, TP4, state)

    def excessive(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), values)
        return mover.move(PP4, TP4, state | ({"rotary.inv_freq": torch.ones(2)} if mover.device == 1 else {}))

    assert "layers.2" in errors(together(range(4), lacking), Mismatch)
    assert "rotary.inv_freq" in errors(together(range(4), excessive), Unaccounted)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(24, 2, dtype=torch.uint8), torch.zeros(24, 3, dtype=torch.int8)], ids=["shape", "dtype"]
)
def test_a_tensor_that_is_not_what_the_layout_says_is_refused_by_all(wrong: torch.Tensor) -> None:
    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), coded(placed(PP4)))
        return mover.move(PP4, TP4, state | ({"layers.3": wrong} if mover.device == 3 else {}))

    assert "layers.3" in errors(together(range(4), work), Mismatch)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


class Broken(Layout):
    """A layout that one device cannot read."""

    @property
    def world_size(self) -> int:
        raise Unpicklable("deep trouble")


def test_an_error_that_one_device_meets_while_it_plans_is_the_same_error_on_all() -> None:
    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), coded(placed(PP4)))
        if mover.device != 1:
            return mover.move(PP4, TP4, state)
        return mover.move(Broken.__new__(Broken), TP4, state)

    assert errors(together(range(4), work), ShardshiftError) == "Unpicklable: deep trouble"


def test_devices_that_were_told_different_things_are_named() -> None:
    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), coded(placed(PP4)))
        return mover.move(PP4, TP4, state, policy="keep", verify=mover.device == 3)

    assert "verify: device 3 has True, device 0 has False" in errors(together(range(4), work), Mismatch)
    unknown: Any = "fast"
    found = together(range(2), lambda mover: mover.move(PP4, PP4, {}, policy=unknown))
    assert "policy 'fast'" in errors(found, Infeasible)
    found = together(range(2), lambda mover: mover.move(PP4, PP4, {}, verify=unknown))
    assert "verify 'fast'" in errors(found, Infeasible)


def test_verify_by_digest_is_what_true_means() -> None:
    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), coded(placed(PP4)))
        return holds(
            mover.device,
            placed(TP4),
            coded(placed(TP4)),
            mover.move(PP4, TP4, state, verify="digest" if mover.device else True),
        )

    assert all(together(range(4), work).values())


def test_a_size_of_elements_that_is_not_theirs_is_refused_before_old_memory_is_given_back() -> None:
    weight = Tensor(Kind.PARAM, "w", (8, 6), "float32", 2)
    halves = [Shard(weight, Region((row, 0), (4, 6))) for row in (0, 4)]
    one, two = Layout([(Shard(weight, Region((0, 0), (8, 6))),)], [0]), Layout([(half,) for half in halves], [0, 1])

    def work(mover: Mover) -> Any:
        state = {} if mover.device else {"w": torch.ones(8, 6)}
        with pytest.raises(Mismatch, match=r"2 bytes \(itemsize\), and it has 4") as raised:
            mover.move(one, two, state, policy="release")
        assert raised.value.journal is None
        return [(name, value.sum().item()) for name, value in state.items()]

    assert together(range(2), work) == {0: [("w", 48.0)], 1: []}


def test_copies_that_differ_are_refused_by_name_and_nothing_has_moved() -> None:
    layout = placed(DP2)
    values = coded(layout)

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, layout, values)
        if mover.device == 1:
            state["layers.1"][3, 1] += 1
        with pytest.raises(Mismatch, match=r"layers\.1\[.*devices 0 and 1 hold different bits"):
            mover.move(DP2, TP4, state)
        assert mover.generation == 0
        return sorted(mover.move(DP2, TP4, state, compare_copies=False))

    assert together(range(4), work) == {device: [f"layers.{i}" for i in range(4)] for device in range(4)}


def test_copies_that_differ_are_refused_also_where_nothing_has_to_move() -> None:
    layout = placed(DP2)

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, layout, coded(layout))
        if mover.device == 1:
            state["layers.1"][3, 1] += 1
        assert all(tensor is state[name] for name, tensor in mover.move(DP2, DP2, state, compare_copies=False).items())
        return mover.move(DP2, DP2, state)

    text = errors(together(range(4), work), Mismatch)
    assert "layers.1" in text
    assert "devices 0 and 1 hold different bits" in text


def whole(*names: str) -> Layout:
    """One role that has tensors of 4 x 2, whole; every rank plays it or none."""
    role = tuple(Shard(Tensor(Kind.PARAM, name, (4, 2), "float32", 4), Region.whole((4, 2))) for name in names)
    return Layout((role,), (0,))


@pytest.mark.parametrize("policy", ["keep", "release"])
def test_what_was_one_tensor_stays_one_and_what_were_two_stay_two(policy: Any) -> None:
    tied = PlacedLayout(whole("emb", "head", "other"), (0,))
    target = PlacedLayout(tied.layout, (1,))

    def work(mover: Mover) -> Any:
        state = {}
        if mover.device == 0:
            emb = torch.ones(4, 2)
            state = {"emb": emb, "head": emb, "other": torch.ones(4, 2)}
        return mover.move(tied, target, state, policy=policy)

    state = together(range(2), work)[1]
    assert state["emb"] is state["head"]
    assert state["emb"].untyped_storage().data_ptr() != state["other"].untyped_storage().data_ptr()


def test_names_that_are_one_tensor_here_and_two_there_are_refused() -> None:
    both = PlacedLayout(Layout(whole("emb", "head").roles, (0, 0)), (0, 1))

    def work(mover: Mover) -> Any:
        emb = torch.ones(4, 2)
        return mover.move(
            both, PlacedLayout(both.layout, (1, 0)), {"emb": emb, "head": emb.clone() if mover.device else emb}
        )

    assert "device 1 holds param:emb, param:head as tensors of their own" in errors(together(range(2), work), Mismatch)


def rows_of(names: Sequence[str], *cuts: tuple[int, int]) -> PlacedLayout:
    """Device i holds the i-th rows of tensors of 4 x 2, under all names."""
    tensors = [Tensor(Kind.PARAM, name, (4, 2), "float32", 4) for name in names]
    roles = [tuple(Shard(tensor, Region((low, 0), (high - low, 2))) for tensor in tensors) for low, high in cuts]
    return placed(Layout(roles, range(len(roles))))


@pytest.mark.parametrize("policy", ["keep", "release"])
def test_a_device_without_elements_of_tied_tensors_does_not_part_them(policy: Any) -> None:
    """Four rows over three devices leave the last one an empty shard."""
    one, three, four = (
        rows_of(("emb", "head"), *cuts)
        for cuts in (((0, 4),), ((0, 2), (2, 4), (4, 4)), ((0, 1), (1, 2), (2, 4), (4, 4)))
    )
    full = torch.arange(8.0).view(4, 2)

    def work(mover: Mover) -> Any:
        emb, shapes = full.clone(), []
        state = {"emb": emb, "head": emb} if mover.device == 0 else {}
        for before, after in pairwise((one, three, four, three, one)):
            state = mover.move(before, after, state, policy=policy)
            for shard in after.shards_on(mover.device):
                assert torch.equal(state[shard.tensor.name], full[shard.region.offsets[0] : shard.region.stops[0]])
                assert state["emb"] is state["head"]
                shapes.append(shard.region.shape[0])
        return shapes

    found = together(range(4), work)
    assert found[2] == [0, 0, 2, 2, 0, 0]
    assert found[0][-1] == 4


def test_tensors_without_elements_at_one_place_of_a_buffer_are_not_one() -> None:
    """Shards of a flat buffer: those of device 1 are empty and begin, and end, at the same byte."""
    before, after = rows_of(("a", "b"), (0, 4), (4, 4)), rows_of(("a", "b"), (0, 2), (2, 4))

    def work(mover: Mover) -> Any:
        buffer = torch.arange(16.0)
        ends = ((0, 8), (8, 16)) if mover.device == 0 else ((16, 16), (16, 16))
        state = {name: buffer[low:high].view(-1, 2) for name, (low, high) in zip("ab", ends, strict=True)}
        found = mover.move(before, after, state)
        return {name: found[name].flatten().tolist() for name in found}

    assert together(range(2), work) == {
        0: {"a": [0.0, 1.0, 2.0, 3.0], "b": [8.0, 9.0, 10.0, 11.0]},
        1: {"a": [4.0, 5.0, 6.0, 7.0], "b": [12.0, 13.0, 14.0, 15.0]},
    }


def test_tensors_that_overlap_in_part_are_refused() -> None:
    layout = PlacedLayout(whole("a", "b"), (0,))

    def work(mover: Mover) -> Any:
        storage = torch.arange(12.0)
        state = {} if mover.device else {"a": storage[:8].view(4, 2), "b": storage[4:].view(4, 2)}
        return mover.move(layout, PlacedLayout(layout.layout, (1,)), state)

    text = errors(together(range(2), work), Mismatch)
    assert "a" in text
    assert "b" in text


@pytest.mark.parametrize("freed", [0, 1])
def test_a_copy_without_memory_is_refused_also_where_nothing_but_the_comparison_would_read_it(freed: int) -> None:
    both, target = PlacedLayout(Layout(whole("a").roles, (0, 0)), (0, 1)), PlacedLayout(whole("a"), (2,))

    def work(mover: Mover) -> Any:
        state = {} if mover.device == 2 else {"a": torch.ones(4, 2)}
        if mover.device == freed:
            state["a"].untyped_storage().resize_(0)
        return mover.move(both, target, state)

    assert "no dense memory" in errors(together(range(3), work), Mismatch)


def test_auto_keeps_if_all_fits_refuses_if_not_and_releases_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = coded(placed(PP4))
    monkeypatch.setattr(attempt, "available_bytes", lambda sharers: 0)

    def work(mover: Mover) -> Any:
        state = state_on(mover.device, placed(PP4), values)
        with pytest.raises(Infeasible, match="may_release=True"):
            mover.move(PP4, TP4, state)
        assert holds(mover.device, placed(PP4), values, state)
        found = mover.move(placed(PP4), placed(TP4), state, may_release=True)
        assert not state
        return holds(mover.device, placed(TP4), values, found)

    assert all(together(range(4), work).values())


def test_a_lost_replica_is_done_without_and_what_has_no_other_holder_is_named() -> None:
    layout, values = PlacedLayout(DP2, (0, 1, 2, 3)), coded(placed(DP2))
    alone = PlacedLayout(even_grid(MODEL, "pp2"), (0, 2))

    def work(mover: Mover) -> Any:
        found = mover.move(layout, alone, state_on(mover.device, layout, values), lost=(1, 3))
        return holds(mover.device, alone, values, found)

    assert together((0, 2), work) == {0: True, 2: True}


def test_the_names_of_what_is_lost_are_raised_on_all() -> None:
    before = PlacedLayout(even_grid(MODEL, "pp2"), (0, 9))
    after = PlacedLayout(even_grid(MODEL, "pp2"), (0, 1))
    found = together(
        (0, 1), lambda mover: mover.move(before, after, state_on(mover.device, before, coded(before)), lost=(9,))
    )
    assert {type(error) for error in found.values()} == {StateLost}
    assert all(set(error.names) == {"param:layers.2", "param:layers.3"} for error in found.values())


def test_every_kind_of_state_has_a_name_of_its_own() -> None:
    shards = [
        Shard(Tensor(Kind.PARAM, "w", (4,), "float32", 4), Region((0,), (2,))),
        Shard(Tensor(Kind.PARAM, "w", (4,), "float32", 4), Region((3,), (1,))),
        Shard(Tensor(Kind.EXP_AVG, "w", (4,), "float32", 4), Region((0,), (4,))),
        Shard(Tensor(Kind.BUFFER, "b", (), "int64", 8), Region((), ())),
    ]
    assert list(names_of(shards)) == ["w[0:2]", "w[3:4]", "exp_avg:w", "b"]


def test_a_mover_needs_to_be_one_of_its_devices() -> None:
    with pytest.raises(Infeasible, match="device 3"):
        Mover(dist.HashStore(), 3, (0, 1))
