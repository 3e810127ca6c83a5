"""Steps and param groups by the parameters they belong to, on real optimizers; ranks are imagined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardshift.adapters import groups
from shardshift.adapters.groups import Groups
from shardshift.adapters.megatron.records import RankRecord
from shardshift.values import Mismatch, Unaccounted

Parameters = dict[str, torch.nn.Parameter]


class FusedAdam(torch.optim.Optimizer):
    """Adam that counts its steps in its groups that hold parameters, as Apex's and Transformer Engine's do."""

    def __init__(self, param_groups: Any, lr: Any) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad**2, 0.001)
                mean = state["exp_avg"] / (1 - 0.9 ** group["step"])
                square = state["exp_avg_sq"] / (1 - 0.999 ** group["step"])
                parameter.addcdiv_(mean, square.sqrt() + group["eps"], value=-float(group["lr"]))


class CountingAdam(torch.optim.AdamW):
    """torch's, with Python numbers for steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for state in self.state.values():
            state["step"] = torch.tensor(float(state["step"]))
        super().step()
        for state in self.state.values():
            state["step"] = int(state["step"])


def made(names: Sequence[str]) -> Parameters:
    return {name: torch.nn.Parameter(torch.arange(4.0) + len(name)) for name in names}


def group(parameters: Parameters, **settings: Any) -> dict[str, Any]:
    origin = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {"params": list(parameters.values()), **origin, "max_lr": 1.0, "min_lr": 0.0, **settings}


def records(*ranks: tuple[torch.optim.Optimizer, Parameters]) -> Groups:
    """What the ranks tell, through the bytes of their records."""
    found = {}
    for rank, (optimizer, parameters) in enumerate(ranks):
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        told = groups.describe(names, optimizer.param_groups, optimizer.state, f"rank {rank}")
        content = RankRecord(rank, told, {}, {}, {}).to_bytes(first=True)[f"rank{rank}"]
        found[rank] = RankRecord.from_bytes(content).groups
    return Groups(found)


def restore(carried: Groups, optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    groups.restore(carried, {parameter: name for name, parameter in parameters.items()}, optimizer.param_groups)


def steps(optimizer: torch.optim.Optimizer, parameters: Parameters, count: int) -> None:
    for step in range(count):
        for index, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1) + index)
        optimizer.step()


def adam(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([group(parameters, **settings)], lr=0.1)


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, CountingAdam, FusedAdam], ids=["a tensor", "a number", "in the group"]
)
def test_the_next_update_is_that_of_a_run_that_never_moved_whatever_counts_the_steps(kind: Any) -> None:
    parameters, alone = made(["a", "bb"]), made(["a", "bb"])
    before, unmoved = kind([group(parameters)], lr=0.1), kind([group(alone)], lr=0.1)
    steps(before, parameters, 7)
    steps(unmoved, alone, 8)
    carried = records((before, parameters))
    arrived = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    after = kind([group(arrived)], lr=0.1)
    for name, parameter in arrived.items():
        moments = {k: v.clone() for k, v in before.state[parameters[name]].items() if k != "step"}
        step = carried.step(name)
        after.state[parameter] = moments if step is None else {"step": step, **moments}
        assert type(step) is type(before.state[parameters[name]].get("step"))
    restore(carried, after, arrived)
    for index, parameter in enumerate(arrived.values()):
        parameter.grad = torch.full_like(parameter, 0.1 * 8 + index)
    after.step()
    for name in arrived:
        assert torch.equal(arrived[name], alone[name])


def test_steps_are_tensors_of_their_own_for_each_parameter() -> None:
    parameters = made(["a", "bb"])
    before = adam(parameters)
    steps(before, parameters, 3)
    carried = records((before, parameters))
    one, other = carried.step("a"), carried.step("bb")
    one += 1
    assert (float(one), float(other), float(carried.step("a"))) == (4.0, 3.0, 3.0)


def test_groups_are_matched_by_what_they_hold_and_not_by_their_order() -> None:
    first, second = made(["w0", "norm0"]), made(["w1", "norm1"])
    decay, none = {"weight_decay": 0.1, "lr": 1.0}, {"weight_decay": 0.0, "lr": 2.0, "wd_mult": 0.0}
    stage0 = torch.optim.AdamW([group({"w": first["w0"]}, **decay), group({"n": first["norm0"]}, **none)])
    stage1 = torch.optim.AdamW([group({"n": second["norm1"]}, **none), group({"w": second["w1"]}, **decay)])
    carried = records((stage0, first), (stage1, second))
    whole = made(["norm0", "norm1", "w0", "w1"])
    norms, weights = ({n: p for n, p in whole.items() if n.startswith(kind)} for kind in ("norm", "w"))
    merged = torch.optim.AdamW([group(norms, wd_mult=0.0), group(weights)])
    restore(carried, merged, whole)
    assert [(g["lr"], g["weight_decay"]) for g in merged.param_groups] == [(2.0, 0.0), (1.0, 0.1)]


@pytest.mark.parametrize("where", ["in the group", "in the group as None", "by parameter"])
def test_a_group_that_was_empty_on_a_rank_has_the_step_of_the_ranks_where_it_was_not(where: str) -> None:
    parameters = made(["a"])
    full, empty = FusedAdam([group(parameters)], 0.1), FusedAdam([group({})], 0.1)
    if where == "by parameter":
        full, empty = adam(parameters), adam({})  # type: ignore[assignment]
        full.state[parameters["a"]]["step"] = torch.tensor(2640.0)
    else:
        full.param_groups[0]["step"] = 2640
        if where == "in the group as None":
            empty.param_groups[0]["step"] = None
    for ranks in ([(full, parameters), (empty, {})], [(empty, {}), (full, parameters)]):
        carried = records(*ranks)
        for arrived in (made(["a"]), {}):
            after = FusedAdam([group(arrived)], 0.1)
            restore(carried, after, arrived)
            if where == "by parameter":
                assert "step" not in after.param_groups[0]
                assert float(carried.step("a")) == 2640
            else:
                assert after.param_groups[0]["step"] == 2640


@pytest.mark.parametrize("where", ["group", "parameter"])
def test_two_different_steps_of_one_parameter_are_refused_by_its_name(where: str) -> None:
    ranks = []
    for step in (7, 8):
        parameters = made(["layers.3.weight"])
        optimizer = FusedAdam([group(parameters)], 0.1)
        if where == "group":
            optimizer.param_groups[0]["step"] = step
        else:
            optimizer.state[parameters["layers.3.weight"]]["step"] = step
        ranks.append((optimizer, parameters))
    arrived = made(["layers.3.weight"])
    with pytest.raises(Mismatch, match=r"layers\.3\.weight.* step 7\.0, another at 8\.0"):
        restore(records(*ranks), FusedAdam([group(arrived)], 0.1), arrived)


def test_parameters_that_started_later_keep_their_own_steps() -> None:
    parameters = made(["old", "thawed"])
    before = adam(parameters)
    for step in range(5):
        for name, parameter in parameters.items():
            parameter.grad = torch.ones_like(parameter) if name == "old" or step >= 3 else None
        before.step()
    carried = records((before, parameters))
    assert (float(carried.step("old")), float(carried.step("thawed"))) == (5.0, 2.0)
    assert carried.step("frozen") is None


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
def test_a_replica_that_joins_has_the_rate_of_now_and_not_of_the_start(rate: Any) -> None:
    parameters = made(["a"])
    before = torch.optim.AdamW([group(parameters)], lr=1.0)
    before.param_groups[0]["lr"] = rate
    carried = records((before, parameters))
    joined = [made(["a"]), made(["a"])]
    rates = []
    for arrived in joined:
        after = torch.optim.AdamW([group(arrived)], lr=1.0)
        restore(carried, after, arrived)
        rates.append(after.param_groups[0]["lr"])
    assert [type(found) for found in rates] == [type(rate)] * 2
    assert [float(found) for found in rates] == [0.5, 0.5]
    if isinstance(rate, torch.Tensor):
        rates[0].fill_(9.0)
        assert float(rates[1]) == 0.5, "no two optimizers share a rate"


def test_a_group_without_parameters_has_the_settings_of_its_like() -> None:
    """As Megatron 0.16.1 has them: a decoupled rate shows in max_lr alone, its four keys are the same."""
    parameters = made(["w", "embedding"])
    before = torch.optim.AdamW(
        [group({"w": parameters["w"]}, lr=0.3), group({"e": parameters["embedding"]}, max_lr=5.0, lr=4.0)]
    )
    carried = records((before, parameters))
    after = torch.optim.AdamW([group({}, max_lr=5.0), group({}), group({}, max_lr=77.0)], lr=1.0)
    restore(carried, after, {})
    assert [g["lr"] for g in after.param_groups] == [4.0, 0.3, 1.0], "what was like none is as it was made"


def test_groups_that_hold_parameters_speak_before_empty_ones() -> None:
    parameters = made(["w"])
    full, stale = torch.optim.AdamW([group(parameters, lr=0.5)]), torch.optim.AdamW([group({}, lr=1.0)])
    for ranks in ([(stale, {}), (full, parameters)], [(full, parameters), (stale, {})]):
        after = torch.optim.AdamW([group({})], lr=1.0)
        restore(records(*ranks), after, {})
        assert after.param_groups[0]["lr"] == 0.5


def test_joining_groups_of_different_settings_is_refused_by_setting_and_names() -> None:
    parameters = made(["w", "norm"])
    before = torch.optim.AdamW([group({"w": parameters["w"]}, lr=1.0), group({"n": parameters["norm"]}, lr=2.0)])
    arrived = made(["w", "norm"])
    with pytest.raises(Mismatch, match=r"w and norm into one param group.*\['lr'\]"):
        restore(records((before, parameters)), torch.optim.AdamW([group(arrived)]), arrived)


def test_a_fresh_source_clears_the_step_that_the_new_optimizer_came_with() -> None:
    parameters, arrived = made(["w"]), made(["w"])
    after = FusedAdam([group(arrived)], 0.1)
    after.param_groups[0]["step"] = 12
    carried = records((FusedAdam([group(parameters)], 0.1), parameters))
    restore(carried, after, arrived)
    assert "step" not in after.param_groups[0]
    assert carried.step("w") is None


def test_a_parameter_that_the_model_has_not_is_refused_by_its_shape() -> None:
    parameters = made(["w"])
    with pytest.raises(Unaccounted, match=r"rank 3: param group 0 .*\(4,\)"):
        groups.describe({}, adam(parameters).param_groups, {}, "rank 3")


def test_a_setting_that_no_record_can_carry_is_refused_by_its_name() -> None:
    parameters = made(["w"])
    optimizer = adam(parameters, schedule=lambda step: step)
    with pytest.raises(Unaccounted, match=r"param group 0: schedule is a builtins\.function"):
        records((optimizer, parameters))


def test_a_replica_tells_only_of_what_it_speaks_for_and_nothing_if_that_is_nothing() -> None:
    parameters = made(["dense", "experts.1"])
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    optimizer = adam(parameters)
    for own, expected in ((["experts.1"], ["experts.1"]), ([], [])):
        told = groups.describe(names, optimizer.param_groups, {}, "rank 1", own)
        assert [name for of_group in told for name in of_group.names] == expected
        assert bool(RankRecord(1, told, {}, {}, {}).to_bytes(first=False)) == bool(expected)


def test_shards_of_one_parameter_on_several_ranks_count_as_one() -> None:
    """As the distributed optimizer has them: the range of a parameter may lie on two ranks."""
    shards: list[Mapping[str, torch.nn.Parameter]] = [made(["a", "b"]), made(["b", "c"])]
    ranks = []
    for own in shards:
        optimizer = adam(dict(own))
        for parameter in own.values():
            optimizer.state[parameter]["step"] = torch.tensor(4.0)
        ranks.append((optimizer, dict(own)))
    carried = records(*ranks)
    assert [float(carried.step(name)) for name in "abc"] == [4.0] * 3
