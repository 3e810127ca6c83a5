"""What a job carries by value: every old rank's record, held against the others', and what a new rank takes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.dtensor.worlds import one_rank
from torch import nn

import shardshift as ss
from shardshift.adapters.dtensor.companions import Companions, record_of
from shardshift.adapters.dtensor.described import described
from shardshift.adapters.dtensor.gathered import check_modules
from shardshift.adapters.dtensor.job import Job
from shardshift.adapters.dtensor.live import Held, Lives, held_by
from shardshift.adapters.dtensor.parts import Names, joined
from shardshift.values import Mesh, Mismatch, Unaccounted

ALONE = Mesh({"dp": 1})


def record(job: Job) -> bytes:
    lives = Lives.of(job.models, job.optimizer)
    text, _ = described((*lives.held.tensors, *lives.state), lives.held.ties, job.names)
    return record_of(job, lives, text.entries)


def told(*jobs: Job, mesh: Mesh | None = None) -> Companions:
    mesh = mesh or Mesh({"dp": len(jobs)})
    return Companions(mesh, dict(zip(mesh.ranks, map(record, jobs), strict=True)))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> torch.optim.Optimizer:
    for _ in range(times):
        optimizer.zero_grad()
        loss: Any = sum((parameter * parameter).sum() for parameter in model.parameters())
        loss.backward()
        optimizer.step()
    return optimizer


def job(
    model: nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 1,
    **more: Any,
) -> Job:
    model = nn.Linear(2, 2) if model is None else model
    more.setdefault("mesh", ALONE)
    return Job(model, stepped(model, make(model.parameters()), steps), **more)


def take(companions: Companions, model: nn.Module, optimizer: Any, names: Names | None = None) -> Held:
    """Set the groups of a new job."""
    held = held_by([model])
    text, _ = described(held.tensors, held.ties, names)
    companions.set_groups(optimizer, held, text.entries)
    return held


def test_a_step_goes_to_every_parameter_with_its_type() -> None:
    found = told(job(steps=7)).scalars(["weight"])
    assert list(found) == ["step"]
    assert torch.equal(found["step"], torch.tensor(7.0))
    assert found["step"].dtype is torch.float32


@pytest.mark.parametrize(("make", "expected"), [(torch.optim.NAdam, {"step", "mu_product"}), (torch.optim.SGD, set())])
def test_further_numbers_go_along(make: Any, expected: set[str]) -> None:
    before = job(make=make)
    found = told(before).scalars(["bias"])
    assert set(found) == expected
    assert all(torch.equal(value, before.optimizer.state[before.models[0].bias][key]) for key, value in found.items())


def test_a_fresh_optimizer_has_nothing_to_tell() -> None:
    """Then a new one that has stepped gives its own up: installing clears it, and nothing is put in its place."""
    assert told(job(steps=0)).scalars(["weight"]) == {}


def test_a_value_given_is_the_receivers_own() -> None:
    companions = told(job())
    one, other = (companions.scalars(["weight"])["step"] for _ in range(2))
    one += 1
    assert other == 1


def test_texts_none_and_nested_values_keep_their_types() -> None:
    before = job(steps=0)
    given = {"mode": "fast", "none": None, "flag": True, "betas": (0.9, [1, 2.5]), "dtype": torch.bfloat16}
    before.optimizer.state[before.models[0].weight].update(given)
    found = told(before).scalars(["weight"])
    assert found == given
    assert [type(value) for value in found.values()] == [type(value) for value in given.values()]


def test_a_value_of_an_unknown_type_is_refused_by_name() -> None:
    before = job(steps=0)
    before.optimizer.state[before.models[0].weight]["helper"] = object()
    with pytest.raises(Unaccounted, match="helper"):
        record(before)


def test_values_that_differ_between_ranks_are_refused_with_both() -> None:
    jobs = [job(steps=0), job(steps=0)]
    for number, each in enumerate(jobs):
        each.optimizer.state[each.models[0].weight]["seen"] = number
    with pytest.raises(Mismatch, match="seen of weight is 0 on one rank and 1 on another"):
        told(*jobs)


def test_steps_that_differ_between_ranks_are_refused_with_both() -> None:
    with pytest.raises(Mismatch, match=r"step 3.*at 4|at optimizer step 3(\.0)?, another at 4"):
        told(job(steps=3), job(steps=4))


def test_a_step_that_only_some_ranks_have_goes_to_all() -> None:
    """The group of rank 1 was empty, and a rank that joins has none: all take step 5."""
    first = job(steps=5)
    empty = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(empty.parameters())}]
    second = Job(empty, torch.optim.AdamW(groups), mesh=ALONE)
    for companions in (told(first, second), told(second, first)):
        assert companions.scalars(["weight"])["step"] == 5


def test_joined_parameters_that_differ_in_a_step_are_refused() -> None:
    model = nn.ModuleDict({"q": nn.Linear(2, 2, bias=False), "k": nn.Linear(2, 2, bias=False)})
    before = job(model)
    before.optimizer.state[model["q"].weight]["step"] += 1
    companions = told(before)
    assert companions.scalars(["k.weight"])["step"] == 1
    with pytest.raises(Mismatch, match=r"step of q\.weight and k\.weight is"):
        companions.scalars(["q.weight", "k.weight"])


def test_groups_are_matched_by_the_parameters_that_they_hold() -> None:
    """Norms without decay come first in one stage and second in the other; a third group holds nothing."""

    def stage(name: str, *, norms_first: bool) -> Job:
        model = nn.ModuleDict({f"{name}_norm": nn.LayerNorm(2), f"{name}_up": nn.Linear(2, 2)})
        groups: list[dict[str, Any]] = [
            {"params": list(model[f"{name}_norm"].parameters()), "lr": 2.0, "weight_decay": 0.0},
            {"params": list(model[f"{name}_up"].parameters()), "lr": 1.0, "weight_decay": 0.5},
        ]
        optimizer = torch.optim.AdamW([*(groups if norms_first else reversed(groups)), {"params": [], "lr": 9.0}])
        return Job(model, optimizer, mesh=ALONE)

    stages = [stage("one", norms_first=False), stage("two", norms_first=True)]
    companions = told(*stages, mesh=Mesh({"pp": 2}))
    fresh = nn.ModuleDict()
    for name in ("one", "two"):
        fresh.update({f"{name}_norm": nn.LayerNorm(2), f"{name}_up": nn.Linear(2, 2)})
    norms = [p for name, p in fresh.named_parameters() if "norm" in name]
    others = [p for name, p in fresh.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": norms}, {"params": others}], lr=0.1)
    take(companions, fresh, optimizer)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(2.0, 0.0), (1.0, 0.5)]
    one_group = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(Mismatch, match=r"into one param group, but their settings differ in .*lr.*weight_decay"):
        take(companions, fresh, one_group)


def test_a_new_group_takes_the_rate_that_a_scheduler_has_set_also_as_a_tensor() -> None:
    for rate in (0.5, torch.tensor(0.5)):
        before = job(make=lambda p: torch.optim.AdamW(p, lr=1.0), steps=0)
        before.optimizer.param_groups[0]["lr"] = rate
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        take(told(before), model, optimizer)
        found = optimizer.param_groups[0]["lr"]
        assert (type(found), float(found)) == (type(rate), 0.5)
        assert found is not rate or not isinstance(rate, torch.Tensor)


def test_settings_that_ranks_have_differently_are_refused() -> None:
    jobs = [job(make=lambda p, lr=lr: torch.optim.AdamW(p, lr=lr)) for lr in (1.0, 0.5)]  # type: ignore[misc]
    with pytest.raises(
        Mismatch, match=r"ranks 0 and 1 have weight in param groups that differ in lr \(1\.0 and 0\.5\)"
    ):
        take(told(*jobs), model := nn.Linear(2, 2), torch.optim.AdamW(model.parameters()))


class CountingInGroup(torch.optim.SGD):
    """Counts its steps where Apex's FusedAdam does: in the group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_a_step_that_is_kept_in_the_group_goes_along_and_one_that_is_not_does_not_come_up() -> None:
    companions = told(job(make=CountingInGroup, steps=5))
    for stepped_before in (0, 2):
        model = nn.Linear(2, 2)
        optimizer = stepped(model, CountingInGroup(model.parameters()), stepped_before)
        take(companions, model, optimizer)
        assert optimizer.param_groups[0]["step"] == 5
        stepped(model, optimizer)
        assert optimizer.param_groups[0]["step"] == 6
    fresh = nn.Linear(2, 2)
    optimizer = stepped(fresh, CountingInGroup(fresh.parameters()))
    take(told(job(make=CountingInGroup, steps=0)), fresh, optimizer)
    assert optimizer.param_groups[0].get("step") is None


def test_groups_follow_the_names_that_both_sides_share() -> None:
    """q and k apart before and one matrix now: one group, if they had the same settings."""
    model = nn.ModuleDict({"q": nn.Linear(2, 4, bias=False), "k": nn.Linear(2, 2, bias=False)})
    before = job(model, lambda p: torch.optim.AdamW(p, lr=0.25))
    fused = nn.ModuleDict({"qk": nn.Linear(2, 6, bias=False)})
    optimizer = torch.optim.AdamW(fused.parameters())
    take(told(before), fused, optimizer, lambda name, shape: joined({"q.weight": 4, "k.weight": 2}, shape))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_of_parameters_that_are_not_in_the_model_is_refused() -> None:
    other = nn.Linear(3, 3)
    with pytest.raises(Mismatch, match=r"steps a parameter of shape \(3, 3\) that is not in the new model"):
        take(told(job()), nn.Linear(2, 2), torch.optim.AdamW(other.parameters()))
    with pytest.raises(Unaccounted, match=r"not in the model"):
        record(Job(nn.Linear(2, 2), torch.optim.AdamW(other.parameters()), mesh=ALONE))


def test_another_kind_of_optimizer_is_refused_by_both_names() -> None:
    companions = told(job())
    model = nn.Linear(2, 2)
    companions.check_optimizers(torch.optim.AdamW(model.parameters()))
    for other in (torch.optim.SGD(model.parameters()), None):
        with pytest.raises(Mismatch, match=r"old job's optimizers are \['AdamW'\], the new one's"):
            companions.check_optimizers(other)
    told(Job(model, mesh=ALONE)).check_optimizers(torch.optim.SGD(model.parameters()))


def test_a_stage_may_have_fewer_kinds_of_optimizer_than_the_job() -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 2, bias=False), "norm": nn.LayerNorm(2)})
    optimizers = [torch.optim.AdamW(model["norm"].parameters()), torch.optim.SGD(model["up"].parameters(), lr=1.0)]
    companions = told(Job(model, optimizers, mesh=ALONE))
    for some in (optimizers, optimizers[:1], optimizers[1:]):
        companions.check_optimizers(some)
    for other in ([], [*optimizers, torch.optim.Adagrad(model.parameters())]):
        with pytest.raises(Mismatch, match=r"are \['AdamW', 'SGD'\], the new one's"):
            companions.check_optimizers(other)


def test_frozen_parameters_and_modules_in_evaluation_are_known_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    companions = told(Job(model, mesh=ALONE))
    assert companions.frozen == {"0.weight"}
    assert companions.evaluating == {"1", "1.0", "1.1"}


def staged(*layers: int) -> nn.Module:
    """The layers of one stage of a pipeline, under their numbers in the whole model."""
    return nn.ModuleDict(
        {"layers": nn.ModuleDict({str(n): nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for n in layers})}
    )


def freeze(found: Job) -> None:
    model: Any = found.model
    model["layers"]["1"][0].weight.requires_grad_(False)


def evaluate(found: Job) -> None:
    model: Any = found.model
    model["layers"]["1"][1].eval()


def evaluate_all(found: Job) -> None:
    model: Any = found.model
    model.eval()


def forget(found: Job) -> None:
    model: Any = found.model
    for group in found.optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each is not model["layers"]["1"][0].bias]


def step_by_another(found: Job) -> None:
    found._parts = (found.model, torch.optim.Adam(found.models[0].parameters()), {})


@pytest.mark.parametrize(
    ("differ", "said"),
    [
        (freeze, r"parameter layers\.1\.0\.weight trains on ranks 0, 3 and is frozen \(requires_grad\) on ranks 1, 2"),
        (evaluate, r"module layers\.1\.1 is in training on ranks 0, 3 and is in evaluation on ranks 1, 2"),
        (
            evaluate_all,
            r"module layers, .*module layers\.1\.1 is in training on ranks 0, 3 and is in evaluation on ranks 1",
        ),
        (
            forget,
            r"parameter layers\.1\.0\.bias is stepped by AdamW on ranks 0, 3 and is in no param group on ranks 1, 2",
        ),
        (
            step_by_another,
            r"parameter layers\.0.* is stepped by AdamW on ranks 0, 3 and is stepped by Adam on ranks 1, 2",
        ),
    ],
)
def test_what_ranks_hold_differently_outside_tensors_is_refused_by_name_and_ranks(
    differ: Callable[[Job], None], said: str
) -> None:
    jobs = [job(staged(0, 1), steps=0) for _ in range(4)]
    for each in jobs[1:3]:
        differ(each)
    with pytest.raises(Mismatch, match=said + ".*nothing was moved"):
        told(*jobs)


@pytest.mark.parametrize("differ", [freeze, evaluate, evaluate_all, forget, step_by_another])
def test_a_stage_says_nothing_of_modules_that_it_does_not_have(differ: Callable[[Job], None]) -> None:
    """The model itself, and its list of layers, are on both stages, each with layers of its own."""
    jobs = [job(staged(*layers), steps=0) for layers in [(0,), (0,), (1, 2), (1, 2)]]
    for each in jobs[2:]:
        differ(each)
    companions = told(*jobs, mesh=Mesh({"pp": 2, "dp": 2}))
    assert companions.frozen == ({"layers.1.0.weight"} if differ is freeze else set())
    assert "layers.0.1" not in companions.evaluating


def test_the_mode_of_modules_is_told_and_set_through_any_wrapper() -> None:
    """DistributedDataParallel before and none after, compiled after, and the other way round."""
    with one_rank():
        wraps: list[Callable[[nn.Module], Any]] = [
            lambda model: model,
            torch.compile,
            nn.parallel.DistributedDataParallel,
            lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
        ]
        for before in wraps:
            for after in wraps:
                old, new = (nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout()) for _ in range(2))
                wrapped_old, wrapped_new = before(old), after(new)
                wrapped_old.train()
                old[1].eval()
                told(Job(wrapped_old, mesh=ALONE)).set_modules([wrapped_new])
                assert [module.training for module in (wrapped_new, new, *new)] == [True, True, True, False, True]
                wrapped_old.eval()
                told(Job(wrapped_old, mesh=ALONE)).set_modules([wrapped_new])
                assert not any(module.training for module in (wrapped_new, *wrapped_new.modules()))


class Counting(nn.Linear):
    """A module with state of its own besides tensors."""

    def __init__(self, count: Any = None) -> None:
        super().__init__(1, 1)
        self.count = count

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("state", [3, b"", b"bytes", {"scale": torch.ones(2), "amax": [1.0]}, "text"])
def test_extra_state_of_modules_goes_to_those_of_their_name(state: Any) -> None:
    companions = told(Job(nn.ModuleDict({"a": Counting(state), "b": Counting()}), mesh=ALONE))
    model = nn.ModuleDict({"a": Counting(), "b": Counting("own"), "c": Counting(1)})
    companions.set_modules([model])
    assert str(model["a"].count) == str(state)
    assert type(model["a"].count) is type(state)
    assert [model["b"].count, model["c"].count] == ["own", 1]


def test_extra_state_that_differs_between_ranks_is_refused_and_that_of_stages_is_joined() -> None:
    def stage(name: str, count: int) -> Job:
        return Job(nn.ModuleDict({name: Counting(count)}), mesh=ALONE)

    with pytest.raises(Mismatch, match="a of the modules' extra state is 1 on one rank and 2 on another"):
        told(stage("a", 1), stage("a", 2))
    model = nn.ModuleDict({"a": Counting(), "b": Counting()})
    told(stage("a", 1), stage("b", 2), mesh=Mesh({"pp": 2})).set_modules([model])
    assert [model["a"].count, model["b"].count] == [1, 2]


def test_modules_that_no_new_rank_has_are_refused_and_each_stage_may_lack_those_of_the_others() -> None:
    old = nn.ModuleDict({"a": Counting(1), "b": nn.Dropout().eval(), "c": nn.Linear(1, 1)})
    companions = told(Job(old, mesh=ALONE))
    whole, dropped = nn.ModuleDict({"a": Counting(), "b": nn.Dropout()}), nn.ModuleDict({"b": nn.Linear(1, 1)})
    plain = nn.ModuleDict({"a": nn.Linear(1, 1)})
    for stages, left in ([whole], []), ([plain, dropped], ["a"]), ([plain], ["a", "b"]), ([whole["a"]], ["a", "b"]):
        lacking = [companions.unknown_modules([stage]) for stage in stages]
        if not left:
            check_modules(lacking)
            continue
        with pytest.raises(Unaccounted, match=f"^{', '.join(left)} of the old job has extra state") as caught:
            check_modules(lacking)
        assert caught.value.names == tuple(left)
    first, second = (nn.ModuleDict({name: whole[name]}) for name in "ab")
    lacking = [companions.unknown_modules([stage]) for stage in (first, second)]
    assert lacking == [["b"], ["a"]]
    check_modules(lacking)
    check_modules([companions.unknown_modules([first, second])])
    check_modules([])


def test_extra_state_that_nothing_takes_back_is_refused_by_name() -> None:
    class Giving(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(Unaccounted, match=r"a \(Giving\) gives extra state and has no set_extra_state"):
        record(Job(nn.ModuleDict({"a": Giving()}), mesh=ALONE))


class Loader:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_extras_are_told_by_name_and_per_rank_ones_are_merged() -> None:
    def merge(states: list[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
        return {"at": sum(state["at"] for state in states) // count}

    jobs = [
        Job(
            nn.Linear(1, 1),
            extras={"data": ss.fsdp.PerRank(Loader({"at": 8 * n}), merge), "same": Loader({"n": 1})},
            mesh=ALONE,
        )
        for n in range(2)
    ]
    companions = told(*jobs)
    assert companions.extras == ("data", "same")
    to = Mesh({"dp": 4})
    assert companions.extra("data", ss.fsdp.PerRank(Loader({}), merge), to, 3) == {"at": 2}
    assert companions.extra("same", Loader({}), to, 3) == {"n": 1}
    with pytest.raises(ss.Infeasible, match="extra 'data' differs along dp"):
        companions.extra("data", Loader({}), to, 3)


def test_an_extra_without_state_is_refused_when_the_job_is_made() -> None:
    with pytest.raises(Mismatch, match="extra 'data' is a list, which has no state_dict"):
        Job(nn.Linear(1, 1), extras={"data": [1]}, mesh=ALONE)


def test_random_streams_are_told_unless_they_are_not_wanted() -> None:
    to = Mesh({"dp": 2})
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    companions = told(Job(_quiet(), mesh=ALONE))
    assert torch.equal(companions.streams(to, 1, 0)["torch"], expected)
    assert set(companions.streams(to, 0, 0)) >= {"python", "numpy", "torch"}
    assert told(Job(_quiet(), mesh=ALONE, random=False)).streams(to, 0, 0) == {}


def _quiet() -> nn.Module:
    """A module that draws nothing when it is made."""
    return nn.ParameterList([nn.Parameter(torch.zeros(1))])


def test_ranks_that_say_the_same_are_read_once() -> None:
    first = record(job(steps=2))
    companions = Companions(Mesh({"dp": 512}), dict.fromkeys(range(512), first))
    assert len(companions.groups.all) == 1
