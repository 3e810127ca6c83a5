from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardshift.elastic.operating.board import MOST_WAITING, STATUS_KEY, Board, BoardSource
from shardshift.elastic.operating.request import Request
from shardshift.elastic.resize import Resize
from shardshift.values import Infeasible, ParallelConfig, PeerLost, ShardshiftError

EIGHT = tuple(range(8))


def parsed(text: str) -> ParallelConfig:
    return ParallelConfig.parse(text)


def to(text: str) -> Request:
    return Request(to=parsed(text))


def data_parallel(devices: Sequence[int]) -> ParallelConfig:
    return ParallelConfig(dp=len(devices))


class Job:
    """A job as its lead sees it: a store, devices that are there, and a status record."""

    def __init__(self, config: str = "pp2tp2dp1", there: Sequence[int] = EIGHT, step_s: float = 0.01) -> None:
        self.store = dist.HashStore()
        self.board = Board(self.store)
        self.there = list(there)
        self.step_s = step_s
        self.runs(config)

    def runs(self, config: str, devices: Sequence[int] | None = None) -> None:
        devices = range(parsed(config).world_size) if devices is None else devices
        status = {"config": config, "devices": list(devices), "step_s": self.step_s}
        self.store.set(STATUS_KEY, json.dumps(status))

    def lead(self, **more: Any) -> BoardSource:
        """What the lead asks; each time that of another rank."""
        return BoardSource(Board(self.store), lambda: self.there, **{"policy": data_parallel} | more)

    def state(self, number: int) -> str:
        answer = self.board.answer(number)
        assert answer is not None
        return answer.state

    def reason(self, number: int) -> str:
        answer = self.board.answer(number)
        assert answer is not None
        return answer.reason


@pytest.fixture
def job() -> Job:
    return Job()


# The board


def test_requests_are_numbered_from_1_and_queued_until_somebody_answers(job: Job) -> None:
    assert [job.board.post(to("pp2")), job.board.post(to("pp2"))] == [1, 2]
    assert [job.state(1), job.state(2)] == ["queued", "queued"]
    assert job.board.request(2) == to("pp2")


def test_a_number_that_was_never_given_out_has_no_answer(job: Job) -> None:
    job.board.post(to("pp2"))
    assert [job.board.answer(number) for number in (0, 2, -1)] == [None, None, None]


def test_many_who_post_at_once_get_numbers_of_their_own(job: Job) -> None:
    def post(devices: int) -> tuple[int, int]:
        return Board(job.store).post(Request(leave=(devices,))), devices

    with ThreadPoolExecutor(8) as pool:
        numbers = dict(pool.map(post, range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert {number: Board(job.store).request(number).leave for number in numbers} == {
        number: (devices,) for number, devices in numbers.items()
    }


def test_two_who_post_the_same_at_the_same_moment_get_two_numbers(job: Job) -> None:
    class Overtaken:
        """A store in which another poster comes between this one's look at the count and its record."""

        def __getattr__(self, name: str) -> Any:
            return getattr(job.store, name)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if job.board.count() == 0:
                assert job.board.post(to("pp2")) == 1
            return job.store.compare_set(key, expected, desired)

    assert Board(Overtaken()).post(to("pp2")) == 2  # type: ignore[arg-type]
    assert job.board.count() == 2


def test_a_poster_that_died_before_it_counted_its_record_leaves_no_gap(job: Job) -> None:
    job.store.compare_set("request/1", "", json.dumps({"to": "pp4", "id": "of the dead one"}))
    assert job.board.post(to("pp8")) == 2
    assert job.lead().upcoming(0) == Resize(2, parsed("pp4"))


def test_a_queue_that_is_full_refuses_all_but_those_who_leave(job: Job) -> None:
    for _ in range(MOST_WAITING):
        job.board.post(to("pp2"))
    with pytest.raises(Infeasible, match=f"{MOST_WAITING} requests wait, from number 1; what to do"):
        job.board.post(to("pp2"))
    job.board.post(Request(leave=(1,)))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("[]", "a JSON object"),
        ('{"to": "pp2", "devices": 3}', "a layout, a number of devices, or devices that leave"),
        ("{}", "a layout, a number of devices, or devices that leave"),
        ('{"to": 4}', "'to' is a text"),
        ('{"to": "pp2xx"}', "not a parallel configuration"),
        ('{"devices": true}', "no number of devices"),
        ('{"devices": 0}', "no number of devices"),
        ('{"devices": 1e3}', "no number of devices"),
        ('{"devices": 99999999999999999999}', "no number of devices"),
        ('{"leave": "4"}', "a list of devices"),
        ('{"leave": [-1]}', "no device id"),
        ('{"leave": [[]]}', "no device id"),
        ('{"leave": [1], "within_s": NaN}', "within_s"),
        ('{"to": "pp2", "within_s": 1}', "within_s"),
        ('{"too": "pp2"}', "has no 'too'"),
        ("pp2", "no JSON"),
    ],
)
def test_a_record_that_is_no_request_is_refused_and_the_next_has_its_turn(
    job: Job, record: str, complaint: str
) -> None:
    job.store.set("request/1", record)
    job.store.add("request/count", 1)
    job.board.post(to("pp4"))
    assert job.lead().upcoming(0) == Resize(2, parsed("pp4"))
    assert job.state(1) == "refused"
    assert complaint in job.reason(1)
    assert "what to do" in job.reason(1)


@pytest.mark.parametrize(
    "request_", [to("pp4tp2dp1"), Request(devices=6), Request(leave=(4, 5), within_s=25.0), Request(leave=(0,))]
)
def test_a_request_is_read_as_it_was_written(request_: Request) -> None:
    assert Request.from_json(json.loads(json.dumps(request_.to_json()))) == request_


# Serving


def test_a_request_is_announced_for_two_steps_ahead_and_stays_the_same_until_it_is_settled(job: Job) -> None:
    lead = job.lead()
    assert lead.upcoming(4) is None
    number = job.board.post(to("pp4tp2dp1"))
    resize = lead.upcoming(5)
    assert resize == Resize(7, parsed("pp4tp2dp1"), None)
    assert lead.upcoming(6) == lead.upcoming(7) == resize
    assert job.state(number) == "announced"
    lead.settled(resize, None)
    assert job.state(number) == "done"
    assert lead.upcoming(7) is None


def test_requests_are_served_in_order_and_never_mixed(job: Job) -> None:
    lead = job.lead()
    first, second = job.board.post(to("pp4")), job.board.post(to("pp8"))
    resize = lead.upcoming(0)
    assert resize is not None
    assert resize.config == parsed("pp4")
    assert (job.state(first), job.state(second)) == ("announced", "queued")
    lead.settled(resize, None)
    job.runs("pp4")
    assert lead.upcoming(2) == Resize(4, parsed("pp8"))


def test_the_same_asked_twice_is_one_change(job: Job) -> None:
    lead = job.lead()
    job.board.post(to("pp4"))
    again = job.board.post(to("pp4"))
    resize = lead.upcoming(0)
    assert resize is not None
    lead.settled(resize, None)
    job.runs("pp4")
    assert lead.upcoming(2) is None
    assert job.state(again) == "done"
    assert "nothing to change" in job.reason(again)


def test_a_refusal_of_the_session_is_the_answer_and_the_next_has_its_turn(job: Job) -> None:
    lead = job.lead()
    job.board.post(to("pp4"))
    job.board.post(to("pp8"))
    resize = lead.upcoming(0)
    assert resize is not None
    lead.settled(resize, Infeasible("hidden 10 is not divisible by 4"))
    assert (job.state(1), job.reason(1)) == ("refused", "hidden 10 is not divisible by 4")
    assert lead.upcoming(2) == Resize(4, parsed("pp8"))


def test_what_another_source_announced_changes_no_answer(job: Job) -> None:
    lead = job.lead()
    job.board.post(to("pp4"))
    lead.upcoming(0)
    lead.settled(Resize(2, parsed("pp8")), None)
    lead.settled(Resize(1, parsed("pp4")), None)
    assert job.state(1) == "announced"


def test_another_lead_goes_on_where_the_last_one_stopped(job: Job) -> None:
    job.board.post(to("pp4"))
    resize = job.lead().upcoming(0)
    assert job.lead().upcoming(1) == resize
    assert resize is not None
    job.lead().settled(resize, None)
    assert job.state(1) == "done"


def test_a_change_that_came_too_late_is_announced_again(job: Job) -> None:
    job.board.post(to("pp4"))
    job.lead().upcoming(0)
    assert job.lead().upcoming(3) == Resize(5, parsed("pp4"))


def test_a_change_that_came_too_late_lets_those_go_first_who_leave(job: Job) -> None:
    job.runs("pp8")
    job.board.post(to("pp4"))
    job.lead().upcoming(0)
    job.board.post(Request(leave=(7,)))
    assert job.lead().upcoming(3) == Resize(5, ParallelConfig(dp=7), (0, 1, 2, 3, 4, 5, 6))
    assert (job.state(1), job.state(2)) == ("queued", "announced")


def test_a_change_that_was_made_but_not_answered_by_a_lost_lead_is_done(job: Job) -> None:
    job.board.post(to("pp4"))
    job.lead().upcoming(0)
    job.runs("pp4", devices=[1, 2, 3, 4])
    assert job.lead().upcoming(3) is None
    assert job.state(1) == "done"


def test_a_change_that_a_loss_broke_off_has_another_turn(job: Job) -> None:
    lead = job.lead()
    job.board.post(Request(devices=8))
    resize = lead.upcoming(0)
    assert resize is not None
    job.there.remove(7)
    lead.settled(resize, PeerLost([7], "move", "died"))
    assert job.state(1) == "queued"
    assert lead.upcoming(2) is None
    assert job.state(1) == "refused"
    assert "needs 8 devices, there are 7 (0-6)" in job.reason(1)


def test_a_leave_that_counted_on_a_device_that_is_gone_is_decided_again(job: Job) -> None:
    job.runs("pp8")
    lead = job.lead()
    job.board.post(Request(leave=(0, 1)))
    resize = lead.upcoming(0)
    assert resize == Resize(2, ParallelConfig(dp=6), (2, 3, 4, 5, 6, 7))
    job.there.remove(7)
    lead.settled(resize, Infeasible("6 ranks, 5 devices"))
    assert lead.upcoming(2) == Resize(4, ParallelConfig(dp=5), (2, 3, 4, 5, 6))


def test_too_few_devices_are_refused_with_what_there_is(job: Job) -> None:
    job.board.post(to("pp4tp4"))
    assert job.lead().upcoming(0) is None
    assert "pp4tp4dp1 needs 16 devices, there are 8 (0-7); what to do" in job.reason(1)


def test_a_step_without_requests_costs_one_question_to_the_store(job: Job) -> None:
    asked: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(job.store, name)

    lead = BoardSource(Board(Counting()), lambda: job.there)  # type: ignore[arg-type]
    job.board.post(to("pp4"))
    resize = lead.upcoming(0)
    assert resize is not None
    lead.settled(resize, None)
    lead.upcoming(2)
    asked.clear()
    lead.upcoming(3)
    assert asked == ["add"]


# Numbers of devices


def test_a_policy_chooses_for_a_number_of_devices_those_that_train_first(job: Job) -> None:
    seen: list[Sequence[int]] = []

    def policy(devices: Sequence[int]) -> ParallelConfig:
        seen.append(devices)
        return ParallelConfig(tp=len(devices))

    job.runs("pp2tp2dp1", devices=[4, 5, 6, 7])
    job.board.post(Request(devices=6))
    assert job.lead(policy=policy).upcoming(0) == Resize(2, ParallelConfig(tp=6))
    assert seen == [[0, 1, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Infeasible("batch 8 on 6; what to do: ask for 4"), "batch 8 on 6; what to do: ask for 4"),
        (ZeroDivisionError("division by zero"), "the policy failed for devices 0-5: ZeroDivisionError: division by"),
    ],
)
def test_whatever_a_policy_raises_is_the_answer(job: Job, error: Exception, reason: str) -> None:
    def policy(devices: Sequence[int]) -> ParallelConfig:
        raise error

    job.board.post(Request(devices=6))
    assert job.lead(policy=policy).upcoming(0) is None
    assert job.reason(1).startswith(reason)


def test_a_policy_that_wants_more_than_it_was_given_is_refused(job: Job) -> None:
    job.board.post(Request(devices=3))
    assert job.lead(policy=lambda devices: ParallelConfig(dp=4)).upcoming(0) is None
    assert "the policy chose pp1tp1dp4, 4 ranks, for 3 devices" in job.reason(1)


def test_without_a_policy_only_layouts_can_be_asked_for(job: Job) -> None:
    job.board.post(Request(devices=3))
    job.board.post(to("pp4"))
    assert job.lead(policy=None).upcoming(0) == Resize(2, parsed("pp4"))
    assert "no policy" in job.reason(1)


# Leaving


def test_leaving_devices_go_before_what_waits_and_after_what_is_announced(job: Job) -> None:
    job.runs("pp8")
    lead = job.lead()
    job.board.post(to("pp4"))
    job.board.post(to("pp2"))
    announced = lead.upcoming(0)
    job.board.post(Request(leave=(4, 5, 6, 7)))
    assert lead.upcoming(1) == announced
    assert announced is not None
    lead.settled(announced, None)
    job.runs("pp4", devices=[4, 5, 6, 7])
    leave = lead.upcoming(2)
    assert leave == Resize(4, parsed("pp4"), (0, 1, 2, 3))
    lead.settled(leave, None)
    job.runs("pp4")
    assert lead.upcoming(4) == Resize(6, parsed("pp2"), (0, 1, 2, 3))


def test_a_leave_keeps_the_layout_where_enough_devices_stay(job: Job) -> None:
    job.runs("pp2tp2dp1", devices=[2, 3, 4, 5])
    job.board.post(Request(leave=(5,)))
    assert job.lead().upcoming(0) == Resize(2, parsed("pp2tp2dp1"), (0, 1, 2, 3, 4, 6, 7))


def test_a_leave_of_devices_that_run_nothing_is_done_at_once_and_they_are_not_used_again(job: Job) -> None:
    job.board.post(Request(leave=(6, 7)))
    job.board.post(Request(devices=8))
    job.board.post(Request(devices=6))
    assert job.lead().upcoming(0) == Resize(2, ParallelConfig(dp=6), (0, 1, 2, 3, 4, 5))
    assert (job.state(1), job.state(2)) == ("done", "refused")
    assert "there are 6 (0-5) without 6-7, which are to leave" in job.reason(2)


def test_two_nodes_that_leave_at_once_are_one_change(job: Job) -> None:
    job.runs("pp8")
    lead = job.lead()
    job.board.post(Request(leave=(4, 5)))
    job.board.post(Request(leave=(6, 7)))
    resize = lead.upcoming(0)
    assert resize == Resize(2, ParallelConfig(dp=4), (0, 1, 2, 3))
    lead.settled(resize, None)
    job.runs("pp1tp1dp4")
    assert lead.upcoming(2) is None
    assert (job.state(1), job.state(2)) == ("done", "done")


def test_nobody_left_is_refused(job: Job) -> None:
    job.board.post(Request(leave=EIGHT))
    assert job.lead().upcoming(0) is None
    assert "all devices that are there (0-7) are to leave; what to do" in job.reason(1)


def test_devices_of_a_refused_leave_are_there_as_before(job: Job) -> None:
    job.board.post(Request(leave=EIGHT))
    job.board.post(to("pp8"))
    assert job.lead().upcoming(0) == Resize(2, parsed("pp8"))


@pytest.mark.parametrize(("within_s", "steps"), [(2.0, 1), (60.0, 2), (None, 2)])
def test_a_leave_with_little_time_is_announced_for_the_next_step(within_s: float | None, steps: int) -> None:
    job = Job("pp8", step_s=1.0)
    job.board.post(Request(leave=(7,), within_s=within_s))
    resize = job.lead().upcoming(10)
    assert resize is not None
    assert resize.iteration == 10 + steps


# Whatever happens

REQUESTS = st.one_of(
    st.sampled_from(["pp2", "pp4", "pp8", "tp16"]).map(to),
    st.integers(1, 9).map(lambda devices: Request(devices=devices)),
    st.sets(st.integers(0, 7), min_size=1, max_size=3).map(lambda devices: Request(leave=tuple(sorted(devices)))),
)
EVENTS = st.lists(st.one_of(REQUESTS, st.sampled_from(["step", "refuse", "lose", "lead"])), max_size=30)


@given(EVENTS)
def test_every_request_is_settled_once_and_no_two_changes_are_under_way(events: list[Request | str]) -> None:
    job = Job()
    lead, iteration, asked, settled = job.lead(), 0, 0, dict[int, str]()
    running = {0, 1, 2, 3}
    for event in [*events, *["step"] * (5 * len(events))]:
        if isinstance(event, Request):
            asked = job.board.post(event)
            continue
        if event == "lead":
            lead = job.lead()
        if event == "lose" and len(job.there) > 1:
            job.there.pop()
        resize = lead.upcoming(iteration)
        assert [job.state(number) for number in range(1, asked + 1)].count("announced") == (resize is not None)
        if resize is not None and resize.iteration == iteration:
            usable = {*job.there} & {*(resize.usable or EIGHT)}
            refusal: ShardshiftError | None = None
            if resize.config.world_size > len(usable):
                refusal = Infeasible("a device that was counted on is gone")
            elif event == "refuse":
                refusal = Infeasible("no")
            else:
                running = {*sorted(usable)[: resize.config.world_size]}
                job.runs(str(resize.config), devices=sorted(running))
            lead.settled(resize, refusal)
        else:
            iteration += 1
        for number in range(1, asked + 1):
            if (state := job.state(number)) in ("done", "refused"):
                assert settled.setdefault(number, state) == state
    assert sorted(settled) == list(range(1, asked + 1))
    gone = {
        device for number, state in settled.items() if state == "done" for device in job.board.request(number).leave
    }
    assert not gone & running
