from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.elastic.toy import GRACE_S, Fault, Outcome, Recipe, ToyAdapter, play

from shardshift import session
from shardshift.elastic import Member
from shardshift.values import Infeasible, Mismatch, PeerLost, Topology


def test_a_job_grows_shrinks_leaves_devices_and_takes_them_in_again() -> None:
    outcome = play(4, Recipe("pp2", {1: "pp2tp2", 2: "tp2", 3: "pp4", 4: "dp3", 5: "pp2tp1dp2"}, steps=6))
    assert outcome.error is None
    assert outcome.told("refused") == {}
    assert outcome.told("done") == {device: [(6, "pp2tp1dp2", True)] for device in range(4)}
    ends = outcome.told("end")
    # Whatever worlds a device has been in, it has left each of them once.
    assert all(built == retired for ((built, retired, _),) in ends.values())
    assert all(reports >= 4 for ((_, _, reports),) in ends.values())


def test_devices_that_are_never_needed_stand_by_until_training_ends() -> None:
    outcome = play(3, Recipe("pp2", {1: "tp2"}, steps=2, policy="auto"))
    assert outcome.error is None
    assert outcome.told("done") == {device: [(2, "pp1tp2dp1", True)] for device in (0, 1)}
    assert outcome.told("end")[2] == [(0, 0, 0)]


@pytest.mark.parametrize("layout", ["tp7", "pp4dp2"])
def test_a_refused_change_is_refused_on_all_and_the_job_trains_on(layout: str) -> None:
    """And leftovers of the attempt do not disturb the next one, in which the standby is still to be had."""
    outcome = play(3, Recipe("pp2", {1: layout, 2: "tp3"}, steps=3))
    assert outcome.error is None
    refused = outcome.told("refused")
    assert refused.keys() == {0, 1}
    assert refused[0] == refused[1]
    assert refused[0][0][0] == "Infeasible"
    assert refused[0][0][2]
    assert outcome.told("done") == {device: [(3, "pp1tp3dp1", True)] for device in range(3)}


@pytest.mark.parametrize(
    ("where", "how", "kind", "text"),
    [
        ("plan", "unpicklable", "ShardshiftError", "Unpicklable: ordered by the test"),
        ("shards", "", "Mismatch", "rank 1 holds something else"),
        ("digest", "", "Mismatch", "device 1 derives plan"),
        ("agree", "infeasible", "Infeasible", "ordered by the test"),
        ("accept", "infeasible", "Infeasible", "ordered by the test"),
    ],
)
@pytest.mark.timeout(60)
def test_what_one_rank_finds_wrong_is_raised_alike_on_all_and_leaves_the_job_as_it_was(
    where: str, how: str, kind: str, text: str
) -> None:
    outcome = play(3, Recipe("pp2", {1: "tp3"}, steps=3, faults=(Fault(1, where, how),)))
    assert outcome.error is None
    refused = outcome.told("refused")
    assert refused.keys() == {0, 1}
    assert refused[0] == refused[1]
    assert refused[0][0][0] == kind
    assert text in refused[0][0][1]
    assert outcome.told("done") == {device: [(3, "pp2tp1dp1", True)] for device in (0, 1)}
    assert outcome.told("end")[2] == [(0, 0, 0)]


@pytest.mark.timeout(60)
def test_ranks_at_different_iterations_take_no_step_together() -> None:
    outcome = play(2, Recipe("dp2", {}, steps=2, faults=(Fault(1, "", "drift"),)))
    refused = outcome.told("refused")
    assert [told[0][0] for told in refused.values()] == ["Mismatch", "Mismatch"]
    assert "ranks are at different iterations, on average 0.5, this one at 1" in refused[1][0][1]
    assert outcome.told("done") == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_with_different_scripts_hear_of_it_before_the_first_step(odd: int) -> None:
    outcome = play(3, Recipe("pp3", {3: "tp2"}, steps=4, faults=(Fault(odd, "", "no script"),)))
    refused = outcome.told("refused")
    assert refused.keys() == {0, 1, 2}
    for device, ((kind, text, _),) in refused.items():
        assert kind == "Mismatch"
        named = "no change" if device == odd else "pp1tp2dp1 after step 3"
        assert f"ranks' sources name different changes; that of this one names {named}; no step was taken" in text
    assert outcome.told("done") == {}


TIMEOUT_S, SHORT_S = 20.0, 3.0
WAITED_FOR = pytest.mark.alone
"""Whoever stops is missed after the limit; so is one that others wait for in the making of a world. The limit is short
then, and nothing may run beside."""
LOSSES = [
    *(("kill", phase, TIMEOUT_S) for phase in ("train", "step", "plan", "agree", "move", "commit")),
    *(("raise", phase, TIMEOUT_S) for phase in ("train", "step", "allocate", "commit")),  # before that it is a refusal
    *(pytest.param("stop", phase, SHORT_S, marks=WAITED_FOR) for phase in ("train", "agree", "move", "rebuild")),
    pytest.param("kill", "rebuild", SHORT_S, marks=WAITED_FOR),
    *(pytest.param("raise", phase, SHORT_S, marks=WAITED_FOR) for phase in ("retire", "rebuild")),
]


def assert_all_survivors_name(device: int, survivors: set[int], outcome: Outcome, timeout_s: float = SHORT_S) -> None:
    ((fault_s,),) = outcome.told("fault")[device][:1]
    told = outcome.told("lost")
    assert told.keys() == survivors, outcome
    texts = {messages[0][2] for messages in told.values()}
    assert len(texts) == 1, texts
    for ranks, phase, text, raised_s in (messages[0] for messages in told.values()):
        assert ranks == (device,), text
        assert phase
        assert raised_s - fault_s < timeout_s + GRACE_S, text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("how", "phase", "timeout_s"), LOSSES)
def test_the_loss_of_a_rank_ends_as_one_peer_lost_on_every_survivor(how: str, phase: str, timeout_s: float) -> None:
    lost = 0 if phase == "plan" else 1  # the lead, for whose proposal the others wait
    recipe = Recipe("pp2", {1: "tp3"}, faults=(Fault(lost, phase, how, 1),), timeout_s=timeout_s)
    assert_all_survivors_name(lost, {0, 1, 2} - {lost}, play(3, recipe, until_lost=2), timeout_s)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("how", "timeout_s"), [("kill", TIMEOUT_S), pytest.param("stop", SHORT_S, marks=WAITED_FOR)])
def test_the_loss_of_the_lead_while_it_prepares_a_later_change_is_told_alike(how: str, timeout_s: float) -> None:
    recipe = Recipe("pp2", {3: "tp3"}, faults=(Fault(0, "plan", how, 1),), timeout_s=timeout_s)
    assert_all_survivors_name(0, {1, 2}, play(3, recipe, until_lost=2), timeout_s)


@WAITED_FOR
@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["plan", "move"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_loss_of_a_joiner_in_a_change_names_the_joiner(where: str, how: str) -> None:
    recipe = Recipe("pp2", {1: "tp3"}, faults=(Fault(2, where, how),), timeout_s=SHORT_S)
    assert_all_survivors_name(2, {0, 1}, play(3, recipe, until_lost=2))


@WAITED_FOR
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_is_lost_while_the_first_world_forms_is_named(how: str) -> None:
    outcome = play(3, Recipe("pp2", {}, faults=(Fault(1, "start", how),), timeout_s=SHORT_S), until_lost=2)
    assert_all_survivors_name(1, {0, 2}, outcome)


@pytest.mark.timeout(60)
def test_a_standby_hears_of_it_when_all_who_train_are_gone() -> None:
    faults = (Fault(0, "train", "kill", 1), Fault(1, "train", "kill", 1))
    outcome = play(3, Recipe("pp2", {}, faults=faults, timeout_s=TIMEOUT_S), until_lost=1)
    assert outcome.told("lost").keys() == {2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_standby_that_dies_hurts_nobody_and_is_passed_over(how: str) -> None:
    """Device 2 dies while it stands by; device 3 takes the place. Too few are left for the last change."""
    recipe = Recipe("pp2", {12: "tp3", 13: "tp4"}, steps=14, standby_dies=(2, how))
    outcome = play(4, recipe)
    assert outcome.error is None
    assert outcome.told("done") == {device: [(14, "pp1tp3dp1", True)] for device in (0, 1, 3)}
    assert {message[0][0] for message in outcome.told("refused").values()} == {"Infeasible"}


@WAITED_FOR
@pytest.mark.timeout(60)
def test_a_standby_that_hangs_does_not_keep_the_launcher_from_ending() -> None:
    outcome = play(3, Recipe("pp2", {}, steps=14, standby_dies=(2, "stop"), timeout_s=SHORT_S))
    assert outcome.error is None
    assert outcome.told("done") == {device: [(14, "pp2tp1dp1", True)] for device in (0, 1)}


@pytest.mark.timeout(90)
def test_many_changes_leave_no_files_and_no_threads_behind() -> None:
    layouts = ["pp2", "tp2", "pp3", "dp2"]
    changes = {iteration: layouts[iteration % 4] for iteration in range(1, 25)}
    outcome = play(3, Recipe("pp2", changes, steps=25, count_at=(5, 9, 21)))
    assert outcome.error is None
    for device, counts in outcome.told("open").items():
        at_5, at_9, at_21 = (count[1:] for count in counts)
        assert at_21 == at_9 == at_5, f"device {device}: (files, threads) {at_5}, {at_9}, {at_21}"


@pytest.mark.timeout(60)
def test_the_launcher_raises_what_a_worker_met_by_itself_not_what_others_say_of_it() -> None:
    outcome = play(2, Recipe("pp2", {}, faults=(Fault(1, "train", "raise", 1),)))
    assert not isinstance(outcome.error, PeerLost)
    assert "worker 1 failed: ValueError: ordered by the test" in str(outcome.error)
    assert outcome.told("lost")[0][0][0] == (1,)


def test_a_session_refuses_what_cannot_begin() -> None:
    member = Member(dist.HashStore(), 0, Topology(1, 2))
    adapter = ToyAdapter(0, lambda message: None)
    with pytest.raises(Infeasible, match="unknown policy 'fast'"):
        session(adapter, "pp1", member=member, policy="fast")
    with pytest.raises(Infeasible, match="needs 4 devices, there are 2"):
        session(adapter, "pp4", member=member)
    with pytest.raises(Infeasible, match="not a parallel configuration"):
        session(adapter, "", member=member)
    for layout in (None, 2, ["pp1"]):
        with pytest.raises(Infeasible, match=r"not a parallel configuration: .*what to do: write it like"):
            session(adapter, layout, member=member)  # type: ignore[arg-type]
    for resizes, text in (({1: "pp2"}, r"write resizes=ss\.Script"), ("1:pp2", "'1:pp2', expected a source")):
        with pytest.raises(Infeasible, match=text):
            session(adapter, "pp1", member=member, resizes=resizes)  # type: ignore[arg-type]


def test_a_session_refuses_to_begin_where_there_is_a_world_already() -> None:
    member = Member(dist.HashStore(), 0, Topology(1, 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(Mismatch, match=r"has a default process group.*what to do: leave init_process_group"):
            session(ToyAdapter(0, lambda message: None), "pp1", member=member)
    finally:
        dist.destroy_process_group()
