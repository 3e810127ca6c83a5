"""Extra state of modules, and hooks after a move. Ranks are imagined; the bytes of records are real."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardshift import ParallelConfig
from shardshift.adapters import hooks
from shardshift.adapters.megatron import extras
from shardshift.adapters.megatron.alike import differing_from, digests
from shardshift.adapters.megatron.extras import ExtraState
from shardshift.adapters.megatron.records import RankRecord
from shardshift.values import Mismatch, Unaccounted


class Holder(torch.nn.Module):
    """Has extra state, whatever it is."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state, self.calls = state, 0

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state, self.calls = state, self.calls + 1


class OneWay(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return b"never taken"


def of(text: str) -> ParallelConfig:
    return ParallelConfig.parse(text)


def carried(config: ParallelConfig, live: Mapping[int, Mapping[str, Any]], policy: Any = "error") -> ExtraState:
    """What the ranks tell of their modules, through the bytes of their records."""
    captured = {
        rank: extras.capture([(name, Holder(state)) for name, state in modules.items()])
        for rank, modules in live.items()
    }
    published = {}
    for rank, own in captured.items():
        at = config.coordinate(rank)
        first = config.rank(at.pp, at.tp)
        names = None if rank == first else differing_from(digests(captured[first]), digests(own))
        record = RankRecord(rank, [], {}, extras.published(own, names), {})
        for content in record.to_bytes(first=rank == first).values():
            published[rank] = RankRecord.from_bytes(content).extra_state
    return ExtraState.read(config, published, policy)


def arrive(state: ExtraState, config: ParallelConfig, where: Mapping[str, int]) -> dict[str, Holder]:
    """New modules by name, on the rank that is given for each."""
    state.check(config)
    made = {name: Holder("as it was built") for name in where}
    for name, rank in where.items():
        state.restore([(name, made[name])], config, rank)
    return made


def test_every_kind_of_extra_state_arrives_at_its_layer_with_its_own_length_and_type() -> None:
    states: dict[str, Any] = {
        "layers.0.fc": b"",
        "layers.1.fc": torch.arange(4, dtype=torch.uint8),
        "layers.2.fc": torch.arange(2322).to(torch.uint8),
        "layers.3.fc": io.BytesIO(b"\x80\x04scale"),
        "layers.4.fc": None,
        "layers.5.fc": {"scale": torch.ones(2), "recipe": ("delayed", 16)},
    }
    names = list(states)
    state = carried(of("pp2"), {stage: {n: states[n] for n in names[3 * stage : 3 * stage + 3]} for stage in (0, 1)})
    made = arrive(state, of("pp3"), {name: index // 2 for index, name in enumerate(names)})
    assert made["layers.4.fc"].calls == 0, "None leaves what the module was built with"
    for name in set(names) - {"layers.4.fc"}:
        found, sent = made[name].state, states[name]
        assert type(found) is type(sent)
        if isinstance(sent, torch.Tensor):
            assert torch.equal(found, sent)
            assert found.dtype == sent.dtype
        elif isinstance(sent, io.BytesIO):
            assert found.getvalue() == sent.getvalue()
    assert made["layers.0.fc"].state == b""
    assert made["layers.5.fc"].state["recipe"] == ("delayed", 16)


def test_experts_are_published_by_the_replicas_that_hold_them_and_arrive_by_global_number() -> None:
    config = of("dp4ep4")
    state = carried(config, {rank: {"router": b"same", f"experts.{rank}": bytes([rank])} for rank in range(4)})
    after = of("dp2ep2")
    made = arrive(state, after, {f"experts.{number}": number // 2 for number in range(4)})
    assert [made[f"experts.{number}"].state for number in range(4)] == [bytes([n]) for n in range(4)]
    assert set(state.copies["experts.3"]) == {3}
    assert arrive(state, after, {"router": 1})["router"].state == b"same"


def by_tensor_rank(config: ParallelConfig) -> dict[int, dict[str, Any]]:
    return {rank: {"fc": bytes([config.coordinate(rank).tp])} for rank in range(config.world_size)}


@pytest.mark.parametrize("after", ["pp1tp2dp1", "pp1tp2dp4", "tp2cp2"])
def test_values_that_differ_between_tensor_ranks_are_kept_where_tp_is_kept(after: str) -> None:
    config = of(after)
    state = carried(of("tp2dp2"), by_tensor_rank(of("tp2dp2")))
    for rank in range(config.world_size):
        assert arrive(state, config, {"fc": rank})["fc"].state == bytes([config.coordinate(rank).tp])


def test_they_are_refused_with_advice_where_tp_changes_or_the_first_is_taken_if_so_asked() -> None:
    before = of("tp2dp2")
    with pytest.raises(Mismatch, match=r"fc differs over tp \(2 values .*What to do: .*extra_state='first'"):
        carried(before, by_tensor_rank(before)).check(of("tp1dp2"))
    state = carried(before, by_tensor_rank(before), "first")
    assert arrive(state, of("tp1"), {"fc": 0})["fc"].state == b"\0"


def test_values_that_differ_between_replicas_need_the_same_replicas() -> None:
    before = of("tp1dp2")
    live = {rank: {"amax": bytes([rank])} for rank in range(2)}
    state = carried(before, live)
    for rank in range(2):
        assert arrive(state, of("dp2"), {"amax": rank})["amax"].state == bytes([rank])
    with pytest.raises(Mismatch, match="amax differs over tp x dp x cp"):
        state.check(of("dp4"))


def test_a_replica_that_agrees_is_told_by_the_first_of_its_own_tensor_rank() -> None:
    before = of("tp2dp2")
    live = {0: {"fc": b"a"}, 1: {"fc": b"b"}, 2: {"fc": b"a"}, 3: {"fc": b"other"}}
    state = carried(before, live)
    assert [arrive(state, before, {"fc": rank})["fc"].state for rank in range(4)] == [b"a", b"b", b"a", b"other"]


def test_states_are_of_each_modules_own() -> None:
    state = carried(of("dp1"), {0: {"fc": torch.zeros(2)}})
    one, other = (arrive(state, of("dp2"), {"fc": rank})["fc"].state for rank in range(2))
    one += 1
    assert float(other.sum()) == 0


def test_modules_that_only_one_layout_has_are_refused_by_name() -> None:
    extras.refuse_one_sided(["a"], ["a", "b"], ["a", "b"])
    with pytest.raises(Unaccounted, match=r"modules layers\.7\.fc have extra state and are not in the model") as lost:
        extras.refuse_one_sided(["layers.7.fc"], ["layers.7.fc"], [])
    assert lost.value.names == ("layers.7.fc",)
    with pytest.raises(Unaccounted, match="modules b of the new layout"):
        extras.refuse_one_sided([], ["a"], ["a", "b"])


def test_state_that_cannot_be_told_or_taken_is_refused_by_the_modules_name() -> None:
    with pytest.raises(Unaccounted, match=r"extra state of layers\.2\.fc\[0\] is a builtins\.object"):
        extras.capture([("layers.2.fc", Holder([object()]))])
    with pytest.raises(Unaccounted, match=r"layers\.3 gives extra state and OneWay has no set_extra_state"):
        extras.capture([("layers.3", OneWay())])
    with pytest.raises(Mismatch, match="two modules of this rank are both embedding"):
        extras.capture([("embedding", Holder(b"1")), ("embedding", Holder(b"2"))])
    assert extras.capture([("plain", torch.nn.Linear(1, 1))]) == {}
    assert extras.declaring([("plain", torch.nn.Linear(1, 1)), ("holder", Holder())]) == {"holder"}


class Decay(torch.nn.Module):
    """Keeps -exp(A_log), as state space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(3))
        self.cached = -torch.exp(self.A_log.detach())

    def after_move(self) -> None:
        self.cached = -torch.exp(self.A_log)


class Mixer(torch.nn.Module):
    """Sums its parts' caches, so theirs must be new before its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = torch.nn.ModuleList([Decay(), Decay()])
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(3), persistent=False)

    def after_move(self) -> None:
        self.total = torch.stack([self.parts[0].cached, self.parts[1].cached]).sum(0)


def test_caches_are_derived_anew_from_what_arrived_children_first() -> None:
    with torch.device("meta"):
        model = Mixer()
    for number, part in enumerate(model.parts):
        part.A_log = torch.nn.Parameter(torch.full((3,), float(number)))
    assert hooks.vouches(model)
    assert not hooks.vouches(torch.nn.Linear(1, 1))
    assert hooks.run([model]) == 3
    for part in model.parts:
        assert torch.equal(part.cached, -torch.exp(part.A_log.detach()))
        assert not part.cached.requires_grad
    assert torch.allclose(model.total, torch.full((3,), -1.0 - torch.e))


class Forgetful(Decay):
    def after_move(self) -> None:
        pass


class Failing(Decay):
    def after_move(self) -> None:
        raise ValueError("no such table")


def test_what_a_hook_leaves_without_data_and_a_hook_that_fails_are_named() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Forgetful())
    model[0].A_log = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(Unaccounted, match=r"0\.cached has no data after after_move of Forgetful"):
        hooks.run([model])
    with pytest.raises(Mismatch, match=r"after_move of 0 \(Failing\) failed: no such table"):
        hooks.run([torch.nn.Sequential(Failing())])
